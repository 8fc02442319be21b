"""EAGLE-3 as a proposer, on vLLM's autoregressive speculator."""

from typing import Any

import torch
from torch import nn
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import SpeculatorCudaGraphManager
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import prepare_prefill_inputs

from vllm_crossspec.engine.draft_settings import DraftSettings
from vllm_crossspec.engine.graphs.rows import RowGraphManager
from vllm_crossspec.engine.proposers.base import HeadSampling, Proposer
from vllm_crossspec.engine.proposers.one_layer import write_entries
from vllm_crossspec.engine.vllm_api import run
from vllm_crossspec.engine.vllm_api.propose import native_arguments
from vllm_crossspec.engine.weights import load_drafter
from vllm_crossspec.types import Candidates, StepInputs


class Eagle3Proposer(HeadSampling, EagleSpeculator, Proposer):
    """A chain of K tokens, one forward of the one-layer drafter each (EAGLE-3, Li et al. 2025, section 3)."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, name: str, drafts: DraftSettings):
        super().__init__(vllm_config, device, name, drafts)
        num_layers = self.draft_model_config.hf_config.num_hidden_layers
        if drafts.from_one_row and not self.writes_context:
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
            self.prefill_cudagraph_manager = RowGraphManager(self, cudagraph_mode, 1, self._plan_first_pass)
        elif self.drafts.num_rows != self.num_speculative_steps + 1:
            self.prefill_cudagraph_manager = SpeculatorCudaGraphManager(
                self.engine_config, self.device, cudagraph_mode, self.drafts.num_rows
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
        """The first pass's attention metadata and cache slots: one query row a request.

        Graphs hold the attention's work plan, and the slots go where they read them.
        """
        if step.options.get("skip_attn_for_dummy_run"):
            return step
        batch, num_reqs = step.batch, run.num_requests(step)
        desc = run.dispatch(self, self.prefill_cudagraph_manager, num_reqs, 1, step.options).desc
        tables = self.block_tables
        # The rows of a dummy run name request slots whose blocks may be others' by now: it writes nothing.
        kv_slots = (
            tables.get_dummy_slot_mappings(desc.num_tokens)
            if step.options.get("dummy_run")
            else tables.compute_slot_mappings(
                batch.idx_mapping, batch.query_start_loc, batch.positions, desc.num_tokens
            )
        )
        self.draft_max_seq_len = self.max_model_len
        if desc.cg_mode == CUDAGraphMode.FULL:
            run.map_block_tables(self)
            return step
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
        metadata = run.uniform_metadata(self, desc, num_reqs, 1, batch.seq_lens_cpu_upper_bound, 0)
        return step._replace(attn_metadata=metadata, slot_mappings=run.slots_by_layer(self, kv_slots))

    def _plan_first_pass(self, num_reqs: int, attn_metadata: dict[str, Any] | None) -> None:
        """The attention's work plan of :meth:`start_rows`' pass, captured ahead of it; the arguments are vLLM's."""
        if attn_metadata is not None:
            self._update_draft_decode_metadata(attn_metadata, num_reqs)

    @property
    def writes_context(self) -> bool:
        """A second layer's keys would need the first's attention."""
        return self.draft_model_config.hf_config.num_hidden_layers == 1

    @torch.inference_mode()
    def write_context(
        self, features: torch.Tensor, next_tokens: torch.Tensor, positions: torch.Tensor, kv_slots: list[torch.Tensor]
    ) -> None:
        """Keys and values of the one layer: two norms, one projection, rotation, one cache write."""
        write_entries(self.model.model, features, next_tokens, positions, kv_slots[0])
