"""The host that lets a router choose the drafter of every request in every round (WhiFlash, section 3)."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backends.utils import PAD_SLOT_ID

from vllm_crossspec.catchup.backlog import Array, Backlog, StepRows, Tokens, ranges
from vllm_crossspec.catchup.kernels import locate, settle
from vllm_crossspec.engine.host import WARM_UP_REQUESTS, ProposerHost
from vllm_crossspec.engine.proposers.base import empty_tree, first_rows
from vllm_crossspec.engine.routers import make_router
from vllm_crossspec.metrics.export import start_worker_export
from vllm_crossspec.metrics.routing import RoutingCounters
from vllm_crossspec.metrics.stages import StageClock
from vllm_crossspec.tree.chain import chain
from vllm_crossspec.tree.state import CHAIN, NOTHING
from vllm_crossspec.types import StepInputs, TokenTree

logger = init_logger("vllm.crossspec")

NOBODY = -1
"""The route of a request for which no drafter drafts."""


class Inputs(NamedTuple):
    """What vLLM hands to ``propose``, as far as a round of routing needs it (see ``StepInputs``)."""

    batch: Any
    last_hidden_states: torch.Tensor
    tapped_hidden_states: list[torch.Tensor]
    num_sampled: torch.Tensor
    num_rejected: torch.Tensor
    last_sampled: torch.Tensor
    next_prefill_tokens: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor


class RoutedHost(ProposerHost):
    """One drafter drafts for a request in a round, whichever the router chose; the others do nothing.

    What the others miss waits as fused features in a bounded buffer each (``catchup.backlog``), and becomes keys and
    values, no more, when the drafter is chosen, when the buffer is full, or when other requests may find the blocks
    in the prefix cache. The drafter of a round starts from the last accepted token alone: one row a request.

    The round waits for the device once: the routes and the accepted lengths come to the host in one copy
    (``_Verdict``), while the device fuses and stores the step's features.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, req_states: Any):
        super().__init__(vllm_config, device, req_states)
        settings = self.settings
        assert settings.router is not None
        self.lazy = settings.router.lazy
        self.max_depth = settings.max_depth
        self.order = settings.routing_order
        num_slots = vllm_config.scheduler_config.max_num_seqs
        self.computed = np.zeros(num_slots, dtype=np.int64)
        self.live = np.zeros(num_slots, dtype=bool)
        self.backlogs = {
            name: Backlog(num_slots, settings.router.max_backlog, p.hidden_size, p.dtype, device)
            for name, p in self.proposers.items()
        }
        self.router = make_router(settings, vllm_config, device)
        self.routing = RoutingCounters(self.order, num_slots)
        self.clock = StageClock(("route", "store", "catch_up", "draft"), device)
        self.drafts = empty_tree(num_slots, self.num_speculative_steps, device)
        self.verdict = _Verdict(num_slots, device)
        self.row_starts = torch.arange(num_slots + 1, dtype=torch.int32, device=device)
        self.ones = torch.ones(num_slots, dtype=torch.int32, device=device)
        self.zeros = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self.keeps_prefixes = bool(vllm_config.cache_config.enable_prefix_caching)
        self._shares_prefix = False
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

    # -- requests come and go ---------------------------------------------------------------------------------

    def add_requests(self, slots: list[int], num_computed: list[int]) -> None:
        """Requests take slots; the first tokens of each, so many, were found in the prefix cache."""
        self.computed[slots], self.live[slots] = num_computed, True
        for backlog in self.backlogs.values():
            backlog.cached[slots] = num_computed
        self.routing.forget(slots)
        on_device = async_tensor_h2d(np.array(slots, dtype=np.int64), device=self.device)
        self.router.release(on_device)
        if self.state is not None:
            self.state.sizes.index_fill_(0, on_device, 0)  # nothing is drafted yet
        # Their blocks may be of a request that still runs, even of one that starts in the same step: all drafters
        # must have written them before these draft.
        self._shares_prefix |= any(num_computed)

    def remove_requests(self, slots: list[int]) -> None:
        """Requests leave their slots (ended, aborted or preempted); others may still find their blocks."""
        leaving = np.array([slot for slot in slots if self.live[slot]], dtype=np.int64)
        if not len(leaving):
            return
        if self.keeps_prefixes:
            for name in self.proposers:
                self._catch_up(name, leaving, self.computed[leaving])
        self.live[leaving] = False

    # -- the round --------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor],
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        """One round (vLLM's protocol): route, store, catch up, draft.

        Returns:
            int64 [R, N] draft tokens, of which a request's tree may fill less.
        """
        step = Inputs(
            input_batch,
            last_hidden_states,
            aux_hidden_states or [],
            num_sampled,
            num_rejected,
            last_sampled,
            next_prefill_tokens,
            temperature,
            seeds,
        )
        if dummy_run:
            return self._dummy_round(step, skip_attn_for_dummy_run, is_profile)
        if not self._serving and not input_batch.req_ids[0].startswith(WARM_UP_REQUESTS):
            self._start_serving()
        drafts = self._round(step, num_speculative_tokens)
        self.clock.end_round()
        return drafts

    def _round(self, step: Inputs, num_speculative_tokens: int | None) -> torch.Tensor:
        input_batch = step.batch
        num_reqs = input_batch.num_reqs
        self.clock.mark()
        slots = input_batch.idx_mapping_np[:num_reqs].astype(np.int64)
        settle(
            idx_mapping=input_batch.idx_mapping[:num_reqs],
            query_start_loc=input_batch.query_start_loc,
            num_rejected=step.num_rejected,
            num_computed=self.req_states.num_computed_tokens.gpu,
            last_rows=self.verdict.last_rows,
            computed=self.verdict.computed,
        )
        self.router.decide(
            step.last_hidden_states,
            self.verdict.last_rows[:num_reqs],
            input_batch.idx_mapping[:num_reqs],
            step.num_sampled,
            self.verdict.routes[:num_reqs],
        )
        self.verdict.start()
        self.clock.mark()
        self._store(step, slots)
        self.clock.mark()
        routes, computed = self.verdict.wait(num_reqs)
        self.computed[slots] = computed
        if num_speculative_tokens == 0:
            routes = np.full_like(routes, NOBODY)
        elif self.state is not None:
            routes = np.where(self.state.modes[slots] == NOTHING, NOBODY, routes)
        self._catch_up_round(slots, routes)
        self.clock.mark()
        self.drafts.tokens[:num_reqs].zero_()
        for number, name in enumerate(self.order):
            rows = np.flatnonzero(routes == number)
            if len(rows):
                self._draft(name, step, slots, rows)
        self.clock.mark()
        return self.drafts.tokens[:num_reqs]

    def _store(self, step: Inputs, slots: Array) -> None:
        """Fuse the target states of every token that may have been accepted, and put them into the buffers."""
        batch = step.batch
        packed, rows = self._step_rows(batch, slots)
        everything = len(packed) == batch.num_tokens
        index = None if everything else async_tensor_h2d(packed, device=self.device)
        states = [
            s[: batch.num_tokens] if index is None else s.index_select(0, index) for s in step.tapped_hidden_states
        ]
        for name, proposer in self.proposers.items():
            backlog = self.backlogs[name]
            features = proposer.fuse(torch.cat([states[i] for i in self.tap_indices[name]], dim=-1))
            crowded = backlog.crowded(rows)
            if crowded.any():
                self._catch_up(name, rows.slots[crowded], rows.starts[crowded])
            stored, long = rows, backlog.oversized(rows)
            if long.any():
                written = np.where(long, rows.certain - 1, 0)
                self._write_prompts(name, features, rows, written)
                stored = rows.without(written)
                kept = async_tensor_h2d(ranges(stored.firsts, stored.counts), device=self.device)
                features = features.index_select(0, kept)
            places = async_tensor_h2d(backlog.place(stored), device=self.device)
            backlog.features.index_copy_(0, places, features)

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

    def _catch_up_round(self, slots: Array, routes: Array) -> None:
        """Whoever drafts now takes in what it missed, all but the last token, with which it starts."""
        shares, self._shares_prefix = self._shares_prefix, False
        for number, name in enumerate(self.order):
            chosen = routes == number
            if chosen.any():
                own = slots[chosen]
                self.routing.count_missed(number, own, self.computed[own] - 1 - self.backlogs[name].cached[own])
            if shares:
                everyone = np.flatnonzero(self.live)
                ends = self.computed[everyone] - np.isin(everyone, slots[chosen])
                self._catch_up(name, everyone, ends)
            elif not self.lazy:
                self._catch_up(name, slots, self.computed[slots] - chosen)
            elif chosen.any():
                self._catch_up(name, own, self.computed[own] - 1)
        self.routing.count_decisions(slots, routes)

    def _catch_up(self, name: str, slots: Array, ends: Array) -> None:
        """Write keys and values of what a drafter missed of ``slots``, up to ``ends`` (exclusive)."""
        backlog = self.backlogs[name]
        tokens = backlog.missed(slots, ends)
        if not len(tokens.slots):
            return
        backlog.cached[slots] = np.maximum(backlog.cached[slots], ends)
        self._write(name, backlog.features, tokens)

    def _write(self, name: str, features: torch.Tensor, tokens: Tokens) -> None:
        """Keys and values of ``tokens``, whose features are rows of ``features``, into the drafter's cache."""
        self.routing.count_caught_up(self.order.index(name), len(tokens.slots))
        self._write_now(name, features, tokens)

    def _write_now(self, name: str, features: torch.Tensor, tokens: Tokens) -> None:
        proposer = self.proposers[name]
        packed = async_tensor_h2d(np.stack(tokens), device=self.device)
        slots, positions, rows = packed[0], packed[1], packed[2]
        tables, kv_slots = self.block_tables, []
        next_tokens = torch.empty_like(slots)
        for group in proposer.kv_groups:
            kv_slots.append(torch.empty_like(slots))
            locate(
                slots=slots,
                positions=positions,
                block_table=tables.block_tables[group].gpu,
                block_size=tables.block_sizes[group],
                all_token_ids=self.req_states.all_token_ids.gpu,
                kv_slots=kv_slots[-1],
                next_tokens=next_tokens,
                pad=PAD_SLOT_ID,
            )
        proposer.write_context(features.index_select(0, rows), next_tokens, positions, kv_slots)

    def _draft(self, name: str, step: Inputs, slots: Array, rows: Array) -> None:
        """One drafter drafts for the requests of ``rows``, from the last accepted token of each."""
        proposer, backlog, own = self.proposers[name], self.backlogs[name], slots[rows]
        ends = self.computed[own]
        packed = async_tensor_h2d(np.stack([rows, own, ends - 1, backlog.rows_at(own, ends - 1)]), device=self.device)
        backlog.cached[own] = ends
        batch = self._one_row_batch(step.batch, rows, ends, packed)
        self.block_tables.gather_block_tables(batch.idx_mapping, num_reqs_padded=len(rows))
        inputs = self._one_row_step(step, batch, backlog.features.index_select(0, packed[3]))
        candidates = proposer.propose_step(proposer.start_rows(inputs))
        tree = candidates.tree
        if tree is None:
            chain(tokens=candidates.tokens, out=self.chains)
            tree = first_rows(self.chains, len(rows))
        self._keep_tree(batch, tree)
        self.drafts.tokens.index_copy_(0, packed[0], tree.tokens)
        self.counters.mark_drafted(batch.idx_mapping, tuple(self.proposers).index(name))

    def _keep_tree(self, batch: Any, tree: TokenTree) -> None:
        """Keep the shapes of the drafts for their verification."""
        state = self.state
        assert state is not None
        if (state.modes[batch.idx_mapping_np] == CHAIN).any():
            self._make_chains(batch, tree)
        state.store(batch.idx_mapping, tree)

    def _one_row_batch(self, batch: Any, rows: Array, ends: Array, packed: torch.Tensor) -> Any:
        """vLLM's batch of the requests in ``rows`` as if only the last accepted token of each had been scheduled."""
        num_reqs = len(rows)
        starts = np.arange(num_reqs + 1, dtype=np.int32)
        return dataclasses.replace(
            batch,
            req_ids=[batch.req_ids[row] for row in rows],
            num_reqs=num_reqs,
            num_reqs_after_padding=num_reqs,
            idx_mapping=packed[1].to(batch.idx_mapping.dtype),
            idx_mapping_np=batch.idx_mapping_np[rows],
            num_scheduled_tokens=np.ones(num_reqs, dtype=np.int32),
            num_tokens=num_reqs,
            num_tokens_after_padding=num_reqs,
            num_draft_tokens=0,
            num_draft_tokens_per_req=None,
            query_start_loc=self.row_starts[: num_reqs + 1],
            query_start_loc_np=starts,
            seq_lens=(packed[2] + 1).to(torch.int32),
            seq_lens_cpu_upper_bound=torch.from_numpy(ends.astype(np.int32)),
            positions=packed[2],
            decode_graph_eligible=True,
        )

    def _one_row_step(self, step: Inputs, batch: Any, features: torch.Tensor, **options: Any) -> StepInputs:
        num_reqs = batch.num_reqs
        return StepInputs(
            batch=batch,
            attn_metadata=None,
            slot_mappings=None,
            last_hidden_states=features,
            tapped_hidden_states=None,
            num_sampled=self.ones[:num_reqs],
            num_rejected=self.zeros[:num_reqs],
            last_sampled=step.last_sampled,
            next_prefill_tokens=step.next_prefill_tokens,
            temperature=step.temperature,
            seeds=step.seeds,
            options=options,
        )

    def _dummy_round(self, step: Inputs, skip_attn: bool, is_profile: bool) -> torch.Tensor:
        """Every drafter drafts for made-up requests: memory profiles, graphs and kernels depend on it."""
        num_reqs = step.batch.num_reqs
        rows = np.arange(num_reqs, dtype=np.int64)
        ends = np.ones(num_reqs, dtype=np.int64)
        packed = async_tensor_h2d(np.stack([rows, rows, ends - 1]), device=self.device)
        batch = self._one_row_batch(step.batch, rows, ends, packed)
        if not skip_attn:
            self.block_tables.get_dummy_block_tables(num_reqs)
        for name, proposer in self.proposers.items():
            features = self.backlogs[name].features[:num_reqs]
            inputs = self._one_row_step(
                step, batch, features, dummy_run=True, skip_attn_for_dummy_run=skip_attn, is_profile=is_profile
            )
            proposer.propose_step(proposer.start_rows(inputs))
        return self.drafts.tokens[:num_reqs]

    # -- figures ----------------------------------------------------------------------------------------------

    def _start_serving(self) -> None:
        self.routing.reset()
        self.clock.reset()
        super()._start_serving()

    def _start_export(self) -> None:
        start_worker_export(self.counters, self.routing, self.clock)

    def routing_stats(self) -> dict[str, Any]:
        """Decisions, switches and missed tokens so far."""
        return {**self.routing.snapshot(), "waits": self.verdict.num_waits, "seconds": dict(self.clock.seconds)}


class _Verdict:
    """What a round's host code must know of the device: one copy of 8 bytes a request, and the one wait of a round.

    Args:
        num_slots: most requests of a batch.
        device: that decides.
    """

    def __init__(self, num_slots: int, device: torch.device):
        self._both = torch.zeros(2, num_slots, dtype=torch.int32, device=device)
        self.routes, self.computed = self._both[0], self._both[1]
        self.last_rows = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.num_waits = 0
        self._on_device = device.type != "cpu"
        if self._on_device:
            self._host = torch.zeros(2, num_slots, dtype=torch.int32, pin_memory=True)
            self._event = torch.Event(device)

    def start(self) -> None:
        """Send it on its way."""
        if self._on_device:
            self._host.copy_(self._both, non_blocking=True)
            self._event.record()

    def wait(self, num_reqs: int) -> tuple[Array, Array]:
        """int64 [R] routes and accepted tokens of the batch; waits for the device (the sync named "route copy")."""
        self.num_waits += 1
        both = self._both
        if self._on_device:
            self._event.synchronize()
            both = self._host
        routes, computed = both[:, :num_reqs].numpy().astype(np.int64)
        return routes, computed
