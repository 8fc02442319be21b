"""Which draft tokens the scheduler's grammar check is to look at."""

from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler

from vllm_crossspec.engine.draft_state import DraftState


class LiveDraftTokensHandler(DraftTokensHandler):
    """Tells the scheduler's grammar check which draft tokens are none: those past a request's live nodes.

    Args:
        device: of the tokens.
        state: of the drafts.
    """

    def __init__(self, device: torch.device, state: DraftState):
        super().__init__(device)
        self.state = state
        self.columns = torch.arange(state.num_rows - 1, dtype=torch.int32, device=device)

    def set_draft_tokens(self, input_batch: Any, draft_tokens: torch.Tensor) -> None:
        """Take the round's draft tokens [R, n]; -1 past the live ones where a grammar will read them.

        Once drafting has stopped there are none, and without asynchronous scheduling none are planned.
        """
        if self.state.has_stopped:
            draft_tokens = draft_tokens[:, :0]
        if input_batch.has_structured_output_reqs:
            live = self.state.sizes[input_batch.idx_mapping]
            dead = self.columns[None, : draft_tokens.shape[1]] >= live[:, None]
            draft_tokens = draft_tokens.masked_fill(dead, -1)
        super().set_draft_tokens(input_batch, draft_tokens)
