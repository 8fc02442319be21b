"""EAGLE-3 as a proposer, on vLLM's autoregressive speculator."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.dp_utils import dispatch_cg_and_sync_dp
from vllm.v1.worker.gpu.spec_decode.dflash.cudagraph import DFlashCudaGraphManager
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import SpeculatorCudaGraphManager
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import prepare_prefill_inputs

from vllm_crossspec.engine.loading import load_drafter
from vllm_crossspec.engine.proposers.base import (
    Proposer,
    TargetKeys,
    native_arguments,
    ranked_logits,
    without_schedule,
)
from vllm_crossspec.engine.proposers.one_layer import write_entries
from vllm_crossspec.types import Candidates, DraftSettings, StepInputs


class OneRowGraphManager(DFlashCudaGraphManager):
    """CUDA graphs of a first pass over one row a request, whose attention metadata is the drafter's own.

    vLLM's first pass runs over the target's rows with the target's metadata. This one is called as that is.
    """

    def __init__(self, proposer: "Eagle3Proposer", cudagraph_mode: CUDAGraphMode):
        full = cudagraph_mode.decode_mode() == CUDAGraphMode.FULL
        mode = CUDAGraphMode.FULL_DECODE_ONLY if full else CUDAGraphMode.NONE
        super().__init__(without_schedule(proposer.vllm_config), proposer.device, mode, decode_query_len=1)
        self.proposer = proposer

    def capture(self, forward_fn: Callable[..., None], *target: Any, progress_bar_desc: str = "") -> None:
        """Capture vLLM's ``_prefill``; the target's state, buffers and attention groups are not wanted."""
        own = self.proposer
        super().capture(
            forward_fn,
            own.input_buffers,
            own.block_tables,
            own.attn_groups,
            own.kv_cache_config,
            own.max_model_len,
            causal=True,
            prepare_forward=lambda num_reqs, attn_metadata: None,
            progress_bar_desc=progress_bar_desc,
        )


class Eagle3Proposer(EagleSpeculator, Proposer):
    """A chain of K tokens, one forward of the one-layer drafter each (EAGLE-3, Li et al. 2025, section 3)."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, name: str, drafts: DraftSettings):
        super().__init__(vllm_config, device)
        self.name, self.drafts = name, drafts
        num_layers = self.draft_model_config.hf_config.num_hidden_layers
        if drafts.from_one_row and num_layers != 1:  # a second layer's keys would need the first's attention
            raise ValueError(
                f"speculative_config.drafters.{name}.model: {self.draft_model_config.model} has {num_layers} layers, "
                "but beside other drafters an EAGLE-3 drafter has one; use it alone"
            )

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        """The drafter's model, under a layer prefix of its own."""
        overlaid = self.speculative_config.apply_draft_overrides(self.vllm_config)
        return load_drafter(target_model, overlaid, self.name, "eagle_head")

    # -- CUDA graphs ------------------------------------------------------------------------------------------

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """As vLLM's, but the first pass is as wide as the engine's verification, whatever this drafter's own length."""
        super().init_cudagraph_manager(cudagraph_mode)
        if self.drafts.from_one_row:
            self.prefill_cudagraph_manager = OneRowGraphManager(self, cudagraph_mode)
        elif self.drafts.num_nodes != self.num_speculative_steps:
            self.prefill_cudagraph_manager = SpeculatorCudaGraphManager(
                self.engine_config, self.device, cudagraph_mode, self.drafts.num_nodes + 1
            )

    # -- the round --------------------------------------------------------------------------------------------

    def propose_step(self, step: StepInputs) -> Candidates:
        """Draft K tokens a request; the first pass also takes the step's tokens into the cache."""
        return Candidates(tokens=self.propose(**native_arguments(step)))

    def catch_up(self, step: StepInputs) -> None:
        """The first pass alone: it writes K and V of the step's accepted tokens."""
        step.options["num_speculative_tokens"] = 1
        self.propose(**native_arguments(step))

    def start_rows(self, step: StepInputs) -> StepInputs:
        """The first pass's attention metadata and cache slots: one query row a request."""
        if step.options.get("skip_attn_for_dummy_run"):
            return step
        batch, num_reqs = step.batch, step.batch.num_reqs
        prepare_prefill_inputs(
            self.last_token_indices,
            self.current_draft_step,
            self.input_buffers,
            batch,
            step.num_sampled,
            step.num_rejected,
            step.last_sampled,
            step.next_prefill_tokens,
            self.max_num_reqs,
        )
        desc, _ = dispatch_cg_and_sync_dp(
            self.prefill_cudagraph_manager,
            num_reqs,
            num_reqs,
            uniform_token_count=1,
            dp_size=self.dp_size,
            dp_rank=self.dp_rank,
            need_eager=step.options.get("is_profile", False),
            dp_sync_state=None,
        )
        tables = self.block_tables
        # The rows of a dummy run name request slots whose blocks may be others' by now: it writes nothing.
        slots = (
            tables.get_dummy_slot_mappings(desc.num_tokens)
            if step.options.get("dummy_run")
            else tables.compute_slot_mappings(
                batch.idx_mapping, batch.query_start_loc, batch.positions, desc.num_tokens
            )
        )
        self.draft_max_seq_len = self.max_model_len
        metadata = self._build_uniform_attn_metadata(
            batch_desc=desc,
            num_reqs=num_reqs,
            num_query_per_req=1,
            seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound,
            step=0,
        )
        return step._replace(
            attn_metadata=metadata, slot_mappings=build_slot_mappings_by_layer(slots, self.kv_cache_config)
        )

    @torch.inference_mode()
    def write_context(
        self, features: torch.Tensor, next_tokens: torch.Tensor, positions: torch.Tensor, kv_slots: list[torch.Tensor]
    ) -> None:
        """Keys and values of the one layer: two norms, one projection, rotation, one cache write."""
        write_entries(self.model.model, features, next_tokens, positions, kv_slots[0])

    def sample_draft(
        self,
        hidden_states: torch.Tensor,
        sample_src_positions: torch.Tensor,
        idx_mapping: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        draft_step: torch.Tensor,
        draft_logits: torch.Tensor | None,
        spec_step_idx: int = 0,
    ) -> torch.Tensor:
        """First choices, coupled with the target's noise where the drafts are to be.

        vLLM scatters the draft logits into a full row of the target's vocabulary first, at every step. Here the
        arg-max is taken in the reduced vocabulary and only the winner is mapped; ``d2t`` is ascending, so the winner,
        ties included, is the same.

        Args:
            hidden_states: [R, H]. The other arguments are vLLM's.

        Returns:
            int64 [R] token ids of the target's vocabulary.
        """
        offsets = self.offsets
        plain = not self.drafts.is_coupled and (offsets is None or self.use_local_argmax_reduction)
        if draft_logits is not None or self.use_acceptance_estimator or plain:
            return super().sample_draft(
                hidden_states,
                sample_src_positions,
                idx_mapping,
                temperature,
                seeds,
                draft_step,
                draft_logits,
                spec_step_idx,
            )
        keys = TargetKeys(idx_mapping, sample_src_positions, temperature, seeds, self.use_fp64_gumbel)
        winner = self.logits_for_ranking(hidden_states, keys).argmax(dim=-1)
        return winner if offsets is None else winner + offsets[winner]

    @property
    def offsets(self) -> torch.Tensor | None:
        """int64 [draft vocabulary] target id minus draft id; None where the drafter has the target's vocabulary."""
        return getattr(self.model, "draft_id_to_target_id", None)

    def logits_for_ranking(self, hidden_states: torch.Tensor, keys: TargetKeys) -> torch.Tensor:
        """[rows, draft vocabulary] by which this drafter chooses, for states [rows, H]."""
        logits = self.model.logits_processor(self.model.lm_head, hidden_states)
        return ranked_logits(logits, keys if self.drafts.is_coupled else None, self.offsets)
