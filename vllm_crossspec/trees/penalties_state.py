"""vLLM's penalties for draft trees."""

from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcessor
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState

from vllm_crossspec.trees.draft_state import DraftState
from vllm_crossspec.trees.verify.penalties import Penalties, tree_penalties


class TreePenalties(LogitsProcessor):
    """vLLM's penalties with a node's ancestors as its drafted history; ``chain`` is vLLM's state.

    Difference from vLLM's class, which counts all rows before a draft as its history: only ancestors count.
    """

    def __init__(self, chain: PenaltiesState, state: DraftState):
        self.chain, self.state = chain, state
        self.live_per_row: torch.Tensor | None = None

    def add_request(self, *arguments: Any, **options: Any) -> bool:
        return self.chain.add_request(*arguments, **options)

    def apply_staged_writes(self) -> None:
        self.chain.apply_staged_writes()

    def apply(self, logits: torch.Tensor, context: LogitsContext) -> torch.Tensor:
        """Penalize in place; without drafts vLLM's own code runs."""
        chain = self.chain
        if self.live_per_row is None:
            return chain.apply(logits, context)
        if np.any(chain.use_penalty[context.idx_mapping_np]):
            given = Penalties(
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
            tree_penalties(logits, given)
        return logits
