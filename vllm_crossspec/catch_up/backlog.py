"""The queue of a drafter under a router: tokens that it must still write into its cache while others draft.

Bookkeeping is on the host, in arrays with one entry per request; the features stay on the device. R requests of the
batch, S request slots, B buffered tokens per request, F width of fused features.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_crossspec.arrays import Array, ranges
from vllm_crossspec.catch_up.graphs import NO_SLOT, ContextGraphs
from vllm_crossspec.catch_up.kernels import joined
from vllm_crossspec.catch_up.queue import MAX_UNFUSED, CatchUpQueue

MAX_TOKENS_AT_ONCE = 4096
"""Most tokens of one forward pass; a larger catch-up is split."""


def tokens_of(slots: Array, starts: Array, firsts: Array, counts: Array) -> Array:
    """int64 [3, n] consecutive tokens of requests: slots, positions, and rows of their features.

    Args:
        slots, starts, firsts: int64 [R] slot, first position and first row of each request.
        counts: int64 [R] tokens of each.
    """
    return np.stack((np.repeat(slots, counts), ranges(starts, counts), ranges(firsts, counts)))


class StepRows(NamedTuple):
    """Rows of the target's step that may hold accepted tokens, by request.

    Attributes:
        slots: int64 [R].
        starts: int64 [R] position of the first row.
        firsts: int64 [R] row of it among the packed rows of the step.
        counts: int64 [R] rows; how many drafts were accepted is not known yet.
        certain: int64 [R] rows, at least one, that are surely accepted: a prompt's, and a draft's root.
        packed: int64 [n] all of these rows, as rows of the step.
        on_device: ``packed`` on the device; None if it holds all rows of the step.
    """

    slots: Array
    starts: Array
    firsts: Array
    counts: Array
    certain: Array
    packed: Array
    on_device: torch.Tensor | None


class _Unfused(NamedTuple):
    """Rows of one step: the tapped states [T, H], int64 [n] rows of them, int64 [n] rows of the buffer."""

    states: list[torch.Tensor]
    rows: Array
    places: Array


class Backlog(CatchUpQueue):
    """The features of the tokens that one drafter missed, by request slot, and how many tokens its cache holds.

    Row ``slot * capacity`` of the buffer holds the features of position ``bases[slot]``; later positions follow. A
    slot's buffer restarts when the drafter has caught up with all earlier tokens.

    Args:
        proposer, taps: as of any queue.
        capacity: B.
        fuses_late: whether states wait unfused, so that one fuse takes many rows. The steps' tensors are then kept, and
            must not be written again.
        count: called with the number of tokens of each catch-up.

    Attributes:
        features: [S * B, F].
        cached: int64 [S] tokens whose keys and values are in the drafter's cache.
        bases: int64 [S] position of each slot's first buffered token.
        graphs: CUDA graphs of catching up; None if not captured.
    """

    def __init__(
        self, proposer: Any, taps: list[int], *, capacity: int, fuses_late: bool, count: Callable[[int], None]
    ):
        super().__init__(proposer, taps)
        self.capacity, self.fuses_late, self._count = capacity, fuses_late, count
        num_slots = proposer.engine_config.scheduler_config.max_num_seqs
        shape = (num_slots * capacity, proposer.hidden_size)
        self.features = torch.zeros(shape, dtype=proposer.dtype, device=proposer.device)
        self.cached = np.zeros(num_slots, dtype=np.int64)
        self.bases = np.zeros(num_slots, dtype=np.int64)
        self.graphs: ContextGraphs | None = None
        self._unfused: list[_Unfused] = []

    # -- a step comes in --------------------------------------------------------------------------------------

    def store(self, states: list[torch.Tensor], rows: StepRows) -> None:
        """Fuse a step's rows of the states ([T, H] of every tapped layer) into the buffer, or queue them unfused.

        A prompt longer than the buffer goes straight into the cache, except its last token.
        """
        used = rows.starts - self.bases[rows.slots]
        crowded = (self.cached[rows.slots] < rows.starts) & (used + rows.counts > self.capacity)
        if crowded.any():
            self.catch_up(rows.slots[crowded], rows.starts[crowded])
        long, num_rows = rows.counts > self.capacity, len(rows.packed)
        if self.fuses_late and num_rows <= MAX_UNFUSED and not long.any():
            if self.num_unfused + num_rows > MAX_UNFUSED:
                self.fuse_waiting()
            own = [states[i] for i in self.taps] or states[:1]
            self._unfused.append(_Unfused(own, rows.packed, self._place(rows)))
            return
        self.fuse_waiting()
        features, device = self.fuse(states, rows.on_device), self.features.device
        if long.any():
            written = np.where(long, rows.certain - 1, 0)
            if written.any():
                self._take_in(features, tokens_of(rows.slots, rows.starts, rows.firsts, written))
            self.cached[rows.slots] += written
            rows = rows._replace(
                starts=rows.starts + written, firsts=rows.firsts + written, counts=rows.counts - written
            )
            features = features.index_select(0, async_tensor_h2d(ranges(rows.firsts, rows.counts), device=device))
        self.features.index_copy_(0, async_tensor_h2d(self._place(rows), device=device), features)

    def _place(self, rows: StepRows) -> Array:
        """int64 [sum of counts]: the buffer's row for each of the step's rows; there must be room."""
        slots = rows.slots
        self.bases[slots] = np.where(self.cached[slots] == rows.starts, rows.starts, self.bases[slots])
        return ranges(self.rows_at(slots, rows.starts), rows.counts)

    # -- the drafter takes it in ------------------------------------------------------------------------------

    def rows_at(self, slots: Array, positions: Array) -> Array:
        """int64 [k]: the buffer's rows of one token per slot."""
        return slots * self.capacity + positions - self.bases[slots]

    def missed(self, slots: Array, ends: Array) -> Array:
        """int64 [3, n] tokens of ``slots`` from the end of the cache up to ``ends`` (exclusive), int64 [k] each."""
        starts = self.cached[slots]
        return tokens_of(slots, starts, self.rows_at(slots, starts), np.maximum(ends - starts, 0))

    def catch_up(self, slots: Array, ends: Array) -> None:
        """Write keys and values of the tokens that the drafter missed in ``slots``, up to ``ends`` (exclusive)."""
        tokens = self.missed(slots, ends)
        if tokens.shape[1]:
            self.cached[slots] = np.maximum(self.cached[slots], ends)
            self.fuse_waiting(slots)
            self._take_in(self.features, tokens)

    def catch_up_within(self, slots: Array, bounds: Array) -> None:
        """As :meth:`catch_up`, where the host does not know yet how many tokens were accepted, at most ``bounds``.

        Nothing reads what is written past the last accepted token before it is written again. :meth:`settle` counts the
        others.
        """
        tokens = self.missed(slots, bounds - 1)
        if tokens.shape[1]:
            self.fuse_waiting(slots)
            self.write_tokens(self.features, tokens)

    def settle(self, slots: Array, ends: Array) -> None:
        """The drafter has taken in ``slots`` up to ``ends`` (int64 [k] each)."""
        self._count(int(np.maximum(ends - 1 - self.cached[slots], 0).sum()))
        self.cached[slots] = ends

    def start(self, slots: Array, ends: Array | None, rows: torch.Tensor) -> torch.Tensor:
        """[k, F] features of each request's last token, whose keys and values the drafter writes as it drafts.

        Args:
            ends: int64 [k] accepted tokens of ``slots``, int64 [k]; None where the host does not know them yet.
            rows: int64 [k] the buffer's rows of the last tokens (:meth:`rows_at`).
        """
        if ends is not None:
            self.cached[slots] = ends
        self.fuse_waiting(slots)
        return self.features.index_select(0, rows)

    def _take_in(self, features: torch.Tensor, tokens: Array) -> None:
        self._count(tokens.shape[1])
        self.write_tokens(features, tokens)

    def write_tokens(self, features: torch.Tensor, tokens: Array) -> None:
        """Write keys and values of int64 [3, n] tokens, whose features are rows of ``features``."""
        if self.graphs is not None and features is self.features:
            self.graphs.replay(tokens)
            return
        packed = async_tensor_h2d(tokens, device=features.device)
        for piece in packed.split(MAX_TOKENS_AT_ONCE, dim=1):
            self._write_packed(features, piece)

    def _write_packed(self, features: torch.Tensor, packed: torch.Tensor) -> None:
        """As :meth:`write_tokens`, for int64 [3, n] tokens on the device; tokens of ``NO_SLOT`` are padding."""
        slots, positions, rows = packed.unbind()
        self.write(features.index_select(0, rows), slots, positions)

    def write_nothing(self, num_tokens: int) -> None:
        """Do the work of a catch-up of ``num_tokens`` tokens without changing the cache, for timing."""
        if self.fuses_late:
            config = self.proposer.engine_config.model_config
            width = len(self.taps) * config.get_hidden_size()
            self.proposer.fuse(self.features.new_zeros(num_tokens, width, dtype=config.dtype))
        nothing = np.zeros(num_tokens, dtype=np.int64)
        self.write_tokens(self.features, np.stack((nothing + NO_SLOT, nothing, nothing)))

    def capture(self) -> None:
        """Capture CUDA graphs of catching up."""
        write = functools.partial(self._write_packed, self.features)
        self.graphs = ContextGraphs(write, self.proposer.engine_config, self.features.device)
        self.graphs.capture()

    # -- states that wait to be fused -------------------------------------------------------------------------

    @property
    def num_unfused(self) -> int:
        """Rows that wait to be fused."""
        return sum(len(step.rows) for step in self._unfused)

    def forget(self, slots: Array | None) -> list[_Unfused]:
        """Remove and return the unfused rows of some slots (int64 [k]; None: of all)."""
        steps, self._unfused = self._unfused, []
        if slots is None:
            return steps
        taken: list[_Unfused] = []
        for step in steps:
            wanted = np.isin(step.places // self.capacity, slots)
            for found, where in ((taken, wanted), (self._unfused, ~wanted)):
                if where.any():
                    found.append(_Unfused(step.states, step.rows[where], step.places[where]))
        return taken

    @torch.inference_mode()
    def fuse_waiting(self, slots: Array | None = None) -> None:
        """Fuse the waiting rows of some slots (int64 [k]; None: of all) into the buffer.

        Of two rows for one place the later one counts: the earlier was a rejected draft.
        """
        steps = self.forget(slots)
        if not steps:
            return
        places = np.concatenate([step.places for step in steps])
        places, from_end = np.unique(places[::-1], return_index=True)
        states = steps[0].states
        if len(steps) > 1:
            states = [torch.cat([step.states[i] for step in steps]) for i in range(len(states))]
        lengths = [len(step.states[0]) for step in steps]
        firsts = np.cumsum([0, *lengths[:-1]])
        rows = np.concatenate([step.rows + first for step, first in zip(steps, firsts, strict=True)])
        packed = np.stack((rows[len(rows) - 1 - from_end], places))
        on_device = torch.from_numpy(packed).to(self.features.device)
        features = self.proposer.fuse(joined(states, [*range(len(self.taps))], on_device[0]))
        self.features.index_copy_(0, on_device[1], features)
