"""vLLM's model runner with sample-and-match verification, of chains and of trees.

Everything between the target's forward pass and the drafter's next round that vLLM does for chains is done here for
trees: rows get the position of their depth and a mask of their ancestors before the pass; after it the accepted path
moves to where an accepted chain would be, in the KV cache of every target layer and in the states that drafters read.
"""

from typing import Any

import torch
from vllm.logger import init_logger
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState
from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler

from vllm_crossspec.config import settings_of
from vllm_crossspec.engine.attention import base
from vllm_crossspec.engine.features.adaptive import cut_drafts
from vllm_crossspec.engine.features.contemplate import Contemplation, contemplate_for, num_soft_prompts
from vllm_crossspec.engine.features.rounds import make_recorder
from vllm_crossspec.engine.graphs import widths
from vllm_crossspec.engine.requests import draft_mode
from vllm_crossspec.engine.speculators.routed import RoutedHost
from vllm_crossspec.engine.startup import round_costs, step_costs
from vllm_crossspec.engine.verification.penalties import TreePenalties
from vllm_crossspec.engine.verification.sampler import MatchVerifier
from vllm_crossspec.kv_compaction.kernels import (
    MAX_TENSORS,
    KVLayers,
    compact_kv,
    compact_rows,
    make_kv_layers,
    restore_rows,
)
from vllm_crossspec.tree.state import NOTHING, TREE, TreeState
from vllm_crossspec.verify.rows import prepare_rows
from vllm_crossspec.verify.walk import last_rows

logger = init_logger("vllm.crossspec")

COMPILED_BATCHES = (1, 2, 16)
"""Triton compiles a kernel anew for an argument that is 1, a multiple of 16, or neither."""

NATIVE_PROCESSORS = 3
"""vLLM's own logits processors (bias, penalties, bad words); the rest are the user's."""


class LiveDraftTokensHandler(DraftTokensHandler):
    """Tells the scheduler's grammar check which draft tokens are none: those past a request's live nodes.

    Args:
        device: of the tokens.
        state: of the trees.
    """

    def __init__(self, device: torch.device, state: TreeState):
        super().__init__(device)
        self.state = state
        self.columns = torch.arange(state.num_rows - 1, dtype=torch.int32, device=device)

    def set_draft_tokens(self, input_batch: Any, draft_tokens: torch.Tensor) -> None:
        """Take the round's draft tokens [R, n]; -1 past the live ones where a grammar will read them."""
        if input_batch.has_structured_output_reqs:
            live = self.state.sizes[input_batch.idx_mapping]
            dead = self.columns[None, : draft_tokens.shape[1]] >= live[:, None]
            draft_tokens = draft_tokens.masked_fill(dead, -1)
        super().set_draft_tokens(input_batch, draft_tokens)


class MatchRunner:
    """What our runners add to vLLM's; mixed in before its class, for a GPU and for a CPU alike."""

    def __init__(self, vllm_config: Any, device: torch.device):
        super().__init__(vllm_config, device)  # type: ignore[call-arg]
        settings = settings_of(vllm_config)
        assert settings is not None
        self.settings = settings
        self.has_trees = settings.has_trees
        self.tree_state = TreeState(
            self.max_num_reqs,
            self.max_num_tokens,
            self.speculator.num_speculative_steps,
            settings.max_depth,
            device,
            num_rows=self.num_speculative_steps + 1,
            num_soft=num_soft_prompts(self.speculator),
        )
        self.contemplation: Contemplation | None = None
        self.speculator.bind(self.tree_state)
        self.draft_tokens_handler = LiveDraftTokensHandler(device, self.tree_state)
        self._routed = self.speculator if isinstance(self.speculator, RoutedHost) else None
        self._logits: torch.Tensor | None = None
        self._last_rows = torch.zeros(self.max_num_reqs, dtype=torch.int64, device=device)
        self._sampling = False
        self._step_costs: step_costs.StepTable | None = None
        self._kv_layers: KVLayers | None = None
        self._has_drafts = self._chains_only = False
        self._adapts = settings.adapts
        self._tapped: list[torch.Tensor] = []
        self.round_recorder = make_recorder(settings, self.tree_state, self.speculator.proposers)
        if self.has_trees:
            base.register()
            base.set_tree_source(self.tree_source)
        else:
            base.unregister()  # an engine with trees may have run in this process before
        logger.info(
            "crossspec: drafts of up to %d tokens, %d deep; %.1f MiB for trees and masks",
            self.tree_state.num_nodes,
            settings.max_depth,
            self.tree_state.num_bytes / 2**20,
        )

    # -- loading ----------------------------------------------------------------------------------------------

    def load_model(self, *arguments: Any, **options: Any) -> None:
        """Load, then put the verifier in the rejection sampler's place."""
        super().load_model(*arguments, **options)  # type: ignore[misc]
        penalties = None
        if self.has_trees:
            base.check_backends(self.vllm_config, draft_layers=self.speculator.tree_layer_names)
            penalties = TreePenalties(self.sampler.penalties_state, self.tree_state)
            self.sampler.logits_processors = [
                penalties if isinstance(processor, PenaltiesState) else processor
                for processor in self.sampler.logits_processors
            ]
            # A custom logits processor expects the rows of a chain.
            self._chains_only = len(self.sampler.logits_processors) > NATIVE_PROCESSORS
        # FlashInfer draws from a generator of its own: right in distribution, but no drafter can foresee it.
        self.sampler.use_flashinfer = False
        self.rejection_sampler = MatchVerifier(self.sampler, self.tree_state, penalties)
        if self._routed is not None and self._routed.router.needs_logits:
            self._keep_logits()
        if self.settings.contemplates:
            self.contemplation = contemplate_for(self)
            self.uses_inputs_embeds = True

    def _keep_logits(self) -> None:
        """Hold the step's logits for the router, which reads them when it is known which rows were accepted."""
        compute = self.model.compute_logits

        def compute_logits(*arguments: Any, **options: Any) -> torch.Tensor:
            logits = compute(*arguments, **options)
            if self._sampling:  # prompt log-probabilities are computed here, too
                self._logits = logits
            return logits

        self.model.compute_logits = compute_logits

    def _observe_logits(self, batch: Any) -> None:
        """Show the router the logits after each request's last accepted token."""
        logits, self._logits = self._logits, None
        if logits is None or self._routed is None:
            return
        if self._has_drafts:
            rows, state = self._last_rows[: batch.num_reqs], self.tree_state
            last_rows(cu_num_logits=batch.cu_num_logits, num_sampled=state.num_sampled, path=state.path, rows=rows)
        else:
            rows = batch.cu_num_logits[1:].long() - 1
        self._routed.router.observe_logits(logits, rows)

    def initialize_kv_cache(self, *arguments: Any, **options: Any) -> None:
        """Allocate, then note where the K and V of every target layer lie."""
        super().initialize_kv_cache(*arguments, **options)  # type: ignore[misc]
        if not self.has_trees:
            return
        if self._adapts:
            settings = settings_of(self.vllm_config)
            assert settings is not None
            self.cudagraph_manager = widths.target_graphs(self, settings)
        layers = self.compilation_config.static_forward_context
        caches, seen = [], set()
        for group, spec in enumerate(self.kv_cache_config.kv_cache_groups):
            for name in spec.layer_names:
                cache = layers[name].kv_cache
                if layers[name].is_draft_layer or cache.data_ptr() in seen:
                    continue
                seen.add(cache.data_ptr())
                caches.append((cache, group))
        self._kv_layers = make_kv_layers(caches)

    def capture_model(self, *, profile_only: bool = False) -> int:
        """Capture, then time the captured steps: after this vLLM expects no kernel to be compiled any more."""
        size = super().capture_model(profile_only=profile_only)  # type: ignore[misc]
        if not profile_only:
            if self._routed is not None:
                self._warm_up_routing(self._routed)
            self.measured_step_costs()
            if self._routed is not None and round_costs.is_wanted(self._routed):
                self._routed.router.set_costs(round_costs.measure(self))
        return size

    @torch.inference_mode()
    def _warm_up_routing(self, host: RoutedHost) -> None:
        """Compile the kernels of router and drafters: the warm-up's requests may all have gone to one drafter."""
        states = torch.zeros(1, self.model_config.get_hidden_size(), dtype=self.dtype, device=self.device)
        host.router.warm_up(self.model.compute_logits(states), states)
        for num_reqs in COMPILED_BATCHES:
            num_tokens = num_reqs * self.decode_query_len
            if num_reqs <= self.max_num_reqs and num_tokens <= self.max_num_tokens:
                self._dummy_run(num_tokens, uniform_decode=True, skip_eplb=True)

    def measured_step_costs(self) -> step_costs.StepTable | None:
        """What steps cost, measured at the first call; None where the schedule does not depend on it."""
        if self._step_costs is None and step_costs.is_wanted(self.vllm_config):
            self._step_costs = step_costs.measure(self)
        return self._step_costs

    # -- the step ---------------------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: Any, *arguments: Any, dummy_run: bool = False, **options: Any) -> Any:
        """The step with as many draft rows of each request as its tree has nodes."""
        if self._adapts and not dummy_run:
            new = {request.req_id for request in scheduler_output.scheduled_new_reqs}
            scheduler_output = cut_drafts(
                scheduler_output, lambda req_id: None if req_id in new else self._width_of(req_id)
            )
        return super().execute_model(scheduler_output, *arguments, dummy_run=dummy_run, **options)  # type: ignore[misc]

    def _width_of(self, req_id: str) -> int | None:
        """Draft tokens that a request's tree needs; None for one that is new here, or whose drafts follow a chain.

        The grammar of a structured request, made by the scheduler, has a row for each planned draft token.
        """
        slot, state = self.req_states.req_id_to_index.get(req_id), self.tree_state
        if slot is None or state.modes[slot] != TREE:
            return None
        return self.settings.planned(int(state.widths[slot]))

    def add_requests(self, scheduler_output: Any) -> None:
        """Note what each new request lets its drafter do."""
        super().add_requests(scheduler_output)  # type: ignore[misc]
        if not scheduler_output.scheduled_new_reqs:
            return
        state = self.tree_state
        for request in scheduler_output.scheduled_new_reqs:
            slot = self.req_states.req_id_to_index[request.req_id]
            state.modes[slot] = draft_mode(request.sampling_params, self._chains_only)
            state.widths[slot] = state.num_nodes
        if self.contemplation is not None:
            new_ids = (request.req_id for request in scheduler_output.scheduled_new_reqs)
            self.contemplation.forget([self.req_states.req_id_to_index[req_id] for req_id in new_ids])
        if self._routed is not None:
            new = scheduler_output.scheduled_new_reqs
            slots = [self.req_states.req_id_to_index[request.req_id] for request in new]
            self._routed.add_requests(slots, [request.num_computed_tokens for request in new])
        # A copy of the host's array, for the next batch of new requests may change it before this one is through.
        async_tensor_h2d(state.modes.copy(), out=state.modes_on_device)
        if not self.speculator.stores_trees:
            state.sizes.copy_((state.modes_on_device != NOTHING) * state.num_nodes)
        else:  # nothing may be drafted, and so stored, while all of a batch opted out
            state.sizes.masked_fill_(state.modes_on_device == NOTHING, 0)

    def finish_requests(self, scheduler_output: Any) -> None:
        """What drafters still have to take in of requests that leave together is taken in together."""
        if self._routed is not None:
            leaving = scheduler_output.finished_req_ids | (scheduler_output.preempted_req_ids or set())
            slots = (self.req_states.req_id_to_index.get(req_id) for req_id in leaving)
            self._routed.remove_requests(sorted(slot for slot in slots if slot is not None))
        super().finish_requests(scheduler_output)  # type: ignore[misc]

    def _remove_request(self, req_id: str) -> bool:
        """A slot that is given up may hold what drafters still have to take in."""
        slot = self.req_states.req_id_to_index.get(req_id)
        if self._routed is not None and slot is not None:
            self._routed.remove_requests([slot])
        return super()._remove_request(req_id)  # type: ignore[misc]

    def prepare_inputs(self, *arguments: Any, **options: Any) -> Any:
        """vLLM's batch; contemplate rows get no logits."""
        batch = super().prepare_inputs(*arguments, **options)  # type: ignore[misc]
        return batch if self.contemplation is None else self.contemplation.split(batch)

    def prepare_attn(self, input_batch: Any) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """KV slots from linear positions as ever, then the trees' positions and masks."""
        prepared = super().prepare_attn(input_batch)  # type: ignore[misc]
        self._has_drafts = input_batch.num_draft_tokens > 0
        if self._has_drafts:
            state = self.tree_state
            prepare_rows(
                idx_mapping=input_batch.idx_mapping,
                query_start_loc=input_batch.query_start_loc,
                cu_rows=self._cu_rows(input_batch),
                seq_lens=input_batch.seq_lens,
                prefill_len=self.req_states.prefill_len.gpu,
                parents=state.parents,
                sizes=state.sizes,
                positions=input_batch.positions,
                row_mask=state.row_mask,
                prefix_len=state.prefix_len,
                num_live=state.num_live,
                max_depth=state.max_depth,
                contemplates=self.settings.contemplates,
                num_soft=state.num_soft,
            )
            # Requests that only pad a CUDA graph have no rows.
            state.prefix_len[input_batch.num_reqs : input_batch.num_reqs_after_padding].zero_()
            self._step_batch = input_batch
        return prepared

    def tree_source(self, common: Any, capturing: bool) -> Any:
        """The step's trees for the metadata builders of the attention; None where no request brought drafts.

        Args:
            common: vLLM's common attention metadata.
            capturing: whether a CUDA graph of a uniform verification batch is being captured.
        """
        state, max_query_len = self.tree_state, common.max_query_len
        if capturing:
            if common.max_query_len <= 1:
                return None
            num_reqs, num_tokens = common.num_reqs, common.num_actual_tokens
        elif self._has_drafts:
            batch = self._step_batch
            # Verification requests lead the batch (vLLM sorts it so).
            num_reqs = int((batch.num_draft_tokens_per_req > 0).sum())
            num_tokens = int(batch.query_start_loc_np[num_reqs])
            # A graph for several widths takes single rows without drafts, too, and has no other path for them.
            if num_reqs == batch.num_reqs or (self._adapts and (batch.num_scheduled_tokens[num_reqs:] == 1).all()):
                num_reqs, num_tokens = common.num_reqs, common.num_actual_tokens
            max_query_len = widths.captured_query_len(self.cudagraph_manager) or max_query_len
        else:
            return None
        return base.TargetTail(
            prefix_len=state.prefix_len,
            row_mask=state.row_mask,
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            max_query_len=min(max_query_len, state.num_rows),
            everything=num_reqs >= common.num_reqs,
        )

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Keep hold of the tapped states, which the commit moves."""
        step = self.execute_model_state
        self._tapped = list(step.aux_hidden_states or ()) if step is not None else []
        return super().sample_tokens(grammar_output)  # type: ignore[misc]

    def sample(self, hidden_states: torch.Tensor, input_batch: Any, grammar_output: Any) -> Any:
        """Verify, then commit the accepted paths."""
        self._sampling = True
        verified = input_batch if self.contemplation is None else self.contemplation.verified(input_batch)
        if verified is not input_batch and grammar_output is not None:
            grammar_output = self.contemplation.masks_of(input_batch, grammar_output)
        out = super().sample(hidden_states, verified, grammar_output)  # type: ignore[misc]
        self._sampling = False
        self._observe_logits(input_batch)
        if self.contemplation is not None:
            self.contemplation.observe(input_batch, hidden_states, self._tapped)
        if self.has_trees and self._has_drafts:
            if self.round_recorder is not None:
                self.round_recorder.record(input_batch)
            self._commit(hidden_states, input_batch)
        self._has_drafts = False
        self.tree_state.cu_rows = None
        return out

    def _cu_rows(self, batch: Any) -> torch.Tensor:
        """int32 [R + 1], first row of each request among all rows that a round brings, contemplate rows included."""
        rows = self.tree_state.cu_rows
        return batch.cu_num_logits if rows is None else rows

    def _commit(self, hidden_states: torch.Tensor, batch: Any) -> None:
        """Move K, V, states and ids of each accepted path to the rows of an accepted chain.

        Three launches, and one more for every eight tapped states.
        """
        state = self.tree_state
        path = {
            "query_start_loc": batch.query_start_loc,
            "cu_num_logits": self._cu_rows(batch),
            "num_sampled": state.num_sampled,
            "path": state.path,
        }
        compact_kv(self._kv_layers, **path, slot_mappings=self.block_tables.slot_mappings)
        states = [hidden_states, *self._tapped]
        for first in range(0, len(states), MAX_TENSORS):
            compact_rows(states[first : first + MAX_TENSORS], **path)
        restore_rows(**path, seq_lens=batch.seq_lens, positions=batch.positions, input_ids=batch.input_ids)
