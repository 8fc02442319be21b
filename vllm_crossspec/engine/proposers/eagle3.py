"""EAGLE-3 as a proposer, on vLLM's autoregressive speculator."""

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import SpeculatorCudaGraphManager

from vllm_crossspec.engine.loading import load_drafter
from vllm_crossspec.engine.proposers.base import Proposer, TargetKeys, native_arguments, ranked_logits
from vllm_crossspec.types import Candidates, DraftSettings, StepInputs


class Eagle3Proposer(EagleSpeculator, Proposer):
    """A chain of K tokens, one forward of the one-layer drafter each (EAGLE-3, Li et al. 2025, section 3)."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, name: str, drafts: DraftSettings):
        super().__init__(vllm_config, device)
        self.name, self.drafts = name, drafts

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        """The drafter's model, under a layer prefix of its own."""
        overlaid = self.speculative_config.apply_draft_overrides(self.vllm_config)
        return load_drafter(target_model, overlaid, self.name, "eagle_head")

    # -- CUDA graphs ------------------------------------------------------------------------------------------

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """As vLLM's, but the first pass is as wide as the engine's verification, whatever this drafter's own length."""
        super().init_cudagraph_manager(cudagraph_mode)
        if self.drafts.num_nodes != self.num_speculative_steps:
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
