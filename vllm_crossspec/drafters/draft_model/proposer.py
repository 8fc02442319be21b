"""A small language model as a proposer: K forwards per round, the first over two rows per request, then over one."""

from typing import Any

import torch
from torch import nn
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import (
    TargetDependentARSpeculator,
    prepare_decode_inputs,
)

from vllm_crossspec.config.schema import CrossSpecConfig
from vllm_crossspec.drafters.draft_model.inputs import CHAIN_ROWS, NO_SLOT, RoundRows, prepare_rows
from vllm_crossspec.drafting.proposer import HeadSampling
from vllm_crossspec.drafting.weights import load_language_model, standalone_config
from vllm_crossspec.graphs.rows import RowGraphManager
from vllm_crossspec.types import Candidates, StepInputs
from vllm_crossspec.vllm_api import run


class DraftModelProposer(HeadSampling, TargetDependentARSpeculator):
    """A chain of K tokens from a model that reads only the text (FlashHead for drafters, Ma and Wang 2026, section 3).

    Differences from vLLM's class for draft models:

    - The first pass runs over two rows per request instead of all target rows: the last accepted token, which the cache
      may lack, and the bonus token. The latter gives draft 1.
    - A separate pass takes in prompts, over the target's rows.
    - Passes run in CUDA graphs.
    """

    hidden_states: torch.Tensor
    writes_context = False  # keys of a second layer need the first's attention

    def __init__(self, vllm_config: VllmConfig, device: torch.device, name: str, settings: CrossSpecConfig):
        super().__init__(vllm_config, device, name, settings)
        # vLLM's dummy rounds reserve this many rows per request.
        self.num_query_per_req = self.rows_of_round(settings)
        if self.num_query_per_req > self.max_model_len:
            raise ValueError(
                f"speculative_config.tree.depth: a round takes {self.num_query_per_req} tokens of a request, two more "
                f"than the tree is deep, and --max-model-len is {self.max_model_len}; use fewer levels"
            )
        num_rows = self.max_num_reqs * self.num_query_per_req
        if num_rows > self.max_num_tokens:
            raise ValueError(
                f"speculative_config.method: a round takes {self.num_query_per_req} rows of each request in a draft "
                f"model, {num_rows} with --max-num-seqs {self.max_num_reqs}, and --max-num-batched-tokens is "
                f"{self.max_num_tokens}; raise the second, or lower the first"
            )
        self.row_slots = torch.full((num_rows,), NO_SLOT, dtype=torch.int64, device=device)
        self.row_starts = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        self.bonus_rows = torch.zeros(self.max_num_reqs, dtype=torch.int64, device=device)
        # vLLM's drafters pass states from step to step, one row per request; this one does not use them.
        self.hidden_states = self.hidden_states[: self.max_num_reqs].clone()
        self.nothing_rejected = torch.zeros(self.max_num_reqs, dtype=torch.int32, device=device)
        self.draft_config = vllm_config

    @staticmethod
    def rows_of_round(settings: CrossSpecConfig) -> int:
        """Rows of a request in the first pass: the last accepted token and the bonus token."""
        return CHAIN_ROWS

    # -- loading ----------------------------------------------------------------------------------------------

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        self.draft_config = standalone_config(self.vllm_config)
        return load_language_model(self.draft_config, self.name)

    @property
    def attn_vllm_config(self) -> VllmConfig:
        return self.draft_config

    # -- CUDA graphs ------------------------------------------------------------------------------------------

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        # The first pass has equally many rows for every request.
        super().init_cudagraph_manager(cudagraph_mode)
        self.prefill_cudagraph_manager = RowGraphManager(
            self, cudagraph_mode, self.num_query_per_req, self._prepare_first_pass
        )

    # -- the round --------------------------------------------------------------------------------------------

    def propose_step(self, step: StepInputs) -> Candidates:
        """Draft K tokens per request, or as many as the engine will verify."""
        self._round(step, self.num_speculative_steps if step.num_drafts is None else step.num_drafts)
        return Candidates(tokens=self.draft_tokens[: step.batch.num_reqs])

    def catch_up(self, step: StepInputs) -> None:
        """Run prompts and the first pass, so that the cache holds the whole text."""
        self._round(step, 0)

    def write_context(self, *entries: Any) -> None:
        raise NotImplementedError("a draft model takes tokens in by whole forward passes")

    @torch.inference_mode()
    def _round(self, step: StepInputs, num_drafts: int) -> None:
        """Run prompts, the first pass, and the later passes; no sync."""
        batch, has_cache = step.batch, not step.skips_attention
        # Padded to a target's graph, a dummy batch may have more requests than there is room for.
        num_reqs = min(run.num_requests(step), self.max_num_reqs)
        longest = int(batch.seq_lens_cpu_upper_bound[:num_reqs].max())
        ahead = max(self.num_speculative_steps, self.num_query_per_req - 1)
        self.draft_max_seq_len = min(longest + ahead, self.max_model_len)
        if step.is_profile or (not step.is_dummy and _has_prompt_rows(batch)):
            self._take_target_rows(step, has_cache)
        self._first_pass(step, num_reqs, has_cache, skip_sample=not num_drafts)
        if num_drafts > 1:
            self._other_passes(step, num_reqs, has_cache, num_drafts)

    def _take_target_rows(self, step: StepInputs, has_cache: bool) -> None:
        """Write keys and values of all target rows; later passes overwrite rejected drafts' before they read them."""
        batch = step.batch
        num_reqs, num_tokens, bounds = batch.num_reqs, batch.num_tokens, batch.seq_lens_cpu_upper_bound
        metadata = kv_slots = None
        if has_cache:
            slots = self.block_tables.slot_mappings[:, :num_tokens]
            metadata = build_attn_metadata(
                attn_groups=self.attn_groups,
                num_reqs=num_reqs,
                num_tokens=num_tokens,
                query_start_loc_gpu=batch.query_start_loc[: num_reqs + 1],
                query_start_loc_cpu=torch.from_numpy(batch.query_start_loc_np[: num_reqs + 1]),
                max_query_len=int(batch.num_scheduled_tokens.max()),
                seq_lens=batch.seq_lens[:num_reqs],
                max_seq_len=int(bounds[:num_reqs].max()),
                block_tables=[table[:num_reqs] for table in self.block_tables.input_block_tables],
                slot_mappings=slots,
                kv_cache_config=self.kv_cache_config,
                seq_lens_cpu_upper_bound=bounds[:num_reqs],
                positions=batch.positions[:num_tokens],
                is_prefilling=torch.from_numpy(batch.is_prefilling_np),
            )
            kv_slots = run.slots_by_layer(self, slots)
        sync = step.dp_sync
        # Ranks need not agree: only ranks with prompts run this pass, and its layers do not communicate.
        across_dp = torch.full_like(sync.num_tokens_across_dp, num_tokens) if sync is not None else None
        self._prepare_eplb_forward(num_tokens)
        self._forward(batch.input_ids[:num_tokens], batch.positions[:num_tokens], metadata, kv_slots, across_dp)

    def _first_pass(self, step: StepInputs, num_reqs: int, has_cache: bool, skip_sample: bool) -> None:
        """Run the first pass, by a captured graph if there is one, and draft token 1; a graph never skips that."""
        self._fill_rows(step, num_reqs)
        manager, rows = self.prefill_cudagraph_manager, self.num_query_per_req
        how = run.dispatch(self, manager, num_reqs, rows, step)
        desc = how.desc
        metadata = kv_slots = None
        if has_cache and not (how.in_graph and self.supports_decode_metadata_update):
            bound = step.batch.seq_lens_cpu_upper_bound
            metadata = run.uniform_metadata(self, desc, num_reqs, rows, bound, rows - 1)
            kv_slots = run.slots_by_layer(self, self.block_tables.slot_mappings[:, : desc.num_tokens])
        self._prepare_eplb_forward(num_reqs * rows)
        if how.in_graph:
            assert manager is not None
            if self.supports_decode_metadata_update:
                run.map_block_tables(self)
            manager.run_fullgraph(desc)
            return
        if has_cache:
            self._prepare_first_pass(num_reqs, metadata)
        self._prefill(num_reqs, desc.num_tokens, metadata, kv_slots, how.tokens_across_dp, skip_sample=skip_sample)

    def _fill_rows(self, step: StepInputs, num_reqs: int) -> None:
        buffers = self.input_buffers
        prepare_rows(
            step,
            num_reqs,
            num_rows=self.num_query_per_req,
            max_model_len=self.max_model_len,
            writes=not step.is_dummy,  # a dummy batch's slots may belong to other requests
            out=RoundRows(
                input_ids=buffers.input_ids,
                positions=buffers.positions,
                row_slots=self.row_slots,
                query_start_loc=buffers.query_start_loc,
                seq_lens=buffers.seq_lens,
                bonus_rows=self.bonus_rows,
                bonus_positions=self.sample_src_positions,
                request_slots=self.idx_mapping,
                temperature=self.temperature,
                seeds=self.seeds,
            ),
        )

    def _prepare_first_pass(self, num_reqs: int, attn_metadata: dict[str, Any] | None) -> None:
        """Compute the rows' cache slots and the attention's plan; a graph holds this."""
        rows = num_reqs * self.num_query_per_req
        # vLLM gets each row as a request of one token, because some rows of a request write nothing.
        self.block_tables.compute_slot_mappings(
            self.row_slots[:rows], self.row_starts[: rows + 1], self.input_buffers.positions[:rows], rows
        )
        if self.supports_decode_metadata_update:
            self._plan_attention(num_reqs, attn_metadata)

    def _prefill(
        self,
        num_reqs: int,
        num_tokens: int,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor] | None,
        num_tokens_across_dp: torch.Tensor | None,
        cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE,
        mm_inputs: Any = None,
        skip_sample: bool = False,
    ) -> None:
        """The first pass's forward, and draft 1 from every request's bonus token (vLLM's hook for its graphs)."""
        states, _ = self._run_model(num_tokens, attn_metadata, slot_mappings, num_tokens_across_dp)
        if skip_sample:
            return
        positions, slots = self.sample_src_positions[:num_reqs], self.idx_mapping[:num_reqs]
        self.current_draft_step.zero_()
        states = states.index_select(0, self.bonus_rows[:num_reqs])
        keys, kept = (positions, slots, self.temperature, self.seeds), (self.current_draft_step, self.draft_logits)
        self.draft_tokens[:num_reqs, 0] = self.sample_draft(states, *keys, *kept)
        self.input_buffers.positions[:num_reqs] = positions

    def _other_passes(self, step: StepInputs, num_reqs: int, has_cache: bool, num_drafts: int) -> None:
        """Draft the other tokens, one row per request each: vLLM's own loop, in one graph or in one per token."""
        own, limits = self.input_buffers, (self.max_model_len, self.max_num_reqs)
        rows = (self.draft_tokens[:num_reqs, 0], own.seq_lens, self.nothing_rejected)
        prepare_decode_inputs(*rows, own, self.sample_src_positions, *limits)
        desc, across_dp = run.dispatch(self, self.decode_cudagraph_manager, num_reqs, 1, step)
        if self.decode_cudagraph_manager is not None:
            desc = self.decode_cudagraph_manager.specialize_spec_tokens(desc, num_drafts)
        fused = self.supports_decode_metadata_update
        decode = self._fused_multi_step_decode if fused else self._multi_step_decode
        # vLLM's lengths do not include the bonus token.
        lengths = step.batch.seq_lens_cpu_upper_bound + 1
        decode(num_reqs, not has_cache, desc, across_dp, lengths, num_drafts)

    # -- the model --------------------------------------------------------------------------------------------

    def _run_model(
        self,
        num_tokens: int,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor] | None,
        num_tokens_across_dp: torch.Tensor | None,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A forward over the first rows of the buffers; returns states [num_tokens, H] twice (vLLM's protocol)."""
        ids, positions = self.input_buffers.input_ids[:num_tokens], self.input_buffers.positions[:num_tokens]
        states = self._forward(ids, positions, attn_metadata, slot_mappings, num_tokens_across_dp)
        return states, states

    def _forward(self, token_ids: torch.Tensor, positions: torch.Tensor, *told: Any) -> torch.Tensor:
        with run.forward_context(self, len(token_ids), *told):
            states: torch.Tensor = self.model(input_ids=token_ids, positions=positions)
        return states


def _has_prompt_rows(batch: Any) -> bool:
    """Whether a request of a real batch computed prompt tokens that the first pass's two rows would miss."""
    if not batch.is_prefilling_np.any():
        return False
    new = batch.num_scheduled_tokens
    if batch.num_draft_tokens_per_req is not None:
        new = new - batch.num_draft_tokens_per_req
    stays_inside = batch.num_computed_prefill_tokens_np + new < batch.prefill_len_np
    return bool((batch.is_prefilling_np & ((new > 1) | stays_inside)).any())
