"""The speculator that lets a router choose the drafter of every request in every round (WhiFlash, section 3)."""

import contextlib
import functools
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.logger import init_logger
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_crossspec.arrays import Array, ranges
from vllm_crossspec.catchup.backlog import NO_SLOT, Backlog, StepRows, Tokens
from vllm_crossspec.catchup.kernels import accepted_lengths
from vllm_crossspec.catchup.unfused import MAX_ROWS, Unfused, joined
from vllm_crossspec.engine.graphs.context import ContextGraphs
from vllm_crossspec.engine.proposers.base import empty_tree
from vllm_crossspec.engine.proposers.stateless import CachelessProposer
from vllm_crossspec.engine.speculators.base import Speculator
from vllm_crossspec.engine.speculators.one_row import OneRowBatches
from vllm_crossspec.engine.speculators.routers import make_router
from vllm_crossspec.host_copy import HostCopy
from vllm_crossspec.metrics.routing import RoutingCounters
from vllm_crossspec.metrics.stages import StageClock
from vllm_crossspec.router.drift import RoundTimer
from vllm_crossspec.router.experience import arrivals
from vllm_crossspec.types import NO_DRAFTS, StepInputs

logger = init_logger("vllm.crossspec")

NO_DRAFTER = -1
"""The route of a request for which no drafter drafts."""

DRIFT_EVERY = 16
"""Rounds that are timed between two in which the router's costs follow what was seen."""

MAX_TOKENS_AT_ONCE = 4096
"""Tokens of one catch-up; more are taken in by parts, for what all requests may have missed together is a lot."""


class RoutedSpeculator(Speculator):
    """One drafter drafts for a request in a round, whichever the router chose; the others keep what they miss.

    What the others miss waits as fused features in a bounded buffer each (``catchup.backlog``), and becomes keys and
    values, no more, when the drafter is chosen, when the buffer is full, or when other requests may find the blocks
    in the prefix cache. The drafter of a round starts from the last accepted token alone: one row a request.

    The round waits for the device once: the routes and the accepted lengths come to the host in one copy
    (``HostCopy``), while the device fuses and stores the step's features. A CPU has nothing to do meanwhile, so it
    fuses later and many rows at once (``catchup.unfused``).
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, req_states: Any):
        super().__init__(vllm_config, device, req_states)
        settings = self.settings
        assert settings.router is not None
        self.lazy, self.max_backlog = settings.router.lazy, settings.router.max_backlog
        self.max_depth = settings.max_depth
        self.order = settings.routing_order
        num_slots = vllm_config.scheduler_config.max_num_seqs
        self.computed = np.zeros(num_slots, dtype=np.int64)
        self.live = np.zeros(num_slots, dtype=bool)
        self.begun = np.zeros(num_slots, dtype=np.int64)  # where an answer begins; negative: in its prompt
        self.owners = {name: settings.owner_of(name) for name in self.proposers}
        self.backlogs = {}
        for name in settings.owners:
            own = self.proposers[name]
            if isinstance(own, CachelessProposer):
                continue
            self.backlogs[name] = Backlog(num_slots, self.max_backlog, own.hidden_size, own.dtype, device)
        self.owner_numbers = np.array([self.order.index(self.owners[name]) for name in self.order])
        self._no_features = torch.zeros(num_slots, 0, dtype=vllm_config.model_config.dtype, device=device)
        self.router = make_router(settings, vllm_config, device)
        self.routing = RoutingCounters(self.order, num_slots)
        self.clock = StageClock(("route", "store", "catch_up", "draft"), device)
        self.drafts = empty_tree(num_slots, self.num_speculative_steps, device)
        self.copied = HostCopy((2, num_slots), device)
        self.routes, self.accepted = self.copied.tensor
        self.last_rows = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.one_row = OneRowBatches(num_slots, device)
        self.keeps_prefixes = bool(vllm_config.cache_config.enable_prefix_caching)
        self._shares_prefix = False
        self.context_graphs: dict[str, ContextGraphs] = {}
        self.unfused: dict[str, Unfused] = {}
        self._alone: str | None = None
        self._is_first_dummy = True
        self.timer: RoundTimer | None = None
        self._num_timed = 0
        if vllm_config.parallel_config.world_size == 1:  # ranks must route alike
            self.timer = RoundTimer(num_slots, self.owner_numbers)
        num_bytes = sum(b.features.nbytes for b in self.backlogs.values())
        logger.info(
            "crossspec: policy %s over %s; %.1f MiB hold what inactive drafters miss (%d tokens of a request, %.2f MiB "
            "a request)",
            settings.router.policy,
            list(self.order),
            num_bytes / 2**20,
            settings.router.max_backlog,
            num_bytes / num_slots / 2**20,
        )

    def load_model(self, target_model: nn.Module) -> None:
        """See the base class; on a CPU what drafters miss is fused by many rows at once."""
        super().load_model(target_model)
        if self.device.type == "cpu":
            for name, backlog in self.backlogs.items():
                fuse, taps = self.proposers[name].fuse, self.tap_indices[name]
                self.unfused[name] = Unfused(fuse, taps, backlog.features, backlog.capacity)

    # -- CUDA graphs ------------------------------------------------------------------------------------------

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Each proposer manages its own graphs; those of a profile run go with the cache that they wrote to."""
        super().init_cudagraph_manager(cudagraph_mode)
        self.context_graphs.clear()
        self._has_full_graphs = cudagraph_mode.decode_mode() == CUDAGraphMode.FULL

    def capture(self) -> None:
        """Capture every proposer's graphs, and those of catching up."""
        super().capture()
        if not self._has_full_graphs:
            return
        for name, backlog in self.backlogs.items():
            write = functools.partial(self._write_eagerly, name, backlog.features)
            self.context_graphs[name] = ContextGraphs(write, self.vllm_config, self.device)
            self.context_graphs[name].capture()

    # -- requests come and go ---------------------------------------------------------------------------------

    def add_requests(self, slots: list[int], num_computed: list[int]) -> None:
        """See the base class."""
        self.computed[slots], self.live[slots], self.begun[slots] = num_computed, True, -1
        for backlog in self.backlogs.values():
            backlog.cached[slots] = num_computed
        self.routing.forget(slots)
        if self.timer is not None:
            self.timer.forget(slots)
        on_device = async_tensor_h2d(np.array(slots, dtype=np.int64), device=self.device)
        self.router.release(on_device)
        if self.kept.state is not None:
            self.kept.state.sizes.index_fill_(0, on_device, 0)  # nothing is drafted yet
        # Their blocks may be of a request that still runs, even of one that starts in the same step: all drafters
        # must have written them before these draft.
        self._shares_prefix |= any(num_computed)

    def remove_requests(self, slots: list[int]) -> None:
        """See the base class; what drafters still have to take in of those that leave together goes in together.

        Others find whole blocks in the prefix cache, so that nobody reads what lies beyond a request's last one.
        """
        super().remove_requests(slots)
        leaving = np.array([slot for slot in slots if self.live[slot]], dtype=np.int64)
        if not len(leaving):
            return
        if self.keeps_prefixes:
            computed, block_size = self.computed[leaving], min(self.block_tables.block_sizes)
            for name in self.backlogs:
                self._catch_up(name, leaving, computed - computed % block_size)
        for unfused in self.unfused.values():
            unfused.forget(leaving)
        self.live[leaving] = False

    # -- the round --------------------------------------------------------------------------------------------

    def round(self, step: StepInputs) -> torch.Tensor:
        """Route, store, catch up, draft; see the base class. Trees may fill less than a request's row."""
        if step.is_dummy:
            return self.kept.plan(self._dummy_round(step))
        self.serve(step.batch)
        drafts = self._round(step)
        self.clock.end_round()
        return self.kept.plan(drafts)

    def _round(self, step: StepInputs) -> torch.Tensor:
        input_batch = step.batch
        num_reqs = input_batch.num_reqs
        self.clock.mark()
        slots = input_batch.idx_mapping_np[:num_reqs].astype(np.int64)
        accepted_lengths(
            idx_mapping=input_batch.idx_mapping[:num_reqs],
            query_start_loc=input_batch.query_start_loc,
            num_rejected=step.num_rejected,
            num_computed=self.req_states.num_computed_tokens.gpu,
            last_rows=self.last_rows,
            computed=self.accepted,
        )
        self._forecast(step)
        self._weigh_arrivals(step.batch, slots)
        self.router.decide(
            step.last_hidden_states,
            self.last_rows[:num_reqs],
            input_batch.idx_mapping[:num_reqs],
            step.num_sampled,
            self.routes[:num_reqs],
        )
        self.copied.start()
        self.clock.mark()
        self._store(step, slots)
        self.clock.mark()
        routes, computed = self.copied.wait(num_reqs)  # the sync named "route copy"
        before, self.computed[slots] = self.computed[slots], computed
        if step.num_scheduled == 0:
            routes = np.full_like(routes, NO_DRAFTER)
        elif self.kept.state is not None:
            routes = np.where(self.kept.state.modes[slots] == NO_DRAFTS, NO_DRAFTER, routes)
        if self.router.experience is not None and (routes == NO_DRAFTER).any():
            # Nothing is learned of a drafter from a round that it does not draft in.
            undrafted = async_tensor_h2d(slots[routes == NO_DRAFTER], device=self.device)
            self.router.previous.index_fill_(0, undrafted, NO_DRAFTER)
        begins = (routes >= 0) & (self.begun[slots] < 0)
        self.begun[slots[begins]] = computed[begins]
        self._time_round(slots, routes)
        self._count(slots, routes, before)
        self._catch_up_round(slots, routes)
        self.clock.mark()
        if (routes == NO_DRAFTER).any():  # whose draft tokens must be valid all the same
            self.drafts.tokens[:num_reqs].zero_()
        for number, name in enumerate(self.order):
            rows = np.flatnonzero(routes == number)
            if len(rows):
                self._draft(name, step, slots, rows)
        self.clock.mark()
        return self.drafts.tokens[:num_reqs]

    def _time_round(self, slots: Array, routes: Array) -> None:
        """Show a router that follows costs what the round took that ends here, if that says what its drafter costs.

        From one wait to the next lie the drafts of the one round and the target's pass over them.
        """
        if self.timer is None or self.router.drift is None:
            return
        missed = None
        if self.unfused:
            taken_in = [self._missed(name, slots, self.computed[slots] - 1) for name in self.order]
            missed = np.stack(taken_in)[routes, np.arange(len(slots))]
        timed = self.timer.ended(slots, routes, time.perf_counter(), missed)
        if timed is None:
            return
        self.router.drift.observe(timed)
        self._num_timed += 1
        if self._num_timed % DRIFT_EVERY == 0:
            self.router.follow_drift()

    def _forecast(self, step: StepInputs) -> None:
        """For a router that goes by experience: what drafters expect that know it before they draft."""
        if self.router.experience is None:
            return
        forecasts = self.router.experience.known.forecasts[: step.batch.num_reqs]
        for number, name in enumerate(self.order):
            forecast = self.proposers[name].forecast(step)
            if forecast is not None:
                forecasts[:, number] = forecast

    def _weigh_arrivals(self, batch: Any, slots: Array) -> None:
        """For a router that goes by experience: how long it takes each drafter to take in what it missed.

        On a CPU alone: a GPU takes in a prompt as fast as a few tokens.
        """
        if self.router.experience is None or not self.unfused:
            return
        scheduled = batch.num_scheduled_tokens[: len(slots)].astype(np.int64)
        ends = self.computed[slots] + scheduled - 1
        missed = np.stack([self._missed(name, slots, ends) for name in self.order], axis=1)
        missed[scheduled > self.max_backlog] = 0  # these all take in, whoever drafts
        answered = np.where(self.begun[slots] < 0, 0, self.computed[slots] - self.begun[slots])
        found = torch.from_numpy(arrivals(missed, answered))
        self.router.experience.known.arrivals[: len(slots)].copy_(found)

    def _missed(self, name: str, slots: Array, ends: Array) -> Array:
        """int64 [R] tokens before ``ends`` that a drafter's cache lacks; 0 where it has none."""
        backlog = self._backlog(name)
        return np.zeros_like(ends) if backlog is None else np.maximum(ends - backlog.cached[slots], 0)

    def _store(self, step: StepInputs, slots: Array) -> None:
        """Fuse the target states of every token that may have been accepted, and put them into the buffers.

        On a CPU they may wait with it (``catchup.unfused``).
        """
        batch = step.batch
        packed, rows = self._step_rows(batch, slots)
        everything = len(packed) == batch.num_tokens
        index = None if everything else async_tensor_h2d(packed, device=self.device)
        states = [s[: batch.num_tokens] for s in step.tapped_hidden_states or [step.last_hidden_states]]
        for name, backlog in self.backlogs.items():
            crowded = backlog.crowded(rows)
            if crowded.any():
                self._catch_up(name, rows.slots[crowded], rows.starts[crowded])
            long = backlog.oversized(rows)
            if name in self.unfused and len(packed) <= MAX_ROWS and not long.any():
                self.unfused[name].add(states, packed, backlog.place(rows))
                continue
            self._settle(name)
            features = self.proposers[name].fuse(joined(states, self.tap_indices[name], index))
            stored = rows
            if long.any():
                written = np.where(long, rows.certain - 1, 0)
                self._write_prompts(name, features, rows, written)
                stored = rows.without(written)
                kept = async_tensor_h2d(ranges(stored.firsts, stored.counts), device=self.device)
                features = features.index_select(0, kept)
            places = async_tensor_h2d(backlog.place(stored), device=self.device)
            backlog.features.index_copy_(0, places, features)

    def _settle(self, name: str, slots: Array | None = None) -> None:
        """What waits to be fused for a drafter, of all requests or of some, is in its buffer now."""
        if name in self.unfused:
            self.unfused[name].settle(slots)

    def _step_rows(self, batch: Any, slots: Array) -> tuple[Array, StepRows]:
        """Which of the step's rows may hold accepted tokens: int64 [n] rows, and the same by request.

        The accepted path of a tree has moved to the rows of an accepted chain by now (``commit``).
        """
        num_reqs = batch.num_reqs
        scheduled = batch.num_scheduled_tokens[:num_reqs].astype(np.int64)
        drafted = np.zeros_like(scheduled)
        if batch.num_draft_tokens_per_req is not None:
            drafted = batch.num_draft_tokens_per_req[:num_reqs].astype(np.int64)
        counts = scheduled - drafted + np.minimum(drafted, self.max_depth)
        rows = StepRows(
            slots=slots,
            starts=self.computed[slots],
            firsts=np.cumsum(counts) - counts,
            counts=counts,
            certain=scheduled - drafted,
        )
        return ranges(batch.query_start_loc_np[:num_reqs].astype(np.int64), counts), rows

    def _write_prompts(self, name: str, features: torch.Tensor, rows: StepRows, counts: Array) -> None:
        """Take the first ``counts`` (int64 [R]) rows of each request into the cache, straight from the step.

        So do prompts that are longer than the buffer, all but their last token; that one waits like any other.
        """
        tokens = Tokens(np.repeat(rows.slots, counts), ranges(rows.starts, counts), ranges(rows.firsts, counts))
        if len(tokens.slots):
            self._write(name, features, tokens)
        moved = counts > 0
        self.backlogs[name].cached[rows.slots[moved]] = (rows.starts + counts)[moved]

    def _count(self, slots: Array, routes: Array, before: Array) -> None:
        """Who drafts, and what it missed of the tokens before this round's (``before``: int64 [R] of them)."""
        for number in np.unique(routes[routes >= 0]).tolist():
            mine = routes == number
            own = slots[mine]
            self.routing.count_missed(number, own, self._missed(self.order[number], own, before[mine]))
        self.routing.count_decisions(slots, routes)

    def _catch_up_round(self, slots: Array, routes: Array) -> None:
        """Whoever drafts now takes in what it missed, all but the last token, with which it starts."""
        shares, self._shares_prefix = self._shares_prefix, False
        owners = np.where(routes >= 0, self.owner_numbers[routes], NO_DRAFTER)
        for name in self.backlogs:
            chosen = owners == self.order.index(name)
            if shares:
                everyone = np.flatnonzero(self.live)
                ends = self.computed[everyone] - np.isin(everyone, slots[chosen])
                self._catch_up(name, everyone, ends)
            elif not self.lazy:
                self._catch_up(name, slots, self.computed[slots] - chosen)
            elif chosen.any():
                self._catch_up(name, slots[chosen], self.computed[slots[chosen]] - 1)

    def _backlog(self, name: str) -> Backlog | None:
        """What a drafter has missed, or the one whose cache it uses; None where it has no cache."""
        return self.backlogs.get(self.owners[name])

    def _catch_up(self, name: str, slots: Array, ends: Array) -> None:
        """Write keys and values of what a drafter missed of ``slots``, up to ``ends`` (exclusive)."""
        backlog = self.backlogs[name]
        tokens = backlog.missed(slots, ends)
        if not len(tokens.slots):
            return
        backlog.cached[slots] = np.maximum(backlog.cached[slots], ends)
        self._settle(name, slots)
        self._write(name, backlog.features, tokens)

    def _write(self, name: str, features: torch.Tensor, tokens: Tokens) -> None:
        """Keys and values of ``tokens``, whose features are rows of ``features``, into the drafter's cache."""
        self.routing.count_caught_up(self.order.index(name), len(tokens.slots))
        self._write_now(name, features, tokens)

    def _write_now(self, name: str, features: torch.Tensor, tokens: Tokens) -> None:
        graphs = self.context_graphs.get(name)
        if graphs is not None and features is self.backlogs[name].features:
            graphs.replay(np.stack(tokens))
            return
        packed = async_tensor_h2d(np.stack(tokens), device=self.device)
        for piece in packed.split(MAX_TOKENS_AT_ONCE, dim=1):
            self._write_eagerly(name, features, piece)

    def catch_up_on_nothing(self, name: str, num_tokens: int) -> None:
        """All that a drafter does to catch up with so many tokens of the buffer, and no trace of it in its cache."""
        nothing, name, backlog = np.zeros(num_tokens, dtype=np.int64), self.owners[name], self._backlog(name)
        if backlog is not None:
            if name in self.unfused:
                width = len(self.tap_indices[name]) * self.vllm_config.model_config.get_hidden_size()
                self.proposers[name].fuse(self._no_features.new_zeros(num_tokens, width))
            self._write_now(name, backlog.features, Tokens(nothing + NO_SLOT, nothing, nothing))

    def _write_eagerly(self, name: str, features: torch.Tensor, packed: torch.Tensor) -> None:
        """The same for int64 [3, n] tokens on the device; those of no slot are padding."""
        slots, positions, rows = packed[0], packed[1], packed[2]
        self.write_context(name, features.index_select(0, rows), slots, positions)

    def _draft(self, name: str, step: StepInputs, slots: Array, rows: Array) -> None:
        """One drafter drafts for the requests of ``rows``, from the last accepted token of each."""
        proposer, backlog, own = self.proposers[name], self._backlog(name), slots[rows]
        ends = self.computed[own]
        kept = np.zeros_like(own) if backlog is None else backlog.rows_at(own, ends - 1)
        packed = self.one_row.packed(rows, own, ends, kept)
        features = self._no_features[: len(rows)]
        if backlog is not None:
            backlog.cached[own] = ends
            self._settle(self.owners[name], own)
            features = backlog.features.index_select(0, packed.kept)
        batch = self.one_row.batch(step.batch, rows, ends, packed)
        self.block_tables.gather_block_tables(batch.idx_mapping, num_reqs_padded=len(rows))
        inputs = self.one_row.step(step, batch, features)
        tokens = self.keep(name, batch, proposer.propose_step(proposer.start_rows(inputs)))
        self.drafts.tokens.index_copy_(0, packed.rows, tokens)

    def _dummy_round(self, step: StepInputs) -> torch.Tensor:
        """Every drafter drafts for made-up requests: memory profiles, graphs and kernels depend on it."""
        num_reqs, tapped = step.batch.num_reqs, step.tapped_hidden_states
        skip_attn, is_profile = step.options["skip_attn_for_dummy_run"], step.options["is_profile"]
        rows = np.arange(num_reqs, dtype=np.int64)
        ends = np.ones(num_reqs, dtype=np.int64)
        packed = self.one_row.packed(rows, rows, ends, rows)
        batch = self.one_row.batch(step.batch, rows, ends, packed)
        if not skip_attn:
            self.block_tables.get_dummy_block_tables(num_reqs)
        if self._is_first_dummy and num_reqs == 1 and step.batch.num_tokens > 1:
            # vLLM compiles a model at its first call: for one row alone, if that has one.
            for name in self.settings.owners:
                self.proposers[name].propose_step(self.step_of(name, step))
        self._is_first_dummy = False
        for name, proposer in self.proposers.items():
            if self._alone not in (None, name):
                continue
            if is_profile and tapped:  # the largest that a round allocates
                proposer.fuse(joined(tapped, self.tap_indices[name]))
            backlog = self._backlog(name)
            features = (self._no_features if backlog is None else backlog.features)[:num_reqs]
            inputs = self.one_row.step(
                step, batch, features, dummy_run=True, skip_attn_for_dummy_run=skip_attn, is_profile=is_profile
            )
            drafted = proposer.propose_step(proposer.start_rows(inputs))
            if drafted.tree is not None:
                self.kept.keep(drafted, batch, drafter=None)
        return self.drafts.tokens[:num_reqs]

    @property
    def num_drafting(self) -> int:
        """See the base class."""
        return len(self.proposers) if self._alone is None else 1

    @contextlib.contextmanager
    def drafting_alone(self, name: str) -> Iterator[None]:
        """Let dummy rounds be of one drafter, so that it can be timed."""
        self._alone = name
        try:
            yield
        finally:
            self._alone = None

    # -- figures ----------------------------------------------------------------------------------------------

    def routing_stats(self) -> dict[str, Any]:
        """Decisions, switches and missed tokens so far."""
        return {**self.routing.snapshot(), "waits": self.copied.num_waits, "seconds": dict(self.clock.seconds)}
