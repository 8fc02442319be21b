"""The interface that every drafter of this project fits."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn

from vllm_crossspec.types import Candidates, StepInputs


class Proposer(ABC):
    """One drafter in the engine: its weights, its KV-cache layers, its target layers, its draft.

    The host builds every proposer with a shallow copy of the engine's config whose ``speculative_config`` is this
    drafter's own, loads it after the target, and calls it once a round: :meth:`propose_step` if the drafter was
    chosen, :meth:`catch_up` if not, so that its cache always holds the accepted tokens.

    Attributes:
        name: the user's name for the drafter; also the prefix of its layers, which keeps them apart from others'.
        num_speculative_steps: K, draft tokens a round.
        draft_attn_layer_names: names of its attention layers, after loading.
        attn_groups: its attention groups, after :meth:`set_attn`.
        draft_logits: [S, K, vocabulary] cache of probabilistic drafts, or None.
    """

    name: str
    model: nn.Module
    num_speculative_steps: int
    num_query_per_req: int
    num_extra_query_per_req: int
    draft_attn_layer_names: set[str]
    attn_groups: list[Any]
    draft_logits: torch.Tensor | None
    supports_mm_inputs: bool
    pcp_manager: Any

    @abstractmethod
    def propose_step(self, step: StepInputs) -> Candidates:
        """Take the step's accepted tokens into the drafter's cache and draft the next tokens."""

    @abstractmethod
    def catch_up(self, step: StepInputs) -> None:
        """Take the step's accepted tokens into the drafter's cache; draft nothing."""

    # The rest is vLLM's own protocol for speculators, which its base class provides.
    @abstractmethod
    def load_model(self, target_model: nn.Module) -> None: ...

    @abstractmethod
    def set_attn(
        self,
        model_state: Any,
        kv_cache_config: Any,
        block_tables: Any,
        target_input_buffers: Any,
        target_attn_groups: Any,
    ) -> None: ...

    @abstractmethod
    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None: ...

    @abstractmethod
    def capture(self) -> None: ...


def native_arguments(step: StepInputs) -> dict[str, Any]:
    """The keyword arguments of vLLM's ``propose`` for this step."""
    return {
        "input_batch": step.batch,
        "attn_metadata": step.attn_metadata,
        "slot_mappings": step.slot_mappings,
        "last_hidden_states": step.last_hidden_states,
        "aux_hidden_states": step.tapped_hidden_states,
        "num_sampled": step.num_sampled,
        "num_rejected": step.num_rejected,
        "last_sampled": step.last_sampled,
        "next_prefill_tokens": step.next_prefill_tokens,
        "temperature": step.temperature,
        "seeds": step.seeds,
        **step.options,
    }
