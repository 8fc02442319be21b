"""Trees of a draft model of its own: plain's text, and in every round the tree that the model makes of it."""

import contextlib
import itertools
from typing import NamedTuple
from unittest import mock

import engines
import pytest
import torch
from test_draft_model import CLUSTERS, COME_AND_GO, POCKET, model_of, noisy, plain, prompts  # noqa: F401
from test_heterospec_engine import calibration_file

from vllm_crossspec.drafters.draft_model.tree_proposer import DraftModelTreeProposer
from vllm_crossspec.kinds.tree import tree_kind
from vllm_crossspec.trees.builders import naive
from vllm_crossspec.types import TokenTree

pytestmark = pytest.mark.e2e

TREE = {"depth": 4, "top_k": 3, "num_nodes": 12}
ALL = {"by_batch_size": {"1": 60}}
SHARPNESS = tree_kind("dynamic", "tree.type").defaults["sharpness"]
SETTINGS = {"skip_tokenizer_init": True, "enable_prefix_caching": False, "max_num_seqs": 3}


def spec(folder, **keys):
    return {"method": "draft_model", "model": str(folder), "tree": TREE | ALL} | keys


# -- texts ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(noisy):  # noqa: F811
    return engines.run_scenarios(spec(noisy), is_async=True)


@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize("scenario", ["one", "eight", "chunked", "prefix", "seeded", "seeded again"])
def test_text_is_plains(results, scenario):
    assert results.tokens[scenario] == engines.results("plain").tokens["seeded" if "seeded" in scenario else scenario]


def test_the_target_drafts_for_itself_without_a_miss():
    """Every level of every round has the target's own choice, which for sampled requests is a matter of its noise."""
    texts, rounds = [{"prompt_token_ids": prompts()[0]}], 5
    one_branch = spec(
        engines.TARGET, tree={"type": "dynamic", "depth": TREE["depth"], "top_k": 1, "num_nodes": 4} | ALL
    )
    with engines.engine(one_branch, async_scheduling=False, **SETTINGS) as llm:
        for times, sampling in ((1, {}), (2, {"temperature": 1.0, "seed": 3})):
            engines.generate(llm, texts, max_tokens=1 + rounds * (TREE["depth"] + 1), ignore_eos=True, **sampling)
            counts = engines.counts(llm)
            assert (counts.drafts, counts.accepted) == (times * rounds, times * rounds * TREE["depth"])


def test_a_tree_of_the_pocket_draft_model_brings_more_than_its_chain_dense_and_by_clusters():
    wanted, accepted = engines.plain(8), {}
    chain = {"tree": {"type": "chain"}, "num_speculative_tokens": TREE["depth"]}
    for name, keys in (("chain", chain), ("tree", {}), ("clusters", {"method": "flashhead", "head": str(CLUSTERS)})):
        with engines.engine(spec(POCKET, **keys)) as llm:
            assert engines.generate(llm, engines.prompts(8)) == wanted
            counts = engines.counts(llm)
        accepted[name] = counts.accepted / counts.drafts
    assert accepted["tree"] > 1.1 * accepted["chain"]
    assert accepted["clusters"] == pytest.approx(accepted["tree"], rel=0.05)


def test_sizes_by_request_and_round(tmp_path):
    """HeteroSpec's bins: some trees grow on beyond their depth, and the text is plain's."""
    tree = {"depth": 3, "top_k": 4, "num_nodes": 20}
    adaptive, wanted = {"model": calibration_file(tmp_path, (0.5, 1.6, 2.4), tree, POCKET)}, engines.plain(8)
    with engines.engine(spec(POCKET, tree=tree, adaptive=adaptive)) as llm:
        assert engines.generate(llm, engines.prompts(8)) == wanted
        sized = llm.collective_rpc("crossspec_adaptive")[0]["draft_model"]
        counts = engines.counts(llm)
    assert sum(n > 0 for n in sized["trees"]) > 1, sized
    assert sum(counts.per_position[tree["depth"] :]) > 0, "a path beyond the ordinary depth"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"max_num_batched_tokens": 17},
            "6 rows of each request in a draft model, 18 with --max-num-seqs 3, and",
        ),
        (
            {"max_model_len": 5},
            "takes 6 tokens of a request, two more than the tree is deep, and --max-model-len",
        ),
    ],
)
def test_rows_that_do_not_fit_get_one_sentence(settings, sentence):
    with pytest.raises(ValueError, match=sentence), engines.engine(spec(POCKET), **SETTINGS | settings):
        pass


# -- trees, beside those that the model itself makes ------------------------------------------------------------------


class Round(NamedTuple):
    """A tree of an engine, and the number of tokens that were known when it was drafted."""

    known: int
    tree: TokenTree


@contextlib.contextmanager
def recorded(llm):
    """Every round of every request meanwhile: (request, tokens of the step, tree or None)."""
    speculator = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.speculator
    own, found, trees = speculator.proposers["draft_model"], [], []
    propose_step, propose = own.propose_step, speculator.propose

    def keep(step):
        candidates = propose_step(step)
        trees[:] = [part.clone() for part in candidates.tree]
        return candidates

    def record(batch, *args, **options):
        trees.clear()
        drafts = propose(batch, *args, **options)
        for row, name in enumerate(batch.req_ids):
            tree = TokenTree(*(part[row : row + 1] for part in trees)) if trees else None
            found.append((name.rsplit("-", 1)[0], int(args[4][row]), tree))  # vLLM's sixth: tokens of the step
        return drafts

    with mock.patch.object(own, "propose_step", keep), mock.patch.object(speculator, "propose", record):
        yield found


def traced(llm, texts, *lengths):
    """The tokens of every request, and its rounds with drafts; one length for all, or one each."""
    from vllm import SamplingParams

    lengths = lengths * len(texts) if len(lengths) == 1 else lengths
    sampling = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]
    with recorded(llm) as found:
        outputs = llm.generate([{"prompt_token_ids": t} for t in texts], sampling, use_tqdm=False)
    tokens = {o.request_id: [*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs}
    known = {o.request_id: len(o.prompt_token_ids) for o in outputs}
    rounds = {name: [] for name in tokens}
    for name, num_sampled, tree in found:
        known[name] += num_sampled
        if tree is not None and num_sampled and known[name] <= len(tokens[name]):
            rounds[name].append(Round(known[name], tree))
    return [(tokens[name], rounds[name]) for name in tokens]


@torch.inference_mode()
def wanted_tree(model, text):
    """The tree of a text by plain loops over whole forward passes."""
    k = TREE["top_k"]
    builder = naive.DynamicTree(**TREE, max_num_reqs=1, device=torch.device("cpu"))
    out = TokenTree(
        torch.zeros(1, TREE["num_nodes"], dtype=torch.int64),
        torch.zeros(1, TREE["num_nodes"], dtype=torch.int32),
        torch.zeros(1, TREE["num_nodes"]),
        torch.zeros(1, dtype=torch.int32),
    )

    def children(paths):
        logits = model(torch.tensor([text + path for path in paths])).logits[:, -1].log_softmax(-1)
        return (SHARPNESS * logits).log_softmax(-1).topk(k)

    best = children([[]])
    beam, paths = builder.start(best.values, best.indices), [[]] * k
    for level in range(2, TREE["depth"] + 1):
        parents = [paths[p] if level > 2 else [] for p in beam.parents[0].tolist()]
        paths = [[*path, token] for path, token in zip(parents, beam.tokens[0].tolist(), strict=True)]
        best = children(paths)
        beam = builder.expand(level, best.values[None], best.indices[None])
    builder.finish(out)
    return out


def equal_trees(folder, traces, every=4):
    """(rounds whose tree is the model's own, ties aside, rounds that were looked at)."""
    model, equal, total = model_of(folder), 0, 0
    for tokens, rounds in traces:
        for known, tree in rounds[::every]:
            wanted = wanted_tree(model, tokens[:known])
            total += 1
            same = all(torch.equal(a, b) for a, b in zip(tree[:2], wanted[:2], strict=True))
            # Where two nodes are equally likely their places may differ; never what the places are worth.
            equal += same or bool((tree.log_probs - wanted.log_probs).abs().max() < 1e-3)
    return equal, total


@pytest.fixture(scope="module")
def llm(noisy):  # noqa: F811
    with engines.engine(spec(noisy), **SETTINGS) as running:
        yield running


def test_every_tree_is_the_models_own(llm, noisy):  # noqa: F811
    """In mixed batches, past rejected and accepted nodes, in and after chunks of prompts."""
    traces = traced(llm, prompts(), 20)
    equal, total = equal_trees(noisy, traces, every=3)
    assert equal == total > 12
    steps = [b.known - a.known for _, rounds in traces for a, b in itertools.pairwise(rounds)]
    assert {1, TREE["depth"] + 1} < set(steps), "rounds that accept nothing, everything, and something between"


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("part", ["the accepted path", "positions", "ancestors", "prompts"])
def test_what_is_broken_is_seen_and_changes_no_text(llm, noisy, part):  # noqa: F811
    texts = [prompts()[i] for i in (0, 2, 3)]
    whole = [tokens for tokens, _ in traced(llm, texts, 12)]
    fill, beam = DraftModelTreeProposer._fill_rows, DraftModelTreeProposer._prepare_beam

    def only_the_bonus_token(own, step, num_reqs):
        fill(own, step, num_reqs)
        kept = own.row_slots[own.bonus_rows[:num_reqs]].clone()
        own.row_slots.fill_(-1)
        own.row_slots[own.bonus_rows[:num_reqs]] = kept

    def late(own, level, beam_, states):
        states = beam(own, level, beam_, states)
        own.level_positions += 1
        return states

    def sees_all(own, level, beam_, states):
        beam_.masks.fill_(-1)
        return beam(own, level, beam_, states)

    name, broken = {
        "the accepted path": ("_fill_rows", only_the_bonus_token),
        "positions": ("_prepare_beam", late),
        "ancestors": ("_prepare_beam", sees_all),
        "prompts": ("_take_target_rows", lambda own, step, has_cache: None),
    }[part]
    with mock.patch.object(DraftModelTreeProposer, name, broken):
        traces = traced(llm, texts, 12)
    equal, total = equal_trees(noisy, traces, every=1)
    assert equal < 0.7 * total, (equal, total)
    assert [tokens for tokens, _ in traces] == whole


def test_a_round_is_as_many_forwards_as_levels(llm):
    rows = []
    forward, level = DraftModelTreeProposer._forward, DraftModelTreeProposer._forward_level

    def counted(own, token_ids, *rest):
        rows.append(len(token_ids))
        return forward(own, token_ids, *rest)

    def counted_level(own, token_ids, *rest):
        rows.append(len(token_ids))
        return level(own, token_ids, *rest)

    with (
        mock.patch.object(DraftModelTreeProposer, "_forward", counted),
        mock.patch.object(DraftModelTreeProposer, "_forward_level", counted_level),
    ):
        engines.generate(llm, [{"prompt_token_ids": prompts()[0]}], max_tokens=12)
    depth = TREE["depth"]
    rounds = [rows[i : i + depth] for i in range(1, len(rows), depth)]
    assert rows[0] == len(prompts()[0]) and len(rounds) > 2
    assert all(r == [depth + 2] + [TREE["top_k"]] * (depth - 1) for r in rounds)


def test_the_end_of_the_models_positions(noisy):  # noqa: F811
    texts, wanted = plain()["to the end"]
    with engines.engine(spec(noisy), **SETTINGS | {"max_model_len": 96}) as llm:
        traces = traced(llm, texts, 96)
    assert [tokens[len(t) :] for (tokens, _), t in zip(traces, texts, strict=True)] == wanted
    early = [(tokens, [r for r in rounds if r.known + TREE["depth"] <= 96]) for tokens, rounds in traces]
    equal, total = equal_trees(noisy, early)
    assert equal == total > 8


@pytest.mark.nightly
def test_preempted_requests_are_drafted_for_again(noisy):  # noqa: F811
    settings = SETTINGS | {"max_model_len": 128, "block_size": 32}
    texts, wanted = plain()["preempted"]
    with engines.engine(spec(noisy), num_gpu_blocks_override=9, **settings) as llm:
        traces = traced(llm, texts, 60)
        preempted = next(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
    assert preempted > 0
    assert [tokens[len(t) :] for (tokens, _), t in zip(traces, texts, strict=True)] == wanted
    equal, total = equal_trees(noisy, traces)
    assert equal == total > 8


def test_cached_prompts_have_the_drafters_entries_too(noisy):  # noqa: F811
    with engines.engine(spec(noisy), skip_tokenizer_init=True, block_size=32) as llm:
        first = traced(llm, [prompts()[0], prompts()[3]], 40)
        before = engines.counts(llm).prefix_hits
        turns = [[*first[0][0], 17, 9], first[1][0][:65], [*first[0][0], 3]]
        second = traced(llm, turns, 16)
        assert engines.counts(llm).prefix_hits - before > sum(map(len, turns)) / 3
    equal, total = equal_trees(noisy, first + second)
    assert equal == total > 4


@pytest.mark.nightly
def test_a_schedule_that_drops_to_nothing_and_returns(noisy):  # noqa: F811
    """From three requests on nothing is drafted, but the drafter's cache is kept for when fewer run."""
    texts, wanted = plain()["come and go"]
    tree = TREE | {"by_batch_size": {"1": TREE["num_nodes"], "3": 0}}
    with engines.engine(spec(noisy, tree=tree), **SETTINGS) as llm:
        traces = traced(llm, texts, *COME_AND_GO)
    assert [tokens[len(text) :] for (tokens, _), text in zip(traces, texts, strict=True)] == wanted
    steps = [b.known - a.known for _, rounds in traces[:2] for a, b in itertools.pairwise(rounds)]
    assert max(steps) > TREE["depth"] + 1, "drafts stopped and came back"
    equal, total = equal_trees(noisy, traces, every=1)
    assert equal == total > 5
