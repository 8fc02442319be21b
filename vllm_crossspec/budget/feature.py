"""A joint budget: of all requests' draft nodes, those are verified that are worth their rows.

The scheduler plans equally many draft rows for every request. This takes the place of ``AdaptiveVerificationManager``
in vLLM's own runner, which lays a step out for fewer rows than were planned, and lets the device say whose they are. To
the scheduler, rows that were taken back are rejected drafts.

Differences from vLLM's: drafts are trees, whose chances come from the drafter's log-probabilities; their correction is
learned by depth; costs are those that ``by_batch_size`` "auto" measures.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits

from vllm_crossspec.arrays import Array
from vllm_crossspec.budget.kernels import Shares, Verified, admit, estimate, learn, make_estimates
from vllm_crossspec.budget.rows import Plan, best_rows
from vllm_crossspec.graphs.query_lens import target_graphs
from vllm_crossspec.load.rows import RowCosts
from vllm_crossspec.step.feature import Feature
from vllm_crossspec.step.step import Step
from vllm_crossspec.types import Candidates
from vllm_crossspec.vllm_api.shared_rows import shared_rows

logger = init_logger("vllm.crossspec")

LAG = 2
"""Rounds after which what a draft is worth has reached the host, without a wait."""


class JointBudget(Feature):
    """Shares the rows of a step out among the drafts of all its requests. R requests, S slots, N draft nodes.

    Attributes:
        estimates: of every slot's drafts.
        costs: of rows; None before they are measured, and all planned rows are verified.
    """

    name = "budget"
    mixes_widths = True

    def __init__(self, runner: Any):
        super().__init__(runner)
        slots, device, nodes = runner.max_num_reqs, runner.device, runner.speculator.num_speculative_steps
        self.estimates = make_estimates(slots, nodes, runner.settings.max_depth, device)
        self.costs: RowCosts | None = None
        self._worth = WorthOnHost(self.estimates.worth)
        self._takes_part = True  # whether the step under way can be cut
        self._budget = 0
        self._planned: Any = np.zeros(0, dtype=np.int32)  # [R] of the batch
        self._others = self._planned
        self._counts = torch.zeros(2 * slots, dtype=torch.int32, device=device)
        self._admitted = torch.zeros(slots, dtype=torch.int32, device=device)
        self._cu_num_logits = torch.zeros(slots + 1, dtype=torch.int32, device=device)
        self._steps, self._rows_planned, self._rows_admitted = 0, 0, 0

    @staticmethod
    def is_wanted(runner: Any) -> bool:
        # A LoRA of the output layer is told by the host which rows are whose.
        has_one_rank = runner.vllm_config.parallel_config.data_parallel_size == 1
        return bool(runner.settings.shares_rows) and has_one_rank and runner.lora_config is None

    def kv_ready(self) -> None:
        """Take the place of vLLM's manager, if CUDA graphs can have batches of mixed widths, or there are none."""
        runner = self.runner
        manager = runner.cudagraph_manager = target_graphs(runner, runner.settings)
        if manager.cudagraph_mode.has_full_cudagraphs() and not getattr(manager, "mixes", False):
            logger.warning("crossspec: rows are not shared out: this attention has no CUDA graphs of mixed widths")
            return
        runner.adaptive_verification = self

    def measure(self) -> None:
        """Tensor-parallel ranks must decide alike, by the first one's costs."""
        table = get_tp_group().broadcast_object(self.runner.measured_step_costs(), src=0)
        self.costs = None if table is None else RowCosts(table)

    # -- the step, as a feature -----------------------------------------------------------------------------------

    def plan(self, scheduler_output: Any) -> Any:
        """A grammar's rows are laid out by the scheduler's plan; steps with one keep all rows."""
        self._takes_part = not scheduler_output.has_structured_output_requests
        return scheduler_output

    def split(self, step: Step) -> None:
        """On a CPU attention goes by the host's arrays, and these can be had at once."""
        batch = step.batch
        is_cut = step.has_drafts and batch.num_draft_tokens < int(self._planned.sum())
        if not is_cut or self.runner.device.type != "cpu":
            return
        admitted = self._admitted[: batch.num_reqs].numpy()
        starts = batch.query_start_loc_np.copy()
        starts[1 : batch.num_reqs + 1] = np.cumsum(admitted + self._others)
        step.batch = dataclasses.replace(
            batch,
            num_scheduled_tokens=admitted + self._others,
            query_start_loc_np=starts,
            cu_num_logits_np=batch.cu_num_logits[: batch.num_reqs + 1].numpy().copy(),
        )

    def sampled(self, step: Step, final_states: torch.Tensor) -> None:
        """Learn from what was accepted."""
        if not step.has_drafts:
            return
        state = self.runner.draft_state
        assert step.num_sampled is not None
        verified = Verified(
            step.batch.idx_mapping, state.parents, state.num_live, state.path, step.num_sampled, state.max_depth
        )
        learn(verified, self.estimates)

    def drafted(self, name: str, batch: Any, candidates: Candidates) -> None:
        """Estimate what these trees are worth, and send it to the host."""
        assert candidates.tree is not None
        estimate(candidates.tree, batch.idx_mapping, self.estimates)
        self._worth.send(batch.idx_mapping_np)

    # -- the step, as vLLM's runner asks for it -------------------------------------------------------------------

    def add_request(self, slot: int) -> None:
        """A request takes a slot; nothing is known of its drafts."""
        self._worth.forget(slot)

    def get_num_tokens(self, scheduled: Mapping[str, int], drafts: Mapping[str, list[int]]) -> int:
        """Rows of the step."""
        plan, runner = Plan(scheduled, drafts), self.runner
        self._budget = plan.num_planned
        if self._takes_part and self.costs is not None:
            slots = [runner.req_states.req_id_to_index[req_id] for req_id in scheduled]
            most = max(min(plan.num_planned, get_max_chunk_logits(runner.vocab_size) - len(slots)), 0)
            self._budget = best_rows(plan, self._worth.of(slots), self.costs, most)
            self._budget = min(self._padded(plan.num_others + self._budget) - plan.num_others, most)
        self._steps += 1
        self._rows_planned += plan.num_planned
        self._rows_admitted += self._budget
        return plan.num_others + self._budget

    def _padded(self, rows: int) -> int:
        """Rows that a CUDA graph of so many computes anyway."""
        compilation = self.runner.compilation_config
        if compilation.cudagraph_mode == CUDAGraphMode.NONE:
            return rows
        sizes = compilation.cudagraph_capture_sizes or ()
        return min((size for size in sizes if size >= rows), default=rows)

    def compact_batch(self, planned: Any, scheduled: Any, cu_num_logits: Any) -> tuple[Any, Any]:
        """The batch as the host is told it: the total is right, the requests' shares are even.

        Returns rows [R], and the first logits row of each request [R + 1], an upper bound.
        """
        self._planned, self._others = planned, scheduled - planned
        if self._budget == int(planned.sum()):
            return scheduled, cu_num_logits
        if not self._budget:
            return self._others, np.arange(len(planned) + 1, dtype=cu_num_logits.dtype)
        leading = int((planned > 0).sum())  # requests with drafts are the first
        even = np.zeros_like(planned)
        even[:leading] = self._budget // leading
        even[: self._budget % leading] += 1
        return self._others + even, cu_num_logits

    def reallocate_drafts(self, req_ids: Sequence[str], idx_mapping: torch.Tensor) -> tuple[Any, ...]:
        """The batch on the device: first logits rows, first rows, and how many draft rows there are."""
        num_reqs, starts = len(self._planned), self.runner.input_buffers.query_start_loc
        counts = self._counts[: 2 * num_reqs].view(2, num_reqs)
        async_tensor_h2d(np.stack([self._planned, self._others]), out=counts)
        logits = self._cu_num_logits[: num_reqs + 1]
        shares = Shares(idx_mapping, counts[0], counts[1], self._admitted, logits, starts)
        admit(shares, self.estimates.worth, self._budget)
        return shared_rows(logits, starts, self._budget)

    def record_confidences(self, confidences: None, batch: Any) -> None:
        """Part of vLLM's protocol; trees are estimated when they are drafted."""

    def batches_to_profile(self, capture_sizes: list[int]) -> Iterator[dict[str, int]]:
        """Part of vLLM's protocol; steps are timed for ``by_batch_size``."""
        return iter(())

    def set_initial_cost_curves(self, samples: Any) -> None:
        """Part of vLLM's protocol, likewise."""

    # -- figures --------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        self._steps = self._rows_planned = self._rows_admitted = 0

    def stats(self) -> dict[str, Any]:
        """Steps with drafts, their planned and verified draft rows, and offset and slope of each level."""
        logistics = [[round(x, 3) for x in pair] for pair in self.estimates.logistics.tolist()]
        rows = {"planned": self._rows_planned, "verified": self._rows_admitted}
        return {"steps": self._steps, "rows": rows, "logistics": logistics}


class WorthOnHost:
    """What every slot's nodes are worth, as the host knows it: on a GPU as of the round before the last one.

    A slot whose drafts have not reached the host counts as the mean of those that have.

    Args:
        worth: float32 [S, N] on the device.
    """

    def __init__(self, worth: torch.Tensor):
        self._worth, self._rounds = worth, np.zeros(len(worth), dtype=np.int64)
        self._lag = LAG if worth.device.type != "cpu" else 1
        self._usual = np.full(worth.shape[1], 0.0)
        self._copies = [worth]
        self._events: list[Any] = []
        if self._lag > 1:
            self._copies = [torch.zeros(worth.shape, pin_memory=True) for _ in range(LAG)]
            self._events = [torch.Event(worth.device) for _ in range(LAG)]
        self._at = 0

    def forget(self, slot: int) -> None:
        """Another request is in this slot."""
        self._rounds[slot] = 0

    def send(self, slots: Array) -> None:
        """Start a copy; the drafts of ``slots`` are new."""
        self._rounds[slots] += 1
        if self._events:
            self._at = (self._at + 1) % LAG
            self._copies[self._at].copy_(self._worth, non_blocking=True)
            self._events[self._at].record()

    def of(self, slots: Sequence[int]) -> Array:
        """float [R, N], falling along N."""
        last = (self._at + 1) % len(self._copies)
        if self._events:
            self._events[last].synchronize()  # recorded a round ago, so that it has long happened
        found = self._copies[last].numpy()[slots]
        is_known = self._rounds[slots] >= self._lag
        if is_known.any():
            self._usual = found[is_known].mean(axis=0)
        return np.where(is_known[:, None], found, self._usual)
