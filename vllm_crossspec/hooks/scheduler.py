"""vLLM's scheduler, which plans no drafts for requests that opted out, and as many as pay off for the others.

vLLM plans equally many draft tokens for every request. For a request that opted out, the target would compute these
rows for nothing, and vLLM's counters would show them as rejected drafts.
"""

import functools
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from vllm_crossspec.config.schema import settings_of
from vllm_crossspec.load.measure import live_schedule
from vllm_crossspec.step.requests import opted_out

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as Native
else:
    Native = object


class OptOutScheduler(Native):
    """A mixin for vLLM's schedulers, asynchronous or not.

    A full CUDA graph needs the same number of rows in every request. With such graphs, a request that opted out keeps
    its rows while others draft. Otherwise it has one row.
    """

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        config = self.vllm_config
        settings = settings_of(config)
        self._is_ours = settings is not None
        # vLLM's own verification would accept drafts of requests that opted out.
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
        """Schedule, and time rounds that are followed by a similar one, if draft lengths follow the load."""
        output = super().schedule(*arguments, **options)
        if self._live is not None:
            last, self._last_round = self._last_round, self._round_of(output)
            if last is not None and self._last_round is not None and last[1:] == self._last_round[1:]:
                self._live.saw_round(*last[1:], self._last_round[0] - last[0])
        return output

    def _round_of(self, scheduler_output: Any) -> tuple[float, int, int] | None:
        """Time, width and number of requests; None if a request prefills, or verifies another width than it drafts."""
        if getattr(scheduler_output, "skip_drafts", False):  # vLLM 0.33: the next step could not use drafts
            return None
        drafts, width = scheduler_output.scheduled_spec_decode_tokens, scheduler_output.num_spec_tokens_to_schedule
        num_reqs = len(scheduler_output.num_scheduled_tokens)
        widest = max(map(len, drafts.values()), default=0)
        rows = num_reqs + sum(map(len, drafts.values()))
        if not num_reqs or width != widest or scheduler_output.total_num_scheduled_tokens != rows:
            return None
        return time.perf_counter(), width, num_reqs

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        # Asynchronous scheduling sets the placeholders of the next step's drafts here.
        super()._update_after_schedule(scheduler_output)
        self._take_drafts_back(scheduler_output.num_scheduled_tokens)

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        # Synchronous scheduling sets the drafts themselves here.
        super().update_draft_token_ids(draft_token_ids)
        self._take_drafts_back(draft_token_ids.req_ids)

    def _take_drafts_back(self, req_ids: Iterable[str]) -> None:
        if not self._is_ours:
            return
        if self._keeps_width and not all(opted_out(request.sampling_params) for request in self.running):
            return
        for req_id in req_ids:
            request: Request | None = self.requests.get(req_id)
            if request is not None and request.spec_token_ids and opted_out(request.sampling_params):
                request.spec_token_ids = []

    def make_spec_decoding_stats(
        self, spec_decoding_stats: Any, *arguments: Any, request_id: str, **options: Any
    ) -> Any:
        """vLLM's statistics, without the rows of requests that opted out."""
        request = self.requests.get(request_id)
        if self._is_ours and request is not None and opted_out(request.sampling_params):
            return spec_decoding_stats
        if self._live is not None and options["num_draft_tokens"] in self._live.rounds:
            tokens = 1 + options["num_accepted_tokens"]
            self._live.saw_tokens(options["num_draft_tokens"], tokens, len(self.running))
        return super().make_spec_decoding_stats(spec_decoding_stats, *arguments, request_id=request_id, **options)


NEVER = 1 << 40  # more blocks than any request has


def forget_prefixes(scheduler: Scheduler) -> None:
    """Empty the prefix cache, and keep the blocks of running requests out of it.

    Running requests keep their blocks. vLLM's own reset refuses while requests run, or recomputes them.
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
    """``scheduler`` with :class:`OptOutScheduler` mixed in; a class that does not derive from vLLM's is unchanged."""
    if not issubclass(scheduler, Scheduler) or issubclass(scheduler, OptOutScheduler):
        return scheduler
    return type(f"OptOut{scheduler.__name__}", (OptOutScheduler, scheduler), {})
