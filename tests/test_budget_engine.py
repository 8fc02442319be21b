"""The joint budget in running engines: plain's text whichever rows are verified, and more tokens of the better ones."""

from typing import Any
from unittest import mock

import engines
import pytest
import sabotage
from hunt_cases import any_rows

from vllm_crossspec.budget import feature

pytestmark = pytest.mark.e2e


@pytest.fixture(autouse=True)
def measured_widths(monkeypatch):
    """A budget is for widths that follow the load, which other tests do without."""
    monkeypatch.delenv("CROSSSPEC_FIXED_WIDTHS")


SPEC = engines.tree("eagle3", engines.EAGLE3, num_nodes=20, depth=3, top_k=5, budget="batch")
SPECS = {
    "tree": SPEC,
    "sizes by request": {
        **engines.tree("eagle3", engines.EAGLE3, num_nodes=60, budget="batch"),
        "adaptive": {"model": str(engines.POCKET / "heterospec" / "calibration.json")},
    },
    "dart": engines.tree("dart", engines.DART, num_nodes=33, budget="batch"),
}


def third_of_rows() -> Any:
    return mock.patch.object(feature, "best_rows", lambda plan, worth, costs, most: most // 3)


@pytest.mark.parametrize(
    ("kind", "is_async"), [("tree", False), ("tree", True), ("sizes by request", False), ("dart", False)]
)
def test_texts_are_plains_whichever_rows_are_verified(kind, is_async):
    plain = [engines.plain(8), engines.plain(8, temperature=0.8, seed=7)]
    mixed, _ = engines.plain_mixed_answers()
    with engines.engine(None, **engines.LARGE_STEPS) as llm:
        chunked = engines.generate(llm, [engines.long_prompt(), *engines.prompts(5)], max_tokens=12)
    settings = {**engines.LARGE_STEPS, "async_scheduling": is_async}
    with any_rows(3), engines.engine(SPECS[kind], **settings) as llm:
        assert engines.generate(llm, engines.prompts(8)) == plain[0]
        assert engines.generate(llm, engines.prompts(8), temperature=0.8, seed=7) == plain[1]
        assert engines.mixed_answers(llm)[0] == mixed
        assert engines.generate(llm, [engines.long_prompt(), *engines.prompts(5)], max_tokens=12) == chunked
        rows = llm.collective_rpc("crossspec_routing", args=("budget",))[0]["rows"]
    assert 0.3 * rows["planned"] < rows["verified"] < 0.7 * rows["planned"], rows


def forget_what_is_worth(worker: Any) -> None:
    """All nodes are worth the same, so that requests get their rows in the order of the batch."""

    def wrapper(original: Any) -> Any:
        def admit(*shares: Any) -> Any:
            worker.model_runner.features["budget"].estimates.worth.fill_(0.5)
            return original(*shares)

        return admit

    sabotage._replace(worker, worker.model_runner.features["budget"], "reallocate_drafts", wrapper)


def test_rows_go_where_they_are_worth_most():
    plain = engines.plain(8)
    with any_rows(), third_of_rows(), engines.engine(SPEC, **engines.LARGE_STEPS) as llm:

        def run(llm: Any) -> list[list[int]]:
            return engines.generate(llm, engines.prompts(8))

        run(llm)  # learns
        found, accepted = engines.run_broken(llm, sabotage.mend, run)
        blind, accepted_blindly = engines.run_broken(llm, forget_what_is_worth, run)
        wrong, _ = engines.run_broken(llm, sabotage.shift_positions, run)
        logistics = llm.collective_rpc("crossspec_routing", args=("budget",))[0]["logistics"]
    assert found == blind == plain
    assert accepted > 1.2 * accepted_blindly, (accepted, accepted_blindly)
    assert wrong != plain, "the control found nothing"
    assert all(0 < slope < 3 for _, slope in logistics), logistics


def test_without_a_budget_nothing_is_shared_out():
    spec = engines.tree("eagle3", engines.EAGLE3, num_nodes=20, depth=3, top_k=5, budget="request")
    with engines.engine(spec) as llm:
        assert llm.collective_rpc("crossspec_routing", args=("budget",)) == [None]
