"""vLLM's scheduler, which plans no drafts for requests that opted out, and as many as pay off for the others.

vLLM plans equally many draft tokens for every request. For a request that opted out, the target would compute these
rows for nothing, and vLLM's counters would show them as rejected drafts.
"""

import functools
import math
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from vllm_crossspec.config.schema import settings_of
from vllm_crossspec.load.measure import live_schedule
from vllm_crossspec.load.schedule import LiveSchedule
from vllm_crossspec.step.requests import opted_out

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as Native
else:
    Native = object


class Scheduled(NamedTuple):
    """A step, as it was scheduled."""

    seconds: float  # when
    width: int  # draft tokens that are made of each request after it
    num_reqs: int  # that decode
    rows: int
    num_others: int  # of the rows, which are no drafts
    widest: int  # most draft tokens of a request that it verifies

    @property
    def is_pure(self) -> bool:
        """Whether no request reads its prompt, and as many tokens are verified as are drafted."""
        return self.width == self.widest and self.num_others == self.num_reqs


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
        self._last_step: Scheduled | None = None
        if self._live is not None:
            self.dynamic_sd_lookup = self._live

    def schedule(self, *arguments: Any, **options: Any) -> Any:
        """Schedule, and time steps that are followed by a similar one, if draft lengths follow the load."""
        was_busy, last, self._last_step = bool(self.running), self._last_step, None
        output = super().schedule(*arguments, **options)
        if self._live is not None and was_busy and last is not None and self._last_step is not None:
            _take_in(self._live, last, self._last_step)
        return output

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        if self._live is not None:
            self._last_step = _as_scheduled(scheduler_output)
            if self._last_step is not None and self._cut_beside_prompts(self._last_step, scheduler_output):
                self._last_step = _as_scheduled(scheduler_output)
        # Asynchronous scheduling sets the placeholders of the next step's drafts here.
        super()._update_after_schedule(scheduler_output)
        self._take_drafts_back(scheduler_output.num_scheduled_tokens)

    def _cut_beside_prompts(self, step: Scheduled, scheduler_output: Any) -> bool:
        """Plan fewer draft rows if the step reads prompts, too; the drafts that stay are the likeliest. Whether it did.

        A connector has been told by now how many tokens a request computes, and these stay as they are.
        """
        assert self._live is not None
        width = self._live.to_verify(step.widest, step.num_reqs, step.num_others)
        if width >= step.widest or any(getattr(self, name, None) is not None for name in CONNECTORS):
            return False
        drafts, scheduled = scheduler_output.scheduled_spec_decode_tokens, scheduler_output.num_scheduled_tokens
        for req_id, tokens in list(drafts.items()):
            fewer = max(len(tokens) - width, 0)
            drafts[req_id] = tokens[:width]
            scheduled[req_id] -= fewer
            scheduler_output.total_num_scheduled_tokens -= fewer
            if not width:
                del drafts[req_id]
        return True

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


CONNECTORS = ("connector", "ec_connector", "aux_output_connector")


def _as_scheduled(output: Any) -> Scheduled | None:
    """None if no request decodes, or nothing is drafted after it because the next step could not use drafts."""
    if getattr(output, "skip_drafts", False):  # vLLM 0.33
        return None
    sizes = {req_id: len(tokens) for req_id, tokens in output.scheduled_spec_decode_tokens.items()}
    decoding = sum(rows == 1 + sizes.get(req_id, 0) for req_id, rows in output.num_scheduled_tokens.items())
    if not decoding:
        return None
    width, rows = output.num_spec_tokens_to_schedule, output.total_num_scheduled_tokens
    num_others, widest = rows - sum(sizes.values()), max(sizes.values(), default=0)
    return Scheduled(time.perf_counter(), width, decoding, rows, num_others, widest)


def _take_in(live: LiveSchedule, last: Scheduled, now: Scheduled) -> None:
    """The seconds between two steps, if they are alike: asynchronous scheduling is a step ahead of what runs."""
    seconds = now.seconds - last.seconds
    if last[1:] == now[1:] and now.is_pure:
        live.saw_round(now.width, now.num_reqs, seconds)
    if last.width == now.width and abs(math.log2(now.rows / last.rows)) < SIMILAR:
        live.saw_step(now.num_reqs, (now.rows + last.rows) // 2, now.width, seconds)


SIMILAR = 0.3
"""Most doublings of its rows by which a step may differ from the one before it, to be timed by both."""
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
