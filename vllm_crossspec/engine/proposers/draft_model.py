"""A small language model of its own as a proposer: K forwards a round, of two rows a request and then of one each."""

from typing import Any

import torch
from torch import nn
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import (
    TargetDependentARSpeculator,
    prepare_decode_inputs,
)

from vllm_crossspec.drafters.draft_model.inputs import CHAIN_ROWS, NOBODY, RoundRows, prepare_rows
from vllm_crossspec.engine.draft_settings import DraftSettings
from vllm_crossspec.engine.graphs.rows import RowGraphManager
from vllm_crossspec.engine.proposers.base import HeadSampling, Proposer
from vllm_crossspec.engine.vllm_api import run
from vllm_crossspec.engine.weights import load_language_model, standalone_config
from vllm_crossspec.types import Candidates, StepInputs


class DraftModelProposer(HeadSampling, TargetDependentARSpeculator, Proposer):
    """A chain of K tokens from a model that reads the text alone (FlashHead for drafters, Ma and Wang 2026, section 3).

    At the start of a round its cache holds the text up to the last accepted token, that one not always included, for a
    round's last draft is never fed. So the first pass takes two rows a request, that token and the bonus token, and
    no row that was rejected; the second row gives draft 1. Prompts are taken in before it, over the target's rows.
    vLLM's own class for such models runs the first pass over all of the target's rows, and nothing in CUDA graphs.
    """

    hidden_states: torch.Tensor

    def __init__(self, vllm_config: VllmConfig, device: torch.device, name: str, drafts: DraftSettings):
        super().__init__(vllm_config, device, name, drafts)
        # vLLM's dummy rounds leave room for so many rows a request.
        self.num_query_per_req = self.rows_of_round(drafts)
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
        self.row_slots = torch.full((num_rows,), NOBODY, dtype=torch.int64, device=device)
        self.row_starts = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        self.bonus_rows = torch.zeros(self.max_num_reqs, dtype=torch.int64, device=device)
        # vLLM's drafters hand states on from step to step, one row a request; this one's own are of no use.
        self.hidden_states = self.hidden_states[: self.max_num_reqs].clone()
        self.nothing_rejected = torch.zeros(self.max_num_reqs, dtype=torch.int32, device=device)
        self.draft_config = vllm_config

    @staticmethod
    def rows_of_round(drafts: DraftSettings) -> int:
        """Rows of a request in the first pass: the last accepted token, maybe never fed yet, and the bonus token."""
        return CHAIN_ROWS

    # -- loading ----------------------------------------------------------------------------------------------

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        """The model, under a layer prefix of its own; it shares nothing with the target."""
        self.draft_config = standalone_config(self.vllm_config)
        return load_language_model(self.draft_config, self.name)

    @property
    def attn_vllm_config(self) -> VllmConfig:
        """What the builders of its attention metadata read heads and sizes from."""
        return self.draft_config

    # -- CUDA graphs ------------------------------------------------------------------------------------------

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """As vLLM's, but the first pass is over as many rows of every request."""
        super().init_cudagraph_manager(cudagraph_mode)
        self.prefill_cudagraph_manager = RowGraphManager(
            self, cudagraph_mode, self.num_query_per_req, self._prepare_first_pass
        )

    # -- the round --------------------------------------------------------------------------------------------

    def propose_step(self, step: StepInputs) -> Candidates:
        """Draft K tokens a request, or as many as the engine will verify."""
        num_drafts = step.options.get("num_speculative_tokens")
        self._round(step, self.num_speculative_steps if num_drafts is None else num_drafts)
        return Candidates(tokens=self.draft_tokens[: step.batch.num_reqs])

    def catch_up(self, step: StepInputs) -> None:
        """Everything but the drafting: prompts and the first pass, which leave the whole text in the cache."""
        self._round(step, 1)

    writes_context = False

    def write_context(
        self, features: torch.Tensor, next_tokens: torch.Tensor, positions: torch.Tensor, kv_slots: list[torch.Tensor]
    ) -> None:
        """Not offered: keys of a second layer need the first's attention, and so this kind drafts alone."""
        raise NotImplementedError("a draft model takes tokens in by whole forward passes")

    @torch.inference_mode()
    def _round(self, step: StepInputs, num_drafts: int) -> None:
        """Prompts, the first pass, and the passes that follow it; no sync."""
        batch, options = step.batch, step.options
        has_cache = not options.get("skip_attn_for_dummy_run", False)
        is_dummy = options.get("dummy_run", False)
        # Padded to a graph of the target's, a dummy batch may have more requests than rows find room for.
        num_reqs = min(run.num_requests(step), self.max_num_reqs)
        longest = int(batch.seq_lens_cpu_upper_bound[:num_reqs].max())
        ahead = max(self.num_speculative_steps, self.num_query_per_req - 1)
        self.draft_max_seq_len = min(longest + ahead, self.max_model_len)
        if options.get("is_profile", False) or (not is_dummy and _has_prompt_rows(batch)):
            self._take_target_rows(step, has_cache)
        self._first_pass(step, num_reqs, has_cache)
        if num_drafts > 1:
            self._other_passes(step, num_reqs, has_cache, num_drafts)

    def _take_target_rows(self, step: StepInputs, has_cache: bool) -> None:
        """Keys and values of the tokens that the target computed, at the slots that it computed them for.

        Rows of rejected drafts among them write what later passes overwrite before they read it.
        """
        batch = step.batch
        num_reqs, num_tokens = batch.num_reqs, batch.num_tokens
        metadata = kv_slots = None
        if has_cache:
            tables = self.block_tables
            metadata = build_attn_metadata(
                attn_groups=self.attn_groups,
                num_reqs=num_reqs,
                num_tokens=num_tokens,
                query_start_loc_gpu=batch.query_start_loc[: num_reqs + 1],
                query_start_loc_cpu=torch.from_numpy(batch.query_start_loc_np[: num_reqs + 1]),
                max_query_len=int(batch.num_scheduled_tokens.max()),
                seq_lens=batch.seq_lens[:num_reqs],
                max_seq_len=int(batch.seq_lens_cpu_upper_bound[:num_reqs].max()),
                block_tables=[table[:num_reqs] for table in tables.input_block_tables],
                slot_mappings=tables.slot_mappings[:, :num_tokens],
                kv_cache_config=self.kv_cache_config,
                seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound[:num_reqs],
                positions=batch.positions[:num_tokens],
                is_prefilling=torch.from_numpy(batch.is_prefilling_np),
            )
            kv_slots = run.slots_by_layer(self, tables.slot_mappings[:, :num_tokens])
        sync = step.options.get("dp_sync_state")
        # Ranks need not agree: only those run this pass that have prompts, and its layers do not speak to each other.
        across_dp = torch.full_like(sync.num_tokens_across_dp, num_tokens) if sync is not None else None
        self._prepare_eplb_forward(num_tokens)
        self._forward(batch.input_ids[:num_tokens], batch.positions[:num_tokens], metadata, kv_slots, across_dp)

    def _first_pass(self, step: StepInputs, num_reqs: int, has_cache: bool) -> None:
        """The round's rows, by a captured graph where there is one; draft 1."""
        self._fill_rows(step, num_reqs)
        manager, rows = self.prefill_cudagraph_manager, self.num_query_per_req
        how = run.dispatch(self, manager, num_reqs, rows, step.options)
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
        self._prefill(num_reqs, desc.num_tokens, metadata, kv_slots, how.tokens_across_dp)

    def _fill_rows(self, step: StepInputs, num_reqs: int) -> None:
        buffers = self.input_buffers
        prepare_rows(
            step,
            num_reqs,
            num_rows=self.num_query_per_req,
            max_model_len=self.max_model_len,
            # The slots that a dummy batch names may be others' by now.
            writes=not step.options.get("dummy_run", False),
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
        """Cache slots of the rows, and what attention wants to know of them; a graph holds this."""
        rows = num_reqs * self.num_query_per_req
        # To vLLM each row is a request of one token, for not every row of a request is to be written.
        self.block_tables.compute_slot_mappings(
            self.row_slots[:rows], self.row_starts[: rows + 1], self.input_buffers.positions[:rows], rows
        )
        if attn_metadata is not None and self.supports_decode_metadata_update:
            self._update_draft_decode_metadata(attn_metadata, num_reqs)

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
        positions = self.sample_src_positions[:num_reqs]
        self.current_draft_step.zero_()
        self.draft_tokens[:num_reqs, 0] = self.sample_draft(
            states.index_select(0, self.bonus_rows[:num_reqs]),
            positions,
            self.idx_mapping[:num_reqs],
            self.temperature,
            self.seeds,
            self.current_draft_step,
            self.draft_logits,
        )
        self.input_buffers.positions[:num_reqs] = positions

    def _other_passes(self, step: StepInputs, num_reqs: int, has_cache: bool, num_drafts: int) -> None:
        """One row a request for each further draft: vLLM's own loop, in one graph or in one a draft."""
        prepare_decode_inputs(
            self.draft_tokens[:num_reqs, 0],
            self.input_buffers.seq_lens,
            self.nothing_rejected,
            self.input_buffers,
            self.sample_src_positions,
            self.max_model_len,
            self.max_num_reqs,
        )
        desc, across_dp = run.dispatch(self, self.decode_cudagraph_manager, num_reqs, 1, step.options)
        if self.decode_cudagraph_manager is not None:
            desc = self.decode_cudagraph_manager.specialize_spec_tokens(desc, num_drafts)
        fused = self.supports_decode_metadata_update
        decode = self._fused_multi_step_decode if fused else self._multi_step_decode
        # vLLM counts from the target's rows; the bonus token is one more.
        lengths = step.batch.seq_lens_cpu_upper_bound + 1
        decode(num_reqs, not has_cache, desc, across_dp, lengths, num_drafts)

    # -- the model --------------------------------------------------------------------------------------------

    def _run_model(
        self,
        num_tokens: int,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor] | None,
        num_tokens_across_dp: torch.Tensor | None,
        cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE,
        mm_inputs: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A forward over the first rows of the buffers: states [num_tokens, H], twice (vLLM's protocol)."""
        ids, positions = self.input_buffers.input_ids[:num_tokens], self.input_buffers.positions[:num_tokens]
        states = self._forward(ids, positions, attn_metadata, slot_mappings, num_tokens_across_dp)
        return states, states

    def _forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor] | None,
        num_tokens_across_dp: torch.Tensor | None,
    ) -> torch.Tensor:
        with run.forward_context(self, len(token_ids), attn_metadata, slot_mappings, num_tokens_across_dp):
            states: torch.Tensor = self.model(input_ids=token_ids, positions=positions)
        return states


def _has_prompt_rows(batch: Any) -> bool:
    """Whether any request computed prompt tokens that the two rows of the first pass would miss.

    Args:
        batch: vLLM's ``InputBatch`` of a real step.
    """
    if not batch.is_prefilling_np.any():
        return False
    new = batch.num_scheduled_tokens
    if batch.num_draft_tokens_per_req is not None:
        new = new - batch.num_draft_tokens_per_req
    stays_inside = batch.num_computed_prefill_tokens_np + new < batch.prefill_len_np
    return bool((batch.is_prefilling_np & ((new > 1) | stays_inside)).any())
