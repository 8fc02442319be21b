"""Records what became of every tree, with its Phi: what `crossspec calibrate heterospec` fits bins to."""

from typing import Any

import torch

from vllm_crossspec.engine.features.base import Feature
from vllm_crossspec.engine.requests import WARM_UP_REQUESTS
from vllm_crossspec.engine.step import Step
from vllm_crossspec.engine.step_records import StepRecords
from vllm_crossspec.types import Candidates

STEPS_ON_DEVICE = 64
"""Steps whose records wait on the device before they are moved to the host at once."""


class RoundRecorder(Feature):
    """Copies, between a verification and the next draft, what is then known of the trees.

    It adds a few copies on the device to a step, and waits for it once in 64 steps: it is for collecting, not for
    serving.

    Of the requests of a step that brought drafts it keeps ``phi`` float32 [R] (nats), ``path`` int32 [R, D + 1] rows of
    the walk from the root (0), ``num_sampled`` int32 [R], of which all but the last are accepted drafts, ``parents``
    uint8 [R, N] row of each node's parent, and ``size`` int32 [R] live nodes.

    Attributes:
        phi: float32 [S] HeteroSpec's Phi of each slot's tree as drafted, in nats; NaN where nobody computed it.
    """

    name = "rounds"

    def __init__(self, runner: Any):
        super().__init__(runner)
        self.phi = torch.full((runner.max_num_reqs,), float("nan"), dtype=torch.float32, device=runner.device)
        self._records = StepRecords(STEPS_ON_DEVICE)

    @staticmethod
    def is_wanted(runner: Any) -> bool:
        """See the base class."""
        adaptive = [drafter.adaptive for drafter in runner.settings.drafters.values()]
        return any(settings is not None and settings.type == "record" for settings in adaptive)

    def drafted(self, name: str, batch: Any, candidates: Candidates) -> None:
        """Keep Phi until the trees are verified."""
        if candidates.sizing is not None:
            self.phi[batch.idx_mapping] = candidates.sizing.phi

    def sampled(self, step: Step, final_states: torch.Tensor) -> None:
        """Keep the step's verified trees, before their successors are drafted."""
        if not step.has_drafts:
            return
        batch, state = step.batch, self.runner.draft_state
        # Verification requests lead the batch (vLLM sorts it so).
        num_reqs = int((batch.num_draft_tokens_per_req > 0).sum())
        if not num_reqs or batch.req_ids[0].startswith(WARM_UP_REQUESTS):
            return
        slots = batch.idx_mapping[:num_reqs].long()
        tensors = {
            "phi": self.phi[slots],
            "path": state.path[:num_reqs].clone(),
            "num_sampled": state.num_sampled[:num_reqs].clone(),
            "parents": state.parents[slots].to(torch.uint8),
            "size": state.num_live[:num_reqs].clone(),
        }
        self._records.add(list(batch.req_ids[:num_reqs]), tensors)

    def take(self) -> list[tuple[list[str], bytes]]:
        """What was recorded since the last call (see ``StepRecords.take``)."""
        return self._records.take()
