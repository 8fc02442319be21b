"""The target's inputs in our engines: as vLLM prepares them, changed by features."""

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from vllm_crossspec.step.feature import Feature

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState as Native
else:
    Native = object


class TargetInputs(Native):
    """A mixin for the vLLM class that prepares a target's inputs. Differences from that class:

    - Features change the inputs before the target reads them.
    - If :attr:`embeds` is set, the target reads embeddings from it instead of token ids.
    """

    features: Sequence[Feature] = ()  # of the step
    embeds: torch.Tensor | None = None  # [rows, H] read instead of token ids; None: token ids are read
    embeds_natively = False  # whether vLLM itself also passes embeddings, as for images

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = super().prepare_inputs(input_batch, req_states)
        for feature in self.features:
            feature.prepared(input_batch, inputs)
        return inputs

    def prepare_inputs_embeds(self, scheduled_encoder_inputs: Any, input_batch: Any, req_states: Any) -> torch.Tensor:
        if self.embeds is None:
            return super().prepare_inputs_embeds(scheduled_encoder_inputs, input_batch, req_states)
        rows, num_tokens = self.embeds[: input_batch.num_tokens_after_padding], input_batch.num_tokens
        if self.embeds_natively:
            rows.copy_(super().prepare_inputs_embeds(scheduled_encoder_inputs, input_batch, req_states))
        else:
            rows[:num_tokens] = self.model.embed_input_ids(input_batch.input_ids[:num_tokens])
        for feature in self.features:
            feature.embedded(input_batch)
        return rows

    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        # CUDA graphs are captured over the same embeddings.
        inputs: dict[str, Any] = super().prepare_dummy_inputs(num_reqs, num_tokens)
        return inputs if self.embeds is None else {**inputs, "inputs_embeds": self.embeds[:num_tokens]}

    def dummy_inputs_embeds(self, num_tokens: int) -> torch.Tensor:
        return super().dummy_inputs_embeds(num_tokens) if self.embeds is None else self.embeds[:num_tokens]


@cache
def with_features(native: type) -> type:
    """vLLM's class for a target, with :class:`TargetInputs` mixed in."""
    return type(native.__name__, (TargetInputs, native), {})
