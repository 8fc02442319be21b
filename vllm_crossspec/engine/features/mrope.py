"""Draft trees of targets with M-RoPE, whose forward pass takes several rows of positions (time, height, width).

vLLM makes them itself, right before the forward pass, from the number of tokens before each row. Behind the prompt all
rows of them are equal: the token's place and what images have shortened the text by. So a draft node's are as far from
its place as its depth in the tree is from its number.
"""

from typing import Any

import torch

from vllm_crossspec.engine.features.base import Feature
from vllm_crossspec.engine.step import Step


class MRope(Feature):
    """Positions of draft trees in every row of positions that the target reads.

    Attributes:
        shifts: int64 [T] linear positions of the step's rows, then how far each is from its own.
    """

    name = "mrope"

    def __init__(self, runner: Any):
        super().__init__(runner)
        self.shifts = torch.zeros(runner.max_num_tokens, dtype=torch.int64, device=runner.device)

    @staticmethod
    def is_wanted(runner: Any) -> bool:
        """See the base class; rows of chains are where vLLM puts them."""
        settings = runner.settings
        return bool(runner.model_config.uses_mrope and (settings.has_trees or settings.contemplates))

    def loaded(self) -> None:
        """Move the positions that vLLM has made, in the buffer that CUDA graphs read."""
        model_state = self.runner.model_state
        native = model_state.prepare_inputs

        def prepare_inputs(batch: Any, req_states: Any) -> dict[str, Any]:
            inputs: dict[str, Any] = native(batch, req_states)
            step, num_tokens = self.runner.step, batch.num_tokens
            if step is not None and step.has_drafts:
                shifts = self.shifts[:num_tokens]
                torch.sub(batch.positions[:num_tokens], shifts, out=shifts)
                inputs["positions"][:, :num_tokens] += shifts
            return inputs

        model_state.prepare_inputs = prepare_inputs

    def split(self, step: Step) -> None:
        """Keep the linear positions, which the layout of the drafts is going to replace."""
        if step.has_drafts:
            num_tokens = step.batch.num_tokens
            self.shifts[:num_tokens].copy_(step.batch.positions[:num_tokens])
