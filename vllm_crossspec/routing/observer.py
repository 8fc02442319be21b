"""Tells a learning router about forecasts, missed tokens and times of rounds."""

import time
from collections.abc import Mapping

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_crossspec.arrays import Array
from vllm_crossspec.drafting.proposer import Proposer
from vllm_crossspec.load.costs import RoundTimer
from vllm_crossspec.routing.backlogs import NO_DRAFTER, Backlogs
from vllm_crossspec.routing.base import Router
from vllm_crossspec.routing.experience import arrivals
from vllm_crossspec.types import StepInputs

DRIFT_EVERY = 16
"""Timed rounds between two updates of the router's costs."""


class RoundObserver:
    """Tells a learning router the drafters' forecasts and missed tokens, and the rounds' times.

    Attributes:
        num_timed: rounds whose time gave a drafter's cost.
    """

    def __init__(self, router: Router, backlogs: Backlogs, proposers: Mapping[str, Proposer], vllm_config: VllmConfig):
        self._router, self._backlogs, self._proposers = router, backlogs, proposers
        num_slots = vllm_config.scheduler_config.max_num_seqs
        self._begun = np.zeros(num_slots, dtype=np.int64)  # where an answer begins; negative: in its prompt
        self.num_timed = 0
        self._timer: RoundTimer | None = None
        if vllm_config.parallel_config.world_size == 1:  # ranks must route alike
            self._timer = RoundTimer(num_slots, backlogs.owner_numbers, is_late=router.settings.is_late)

    def add_requests(self, slots: list[int]) -> None:
        self._begun[slots] = -1
        if self._timer is not None:
            self._timer.forget(slots)

    def before_routing(self, step: StepInputs, slots: Array) -> None:
        """Give the router the drafters' forecasts for ``slots`` (int64 [R]), and the costs of moving them.

        Costs of moving matter only if states are fused late: otherwise a prompt is taken in as fast as a few tokens.
        """
        if self._router.experience is None:
            return
        known, backlogs, num_reqs = self._router.experience.known, self._backlogs, len(slots)
        for number, name in enumerate(backlogs.order):
            forecast = self._proposers[name].forecast(step)
            if forecast is not None:
                known.forecasts[:num_reqs, number] = forecast
        if not backlogs.fuses_late:
            return
        scheduled = step.batch.num_scheduled_tokens[:num_reqs].astype(np.int64)
        computed, begun = backlogs.computed[slots], self._begun[slots]
        missed = backlogs.all_missed(slots, computed + scheduled - 1).T
        missed[scheduled > backlogs.capacity] = 0  # all drafters take these in
        found = arrivals(missed, np.where(begun < 0, 0, computed - begun))
        known.arrivals[:num_reqs].copy_(torch.from_numpy(found))

    def after_routing(self, slots: Array, routes: Array, is_timed: bool = True) -> None:
        """Take each request's drafter (int64 [R]), and time the previous round, which ends here.

        The time between two waits is one round's drafting and the target's pass over the drafts. Among rounds that do
        not wait, one that waits is not timed.
        """
        router, backlogs = self._router, self._backlogs
        if router.experience is not None and (routes == NO_DRAFTER).any():
            router.draft_nothing(async_tensor_h2d(slots[routes == NO_DRAFTER], device=router.device))
        computed = backlogs.computed[slots]
        begins = (routes >= 0) & (self._begun[slots] < 0)
        self._begun[slots[begins]] = computed[begins]
        if self._timer is None or router.drift is None:
            return
        if not is_timed:
            self._timer.interrupt()
            return
        missed = None
        if backlogs.fuses_late:
            missed = backlogs.all_missed(slots, computed - 1)[routes, np.arange(len(slots))]
        timed = self._timer.ended(slots, routes, time.perf_counter(), missed)
        if timed is None:
            return
        router.drift.observe(timed)
        self.num_timed += 1
        if self.num_timed % DRIFT_EVERY == 0:
            router.follow_drift()
