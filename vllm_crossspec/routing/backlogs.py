"""The queues of all drafters under a router, and when each drafter catches up (WhiFlash, section 3.4)."""

import functools
from collections.abc import Mapping

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_crossspec.arrays import Array, ranges
from vllm_crossspec.catch_up.backlog import Backlog, StepRows
from vllm_crossspec.config.schema import CrossSpecConfig
from vllm_crossspec.drafting.proposer import Proposer
from vllm_crossspec.drafting.stateless import CachelessProposer
from vllm_crossspec.metrics.routing import RoutingCounters
from vllm_crossspec.platform import platform
from vllm_crossspec.types import StepInputs

NO_DRAFTER = -1  # the route of a request without a drafter


class Backlogs:
    """The queue of every drafter with a cache, and the accepted tokens of each request.

    A drafter that uses another's cache also uses its queue. S request slots, R requests of a batch, N drafters.

    Attributes:
        queues: by the names of the drafters that own a cache.
        of: every drafter's queue by name; None without a cache.
        owner_numbers: int64 [N] owner of each drafter's cache, in routing order.
        computed: int64 [S] accepted tokens of every slot's request.
        live: bool [S] whether a slot has a request.
        keeps_prefixes: whether requests may reuse others' blocks.
        fuses_late: whether a queue fuses late.
    """

    def __init__(
        self,
        settings: CrossSpecConfig,
        vllm_config: VllmConfig,
        proposers: Mapping[str, Proposer],
        tap_indices: Mapping[str, list[int]],
        counters: RoutingCounters,
        device: torch.device,
    ):
        assert settings.router is not None
        self.lazy, self.capacity = settings.router.lazy, settings.router.max_backlog
        self.order, self.max_depth = settings.routing_order, settings.max_depth
        self.owner_numbers = np.array([self.order.index(settings.owner_of(name)) for name in self.order])
        self.keeps_prefixes = bool(vllm_config.cache_config.enable_prefix_caching)
        num_slots = vllm_config.scheduler_config.max_num_seqs
        self.computed = np.zeros(num_slots, dtype=np.int64)
        self.live = np.zeros(num_slots, dtype=bool)
        self._shares_prefix = False
        self._no_features = torch.zeros(num_slots, 0, dtype=vllm_config.model_config.dtype, device=device)
        self._counters = counters
        self.queues = {
            name: Backlog(
                proposers[name],
                tap_indices[name],
                capacity=self.capacity,
                fuses_late=platform().fuses_late,
                count=functools.partial(counters.count_caught_up, self.order.index(name)),
            )
            for name in settings.owners
            if not isinstance(proposers[name], CachelessProposer)
        }
        self.of = {name: self.queues.get(settings.owner_of(name)) for name in self.order}
        self.fuses_late = any(queue.fuses_late for queue in self.queues.values())

    # -- requests come and go ---------------------------------------------------------------------------------

    def add_requests(self, slots: list[int], num_computed: list[int]) -> None:
        """Requests take slots; the prefix cache had ``num_computed`` first tokens of each."""
        self.computed[slots], self.live[slots] = num_computed, True
        for queue in self.queues.values():
            queue.cached[slots] = num_computed
        # Their blocks may belong to a running request, even one that starts in the same step. All drafters must have
        # written these blocks before the new requests draft.
        self._shares_prefix |= any(num_computed)

    def remove_requests(self, slots: list[int]) -> None:
        """Let drafters catch up with the whole blocks of leaving requests, which the prefix cache keeps."""
        leaving = np.array([slot for slot in slots if self.live[slot]], dtype=np.int64)
        if not len(leaving):
            return
        computed = self.computed[leaving]
        for queue in self.queues.values():
            if self.keeps_prefixes:
                queue.catch_up(leaving, computed - computed % min(queue.proposer.block_tables.block_sizes))
            queue.forget(leaving)
        self.live[leaving] = False

    # -- the round --------------------------------------------------------------------------------------------

    def store(self, step: StepInputs, slots: Array) -> None:
        """Keep all tokens of a step that may be accepted, for all drafters; ``slots`` are its requests'.

        ``commit`` has already moved a tree's accepted path to the rows of an accepted chain.
        """
        batch, num_reqs = step.batch, step.batch.num_reqs
        certain, counts = self.rows_of(step)
        packed = ranges(batch.query_start_loc_np[:num_reqs].astype(np.int64), counts)
        is_all = len(packed) == batch.num_tokens
        index = None if is_all else async_tensor_h2d(packed, device=self._no_features.device)
        rows = StepRows(slots, self.computed[slots], np.cumsum(counts) - counts, counts, certain, packed, index)
        states = [s[: batch.num_tokens] for s in step.tapped_hidden_states or [step.last_hidden_states]]
        for queue in self.queues.values():
            queue.store(states, rows)

    def rows_of(self, step: StepInputs) -> tuple[Array, Array]:
        """int64 [R] each: rows of a step that are surely accepted, and those that may be."""
        batch, num_reqs = step.batch, step.batch.num_reqs
        scheduled = batch.num_scheduled_tokens[:num_reqs].astype(np.int64)
        drafted = np.zeros_like(scheduled)
        if batch.num_draft_tokens_per_req is not None:
            drafted = batch.num_draft_tokens_per_req[:num_reqs].astype(np.int64)
        certain = scheduled - drafted
        return certain, certain + np.minimum(drafted, self.max_depth)

    def missed(self, name: str, slots: Array, ends: Array) -> Array:
        """int64 [R] tokens before ``ends`` that a drafter's cache lacks; 0 without a cache."""
        queue = self.of[name]
        return np.zeros_like(ends) if queue is None else np.maximum(ends - queue.cached[slots], 0)

    def all_missed(self, slots: Array, ends: Array) -> Array:
        """int64 [N, R] :meth:`missed` of all drafters, in routing order."""
        return np.stack([self.missed(name, slots, ends) for name in self.order])

    def count(self, slots: Array, routes: Array, before: Array) -> None:
        """Count the routes, and what each drafter missed of the ``before`` (int64 [R]) tokens before this round."""
        for number in np.unique(routes[routes >= 0]).tolist():
            mine = routes == number
            missed = self.missed(self.order[number], slots[mine], before[mine])
            self._counters.count_missed(number, slots[mine], missed)
        self._counters.count_decisions(slots, routes)

    def catch_up(self, slots: Array, routes: Array) -> None:
        """Let each chosen drafter take in its missed tokens, except the last one, with which it starts."""
        shares, self._shares_prefix = self._shares_prefix, False
        owners = self._owners(routes)
        for name, queue in self.queues.items():
            chosen = owners == self.order.index(name)
            if shares:
                everyone = np.flatnonzero(self.live)
                queue.catch_up(everyone, self.computed[everyone] - np.isin(everyone, slots[chosen]))
            elif not self.lazy:
                queue.catch_up(slots, self.computed[slots] - chosen)
            elif chosen.any():
                queue.catch_up(slots[chosen], self.computed[slots[chosen]] - 1)

    def _owners(self, routes: Array) -> Array:
        """int64 [R] numbers of those whose cache the drafters use."""
        return np.where(routes >= 0, self.owner_numbers[routes], NO_DRAFTER)

    @property
    def must_settle(self) -> bool:
        """Whether the next :meth:`catch_up` takes in more than the chosen drafters need."""
        return self._shares_prefix or not self.lazy

    def catch_up_within(self, slots: Array, routes: Array, bounds: Array) -> None:
        """As :meth:`catch_up`, where the host does not know the accepted lengths yet; ``settle`` takes them later.

        Args:
            slots, routes: int64 [R] slot and drafter of every request of the batch.
            bounds: int64 [R] most accepted tokens of each.
        """
        for name, queue in self.queues.items():
            chosen = np.flatnonzero(self._owners(routes) == self.order.index(name))
            if len(chosen):
                queue.catch_up_within(slots[chosen], bounds[chosen])

    def settle(self, slots: Array, routes: Array) -> None:
        """The drafters that drafted a round ago have taken in what :attr:`computed` says by now."""
        for name, queue in self.queues.items():
            mine = slots[self._owners(routes) == self.order.index(name)]
            if len(mine):
                queue.settle(mine, self.computed[mine])

    def first_rows(self, name: str, slots: Array) -> Array:
        """int64 [k] buffer rows that position 0 of each request would have; 0 without a cache."""
        queue = self.of[name]
        return np.zeros_like(slots) if queue is None else queue.rows_at(slots, np.zeros_like(slots))

    def last_rows(self, name: str, slots: Array) -> Array:
        """int64 [k] buffer rows of the features of each request's last token; 0 without a cache."""
        queue = self.of[name]
        return np.zeros_like(slots) if queue is None else queue.rows_at(slots, self.computed[slots] - 1)

    def start(self, name: str, slots: Array, rows: torch.Tensor, is_settled: bool = True) -> torch.Tensor:
        """[k, F] features from which a drafter starts, and which it takes in; ``rows`` are :meth:`last_rows`.

        Unless it ``is_settled`` how many tokens were accepted, :meth:`settle` counts them as taken in.
        """
        queue = self.of[name]
        if queue is None:
            return self._no_features[: len(slots)]
        return queue.start(slots, self.computed[slots] if is_settled else None, rows)

    # -- not for requests -------------------------------------------------------------------------------------

    def any_features(self, name: str, num_reqs: int) -> torch.Tensor:
        """[num_reqs, F] arbitrary features for a dummy round."""
        queue = self.of[name]
        return (self._no_features if queue is None else queue.features)[:num_reqs]

    def catch_up_on_nothing(self, name: str, num_tokens: int) -> None:
        """Do the work of a catch-up of ``num_tokens`` tokens without changing the cache, for timing."""
        queue = self.of[name]
        if queue is not None:
            queue.write_nothing(num_tokens)
