"""Draft trees of the real drafters give plain's text in every mode; break one part and they do not."""

from typing import Any

import engines
import pytest
import sabotage
from engines import LARGE_STEPS, results

pytestmark = pytest.mark.e2e

TREES = ["eagle3-tree", "dflash-tree"]


@pytest.mark.nightly(keep=5)
@pytest.mark.parametrize("scenario", ["one", "eight", "chunked", "prefix"])
@pytest.mark.parametrize("name", TREES)
def test_greedy_is_plain(name, scenario):
    assert results(name).tokens[scenario] == results("plain").tokens[scenario]


@pytest.mark.parametrize("name", TREES)
def test_seeded_text_is_plains_token_for_token(name):
    tokens = results(name).tokens
    assert tokens["seeded again"] == tokens["seeded"] == results("plain").tokens["seeded"]


@pytest.mark.parametrize("option", engines.OPTIONS)
@pytest.mark.parametrize("name", TREES)
def test_options_that_vllm_refuses_beside_drafts(name, option):
    assert results(name).tokens[option] == results("plain").tokens[option]


@pytest.mark.parametrize("name", TREES)
def test_accepted_paths_are_of_the_trees_depth(name):
    counts = results(name).counts
    assert counts.accepted / counts.drafts > 1
    deepest = max(i for i, accepted in enumerate(counts.per_position, start=1) if accepted)
    assert deepest <= 8 if name == "eagle3-tree" else deepest <= engines.K


# -- one batch of every kind of request ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain_answers():
    return engines.plain_mixed_answers()


@pytest.fixture(scope="module")
def plain_greedy():
    return engines.plain(8, 16)


DRAFTERS = {"eagle3-tree": ("eagle3", engines.EAGLE3), "dflash-tree": ("dflash", engines.DFLASH)}


@pytest.fixture(scope="module", params=DRAFTERS)
def llm(request, plain_answers):
    method, folder = DRAFTERS[request.param]
    with engines.engine(engines.tree(method, folder, num_nodes=24), **LARGE_STEPS) as running:
        yield running


@pytest.fixture(scope="module")
def whole(llm):
    """The unbroken engine's answers and its accepted tokens a draft."""
    return run_broken(llm, sabotage.mend)


def run_broken(llm, how):
    """Tokens and log-probabilities of the mixed batch, and accepted tokens a draft, with one part broken."""
    return engines.run_broken(llm, how, engines.mixed_answers)


def test_a_mixed_batch_is_plains(whole, plain_answers):
    (tokens, logprobs), _ = whole
    assert tokens == plain_answers[0]
    for mine, plain in zip(logprobs, plain_answers[1], strict=True):
        assert [set(step) for step in mine] == [set(step) for step in plain]
        for step, expected in zip(mine, plain, strict=True):
            assert step == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("how", [sabotage.leave_states_in_place, sabotage.foresee_other_noise])
def test_a_broken_drafter_is_slow_and_never_wrong(llm, whole, plain_answers, how):
    (tokens, _), accepted = run_broken(llm, how)
    assert tokens == plain_answers[0]
    assert accepted < 0.95 * whole[1]


@pytest.mark.parametrize("llm", ["dflash-tree"], indirect=True)
@pytest.mark.parametrize(
    "how",
    [
        sabotage.see_siblings,
        sabotage.shift_positions,
        sabotage.leave_kv_in_place,
        sabotage.penalize_rows_before,
        sabotage.bias_first_rows,
        sabotage.cut_first_rows,
        sabotage.accept_everything,
    ],
)
def test_a_broken_part_of_the_verification_is_seen(llm, whole, plain_answers, how):
    """What is broken is the target's side, the same for every drafter."""
    (tokens, _), _ = run_broken(llm, how)
    assert tokens != plain_answers[0]


@pytest.mark.parametrize("llm", ["dflash-tree"], indirect=True)
@pytest.mark.parametrize("how", [sabotage.sample_in_chunks, sabotage.attend_in_two_passes])
def test_other_ways_to_the_same_text(llm, whole, plain_answers, how):
    (tokens, _), accepted = run_broken(llm, how)
    assert tokens == plain_answers[0]
    assert accepted == whole[1]


def test_more_nodes_than_a_word_has_bits(plain_greedy):
    spec = engines.tree("eagle3", engines.EAGLE3, num_nodes=200, depth=5, top_k=12)
    with engines.engine(spec, **LARGE_STEPS) as llm:
        assert engines.generate(llm, engines.prompts(2), max_tokens=16) == plain_greedy[:2]
        stats = llm.collective_rpc("crossspec_stats")[0]["eagle3"]
    assert stats["draft_tokens"] > 100 * stats["drafts"]
    assert stats["accepted_tokens"] > stats["drafts"]


def test_an_unknown_wish_is_refused(llm):
    from vllm import SamplingParams

    with pytest.raises(ValueError, match="'crossspec' is 'of'; use one of tree, chain, off"):
        llm.generate(engines.prompts(1), SamplingParams(extra_args={"crossspec": "of"}), use_tqdm=False)


# -- load -------------------------------------------------------------------------------------------------------------


def test_trees_narrow_and_vanish_as_the_batch_grows(plain_greedy):
    schedule = {"1": 24, "3": 4, "6": 0}
    spec = engines.tree("dflash", engines.DFLASH, num_nodes=24, by_batch_size=schedule)
    with engines.engine(spec, **LARGE_STEPS) as llm:
        drafted = {}
        for count in (1, 4, 8):
            before = llm.collective_rpc("crossspec_stats")[0]["dflash"]
            assert engines.generate(llm, engines.prompts(count), max_tokens=16) == plain_greedy[:count]
            after = llm.collective_rpc("crossspec_stats")[0]["dflash"]
            drafted[count] = (after["draft_tokens"] - before["draft_tokens"]) / count
    # Draft tokens a request, each of 16 tokens: whole trees, the best nodes, none until some of the eight have ended.
    assert drafted[1] > 2 * drafted[4] > 4 * drafted[8]


def count_levels(worker: Any, cut: bool) -> None:
    """Count the drafter's passes over levels; without ``cut`` as many as the tree is deep, whatever is verified."""
    proposer = worker.model_runner.speculator.active
    worker.levels = 0

    def counted(forward: Any) -> Any:
        def forward_beam(*arguments: Any) -> Any:
            worker.levels += 1
            return forward(*arguments)

        return forward_beam

    sabotage._replace(worker, proposer, "_forward_beam", counted)
    if not cut:
        sabotage._replace(worker, proposer, "_growth_for", lambda _: lambda step: proposer.growths[-1])


@pytest.mark.skipif(engines.REPLAYS_GRAPHS, reason="one graph holds all levels")
def test_levels_beyond_what_is_verified_are_not_grown(plain_greedy):
    """Of three nodes the deepest is in level 3; those of level 5 were thrown away, and nothing else changes."""
    spec = engines.tree("eagle3", engines.EAGLE3, num_nodes=24, depth=5, top_k=4, by_batch_size={"1": 3})
    found = []
    with engines.engine(spec, **LARGE_STEPS) as llm:
        for cut in (False, True):
            before = llm.collective_rpc("crossspec_stats")[0]["eagle3"]["accepted_tokens"]
            llm.collective_rpc(count_levels, args=(cut,))
            assert engines.generate(llm, engines.prompts(2), max_tokens=16) == plain_greedy[:2]
            accepted = llm.collective_rpc("crossspec_stats")[0]["eagle3"]["accepted_tokens"] - before
            found.append((accepted, llm.collective_rpc(lambda worker: worker.levels)[0]))
            llm.collective_rpc(sabotage.mend)
    (accepted, whole), (accepted_again, levels) = found
    assert accepted == accepted_again > 0 and levels == whole / 2
