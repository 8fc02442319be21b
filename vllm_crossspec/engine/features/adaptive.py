"""Drafts whose size differs by request and round: steps in which each request brings its own number of draft nodes.

Trees are sized by what their drafter knows (HeteroSpec), and drafters between which is routed differ in how much they
draft. The scheduler plans for the widest draft of every request, one step ahead of the drafts. What each turned out to
be is known when the step begins: the nodes beyond are taken out of it here, before anything reads the plan. To the
scheduler they are drafts that were rejected.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_crossspec.adaptive.calibration import policies
from vllm_crossspec.engine.features.base import Feature
from vllm_crossspec.engine.graphs.query_lens import target_graphs
from vllm_crossspec.metrics.adaptive import TreeSizeCounters
from vllm_crossspec.types import TREE, Candidates


class AdaptiveSizes(Feature):
    """Verifies no more nodes of a draft than it was given, and counts what trees were given.

    Attributes:
        widths: int32 [S] on the host, draft nodes of each slot's next verification; more than those are never live.
        counters: by drafter.
    """

    name = "adaptive"
    mixes_widths = True

    def __init__(self, runner: Any):
        super().__init__(runner)
        self.num_nodes = runner.speculator.num_speculative_steps
        self.widths_of = {name: runner.settings.width_of(name) for name in runner.settings.drafters}
        self.widths = np.full(runner.max_num_reqs, self.num_nodes, dtype=np.int32)
        self.counters = {name: TreeSizeCounters(policy) for name, policy in policies(runner.settings).items()}

    @staticmethod
    def is_wanted(runner: Any) -> bool:
        """See the base class."""
        return runner.settings.differs_in_width

    def kv_ready(self) -> None:
        """CUDA graphs of every width that drafts may have."""
        self.runner.cudagraph_manager = target_graphs(self.runner, self.runner.settings)

    def added(self, requests: Sequence[Any], slots: list[int]) -> None:
        """See the base class."""
        self.widths[slots] = self.num_nodes

    def plan(self, scheduler_output: Any) -> Any:
        """The step with as many draft rows of each request as its tree has nodes."""
        new = {request.req_id for request in scheduler_output.scheduled_new_reqs}
        return cut_drafts(scheduler_output, lambda req_id: None if req_id in new else self._width_of(req_id))

    def _width_of(self, req_id: str) -> int | None:
        """Draft tokens that a request's tree needs; None for one that is new here, or whose drafts follow a chain.

        The grammar of a structured request, made by the scheduler, has a row for each planned draft token.
        """
        runner = self.runner
        slot = runner.req_states.req_id_to_index.get(req_id)
        if slot is None or runner.draft_state.modes[slot] != TREE:
            return None
        return runner.settings.planned(int(self.widths[slot]))

    def drafted(self, name: str, batch: Any, candidates: Candidates) -> None:
        """Keep and count what the trees just kept were given."""
        sizing = candidates.sizing
        self.widths[batch.idx_mapping_np] = self.widths_of[name] if sizing is None else sizing.widths
        if sizing is not None and name in self.counters:
            self.counters[name].count(sizing)

    def reset(self) -> None:
        """See the base class."""
        for counters in self.counters.values():
            counters.reset()

    def published(self) -> dict[str, Any]:
        """See the base class."""
        return {"sizes": self.counters}

    def stats(self) -> dict[str, Any]:
        """Trees and levels by drafter and bin so far."""
        return {name: counters.snapshot() for name, counters in self.counters.items()}


def cut_drafts(planned: SchedulerOutput, width_of: Callable[[str], int | None]) -> SchedulerOutput:
    """The step with no more draft tokens of a request than its tree has.

    ``planned`` stays as it is: with engine and worker in one process the scheduler will read it again, to count what
    was cut as rejected.

    Args:
        planned: of the scheduler.
        width_of: takes a request's id; draft tokens that it may bring, or None for all that were planned.

    Returns:
        ``planned`` itself where nothing is to be cut.
    """
    drafts = planned.scheduled_spec_decode_tokens
    widths = {req_id: width_of(req_id) for req_id in drafts}
    excess = {
        req_id: len(drafts[req_id]) - width
        for req_id, width in widths.items()
        if width is not None and width < len(drafts[req_id])
    }
    if not excess:
        return planned
    return dataclasses.replace(
        planned,
        scheduled_spec_decode_tokens=drafts | {r: drafts[r][: len(drafts[r]) - n] for r, n in excess.items()},
        num_scheduled_tokens=planned.num_scheduled_tokens
        | {r: planned.num_scheduled_tokens[r] - n for r, n in excess.items()},
        total_num_scheduled_tokens=planned.total_num_scheduled_tokens - sum(excess.values()),
    )
