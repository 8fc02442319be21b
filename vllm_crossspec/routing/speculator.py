"""The speculator in which a router chooses the drafter of every request in every round (WhiFlash, section 3)."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.logger import init_logger
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_crossspec.arrays import Array
from vllm_crossspec.catch_up.kernels import accepted_lengths, joined
from vllm_crossspec.host_copy import HostCopy
from vllm_crossspec.metrics.routing import RoutingCounters
from vllm_crossspec.metrics.stages import StageClock
from vllm_crossspec.routing.backlogs import NO_DRAFTER, Backlogs
from vllm_crossspec.routing.make import make_router
from vllm_crossspec.routing.observer import RoundObserver
from vllm_crossspec.routing.one_row import LastTokenBatches
from vllm_crossspec.speculator.base import Speculator
from vllm_crossspec.types import NO_DRAFTS, StepInputs

logger = init_logger("vllm.crossspec")


class RoutedSpeculator(Speculator):
    """The router's drafter drafts for a request; the other drafters queue the tokens that they miss.

    Differences from ``SingleSpeculator``:

    - Missed tokens wait as fused features in a bounded buffer per drafter (``backlogs``). They become keys and values
      when the drafter is chosen, when the buffer is full, or when other requests may reuse the blocks.
    - A drafter starts from the last accepted token only: one row per request.
    - A round waits for the device once, for a copy of routes and accepted lengths (``HostCopy``). Meanwhile the device
      fuses and stores the step's features. On CPUs states wait unfused (``Platform.fuses_late``).
    - With ``router.wait`` false only rounds wait in which a request reads its prompt. Others carry out the routes of
      the round before, whose copy has arrived, and read the accepted lengths on the device; the host's books are
      settled in the round after.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, req_states: Any):
        super().__init__(vllm_config, device, req_states)
        settings, num_slots = self.settings, vllm_config.scheduler_config.max_num_seqs
        assert settings.router is not None
        self.order = settings.routing_order
        self.routing = RoutingCounters(self.order, num_slots)
        self.backlogs = Backlogs(settings, vllm_config, self.proposers, self.tap_indices, self.routing, device)
        self.router = make_router(settings, vllm_config, device)
        self.observer = RoundObserver(self.router, self.backlogs, self.proposers, vllm_config)
        self.clock = StageClock(("route", "store", "catch_up", "draft"), device)
        self.drafts = torch.zeros(num_slots, self.num_speculative_steps, dtype=torch.int64, device=device)
        self.copied = HostCopy((2, num_slots), device)
        self.routes, self.accepted = self.copied.tensor
        self._waits = settings.router.wait
        self._decided = np.full(num_slots, NO_DRAFTER, dtype=np.int64)  # [S] routes of the last round's copy
        self._unsettled: tuple[Array, Array] | None = None  # slots and routes of a round whose lengths are not known
        self.last_rows = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.one_row = LastTokenBatches(num_slots, device)
        self._is_first_dummy = True
        num_bytes = sum(queue.features.nbytes for queue in self.backlogs.queues.values())
        logger.info(
            "crossspec: policy %s over %s; %.1f MiB hold what inactive drafters miss (%d tokens of a request, %.2f MiB "
            "a request)",
            settings.router.policy,
            list(self.order),
            num_bytes / 2**20,
            settings.router.max_backlog,
            num_bytes / num_slots / 2**20,
        )

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        super().init_cudagraph_manager(cudagraph_mode)
        for queue in self.backlogs.queues.values():
            queue.graphs = None  # those of a profile run write to a cache that is gone
        self._has_full_graphs = cudagraph_mode.decode_mode() == CUDAGraphMode.FULL

    def capture(self) -> None:
        super().capture()
        for queue in self.backlogs.queues.values() if self._has_full_graphs else ():
            queue.capture()

    # -- requests come and go ---------------------------------------------------------------------------------

    def add_requests(self, slots: list[int], num_computed: list[int]) -> None:
        self.backlogs.add_requests(slots, num_computed)
        self._decided[slots] = NO_DRAFTER
        self.routing.forget(slots)
        self.observer.add_requests(slots)
        on_device = async_tensor_h2d(np.array(slots, dtype=np.int64), device=self.device)
        self.router.release(on_device)
        if self.kept.state is not None:
            self.kept.state.sizes.index_fill_(0, on_device, 0)  # nothing is drafted yet

    def remove_requests(self, slots: list[int]) -> None:
        super().remove_requests(slots)
        self._settle()
        self.backlogs.remove_requests(slots)

    # -- the round --------------------------------------------------------------------------------------------

    def round(self, step: StepInputs) -> torch.Tensor:
        """Route, store, catch up, draft."""
        if step.is_dummy:
            return self.kept.plan(self._dummy_round(step))
        self.serve(step.batch)
        num_reqs = step.batch.num_reqs
        slots = step.batch.idx_mapping_np[:num_reqs].astype(np.int64)
        self._settle()
        routes = self._routes_before(step, slots)
        self.clock.mark()
        self._route(step, slots, carries_out=routes is None)
        self.clock.mark()
        self.backlogs.store(step, slots)
        self.clock.mark()
        if routes is None:
            routes = self._take_routes(step, slots)
            self.backlogs.catch_up(slots, routes)
            bounds = None
        else:
            bounds = self.backlogs.computed[slots] + self.backlogs.rows_of(step)[1]
            self.observer.after_routing(slots, routes)
            self.backlogs.count(slots, routes, self.backlogs.computed[slots])
            self.backlogs.catch_up_within(slots, routes, bounds)
            self._unsettled = slots, routes
        self.clock.mark()
        if (routes == NO_DRAFTER).any():  # their draft tokens must be valid too
            self.drafts[:num_reqs].zero_()
        for number, name in enumerate(self.order):
            rows = np.flatnonzero(routes == number)
            if len(rows):
                self._draft(name, step, slots[rows], rows, None if bounds is None else bounds[rows])
        self.clock.mark()
        self.clock.end_round()
        return self.kept.plan(self.drafts[:num_reqs])

    def _settle(self) -> None:
        """Take the copy of the last round, if that did not wait for it."""
        if self._unsettled is None:
            return
        (slots, routes), self._unsettled = self._unsettled, None
        self._decided[slots], self.backlogs.computed[slots] = self.copied.wait(len(slots), is_old=True)
        self.backlogs.settle(slots, routes)

    def _routes_before(self, step: StepInputs, slots: Array) -> Array | None:
        """int64 [R] routes of the round before; None if this one must wait for its own.

        It must where a request that wants drafts has none yet, and where drafters take in what others may reuse.
        """
        if self._waits or self.backlogs.must_settle or (self.backlogs.rows_of(step)[0] > 1).any():
            return None
        gets_drafts = self._get_drafts(step, slots)
        routes = np.where(gets_drafts, self._decided[slots], NO_DRAFTER)
        return None if (gets_drafts & (routes == NO_DRAFTER)).any() else routes

    def _get_drafts(self, step: StepInputs, slots: Array) -> Array:
        """bool [R] whether any are planned for a request, and it wants them."""
        wants = np.full(len(slots), step.num_scheduled != 0)
        return wants if self.kept.state is None else wants & (self.kept.state.modes[slots] != NO_DRAFTS)

    def _route(self, step: StepInputs, slots: Array, carries_out: bool) -> None:
        """Let the router choose, and start the copy of its routes and the accepted lengths."""
        batch, num_reqs = step.batch, step.batch.num_reqs
        accepted_lengths(
            idx_mapping=batch.idx_mapping[:num_reqs],
            query_start_loc=batch.query_start_loc,
            num_rejected=step.num_rejected,
            num_computed=self.req_states.num_computed_tokens.gpu,
            last_rows=self.last_rows,
            computed=self.accepted,
        )
        self.observer.before_routing(step, slots)
        self.router.decide(
            step.last_hidden_states,
            self.last_rows[:num_reqs],
            batch.idx_mapping[:num_reqs],
            step.num_sampled,
            self.routes[:num_reqs],
            carries_out,
        )
        self.copied.start()

    def _take_routes(self, step: StepInputs, slots: Array) -> Array:
        """int64 [R] drafter of each request; from here the host knows the accepted lengths."""
        routes, computed = self.copied.wait(len(slots))  # the sync named "route copy"
        before, self.backlogs.computed[slots] = self.backlogs.computed[slots], computed
        self._decided[slots] = routes
        routes = np.where(self._get_drafts(step, slots), routes, NO_DRAFTER)
        self.observer.after_routing(slots, routes, is_timed=self._waits)
        self.backlogs.count(slots, routes, before)
        return routes

    def _draft(self, name: str, step: StepInputs, slots: Array, rows: Array, bounds: Array | None) -> None:
        """Let one drafter draft for the requests of ``rows``, from the last accepted token of each.

        ``bounds`` are int64 [k] most accepted tokens of each; None where the host knows how many these are.
        """
        proposer, ends = self.proposers[name], self.backlogs.computed[slots] if bounds is None else bounds
        if bounds is None:
            packed = self.one_row.packed(rows, slots, ends, self.backlogs.last_rows(name, slots))
        else:
            packed = self.one_row.packed_within(rows, slots, self.backlogs.first_rows(name, slots), self.accepted)
        features = self.backlogs.start(name, slots, packed.kept, is_settled=bounds is None)
        inputs = self.one_row.inputs(step, rows, ends, packed, features)
        self.block_tables.gather_block_tables(inputs.batch.idx_mapping, num_reqs_padded=len(rows))
        tokens = self.keep(name, inputs.batch, proposer.propose_step(proposer.start_rows(inputs)))
        self.drafts.index_copy_(0, packed.rows, tokens)

    # -- not for requests -------------------------------------------------------------------------------------

    def _dummy_round(self, step: StepInputs) -> torch.Tensor:
        """Let every drafter draft for made-up requests, as memory profiles, graphs and kernels need."""
        num_reqs, tapped = step.batch.num_reqs, step.tapped_hidden_states
        rows, ends = np.arange(num_reqs, dtype=np.int64), np.ones(num_reqs, dtype=np.int64)
        packed = self.one_row.packed(rows, rows, ends, rows)
        inputs = self.one_row.inputs(step, rows, ends, packed, step.last_hidden_states)
        if not step.skips_attention:
            self.block_tables.get_dummy_block_tables(num_reqs)
        if self._is_first_dummy and num_reqs == 1 and step.batch.num_tokens > 1:
            # vLLM compiles a model at its first call: for only one row, if that call has one.
            for name in self.settings.owners:
                self.proposers[name].propose_step(self.step_of(name, step))
        self._is_first_dummy = False
        if not self._waits:  # compile what only such rounds run
            self.one_row.packed_within(rows, rows, rows, self.accepted)
        for name, proposer in self.drafting.items():
            if step.is_profile and tapped:  # the largest allocation of a round
                proposer.fuse(joined(tapped, self.tap_indices[name]))
            own = inputs._replace(last_hidden_states=self.backlogs.any_features(name, num_reqs))
            drafted = proposer.propose_step(proposer.start_rows(own))
            if drafted.tree is not None:
                self.kept.keep(drafted, inputs.batch, drafter=None)
        return self.drafts[:num_reqs]

    @contextlib.contextmanager
    def drafting_alone(self, name: str) -> Iterator[None]:
        """Use only one drafter in dummy rounds within the block, to time it."""
        self.drafting = {name: self.proposers[name]}
        try:
            yield
        finally:
            self.drafting = self.proposers
