"""Drafters without layers in the KV cache, and without states of the target."""

from abc import abstractmethod
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig

from vllm_crossspec.engine.draft_settings import DraftSettings
from vllm_crossspec.engine.proposers.base import Proposer
from vllm_crossspec.types import Candidates, StepInputs


class CachelessProposer(Proposer):
    """No layers in the KV cache, no states of the target: while others draft there is nothing to catch up with."""

    num_query_per_req = 1
    num_extra_query_per_req = 0
    hidden_size = 0
    """F, width of what waits for it while others draft."""
    draft_logits = None
    draft_token_confidence_probs = None
    draft_watermarker = None

    def __init__(self, vllm_config: VllmConfig, device: torch.device, name: str, drafts: DraftSettings):
        assert vllm_config.speculative_config is not None
        self.vllm_config, self.device, self.name, self.drafts = vllm_config, device, name, drafts
        self.speculative_config = vllm_config.speculative_config
        self.num_speculative_steps = drafts.depth
        self.dtype = vllm_config.model_config.dtype
        self.model = nn.Module()
        self.draft_attn_layer_names: set[str] = set()
        self.attn_groups: list[Any] = []

    # -- what others do here, and this has no need of -------------------------------------------------------------

    def catch_up(self, step: StepInputs) -> None:
        """Nothing is missed."""

    def fuse(self, tapped_states: torch.Tensor) -> torch.Tensor:
        """No state is tapped: [n, 0]."""
        return tapped_states

    def write_context(
        self, features: torch.Tensor, next_tokens: torch.Tensor, positions: torch.Tensor, kv_slots: list[torch.Tensor]
    ) -> None:
        """There is no cache."""

    def set_attn(self, *arguments: Any, **options: Any) -> None:
        """There is no attention."""

    def set_eplb_state(self, eplb_state: Any) -> None:
        """There are no experts."""

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """What it launches is not captured."""

    def capture(self) -> None:
        """As :meth:`init_cudagraph_manager`."""


class StatelessProposer(CachelessProposer):
    """A chain of K tokens from the last accepted token of each request, and from nothing else.

    A descendant loads what it drafts with (:meth:`load`) and drafts (:meth:`draft`).
    """

    @abstractmethod
    def load(self, folder: str) -> None:
        """Read the checkpoint, to ``self.device``; after the target is loaded.

        Args:
            folder: or hub id, as the user named it.
        """

    @abstractmethod
    def draft(self, last_tokens: torch.Tensor) -> torch.Tensor:
        """The next tokens of every request, on the device and without waiting for it.

        Args:
            last_tokens: int64 [R] the last accepted token of each.

        Returns:
            int64 [R, K] token ids of the target's vocabulary; K is ``num_speculative_steps``.
        """

    def load_model(self, target_model: nn.Module) -> None:
        """What it drafts with, and nothing of the target's."""
        self.load(str(self.speculative_config.model))

    def propose_step(self, step: StepInputs) -> Candidates:
        """Draft from the last tokens. A request inside its prompt gets a draft that nobody reads."""
        slots = step.batch.idx_mapping[: step.batch.num_reqs]
        return Candidates(tokens=self.draft(step.last_sampled.view(-1)[slots]))
