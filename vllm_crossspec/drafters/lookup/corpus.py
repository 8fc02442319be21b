"""Outputs of earlier requests in bounded memory; a separate thread orders them for search."""

import contextlib
import functools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from vllm_crossspec.arrays import Array
from vllm_crossspec.devices import thread_stream
from vllm_crossspec.drafters.lookup.kernels import NO_TOKEN

logger = logging.getLogger("vllm.crossspec")

MOST_WAITING = 256
"""Most batches of outputs that wait for the thread; more are dropped."""
GROWTH = 8
"""A new version is made at once if 1 / GROWTH of the tokens are new, which bounds the sorting per token."""
REST = 20
"""Otherwise a new version is made after a rest of this many times the last one's duration."""


class Version(NamedTuple):
    """One published state of the corpus.

    Attributes:
        number: counts from 1.
        tokens: int32 [C], outputs with ``NO_TOKEN`` after each.
        order: int32 [places], ordered by the tokens before them; see :func:`places_in_order`.
    """

    number: int
    tokens: torch.Tensor
    order: torch.Tensor

    def for_kernels(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``tokens`` and ``order`` for kernels on the current stream.

        The thread may drop this version before the kernels have run. So its memory, which belongs to the thread's
        stream, is not reused before the current stream has passed them.
        """
        for tensor in (self.tokens, self.order):
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return self.tokens, self.order


def places_in_order(tokens: Array, context: int) -> Array:
    """int32 places that a token follows, ordered by the last ``context`` tokens up to each, read backwards.

    ``tokens`` are int32 [C] with ``NO_TOKEN`` between outputs, which also fills the places before the beginning.
    """
    followed = np.flatnonzero((tokens[:-1] != NO_TOKEN) & (tokens[1:] != NO_TOKEN))
    padded = np.concatenate([np.full(context, NO_TOKEN, dtype=tokens.dtype), tokens])
    keys = [padded[followed + context - back] for back in reversed(range(context))]  # lexsort's last key leads
    return followed[np.lexsort(keys)].astype(np.int32)


class Corpus:
    """Collects outputs from the decoding thread, which never waits, and publishes versions that kernels search.

    Args:
        capacity: most tokens, including separators; the oldest outputs are evicted first.
        context: tokens of a context that kernels compare.
        device: of the versions: one in use, its successor, and earlier ones until launched kernels have read them.

    Attributes:
        version: the newest, or None. It is replaced as a whole, and read once per round.
        num_evicted: outputs evicted so far.
    """

    def __init__(self, capacity: int, context: int, device: torch.device):
        self.capacity, self.context, self.device = capacity, context, device
        self.version: Version | None = None
        self.num_evicted = 0
        self._outputs: deque[Array] = deque()
        self._size = 0
        self._new = 0
        self._next_version = 0.0
        self._waiting: queue.Queue[Callable[[], list[Array]] | None] = queue.Queue(maxsize=MOST_WAITING)
        self._thread = threading.Thread(target=self._work, name="crossspec-corpus", daemon=True)
        self._thread.start()

    def add(self, read: Callable[[], list[Array]]) -> None:
        """Add outputs (int32 token ids), which the thread reads; they are dropped if it cannot keep up."""
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(read)

    def close(self) -> None:
        """End the thread."""
        self._waiting.put(None)
        self._thread.join()

    def _work(self) -> None:
        stream = thread_stream(self.device)
        with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
            self._take_in()

    def _take_in(self) -> None:
        while True:
            try:
                pause = max(self._next_version - time.monotonic(), 0.0) if self._new else None
                read = self._waiting.get(timeout=pause)
            except queue.Empty:
                self._attempt(self._publish)
                continue
            if read is not None:
                self._attempt(functools.partial(self._take, read))
            self._waiting.task_done()
            if read is None:
                return

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:  # only drafts become fewer
            logger.exception("crossspec: earlier outputs were not taken in")

    def _take(self, read: Callable[[], list[Array]]) -> None:
        for output in read():
            self._keep(output)
        if self._new * GROWTH >= max(self._size, 1):
            self._publish()

    def _keep(self, output: Array) -> None:
        output = output[-(self.capacity - 1) :]
        if len(output) < 2:
            return
        self._outputs.append(output)
        self._size += len(output) + 1
        self._new += len(output) + 1
        while self._size > self.capacity:
            self._size -= len(self._outputs.popleft()) + 1
            self.num_evicted += 1

    def _publish(self) -> None:
        start = time.monotonic()
        try:
            self._make_version()
        finally:  # if the device has no memory, the next outputs try again
            self._new = 0
            now = time.monotonic()
            self._next_version = now + REST * (now - start)

    def _make_version(self) -> None:
        end = np.array([NO_TOKEN], dtype=np.int32)
        tokens = np.concatenate([part for output in self._outputs for part in (output.astype(np.int32), end)])
        order = places_in_order(tokens, self.context)
        number = self.version.number + 1 if self.version else 1
        self.version = Version(number, *(torch.from_numpy(part).to(self.device) for part in (tokens, order)))
