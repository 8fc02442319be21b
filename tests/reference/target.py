"""The target in transformers: its states for SafeAILab's drafter, and a scripted copy for z-lab's loop."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from reference.compare import Draft, top_gaps


def load(folder: Path) -> nn.Module:
    """The target in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def states(target: nn.Module, tokens: list[int], layers: tuple[int, ...]) -> torch.Tensor:
    """[1, T, len(layers) * H]: what goes into each of ``layers`` (0 is the first layer), side by side."""
    hidden = target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return torch.cat([hidden[layer] for layer in layers], dim=-1)


@torch.inference_mode()
def greedy(target: nn.Module, tokens: list[int]) -> tuple[list[int], list[float]]:
    """The target's choice after every prefix of ``tokens``, and its lead over the second best."""
    logits = target(torch.tensor([tokens])).logits[0]
    return logits.argmax(dim=-1).tolist(), top_gaps(logits)


class ScriptedTarget(nn.Module):
    """A target that computes as ever and whose logits then always choose the next token of a given text.

    z-lab's loop runs with it unchanged, and accepts just what the engine accepted; what the loop hands in for
    verification is its draft.

    Args:
        target: in transformers.
        tokens: the text, prompt included.
    """

    def __init__(self, target: nn.Module, tokens: list[int]):
        super().__init__()
        self.target, self.tokens = target, tokens
        self.model, self.device = target.model, target.device
        self.drafts: dict[int, Draft] = {}
        self._gaps: list[float] = []

    def lm_head(self, hidden: torch.Tensor) -> torch.Tensor:
        """The output head, for the drafter's states."""
        logits = self.target.lm_head(hidden)
        self._gaps = top_gaps(logits)
        return logits

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, **options: Any) -> Any:
        """One pass of the target; a block of the loop is the last known token and the draft after it."""
        known = int(position_ids[0, 0]) + 1
        if self._gaps and known <= len(self.tokens):
            self.drafts[known] = Draft(input_ids[0, 1:].tolist(), self._gaps)
        output = self.target(input_ids, position_ids=position_ids, **options)
        following = position_ids[0, -output.logits.shape[1] :] + 1
        script = torch.tensor([self.tokens[i] if i < len(self.tokens) else 0 for i in following.tolist()])
        output.logits = nn.functional.one_hot(script, output.logits.shape[-1])[None].float()
        return output
