"""HeteroSpec's trees in running engines: plain's text whatever the bins, and as many target rows as the bins say."""

import functools
import json
from pathlib import Path
from typing import Any

import engines
import pytest
import sabotage

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(engines.REPLAYS_GRAPHS, reason="no forward pass to watch in a graph"),
]

TREE = {"depth": 3, "top_k": 4, "num_nodes": 20}
ALPHA = 2
"""ceil(depth / 2)."""
EVERYTHING, NOTHING = 1e9, -1.0
"""A threshold that all trees are below, and one that none is."""
BINS = {
    "spread": (1.0, 1.6, 2.4),
    "all sure": (EVERYTHING, EVERYTHING + 1, EVERYTHING + 2),
    "none sure": (NOTHING - 2, NOTHING - 1, NOTHING),
}


def calibration_file(
    folder: Path,
    thresholds: tuple[float, ...],
    tree: dict[str, int] = TREE,
    drafter: Path = engines.EAGLE3,
    **changed: Any,
) -> str:
    """A calibration for the pocket models and these bins, as the command would have written it."""
    from vllm_crossspec.kinds.tree import tree_kind

    sharpness = tree_kind("dynamic", "tree.type").defaults["sharpness"]
    from vllm_crossspec.heterospec.calibration import BinFacts, Calibration, TreeShape, write_calibration
    from vllm_crossspec.kinds.identity import identify

    path = folder / "calibration.json"
    facts = BinFacts(mean_rank=1.0, num_paths=1, num_rounds=1, mean_accepted=1.0)
    entries: dict[str, Any] = {
        "thresholds": thresholds,
        "bins": (facts,) * (len(thresholds) + 1),
        "gammas": (0.3, 0.6, 1.0),
        "alpha": -(-tree["depth"] // 2),
        "tree": TreeShape(**tree, sharpness=sharpness),
        "target": identify(str(engines.TARGET), "model"),
        "drafter": identify(str(drafter), "model"),
    }
    write_calibration(path, Calibration(**entries | changed))
    return str(path)


def spec(path: str, **adaptive: Any) -> dict[str, Any]:
    return engines.tree("eagle3", engines.EAGLE3, **TREE) | {"adaptive": {"model": path, **adaptive}}


# -- sent into the worker ----------------------------------------------------------------------------------------


def watch_rows(worker: Any) -> None:
    """Keep, of every step with drafts, what was planned, what the trees need and what the target's forward gets."""
    runner = worker.model_runner
    prepare, forward = runner.prepare_attn, runner.model.forward
    runner.watched, runner.forwarded = [], []

    def prepare_attn(batch: Any) -> Any:
        if batch.num_draft_tokens:
            slots, state = batch.idx_mapping_np, runner.draft_state
            step = {
                "drafted": batch.num_draft_tokens_per_req.tolist(),
                "widths": runner.features["adaptive"].widths[slots].tolist(),
                "sizes": state.sizes[batch.idx_mapping].tolist(),
                "modes": state.modes[slots].tolist(),
                "rows": int(batch.query_start_loc_np[batch.num_reqs]),
                "forward": len(runner.forwarded),
            }
            runner.watched.append(step)
        return prepare(batch)

    def model_forward(*arguments: Any, **inputs: Any) -> Any:
        rows = inputs["input_ids"] if inputs["inputs_embeds"] is None else inputs["inputs_embeds"]
        runner.forwarded.append(int(rows.shape[0]))
        return forward(*arguments, **inputs)

    runner.prepare_attn, runner.model.forward = prepare_attn, model_forward


def watched(worker: Any) -> list[dict[str, Any]]:
    """The steps since the last call, each with the rows of the forward pass that followed."""
    runner = worker.model_runner
    steps, forwarded = runner.watched, runner.forwarded
    runner.watched, runner.forwarded = [], []
    return [step | {"forward": forwarded[step["forward"]]} for step in steps]


def set_bins(worker: Any, thresholds: tuple[float, ...]) -> None:
    """Other thresholds between the bins, as if another calibration had been loaded."""
    table = worker.model_runner.speculator.active.sizer._table
    table["thresholds"][:] = table["thresholds"].new_tensor(thresholds)


def num_waits(worker: Any) -> int:
    return worker.model_runner.speculator.active.sizer.copied.num_waits


def cut_nothing(worker: Any) -> None:
    """The plan stays as it was, whatever the trees need."""
    sabotage._replace(
        worker, worker.model_runner.features["adaptive"], "_width_of", lambda original: lambda req_id: None
    )


def swap_widths(worker: Any) -> None:
    """Give the requests of a batch each other's widths."""

    def wrapper(original):
        def drafted(name: str, batch: Any, candidates: Any) -> None:
            original(name, batch, candidates)
            widths, slots = worker.model_runner.features["adaptive"].widths, batch.idx_mapping_np
            widths[slots] = widths[slots[::-1]]

        return drafted

    sabotage._replace(worker, worker.model_runner.features["adaptive"], "drafted", wrapper)


# -- the engines --------------------------------------------------------------------------------------------------


def run_mixed(llm: Any, opting_out: bool) -> list[list[int]]:
    """Six requests that run together: two that opt out, two sampled, one of them penalized, and one of a grammar."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    def asks(mode: str) -> dict[str, Any]:
        return {"extra_args": {"crossspec": mode}} if opting_out else {}

    options: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "seed": 11, "frequency_penalty": 0.3},
        asks("chain"),
        asks("off"),
        {"structured_outputs": StructuredOutputsParams(choice=["yes indeed it is so", "no never was it so"])},
        {"temperature": 0.6, "seed": 5, "logprobs": 2},
    ]
    parameters = [SamplingParams(**({"temperature": 0.0, "max_tokens": 14} | given)) for given in options]
    return [list(o.outputs[0].token_ids) for o in llm.generate(engines.prompts(6), parameters, use_tqdm=False)]


SCENARIOS = {
    "six": lambda llm, ours: engines.generate(llm, engines.prompts(6), max_tokens=24),
    "chunked": lambda llm, ours: engines.generate(llm, [engines.long_prompt(), *engines.prompts(2)], max_tokens=12),
    "mixed": run_mixed,
}


@functools.cache
def plain() -> dict[str, list[list[int]]]:
    with engines.engine(None) as llm:
        return {name: scenario(llm, False) for name, scenario in SCENARIOS.items()}


class Run:
    """What one policy did in one scenario."""

    def __init__(self, llm: Any, scenario: str):
        def figures() -> tuple[dict[str, Any], dict[str, Any], int]:
            stats, sized = (llm.collective_rpc(f"crossspec_{name}")[0]["eagle3"] for name in ("stats", "adaptive"))
            return stats, sized, llm.collective_rpc(num_waits)[0]

        llm.collective_rpc(watched)
        before = figures()
        self.tokens = SCENARIOS[scenario](llm, True)
        after = figures()
        self.steps = llm.collective_rpc(watched)[0]
        self.stats, self.sized = (
            {name: _minus(new[name], old[name]) for name in new} for new, old in zip(after[:2], before[:2], strict=True)
        )
        self.num_waits = after[2] - before[2]


def _minus(new: Any, old: Any) -> Any:
    return [a - b for a, b in zip(new, old, strict=True)] if isinstance(new, list) else new - old


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    plain()  # first: vLLM's counters are those of the newest engine of a process
    path = calibration_file(tmp_path_factory.mktemp("heterospec"), BINS["spread"])
    # Asynchronous: the scheduler plans whole trees before it can know of any cut.
    with (
        engines.engine(
            spec(path), enable_prefix_caching=False, max_num_batched_tokens=160, async_scheduling=True
        ) as running,
    ):
        engines.generate(running, engines.prompts(1), max_tokens=4)  # so that the counters are serving's
        running.collective_rpc(watch_rows)
        yield running


@pytest.fixture(scope="module")
def runs(llm):
    found: dict[tuple[str, str], Run] = {}

    def of(bins: str, scenario: str) -> Run:
        if (bins, scenario) not in found:
            llm.collective_rpc(set_bins, args=(BINS[bins],))
            found[bins, scenario] = Run(llm, scenario)
        return found[bins, scenario]

    return of


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("bins", BINS)
def test_text_is_plains(runs, bins, scenario):
    assert runs(bins, scenario).tokens == plain()[scenario]


def check_rows(steps: list[dict[str, Any]], contemplates: bool = False) -> None:
    """No tree brings more rows than it needs, none has nodes without rows, and the forward pass has no others.

    Steps in which prompts run beside are left out of the sum: their tokens are rows, too. A request that opted out has
    no drafts, and its prompt is through where those of later ones are.
    """
    from vllm_crossspec.kinds.contemplate_layout import planned_tokens
    from vllm_crossspec.types import NO_DRAFTS, TREE

    for step in steps:
        assert step["forward"] == step["rows"]
        for drafted, width, size, mode in zip(
            step["drafted"], step["widths"], step["sizes"], step["modes"], strict=True
        ):
            if mode == TREE:
                assert drafted <= planned_tokens(width, contemplates) and size <= width
        if all(n or mode == NO_DRAFTS for n, mode in zip(step["drafted"], step["modes"], strict=True)):
            assert step["forward"] == sum(drafted + 1 for drafted in step["drafted"])


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("bins", BINS)
def test_the_target_computes_as_many_rows_as_the_trees_need(runs, bins, scenario):
    """20 nodes: bin 0 keeps 6 + 2, bin 1 12 + 1, the others all; each request has one more row, its root."""
    run = runs(bins, scenario)
    check_rows(run.steps)
    # The device's own count of what it verified says the same, for rounds that begin inside a prompt bring none.
    verified = sum(drafted + 1 for step in run.steps for drafted in step["drafted"] if drafted)
    assert run.stats["draft_tokens"] + run.stats["drafts"] <= verified
    if scenario == "six":
        assert run.stats["draft_tokens"] + run.stats["drafts"] == verified
        pairs = [pair for step in run.steps for pair in zip(step["drafted"], step["widths"], strict=True)]
        widths = {width for drafted, width in pairs if drafted}  # one that has drafted nothing yet has no tree
        assert widths == {"spread": {8, 13, 20}, "all sure": {8}, "none sure": {20}}[bins]
        if bins == "spread":
            assert any(len(set(step["drafted"])) > 2 for step in run.steps), "no step was of several widths"


def test_bins_are_what_the_tests_mean(runs):
    trees = {bins: runs(bins, "six").sized["trees"] for bins in BINS}
    assert all(count > 0 for count in trees["spread"]), trees
    assert trees["all sure"][0] > 0 and not any(trees["all sure"][1:])
    assert trees["none sure"][-1] > 0 and not any(trees["none sure"][:-1])


def test_sure_trees_are_deeper_and_narrower(runs):
    six = {bins: runs(bins, "six") for bins in BINS}
    deepest = {
        bins: max(i for i, n in enumerate(run.stats["accepted_per_position"], start=1) if n)
        for bins, run in six.items()
    }
    assert deepest["none sure"] == TREE["depth"] < deepest["all sure"] <= TREE["depth"] + ALPHA
    rows = {bins: sum(step["forward"] for step in run.steps) for bins, run in six.items()}
    assert rows["all sure"] < rows["spread"] < rows["none sure"]


def test_one_wait_a_round_and_no_pass_too_many(runs):
    """The levels beyond the ordinary ones are those of the surest request, whatever the others need."""
    for bins in BINS:
        run = runs(bins, "six")
        assert run.num_waits == run.sized["rounds"] > 0
        assert run.sized["extra_levels"][:2] == [2 * run.sized["trees"][0], run.sized["trees"][1]]
        assert run.sized["extra_passes"] <= ALPHA * run.sized["rounds"]
    assert runs("all sure", "six").sized["extra_passes"] == ALPHA * runs("all sure", "six").sized["rounds"]
    assert runs("none sure", "six").sized["extra_passes"] == 0


# -- negative controls --------------------------------------------------------------------------------------------


def broken(llm: Any, how: Any) -> tuple[list[list[int]], list[dict[str, Any]]]:
    llm.collective_rpc(set_bins, args=(BINS["spread"],))
    llm.collective_rpc(watched)
    llm.collective_rpc(how)
    try:
        return SCENARIOS["six"](llm, True), llm.collective_rpc(watched)[0]
    finally:
        llm.collective_rpc(sabotage.mend)


def test_rows_that_are_not_cut_are_seen(llm, runs):
    runs("spread", "six")
    tokens, steps = broken(llm, cut_nothing)
    assert tokens == plain()["six"]
    with pytest.raises(AssertionError):
        check_rows(steps)


def test_query_lens_of_other_requests_are_seen_and_cost_no_text(llm, runs):
    """A tree that lost rows has nodes that nobody verifies: slower, and plain's text all the same."""
    runs("spread", "six")
    tokens, steps = broken(llm, swap_widths)
    assert tokens == plain()["six"]
    with pytest.raises(AssertionError):
        check_rows(steps)


def test_a_broken_target_pass_is_seen(llm, runs):
    runs("spread", "six")
    assert broken(llm, sabotage.shift_positions)[0] != plain()["six"]


def test_the_file_is_the_commands(tmp_path):
    content = json.loads(Path(calibration_file(tmp_path, BINS["spread"])).read_text())
    assert [entry["width"] for entry in content["bins"]] == [8, 13, 20, 20]


# ---- an engine of its own, which ends the ones above: last


def test_bins_may_have_more_nodes_than_the_tree(tmp_path):
    """The paper's third bin, not capped: N' = 20 + (4 - 3) nodes, in an engine whose tree has 20."""
    from vllm_crossspec.heterospec.heterospec import Reading

    thresholds = (NOTHING - 1, NOTHING, EVERYTHING)
    path = calibration_file(tmp_path, thresholds, alpha=4, reading=Reading(first_bin=1, is_capped=False))
    with engines.engine(spec(path), enable_prefix_caching=False) as llm:
        llm.collective_rpc(watch_rows)
        assert SCENARIOS["six"](llm, True) == plain()["six"]
        steps = llm.collective_rpc(watched)[0]
        sized = llm.collective_rpc("crossspec_adaptive")[0]["eagle3"]
    assert sized["trees"][2] > 0 and sized["nodes"][2] == 21 * sized["trees"][2]
    assert {drafted for step in steps for drafted in step["drafted"] if drafted} == {21}
    assert any(21 in step["sizes"] for step in steps)
    check_rows(steps)
