"""EAGLE-3 as a proposer, on vLLM's autoregressive speculator."""

import torch
from torch import nn
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import SpeculatorCudaGraphManager
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import prepare_prefill_inputs

from vllm_crossspec.config.schema import CrossSpecConfig
from vllm_crossspec.drafting.one_layer import write_entries
from vllm_crossspec.drafting.proposer import HeadSampling
from vllm_crossspec.drafting.weights import load_drafter
from vllm_crossspec.graphs.rows import RowGraphManager
from vllm_crossspec.types import Candidates, StepInputs
from vllm_crossspec.vllm_api import run
from vllm_crossspec.vllm_api.propose import native_arguments


class Eagle3Proposer(HeadSampling, EagleSpeculator):
    """A chain of K tokens, each from one forward of the one-layer drafter (EAGLE-3, Li et al. 2025, section 3).

    Differences from vLLM's ``EagleSpeculator``:

    - Several can be loaded beside one target.
    - Drafts can come from another head, and be coupled with the target's noise.
    - A round can start from one row per request, after the cache has caught up without a forward.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, name: str, settings: CrossSpecConfig):
        super().__init__(vllm_config, device, name, settings)
        num_layers = self.draft_model_config.hf_config.num_hidden_layers
        self.writes_context = num_layers == 1  # a second layer's keys would need the first's attention
        if settings.starts_from_last_token and not self.writes_context:
            raise ValueError(
                f"speculative_config.drafters.{name}.model: {self.draft_model_config.model} has {num_layers} layers, "
                "but beside other drafters an EAGLE-3 drafter has one; use it alone"
            )

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        overlaid = self.speculative_config.apply_draft_overrides(self.vllm_config)
        return load_drafter(target_model, overlaid, self.name, "eagle_head")

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        # The first pass is as wide as the engine's verification, which can exceed this drafter's own length.
        super().init_cudagraph_manager(cudagraph_mode)
        if self.settings.starts_from_last_token:
            self.prefill_cudagraph_manager = RowGraphManager(self, cudagraph_mode, 1, self._plan_attention)
        elif self.settings.num_rows != self.num_speculative_steps + 1:
            self.prefill_cudagraph_manager = SpeculatorCudaGraphManager(
                self.engine_config, self.device, cudagraph_mode, self.settings.num_rows
            )

    def propose_step(self, step: StepInputs) -> Candidates:
        return Candidates(tokens=self.propose(**native_arguments(step)))

    def catch_up(self, step: StepInputs) -> None:
        # The first pass alone writes K and V of the step's accepted tokens.
        self.propose(**native_arguments(step._replace(num_drafts=1)))

    def start_rows(self, step: StepInputs) -> StepInputs:
        """Add the first pass's attention metadata and cache slots, for one query row per request."""
        if step.skips_attention:
            return step
        batch, num_reqs = step.batch, run.num_requests(step)
        desc = run.dispatch(self, self.prefill_cudagraph_manager, num_reqs, 1, step).desc
        tables, rows = self.block_tables, (batch.idx_mapping, batch.query_start_loc, batch.positions)
        if step.is_dummy:  # it must write nothing: its slots' blocks may belong to other requests
            kv_slots = tables.get_dummy_slot_mappings(desc.num_tokens)
        else:
            kv_slots = tables.compute_slot_mappings(*rows, desc.num_tokens)
        self.draft_max_seq_len = self.max_model_len
        if desc.cg_mode == CUDAGraphMode.FULL:
            run.map_block_tables(self)
            return step
        own = (self.last_token_indices, self.current_draft_step, self.input_buffers)
        sampled = (step.num_sampled, step.num_rejected, step.last_sampled, step.next_prefill_tokens)
        prepare_prefill_inputs(*own, batch, *sampled, self.max_num_reqs)
        metadata = run.uniform_metadata(self, desc, num_reqs, 1, batch.seq_lens_cpu_upper_bound, 0)
        return step._replace(attn_metadata=metadata, slot_mappings=run.slots_by_layer(self, kv_slots))

    @torch.inference_mode()
    def write_context(
        self, features: torch.Tensor, next_tokens: torch.Tensor, positions: torch.Tensor, kv_slots: list[torch.Tensor]
    ) -> None:
        write_entries(self.model.model, features, next_tokens, positions, kv_slots[0])
