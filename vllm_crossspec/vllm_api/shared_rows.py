"""What vLLM's runner is told of a step whose rows are shared out on the device."""

from typing import Any

import torch
from vllm.v1.worker.gpu.input_batch import InputBatch

_TELLS_HOST = "num_admitted_draft_tokens" in InputBatch.__dataclass_fields__


def shared_rows(first_logits: torch.Tensor, first_rows: torch.Tensor, num_drafts: int) -> tuple[Any, ...]:
    """As ``AdaptiveVerificationManager.reallocate_drafts`` returns it: int32 [R + 1] each, and all draft rows.

    vLLM 0.33 also takes what the host is told of a grammar's drafts: nothing, as steps with one keep all their rows.
    """
    return (first_logits, first_rows, num_drafts, *((None,) if _TELLS_HOST else ()))
