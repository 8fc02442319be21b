"""What a feature of the step is: hooks that the runner and the speculator call, in the registry's order."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from vllm_crossspec.step.step import Step
from vllm_crossspec.types import Candidates


class Feature:
    """Something that a step does beyond verifying chains. Every hook does nothing until a feature overrides it.

    A feature keeps what it knows of request slots itself; what it must know of the step under way is the
    :class:`~vllm_crossspec.step.step.Step`'s.

    Args:
        runner: the model runner, its speculator made and nothing loaded.

    Attributes:
        name: of the feature, by which others and the workers' methods find it.
        mixes_widths: whether requests of one CUDA graph may bring different numbers of draft rows because of it.
        num_soft_prompts: keys and values that some rows see in front of everything else.
    """

    name: ClassVar[str]
    mixes_widths: bool = False
    num_soft_prompts: int = 0

    def __init__(self, runner: Any):
        self.runner = runner

    @staticmethod
    def is_wanted(runner: Any) -> bool:
        """Whether the engine of this runner has the feature."""
        raise NotImplementedError

    @staticmethod
    def left_out() -> None:
        """The engine has no such feature, but one that ran in this process before may have had it."""

    # -- once -----------------------------------------------------------------------------------------------------

    def loaded(self) -> None:
        """Target and drafters are loaded, and the verifier is in its place."""

    def kv_ready(self) -> None:
        """The KV cache is laid out; nothing is captured yet."""

    def captured(self) -> None:
        """CUDA graphs are captured; after this vLLM expects no kernel to be compiled any more."""

    def measure(self) -> None:
        """Time what the feature goes by, once: after graphs were captured, or where none are, before any request."""

    def swapped(self, names: Sequence[str]) -> None:
        """These drafters have new weights, in the tensors of the old ones."""

    # -- requests come and go -------------------------------------------------------------------------------------

    def added(self, requests: Sequence[Any], slots: list[int]) -> None:
        """These new requests have taken these slots."""

    def removed(self, slots: list[int]) -> None:
        """The requests of these slots are about to leave: ended, aborted or preempted."""

    # -- the step, in this order ----------------------------------------------------------------------------------

    def plan(self, scheduler_output: Any) -> Any:
        """The scheduler's plan of the step, before anything reads it."""
        return scheduler_output

    def split(self, step: Step) -> None:
        """vLLM has laid the batch out: say which of its rows get logits."""

    def embedded(self, batch: Any) -> None:
        """The embeddings that the target is going to read are in place, where it reads any."""

    def prepared(self, batch: Any, inputs: dict[str, Any]) -> None:
        """What else its forward pass reads, by name (``model_state.TargetInputs``)."""

    def before_sampling(self, step: Step, batch: Any, grammar_output: Any) -> tuple[Any, Any]:
        """The batch and the grammar's output as sampling is to see them."""
        return batch, grammar_output

    def sampled(self, step: Step, final_states: torch.Tensor) -> None:
        """The drafts are verified; all features before this one have seen it. [T, H] states of the target."""

    def drafted(self, name: str, batch: Any, candidates: Candidates) -> None:
        """The drafter ``name`` has drafted for the requests of ``batch``, and its drafts are kept."""

    # -- figures --------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """The first round of a user's request begins: forget what was counted in the warm-up."""

    def published(self) -> dict[str, Any]:
        """What ``metrics.export.start_worker_export`` is to publish, by its parameters' names."""
        return {}

    def stats(self) -> dict[str, Any]:
        """What was counted so far; waits for the device."""
        return {}
