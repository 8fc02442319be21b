"""Outputs of earlier requests, kept in memory of a bounded size and ordered for search by a thread of their own."""

import contextlib
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
from vllm_crossspec.lookup.kernels import NO_TOKEN

logger = logging.getLogger("vllm.crossspec")

MOST_WAITING = 256
"""Batches of outputs that wait for the thread; more are dropped."""
GROWTH = 8
"""A new version comes at once when this part of the tokens is new: what is sorted anew then stays in proportion."""
REST = 20
"""Else one comes when the thread has rested this many times as long as the last one took."""


class Version(NamedTuple):
    """One published state of the corpus.

    Attributes:
        number: counts from 1.
        tokens: int32 [C], outputs with ``NO_TOKEN`` after each.
        order: int32 [places] in the order of what leads to them; see :func:`places_in_order`.
    """

    number: int
    tokens: torch.Tensor
    order: torch.Tensor


def places_in_order(tokens: Array, context: int) -> Array:
    """The places that a token follows, in the order of the last ``context`` tokens up to each, the last one first.

    Args:
        tokens: int32 [C], ``NO_TOKEN`` between outputs.
        context: tokens that are compared; before the beginning stands ``NO_TOKEN``.

    Returns:
        int32 [places].
    """
    followed = np.flatnonzero((tokens[:-1] != NO_TOKEN) & (tokens[1:] != NO_TOKEN))
    padded = np.concatenate([np.full(context, NO_TOKEN, dtype=tokens.dtype), tokens])
    keys = [padded[followed + context - back] for back in reversed(range(context))]  # lexsort's last key leads
    return followed[np.lexsort(keys)].astype(np.int32)


class Corpus:
    """Takes outputs in from the decoding thread, which never waits, and publishes versions that kernels search.

    Args:
        capacity: most tokens that are kept, separators among them; the oldest outputs go first.
        context: tokens of a context, as kernels compare them.
        device: where versions live; there are two at most, one in use and one that takes its place.

    Attributes:
        version: the newest; None before there is one. Replaced as a whole, and read once a round.
        num_evicted: outputs that had to go so far.
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
        """Take in outputs, which the thread reads; dropped where it cannot keep up.

        Args:
            read: gives int32 arrays of token ids; may wait for the device.
        """
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(read)

    def settle(self) -> None:
        """Wait until all that was added is published; for tests and for the end of a measurement."""
        while self._waiting.unfinished_tasks or self._new:
            time.sleep(0.001)

    def close(self) -> None:
        """End the thread."""
        self._waiting.put(None)
        self._thread.join()

    def _work(self) -> None:
        while True:
            try:
                pause = max(self._next_version - time.monotonic(), 0.0) if self._new else None
                read = self._waiting.get(timeout=pause)
            except queue.Empty:
                self._publish()
                continue
            try:
                for output in read() if read is not None else ():
                    self._keep(output)
                if self._new * GROWTH >= max(self._size, 1):
                    self._publish()
            except Exception:  # drafts become fewer, and nothing else
                logger.exception("crossspec: earlier outputs were not taken in")
            finally:
                self._waiting.task_done()
            if read is None:
                return

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
        end = np.array([NO_TOKEN], dtype=np.int32)
        tokens = np.concatenate([part for output in self._outputs for part in (output.astype(np.int32), end)])
        order = places_in_order(tokens, self.context)
        number = self.version.number + 1 if self.version else 1
        self.version = Version(
            number, torch.from_numpy(tokens).to(self.device), torch.from_numpy(order).to(self.device)
        )
        self._new = 0
        now = time.monotonic()
        self._next_version = now + REST * (now - start)
