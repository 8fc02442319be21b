"""ConFu in running engines: plain's text with contemplate rows in the batch, and none of them seen by another row."""

import json
from typing import Any

import engines
import pytest
import sabotage
import shadow
import torch
from engines import ASYNC, LARGE_STEPS, results

pytestmark = pytest.mark.e2e


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("scenario", ["one", "eight", "chunked", "prefix", "seeded"])
@pytest.mark.parametrize("name", ["confu", "confu-tree"])
def test_text_is_plains(name, scenario):
    assert results(name).tokens[scenario] == results("plain").tokens[scenario]


@pytest.mark.parametrize("name", ["confu", "confu-tree"])
def test_drafts_were_accepted_and_contemplate_rows_do_not_count(name):
    """To vLLM's scheduler a round has 2 N + 1 drafts; ours counts N, and both count the same accepted ones."""
    found, stats = results(name), results(name).stats["confu"]
    assert stats["accepted_tokens"] > 2 * stats["drafts"]
    assert stats["draft_tokens"] <= (7 if name == "confu" else 60) * stats["drafts"]
    if name not in ASYNC:  # under async scheduling the device also counts the round in flight when a request ends
        assert stats["accepted_tokens"] == found.counts.accepted


# -- one batch of every kind of request ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain():
    """Its answers to the mixed batch."""
    return engines.plain_mixed_answers()


@pytest.fixture(scope="module")
def plain_texts():
    """Its texts of :func:`greedy_and_seeded`."""
    return [engines.plain(4, 20), engines.plain(2, 12, temperature=0.8, seed=3)]


def greedy_and_seeded(llm):
    texts = engines.prompts(4)
    return [
        engines.generate(llm, texts, max_tokens=20),
        engines.generate(llm, texts[:2], max_tokens=12, temperature=0.8, seed=3),
    ]


@pytest.fixture(scope="module")
def llm(plain):
    with engines.engine(engines.tree("confu", engines.CONFU, num_nodes=24), **LARGE_STEPS) as running:
        yield running


@pytest.fixture(scope="module")
def whole(llm):
    return run_broken(llm, sabotage.mend)


def run_broken(llm, how):
    """Tokens and log-probabilities of the mixed batch, and accepted tokens a draft, with one part broken."""
    return engines.run_broken(llm, how, engines.mixed_answers)


def test_a_mixed_batch_is_plains(whole, plain):
    (tokens, logprobs), _ = whole
    assert tokens == plain[0]
    for mine, expected in zip(logprobs, plain[1], strict=True):
        for step, wanted in zip(mine, expected, strict=True):
            assert step == pytest.approx(wanted, abs=1e-3)


def test_a_drafter_of_other_states_is_slow_and_never_wrong(llm, whole, plain):
    (tokens, _), accepted = run_broken(llm, sabotage.leave_states_in_place)
    assert tokens == plain[0]
    assert accepted < whole[1]


@pytest.mark.parametrize("how", [sabotage.foresee_noise, sabotage.foresee_nothing])
def test_other_futures_never_make_another_text(llm, plain, how):
    """What they are worth shows in longer runs: test_confu_futures.py."""
    (tokens, _), _ = run_broken(llm, how)
    assert tokens == plain[0]


@pytest.mark.parametrize(
    "how",
    [
        sabotage.show_contemplate_rows,
        sabotage.show_soft_prompts,
        sabotage.keep_contemplate_rows,
        sabotage.see_siblings,
        sabotage.leave_kv_in_place,
    ],
)
def test_a_broken_part_of_the_target_is_seen(llm, plain_texts, how):
    for broken in (how, sabotage.mend):
        found, _ = engines.run_broken(llm, broken, lambda llm: engines.generate(llm, engines.prompts(4), max_tokens=20))
        assert (found == plain_texts[0]) == (broken is sabotage.mend)


def test_the_gpus_algorithm_gives_the_same_text(llm, whole, plain):
    (tokens, _), accepted = run_broken(llm, sabotage.attend_in_two_passes)
    assert tokens == plain[0]
    assert accepted == whole[1]


# -- logits, to the bit ---------------------------------------------------------------------------------------------


def script_drafts(worker: Any, texts: dict[int, list[int]]) -> None:
    """Drafts no longer depend on the drafter: made-up trees in which the text itself is one path.

    Args:
        texts: what follows each prompt, by the prompt's length.
    """
    runner = worker.model_runner
    host, states = runner.speculator, runner.req_states
    worker.logits = []

    def wrapper(original):
        def keep(drafted, batch, dummy_run=False):
            tree, num_nodes = drafted.tree, drafted.tree.tokens.shape[1]
            for row, slot in enumerate(batch.idx_mapping_np[: batch.num_reqs]):
                prompt, total = int(states.prompt_len.np[slot]), int(states.total_len.gpu[slot])
                text = texts.get(prompt, [])[total - prompt :] + [0] * num_nodes
                generator = torch.Generator().manual_seed(1000 * prompt + total)
                above = (min(node + 1, 5) for node in range(num_nodes))  # so that no path is deeper than 5
                parents = [int(torch.randint(0, most, (1,), generator=generator)) for most in above]
                tokens = torch.randint(0, 4096, (num_nodes,), generator=generator)
                parents[:4], tokens[:4] = range(4), torch.tensor(text[:4])
                tree.tokens[row], tree.sizes[row] = tokens, num_nodes
                tree.parents[row] = torch.tensor(parents, dtype=torch.int32)
            return original(drafted, batch, dummy_run)

        return keep

    sabotage._replace(worker, host.kept, "keep", wrapper)

    def keep_logits(original):
        def compute_logits(*arguments, **options):
            logits = original(*arguments, **options)
            worker.logits.append(logits.clone())
            return logits

        return compute_logits

    sabotage._replace(worker, runner.model, "compute_logits", keep_logits)


def scripted_logits(spec: dict[str, Any], texts: list[list[int]]) -> list[list[torch.Tensor]]:
    """Logits of all ordinary rows, step by step, with the same drafts whoever drafts; by one softmax and by two."""
    with engines.engine(spec, enable_prefix_caching=False, async_scheduling=False, max_num_batched_tokens=512) as llm:
        prompts = engines.prompts(len(texts))
        known = {len(llm.get_tokenizer().encode(p)): text for p, text in zip(prompts, texts, strict=True)}
        assert len(known) == len(texts), "prompts must differ in length"
        llm.collective_rpc(shadow.pad_products)
        found = []
        try:
            for how in (sabotage.mend, sabotage.attend_in_two_passes):
                llm.collective_rpc(how)
                llm.collective_rpc(script_drafts, args=(known,))
                assert engines.generate(llm, prompts, max_tokens=len(texts[0])) == texts
                found.append(llm.collective_rpc(take_logits)[0])
                llm.collective_rpc(sabotage.mend)
        finally:
            llm.collective_rpc(sabotage.mend)
            llm.collective_rpc(shadow.unpad)
    return found


def take_logits(worker: Any) -> list[torch.Tensor]:
    return worker.logits


@pytest.mark.nightly
def test_ordinary_rows_have_the_same_logits_with_and_without_contemplate_rows(plain_texts, monkeypatch):
    """In float32, to the bit: prompts of several lengths, trees with rejected and accepted nodes."""
    # In one process all prompts are there before the first step, so that both engines take the same steps.
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    texts = plain_texts[0][:3]
    # 32 rows a request without contemplate rows: products of 64 rows and more, which a CPU sums alike.
    tree = {"num_nodes": 31, "depth": 5, "top_k": 6}
    without = scripted_logits(engines.tree("eagle3", engines.EAGLE3, **tree), texts)
    beside = scripted_logits(engines.tree("confu", engines.CONFU, **tree), texts)
    for mine, theirs in zip(beside, without, strict=True):
        assert len(mine) == len(theirs) > 3
        assert max(len(step) for step in mine) == 3 * 32
        # Not the prompts' own step: it has no contemplate rows, and vLLM takes the requests in any order.
        assert all(map(torch.equal, mine[1:], theirs[1:]))


# -- with everything else -------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_beside_another_drafter_and_routed(plain_texts):
    spec = {
        "method": "whiflash",
        "drafters": {
            "confu": {"model": str(engines.CONFU), "tree": {"depth": 3, "top_k": 6, "num_nodes": 20}},
            "dflash": {"model": str(engines.DFLASH), "num_speculative_tokens": engines.K},
        },
        "router": {"policy": "entropy", "threshold": 1.0},
    }
    with engines.engine(spec, **LARGE_STEPS) as llm:
        assert greedy_and_seeded(llm) == plain_texts
        drafted = {name: stats["drafts"] for name, stats in llm.collective_rpc("crossspec_stats")[0].items()}
    assert all(count > 5 for count in drafted.values()), drafted


@pytest.mark.nightly
def test_calibrated_and_sized_by_heterospec(plain_texts, tmp_path):
    from commands import crossspec
    from test_heterospec_engine import check_rows, watch_rows, watched

    from vllm_crossspec.heterospec.calibration import read_calibration

    spec = {"method": "confu", "model": str(engines.CONFU), "tree": {"depth": 3, "top_k": 4, "num_nodes": 20}}
    path = tmp_path / "calibration.json"
    given = ("--limit", "3", "--max-tokens", "32", "--max-model-len", "512", "--batch-size", "6")
    crossspec("calibrate", "heterospec", "--out", path, "--spec", json.dumps(spec), *given)
    policy = read_calibration(path, "adaptive.model").policy()
    assert len(set(policy.widths)) > 1 and policy.max_extension == 2
    spec["adaptive"] = str(path)
    with engines.engine(spec, **LARGE_STEPS) as llm:
        llm.collective_rpc(watch_rows)
        assert greedy_and_seeded(llm) == plain_texts
        steps = llm.collective_rpc(watched)[0]
        sized = llm.collective_rpc("crossspec_adaptive")[0]["confu"]["trees"]
    assert sum(count > 0 for count in sized) > 1, sized
    check_rows(steps, contemplates=True)
    # Each node, and the root, has its contemplate row.
    widths = {rows for step in steps for rows in step["drafted"] if rows}
    assert widths <= {2 * n + 1 for n in policy.widths} and len(widths) > 1


@pytest.mark.nightly
def test_with_a_flashhead(plain_texts, tmp_path):
    from crossspec_tools.flashhead.build import cluster
    from crossspec_tools.flashhead.files import read_output_embedding, save_assets
    from vllm_crossspec.drafting.flashhead.assets import Assets, group

    weight = read_output_embedding(engines.CONFU)
    found = cluster(weight, cluster_size=8, iterations=3)
    members = group(found.assignments, len(weight) // 8)
    save_assets(tmp_path / "head", Assets(found.centroids, members, (0, 1, 2, 3), len(members) // 3, {}))
    spec = engines.tree("confu", engines.CONFU, num_nodes=24) | {"head": str(tmp_path / "head")}
    with engines.engine(spec, **LARGE_STEPS) as llm:
        assert greedy_and_seeded(llm) == plain_texts
        stats = llm.collective_rpc("crossspec_stats")[0]["confu"]
    assert stats["accepted_tokens"] > 2 * stats["drafts"]


def test_rows_narrow_and_vanish_as_the_batch_grows(plain_texts):
    spec = engines.tree("confu", engines.CONFU, num_nodes=24, by_batch_size={"1": 24, "2": 4, "4": 0})
    with engines.engine(spec, **LARGE_STEPS) as llm:
        assert greedy_and_seeded(llm) == plain_texts
        stats = llm.collective_rpc("crossspec_stats")[0]["confu"]
    assert 0 < stats["draft_tokens"] < 24 * stats["drafts"]
