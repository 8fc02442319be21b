"""What vLLM takes our speculator for."""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator


class StandInSpeculator(DraftModelSpeculator):
    """A draft-model speculator to the runner, which asks for that class, without any of that class's buffers.

    Every drafter has its own. The base's initialiser, which would allocate them once more, does not run: what vLLM
    reads of an instance is set here and in :meth:`lead`.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, req_states: Any):
        speculative = vllm_config.speculative_config
        assert speculative is not None
        self.vllm_config, self.device, self.speculative_config = vllm_config, device, speculative
        self.method = speculative.method
        self.req_states = req_states
        self.dcp_size = 1
        self.enable_adaptive_verification = False
        self.supports_mm_inputs = False

    def lead(self, active: Any, everyone: list[Any]) -> None:
        """Take what the runner reads of drafts from ``active``, and the widest queries of ``everyone``."""
        self.num_query_per_req = max(p.num_query_per_req for p in everyone)
        self.num_extra_query_per_req = max(p.num_extra_query_per_req for p in everyone)
        self.draft_logits = active.draft_logits
        self.draft_token_confidence_probs = active.draft_token_confidence_probs
        self.draft_watermarker = active.draft_watermarker
