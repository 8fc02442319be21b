"""Drafters without KV cache and without states of the target."""

from abc import abstractmethod
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig

from vllm_crossspec.config.schema import CrossSpecConfig
from vllm_crossspec.drafting.proposer import Proposer
from vllm_crossspec.types import Candidates, StepInputs


class CachelessProposer(Proposer):
    """A drafter without KV cache and target states; it never has to catch up."""

    num_query_per_req = 1
    num_extra_query_per_req = 0
    hidden_size = 0
    """F, width of its features."""
    draft_logits = None
    draft_token_confidence_probs = None
    draft_watermarker = None

    def __init__(self, vllm_config: VllmConfig, device: torch.device, name: str, settings: CrossSpecConfig):
        assert vllm_config.speculative_config is not None
        self.vllm_config, self.device, self.name = vllm_config, device, name
        self.settings, self.drafter = settings, settings.drafters[name]
        self.speculative_config = vllm_config.speculative_config
        self.num_speculative_steps = self.drafter.depth
        self.dtype = vllm_config.model_config.dtype
        self.model = nn.Module()
        self.draft_attn_layer_names: set[str] = set()
        self.attn_groups: list[Any] = []

    def fuse(self, tapped_states: torch.Tensor) -> torch.Tensor:
        return tapped_states  # [n, 0]: no state is tapped

    def _nothing(self, *arguments: Any, **options: Any) -> None:
        """Do nothing: there is no cache, attention, expert or graph, and nothing to load unless a subclass does."""

    load_model = catch_up = write_context = set_attn = set_eplb_state = init_cudagraph_manager = capture = _nothing


class StatelessProposer(CachelessProposer):
    """A chain of K tokens from only the last accepted token of each request; subclasses load and draft."""

    @abstractmethod
    def load(self, folder: str) -> None:
        """Load the checkpoint (a folder or hub id from the settings) to ``self.device``."""

    @abstractmethod
    def draft(self, last_tokens: torch.Tensor) -> torch.Tensor:
        """int64 [R, K] target token ids after ``last_tokens``, int64 [R]; K is ``num_speculative_steps``.

        It must run on the device without waiting for it.
        """

    def load_model(self, target_model: nn.Module) -> None:
        self.load(str(self.speculative_config.model))

    def propose_step(self, step: StepInputs) -> Candidates:
        # A request inside its prompt gets an unused draft.
        slots = step.batch.idx_mapping[: step.batch.num_reqs]
        return Candidates(tokens=self.draft(step.last_sampled.view(-1)[slots]))
