"""Steps in which each request brings its own number of draft nodes.

HeteroSpec sizes trees by request and round, and a router's drafters differ in how much they draft. The scheduler plans
the widest draft for every request, one step ahead of the drafts. The excess nodes are taken out here when the step
begins, before anything reads the plan. To the scheduler they are rejected drafts.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_crossspec.graphs.query_lens import target_graphs
from vllm_crossspec.metrics.adaptive import TreeSizeCounters
from vllm_crossspec.step.feature import Feature
from vllm_crossspec.types import TREE, Candidates


class AdaptiveSizes(Feature):
    """Verifies no more nodes of a draft than it was given, and counts them.

    Attributes:
        widths: int32 [S] on the host, most live draft nodes of each slot's next verification.
        counters: by drafter.
    """

    name = "adaptive"
    mixes_widths = True

    def __init__(self, runner: Any):
        super().__init__(runner)
        self.num_nodes = runner.speculator.num_speculative_steps
        self.widths_of = {name: runner.settings.width_of(name) for name in runner.settings.drafters}
        self.widths = np.full(runner.max_num_reqs, self.num_nodes, dtype=np.int32)
        self.counters = {
            name: TreeSizeCounters(len(policy.widths)) for name, policy in runner.settings.policies.items()
        }

    @staticmethod
    def is_wanted(runner: Any) -> bool:
        return runner.settings.differs_in_width

    def kv_ready(self) -> None:
        """CUDA graphs of every width that drafts may have."""
        self.runner.cudagraph_manager = target_graphs(self.runner, self.runner.settings)

    def added(self, requests: Sequence[Any], slots: list[int]) -> None:
        self.widths[slots] = self.num_nodes

    def plan(self, scheduler_output: Any) -> Any:
        """The step, with as many draft rows for each request as its tree has nodes."""
        new = {request.req_id for request in scheduler_output.scheduled_new_reqs}
        return cut_drafts(scheduler_output, lambda req_id: None if req_id in new else self._width_of(req_id))

    def _width_of(self, req_id: str) -> int | None:
        """Draft tokens that a request's tree needs; None (all planned ones) for a request that is new or has a chain.

        The scheduler's grammar of a structured request has a row for each planned draft token.
        """
        runner = self.runner
        slot = runner.req_states.req_id_to_index.get(req_id)
        if slot is None or runner.draft_state.modes[slot] != TREE:
            return None
        return runner.settings.planned(int(self.widths[slot]))

    def drafted(self, name: str, batch: Any, candidates: Candidates) -> None:
        """Keep and count the sizes of these trees."""
        sizing = candidates.sizing
        self.widths[batch.idx_mapping_np] = self.widths_of[name] if sizing is None else sizing.widths
        if sizing is not None and name in self.counters:
            self.counters[name].count(sizing)

    def reset(self) -> None:
        for counters in self.counters.values():
            counters.reset()

    def published(self) -> dict[str, Any]:
        return {"sizes": self.counters}

    def stats(self) -> dict[str, Any]:
        """Trees and levels by drafter and bin so far."""
        return {name: counters.snapshot() for name, counters in self.counters.items()}


def cut_drafts(planned: SchedulerOutput, width_of: Callable[[str], int | None]) -> SchedulerOutput:
    """The step with at most ``width_of(request's id)`` draft tokens of each request, where that is not None.

    ``planned`` is never changed, and returned if nothing is cut. If engine and worker share a process, the scheduler
    reads it again, to count as rejected what was cut.
    """
    drafts, scheduled = planned.scheduled_spec_decode_tokens, planned.num_scheduled_tokens
    widths = {req_id: width_of(req_id) for req_id in drafts}
    cut = {r: drafts[r][:width] for r, width in widths.items() if width is not None and width < len(drafts[r])}
    if not cut:
        return planned
    excess = {req_id: len(drafts[req_id]) - len(kept) for req_id, kept in cut.items()}
    return dataclasses.replace(
        planned,
        scheduled_spec_decode_tokens=drafts | cut,
        num_scheduled_tokens=scheduled | {req_id: scheduled[req_id] - n for req_id, n in excess.items()},
        total_num_scheduled_tokens=planned.total_num_scheduled_tokens - sum(excess.values()),
    )
