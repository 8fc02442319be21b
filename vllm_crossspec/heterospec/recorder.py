"""Records the outcome of every tree, with its Phi, for `crossspec calibrate heterospec`, which fits bins to it."""

from typing import Any

import torch

from vllm_crossspec.step.feature import Feature
from vllm_crossspec.step.records import StepRecords
from vllm_crossspec.step.requests import WARM_UP_REQUESTS
from vllm_crossspec.step.step import Step
from vllm_crossspec.types import Candidates

STEPS_ON_DEVICE = 64
"""Steps whose records move from the device to the host together."""


class RoundRecorder(Feature):
    """Copies the verified trees of a step before the next draft: for collecting, since it waits once in 64 steps.

    For the requests of a step that brought drafts it keeps:

        phi: float32 [R] nats
        path: int32 [R, D + 1] rows of the walk from the root (0)
        num_sampled: int32 [R]; all except the last are accepted drafts
        parents: uint8 [R, N] row of each node's parent
        size: int32 [R] live nodes

    Attributes:
        phi: float32 [S] HeteroSpec's Phi of each slot's tree as drafted, in nats; NaN if it was not computed.
    """

    name = "rounds"

    def __init__(self, runner: Any):
        super().__init__(runner)
        self.phi = torch.full((runner.max_num_reqs,), float("nan"), dtype=torch.float32, device=runner.device)
        self._records = StepRecords(STEPS_ON_DEVICE)

    @staticmethod
    def is_wanted(runner: Any) -> bool:
        return any(drafter.records_trees for drafter in runner.settings.drafters.values())

    def drafted(self, name: str, batch: Any, candidates: Candidates) -> None:
        """Keep Phi until the trees are verified."""
        if candidates.sizing is not None:
            self.phi[batch.idx_mapping] = candidates.sizing.phi

    def sampled(self, step: Step, final_states: torch.Tensor) -> None:
        """Keep the step's verified trees, before the next ones are drafted."""
        if not step.has_drafts:
            return
        batch, state = step.batch, self.runner.draft_state
        # Verification requests lead the batch (vLLM sorts it so).
        num_reqs = int((batch.num_draft_tokens_per_req > 0).sum())
        if not num_reqs or batch.req_ids[0].startswith(WARM_UP_REQUESTS):
            return
        assert step.num_sampled is not None
        slots = batch.idx_mapping[:num_reqs].long()
        tensors = {
            "phi": self.phi[slots],
            "path": state.path[:num_reqs].clone(),
            "num_sampled": step.num_sampled[:num_reqs].clone(),
            "parents": state.parents[slots].to(torch.uint8),
            "size": state.num_live[:num_reqs].clone(),
        }
        self._records.add(list(batch.req_ids[:num_reqs]), tensors)

    def take(self) -> list[tuple[list[str], bytes]]:
        """What was recorded since the last call (see ``StepRecords.take``)."""
        return self._records.take()
