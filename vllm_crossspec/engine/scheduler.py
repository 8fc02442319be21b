"""vLLM's scheduler, which plans no drafts for requests that opted out of them, and as many as pay for the others.

Left alone it plans as many draft tokens for every request. For one that wants none they are rows that the target
computes for nothing, and drafts of which none is accepted in vLLM's counters.
"""

import functools
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.scheduler import Scheduler

from vllm_crossspec.config import settings_of
from vllm_crossspec.engine.requests import opted_out
from vllm_crossspec.engine.startup.step_costs import live_schedule

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as Native
else:
    Native = object


class OptOutScheduler(Native):
    """What is added to vLLM's scheduler; mixed in before its class, the asynchronous one and the other alike.

    A full CUDA graph is of requests that all have as many rows. Where there are such graphs, a request that opted out
    keeps its rows in the company of others that draft, for its own would cost them their graph; alone or among its
    like it has one row. Without such graphs it always has.
    """

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        config = self.vllm_config
        settings = settings_of(config)
        self._is_ours = settings is not None
        # vLLM's own verification would accept what is drafted for those that opted out.
        self._keeps_width = (
            settings is not None
            and settings.verification == "match"
            and config.compilation_config.cudagraph_mode.has_full_cudagraphs()
        )
        self._live = live_schedule(config) if self._is_ours else None
        self._last_round: tuple[float, int, int] | None = None
        if self._live is not None:
            self.dynamic_sd_lookup = self._live

    def schedule(self, *arguments: Any, **options: Any) -> Any:
        """Where draft lengths follow the load: time the rounds that are like the one after them."""
        output = super().schedule(*arguments, **options)
        if self._live is not None:
            last, self._last_round = self._last_round, self._round_of(output)
            if last is not None and self._last_round is not None and last[1:] == self._last_round[1:]:
                self._live.saw_round(*last[1:], self._last_round[0] - last[0])
        return output

    def _round_of(self, scheduler_output: Any) -> tuple[float, int, int] | None:
        """Now, width and number of requests; None where some prefill, or verify another width than is drafted.

        From vLLM 0.33 on nothing is drafted in a step behind which nobody can use drafts.
        """
        if getattr(scheduler_output, "skip_drafts", False):
            return None
        drafts, width = scheduler_output.scheduled_spec_decode_tokens, scheduler_output.num_spec_tokens_to_schedule
        num_reqs = len(scheduler_output.num_scheduled_tokens)
        widest = max(map(len, drafts.values()), default=0)
        rows = num_reqs + sum(map(len, drafts.values()))
        if not num_reqs or width != widest or scheduler_output.total_num_scheduled_tokens != rows:
            return None
        return time.perf_counter(), width, num_reqs

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        """With asynchronous scheduling: the placeholders of the next step's drafts are set here."""
        super()._update_after_schedule(scheduler_output)
        self._take_drafts_back(scheduler_output.num_scheduled_tokens)

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Without: the drafts themselves are."""
        super().update_draft_token_ids(draft_token_ids)
        self._take_drafts_back(draft_token_ids.req_ids)

    def _take_drafts_back(self, req_ids: Iterable[str]) -> None:
        if not self._is_ours:
            return
        requests = self.requests
        running = self.running
        if self._keeps_width and not all(opted_out(request.sampling_params) for request in running):
            return
        for req_id in req_ids:
            request = requests.get(req_id)
            if request is not None and request.spec_token_ids and opted_out(request.sampling_params):
                request.spec_token_ids = []

    def make_spec_decoding_stats(
        self, spec_decoding_stats: Any, *arguments: Any, request_id: str, **options: Any
    ) -> Any:
        """Not of rows that a request that opted out has for the sake of others."""
        request = self.requests.get(request_id)
        if self._is_ours and request is not None and opted_out(request.sampling_params):
            return spec_decoding_stats
        if self._live is not None and options["num_draft_tokens"] in self._live.rounds:
            self._live.saw_tokens(options["num_draft_tokens"], 1 + options["num_accepted_tokens"])
        return super().make_spec_decoding_stats(spec_decoding_stats, *arguments, request_id=request_id, **options)


NEVER = 1 << 40
"""More blocks than any request has."""


def forget_prefixes(scheduler: Scheduler) -> None:
    """Nobody finds what was computed so far in the prefix cache any more, nor what running requests will compute.

    Their tokens go on with the blocks that they have. vLLM's own reset would refuse while requests run, or have them
    computed once more.
    """
    cache_manager = scheduler.kv_cache_manager
    if not cache_manager.enable_caching:
        return
    coordinator = cache_manager.coordinator
    for pool in dict.fromkeys(single_type.block_pool for single_type in coordinator.single_type_managers):
        pool.evict_blocks(set(range(pool.num_gpu_blocks)))
    for single_type in coordinator.single_type_managers:
        for req_id in single_type.num_cached_block:
            single_type.num_cached_block[req_id] = NEVER


@functools.cache
def with_opting_out(scheduler: type) -> type:
    """``scheduler`` with the above; one that does not descend from vLLM's stays as it is."""
    if not issubclass(scheduler, Scheduler) or issubclass(scheduler, OptOutScheduler):
        return scheduler
    return type(f"OptOut{scheduler.__name__}", (OptOutScheduler, scheduler), {})
