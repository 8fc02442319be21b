"""vLLM's penalties for draft trees."""

from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcessor
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState

from vllm_crossspec.engine.draft_state import DraftState
from vllm_crossspec.verify.penalties import tree_penalties


class TreePenalties(LogitsProcessor):
    """vLLM's penalties with a node's own ancestors as the drafted history, where a chain has the rows before it.

    Args:
        chain: vLLM's state; its parameters and counts stay the truth.
        state: of the trees.
    """

    def __init__(self, chain: PenaltiesState, state: DraftState):
        self.chain, self.state = chain, state
        self.live_per_row: torch.Tensor | None = None

    def add_request(self, *arguments: Any, **options: Any) -> bool:
        """Handed to vLLM's state."""
        return self.chain.add_request(*arguments, **options)

    def apply_staged_writes(self) -> None:
        """Handed to vLLM's state."""
        self.chain.apply_staged_writes()

    def apply(self, logits: torch.Tensor, context: LogitsContext) -> torch.Tensor:
        """Penalize in place; rows without drafts go vLLM's own way."""
        chain = self.chain
        if self.live_per_row is None:
            return chain.apply(logits, context)
        if np.any(chain.use_penalty[context.idx_mapping_np]):
            tree_penalties(
                logits=logits,
                idx_mapping_per_row=context.expanded_idx_mapping,
                token_ids=context.input_ids,
                local_pos=context.expanded_local_pos,
                live_per_row=self.live_per_row,
                parents=self.state.parents,
                repetition=chain.repetition_penalty.gpu,
                frequency=chain.frequency_penalty.gpu,
                presence=chain.presence_penalty.gpu,
                prompt_bin_mask=chain.prompt_bin_mask,
                output_bin_counts=chain.output_bin_counts,
                max_depth=self.state.max_depth,
            )
        return logits
