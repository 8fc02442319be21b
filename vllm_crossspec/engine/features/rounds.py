"""Records what became of every tree, with its Phi: what `crossspec calibrate heterospec` fits bins to."""

from typing import Any, NamedTuple

import torch
import triton
from safetensors.torch import save

from vllm_crossspec.engine.features.base import Feature
from vllm_crossspec.engine.requests import WARM_UP_REQUESTS
from vllm_crossspec.engine.step import Step
from vllm_crossspec.types import Candidates

STEPS_ON_DEVICE = 64
"""Steps whose records wait on the device before they are moved to the host at once."""


class RoundRecord(NamedTuple):
    """What one step leaves of the requests that brought drafts.

    Attributes:
        request_ids: R of them, vLLM's own.
        tensors: ``phi`` float32 [R] (nats), ``path`` int32 [R, D + 1] rows of the walk from the root (0),
            ``num_sampled`` int32 [R], of which all but the last are accepted drafts, ``parents`` uint8 [R, N] row of
            each node's parent, ``size`` int32 [R] live nodes.
    """

    request_ids: list[str]
    tensors: dict[str, torch.Tensor]


class RoundRecorder(Feature):
    """Copies, between a verification and the next draft, what is then known of the trees.

    It adds a few copies on the device to a step, and waits for it once in 64 steps: it is for collecting, not for
    serving. Where kernels are interpreted, trees are built with PyTorch, which is much quicker.

    Attributes:
        phi: float32 [S] HeteroSpec's Phi of each slot's tree as drafted, in nats; NaN where nobody computed it.
    """

    name = "rounds"

    def __init__(self, runner: Any):
        super().__init__(runner)
        self.phi = torch.full((runner.max_num_reqs,), float("nan"), dtype=torch.float32, device=runner.device)
        self._waiting: list[RoundRecord] = []
        self._on_host: list[RoundRecord] = []
        if triton.knobs.runtime.interpret:
            for proposer in runner.speculator.proposers.values():
                proposer.build_in_batches()

    @staticmethod
    def is_wanted(runner: Any) -> bool:
        """See the base class."""
        return runner.settings.records_trees

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
        self._waiting.append(RoundRecord(list(batch.req_ids[:num_reqs]), tensors))
        if len(self._waiting) >= STEPS_ON_DEVICE:
            self._move_to_host()

    def _move_to_host(self) -> None:
        """One copy per tensor for all waiting steps; waits for the device."""
        if not self._waiting:
            return
        ids = [request_id for record in self._waiting for request_id in record.request_ids]
        names = self._waiting[0].tensors
        joined = {name: torch.cat([record.tensors[name] for record in self._waiting]).cpu() for name in names}
        self._on_host.append(RoundRecord(ids, joined))
        self._waiting = []

    def take(self) -> list[tuple[list[str], bytes]]:
        """What was recorded since the last call, as (request ids, tensors in safetensors' format); waits."""
        self._move_to_host()
        taken, self._on_host = self._on_host, []
        return [(record.request_ids, save(record.tensors)) for record in taken]
