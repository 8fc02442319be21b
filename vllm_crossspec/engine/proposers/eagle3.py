"""EAGLE-3 as a proposer, on vLLM's autoregressive speculator."""

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

from vllm_crossspec.engine.loading import load_drafter
from vllm_crossspec.engine.proposers.base import Proposer, native_arguments
from vllm_crossspec.types import Candidates, StepInputs


class Eagle3Proposer(EagleSpeculator, Proposer):
    """A chain of K tokens, one forward of the one-layer drafter each (EAGLE-3, Li et al. 2025, section 3)."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, name: str):
        super().__init__(vllm_config, device)
        self.name = name

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        """The drafter's model, under a layer prefix of its own."""
        overlaid = self.speculative_config.apply_draft_overrides(self.vllm_config)
        return load_drafter(target_model, overlaid, self.name, "eagle_head")

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
        """Greedy drafts of a reduced vocabulary take the arg-max there and map only the winner.

        vLLM scatters the draft logits into a full row of the target's vocabulary first, at every step; ``d2t`` is
        ascending, so the winner, ties included, is the same.

        Args:
            hidden_states: [R, H]. The other arguments are vLLM's.

        Returns:
            int64 [R] token ids of the target's vocabulary.
        """
        offsets = getattr(self.model, "draft_id_to_target_id", None)
        if (
            draft_logits is not None
            or offsets is None
            or self.use_acceptance_estimator
            or self.use_local_argmax_reduction
        ):
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
        winner = self.model.logits_processor(self.model.lm_head, hidden_states).argmax(dim=-1)
        return winner + offsets[winner]
