"""Draft trees of targets with M-RoPE, which have three positions per row (time, height, width).

vLLM computes them before the forward pass from the number of tokens before each row. After the prompt all three are
equal: the row's index minus the tokens that images save. A draft node's must be shifted by the difference between its
depth and its row number.
"""

from typing import Any

import torch

from vllm_crossspec.step.feature import Feature
from vllm_crossspec.step.step import Step


class MRope(Feature):
    """Shifts the M-RoPE positions of draft trees."""

    name = "mrope"

    def __init__(self, runner: Any):
        super().__init__(runner)
        # Linear positions of the step's rows, then each row's shift.
        self.shifts = torch.zeros(runner.max_num_tokens, dtype=torch.int64, device=runner.device)

    @staticmethod
    def is_wanted(runner: Any) -> bool:
        settings = runner.settings
        return bool(runner.model_config.uses_mrope and (settings.has_trees or settings.contemplates))

    def prepared(self, batch: Any, inputs: dict[str, Any]) -> None:
        """Shift vLLM's positions, in the buffer that CUDA graphs read."""
        step, num_tokens = self.runner.step, batch.num_tokens
        if step is not None and step.has_drafts:
            shifts = self.shifts[:num_tokens]
            torch.sub(batch.positions[:num_tokens], shifts, out=shifts)
            inputs["positions"][:, :num_tokens] += shifts

    def split(self, step: Step) -> None:
        """Keep the linear positions, which the drafts' layout will replace."""
        if step.has_drafts:
            num_tokens = step.batch.num_tokens
            self.shifts[:num_tokens].copy_(step.batch.positions[:num_tokens])
