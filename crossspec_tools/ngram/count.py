"""Counting by external sort: sorted runs of a bounded size, merged one range of keys at a time.

A key is a whole n-gram of the highest order: its tokens, shifted by one, side by side in one or two 64-bit words, the
first token highest. Places after a document's end are 0, which sorts first. The count of a shorter n-gram is the sum of
those that begin with it.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from crossspec_tools.ngram.inputs import Tokens
from crossspec_tools.ngram.levels import LevelFiles, Progress
from vllm_crossspec.arrays import Array
from vllm_crossspec.files import replacing

Words = npt.NDArray[np.uint64]
BYTES_A_TOKEN = 120
"""What sorting a run takes in memory for every n-gram in it, measured at its peak."""


class Keys:
    """How n-grams become words."""

    def __init__(self, order: int, vocab_size: int):
        self.order, self.vocab_size = order, vocab_size
        self.bits = vocab_size.bit_length()
        self.first = min(order, 64 // self.bits)  # tokens in the first word
        self.num_words = 1 if self.first == order else 2
        assert (order - self.first) * self.bits <= 64

    def pack(self, tokens: Tokens) -> Words:
        """uint64 [W, n]: the n-gram of every token that begins one."""
        ids, num_starts = tokens
        starts = np.flatnonzero(ids[:num_starts] >= 0)
        words = np.zeros((self.num_words, len(starts)), dtype=np.uint64)
        alive = np.ones(len(starts), dtype=bool)
        for place in range(self.order):
            at = starts + place
            inside = at < len(ids)
            token = np.where(inside, ids[np.minimum(at, len(ids) - 1)], -1)
            alive &= token >= 0
            word = words[0 if place < self.first else 1]
            word <<= np.uint64(self.bits)
            word |= np.where(alive, token + 1, 0).astype(np.uint64)
        return words

    def unpack(self, words: Words) -> list[Array]:
        """The tokens of keys, shifted by one, [n] for each of ``order`` places."""
        mask = np.uint64((1 << self.bits) - 1)
        columns = []
        for place in range(self.order):
            word, last = (0, self.first) if place < self.first else (1, self.order)
            shift = np.uint64((last - 1 - place) * self.bits)
            columns.append(((words[word] >> shift) & mask).astype(np.int64))
        return columns


def unique(words: Words, counts: npt.NDArray[np.uint64] | None = None) -> tuple[Words, npt.NDArray[np.uint64]]:
    """Keys sorted, each once, with what their counts (1 each where None) add up to."""
    if words.shape[0] == 1 and counts is None:
        words = np.sort(words, axis=1)
    else:
        # Stable: what comes of sorted runs is merged, not sorted anew.
        order = np.argsort(words[0], kind="stable") if words.shape[0] == 1 else np.lexsort((words[1], words[0]))
        words = words[:, order]
        counts = None if counts is None else counts[order]
    is_new = np.ones(words.shape[1], dtype=bool)
    is_new[1:] = (words[:, 1:] != words[:, :-1]).any(0)
    starts = np.flatnonzero(is_new)
    if not len(starts):
        return words, np.zeros(0, dtype=np.uint64)
    if counts is None:
        sums = np.diff(np.append(starts, words.shape[1])).astype(np.uint64)
    else:
        sums = np.add.reduceat(counts, starts)
    return words[:, starts], sums


def write_runs(batches: Iterator[Tokens], keys: Keys, budget: int, stem: Path) -> list[str]:
    """Count the n-grams of a piece; the names of the sorted runs written beside ``stem``.

    Raises ValueError: a token lies outside the vocabulary.
    """
    most = max(1, budget // (BYTES_A_TOKEN + 8 * keys.num_words))
    waiting: list[Words] = []
    names: list[str] = []

    def flush() -> None:
        words, counts = unique(np.concatenate(waiting, axis=1))
        waiting.clear()
        names.append(f"{stem.name}-{len(names):05d}.npy")
        with replacing(stem.with_name(names[-1])) as partial, partial.open("wb") as file:
            np.save(file, np.concatenate((words, counts[None])))

    num_waiting = 0
    for batch in batches:
        for begin in range(0, batch.num_starts, most):
            part = batch.ids[begin : begin + most + keys.order - 1]
            if len(part) and part.max() >= keys.vocab_size:
                raise ValueError(f"token {part.max()} is none of a vocabulary of {keys.vocab_size}")
            num_starts = min(most, batch.num_starts - begin)
            if num_waiting + num_starts > most and waiting:
                flush()
                num_waiting = 0
            waiting.append(keys.pack(Tokens(part, num_starts)))
            num_waiting += num_starts
    if waiting:
        flush()
    return names


def merged(paths: list[Path], keys: Keys, budget: int) -> Iterator[tuple[Words, npt.NDArray[np.uint64]]]:
    """All runs as one, sorted, in parts that fit the budget; keys of one part are below those of the next."""
    runs = [np.load(path, mmap_mode="r", allow_pickle=False) for path in paths]
    total = sum(run.shape[1] for run in runs)
    num_parts = max(1, -(-total * (BYTES_A_TOKEN + 8 * keys.num_words) // max(1, budget)))
    samples = [run[0, :: max(1, run.shape[1] * 64 // max(1, total // num_parts))] for run in runs]
    sorted_samples = np.sort(np.concatenate(samples)) if samples else np.zeros(0, dtype=np.uint64)
    picks = np.linspace(0, len(sorted_samples), num_parts + 1)[1:-1].astype(np.int64)
    splits = np.unique(sorted_samples[picks])
    bounds = [[0, *np.searchsorted(run[0], splits).tolist(), run.shape[1]] for run in runs]
    for part in range(len(splits) + 1):
        pieces = [run[:, at[part] : at[part + 1]] for run, at in zip(runs, bounds, strict=True)]
        rows = np.concatenate(pieces, axis=1) if pieces else np.zeros((keys.num_words + 1, 0), dtype=np.uint64)
        if rows.shape[1]:
            yield unique(rows[:-1], rows[-1])


class _LevelWriter:
    """Appends the nodes of one level; the last one stays open until it is known to be whole."""

    def __init__(self, files: LevelFiles):
        files.create()
        self.files = files
        self.open: Array = np.zeros((3, 0), dtype=np.int64)  # token, count, children

    def add(self, nodes: Array, goes_on: bool) -> None:
        """int64 [3, n]; the first one continues the open node where ``goes_on``."""
        if goes_on:
            self.open[1:, 0] += nodes[1:, 0]
            nodes = nodes[:, 1:]
        if nodes.shape[1]:
            nodes = np.concatenate((self.open, nodes), axis=1)
            self.files.append(*nodes[:, :-1])
            self.open = nodes[:, -1:]

    def close(self) -> None:
        """Write the open node, too."""
        self.files.append(*self.open)


def write_levels(paths: list[Path], keys: Keys, budget: int, folder: Path, progress: Progress) -> None:
    """Merge runs into the level files of a trie."""
    writers = [_LevelWriter(LevelFiles(folder, level)) for level in range(1, keys.order + 1)]
    total = sum(np.load(path, mmap_mode="r", allow_pickle=False).shape[1] for path in paths)
    done, last = 0, [-1] * keys.order
    for words, counts in merged(paths, keys, budget):
        columns = keys.unpack(words)
        _add_part(writers, columns, counts.astype(np.int64), last)
        last = [int(column[-1]) for column in columns]
        done += words.shape[1]
        progress("merging n-grams", min(done, total), total)  # the same key in two runs is one of them
    progress("merging n-grams", total, total)
    for writer in writers:
        writer.close()


def _add_part(writers: list[_LevelWriter], columns: list[Array], counts: Array, last: list[int]) -> None:
    """The nodes of sorted keys, level by level; ``last`` is the key before them."""
    size = len(counts)
    changes: list[npt.NDArray[np.bool_]] = []
    change = np.zeros(size, dtype=bool)
    for column, before in zip(columns, last, strict=True):
        change = change.copy()
        change[1:] |= column[1:] != column[:-1]
        change[0] |= column[0] != before
        changes.append(change)
    for level, writer in enumerate(writers):
        starts = np.flatnonzero(changes[level])
        goes_on = not changes[level][0]
        if goes_on:
            starts = np.concatenate(([0], starts))
        sums = np.add.reduceat(counts, starts)
        if level + 1 < len(writers):
            born = changes[level + 1] & (columns[level + 1] > 0)
            kids = np.add.reduceat(born.astype(np.int64), starts)
        else:
            kids = np.zeros(len(starts), dtype=np.int64)
        tokens = columns[level][starts] - 1
        real = tokens >= 0
        writer.add(np.stack((tokens, sums, kids))[:, real], goes_on and bool(real[0]))
