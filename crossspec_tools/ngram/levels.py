"""A trie on its way to a store: counts level by level in plain files, and the store's file written from them."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_crossspec.arrays import Array
from vllm_crossspec.files import replacing
from vllm_crossspec.ngram_store.store import FILE_TYPES, FORMAT, MAX_CODES, VERSION, Header

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is, and of how much."""

BLOCK = 1 << 21
"""Nodes that are worked on at once: about 100 MB."""
_Place = tuple[int, int]
"""Where the next node goes, and the next parent's end."""
STORED = {"tokens": np.int32, "counts": np.int64, "kids": np.int32}


class LevelFiles:
    """The nodes of one level in their order: token, count and number of children of each, appended to files."""

    def __init__(self, folder: Path, level: int):
        self.paths = {name: folder / f"level-{level}.{name}" for name in STORED}

    def create(self) -> None:
        """Begin with no node."""
        for path in self.paths.values():
            path.write_bytes(b"")

    def append(self, tokens: Array, counts: Array, kids: Array) -> None:
        """More nodes, after the ones before; [n] each."""
        for (name, path), values in zip(self.paths.items(), (tokens, counts, kids), strict=True):
            with path.open("ab") as file:
                values.astype(STORED[name]).tofile(file)

    def read(self) -> "Level":
        """All of it, mapped."""
        size = self.paths["kids"].stat().st_size // np.dtype(STORED["kids"]).itemsize
        parts = [
            np.memmap(path, STORED[name], "r") if size else np.zeros(0, STORED[name])
            for name, path in self.paths.items()
        ]
        return Level(*parts)


class Level(NamedTuple):
    """Tokens, counts and numbers of children, [n] each."""

    tokens: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int64]
    kids: npt.NDArray[np.int32]


class Facts(NamedTuple):
    """What a store says of itself beside its nodes."""

    order: int
    vocab_size: int
    tokenizer: str
    bits: int
    min_count: int


def blocks(kids: npt.NDArray[np.int32], limit: int = BLOCK) -> Iterator[tuple[int, int, int, Array]]:
    """Parents in runs of up to ``limit`` children: first parent, the one after the last, first child, ends [n]."""
    parent = child = 0
    while parent < len(kids):
        ends = child + np.cumsum(kids[parent : parent + limit], dtype=np.int64)
        count = max(1, int(np.searchsorted(ends, child + limit, "right")))
        yield parent, parent + count, child, ends[:count]
        parent, child = parent + count, int(ends[count - 1])


def write_store(path: Path, folder: Path, facts: Facts, progress: Progress) -> Header:
    """Turn the level files of a folder into a store; the file appears when it is whole. Returns the header written.

    N-grams of two tokens or more that were seen less often than ``facts.min_count`` are left out; what is left keeps
    its probability, given the whole count of its context.
    """
    levels = [LevelFiles(folder, level).read() for level in range(1, facts.order + 1)]
    total = int(levels[0].counts.sum())
    header = Header(
        order=facts.order,
        vocab_size=facts.vocab_size,
        tokenizer=facts.tokenizer,
        num_tokens=total,
        num_unigrams=len(levels[0].tokens),
        level_sizes=(facts.vocab_size, *(_count_kept(level.counts, facts.min_count) for level in levels[1:])),
        max_children=tuple(int(level.kids.max(initial=0)) for level in levels[:-1]),
        bits=facts.bits,
        scale=math.log(max(total, 2)) / MAX_CODES[facts.bits],  # so that the rarest token still has a code
    )
    with replacing(path) as partial:
        out = create_file(partial, header)
        codes = np.full(header.vocab_size, header.none_code, out["codes"].dtype)
        codes[levels[0].tokens] = _codes(levels[0].counts, np.full(len(levels[0].counts), total), header)
        out["codes"][: header.vocab_size] = codes
        out["offsets"][0] = header.vocab_size
        at = header.vocab_size, 1
        for number in range(1, facts.order):
            progress(f"writing level {number + 1}", number - 1, facts.order - 1)
            at = _write_level(out, levels[number - 1 : number + 1], number, at, header, facts.min_count)
        assert at == (header.total, header.num_inner + 1)
        for array in out.values():
            if isinstance(array, np.memmap):
                array.flush()
    progress("writing", facts.order - 1, facts.order - 1)
    return header


def _count_kept(counts: npt.NDArray[np.int64], min_count: int) -> int:
    steps = range(0, len(counts), BLOCK)
    return sum(int(np.count_nonzero(counts[begin : begin + BLOCK] >= min_count)) for begin in steps)


def _write_level(
    out: dict[str, npt.NDArray[np.int64]], levels: list[Level], number: int, at: _Place, header: Header, min_count: int
) -> _Place:
    """The children of level ``number``, and where each parent's end."""
    parents, children = levels
    node, parent = at
    for first, last, begin, ends in blocks(parents.kids):
        counts = children.counts[begin : ends[-1]]
        kids = parents.kids[first:last]
        keep = counts >= min_count
        above = np.repeat(np.asarray(parents.counts[first:last]), kids)[keep]
        kept_before = np.concatenate(([0], np.cumsum(keep)))
        size = int(kept_before[-1])
        kept_ends = node + kept_before[ends - begin]
        shift = header.vocab_size
        out["tokens"][node - shift : node - shift + size] = children.tokens[begin : ends[-1]][keep]
        out["codes"][node : node + size] = _codes(counts[keep], above, header)
        node += size
        if number > 1:
            kept_ends = kept_ends[parents.counts[first:last] >= min_count]
            out["offsets"][parent : parent + len(kept_ends)] = kept_ends
            parent += len(kept_ends)
            continue
        # Level 1 has an entry for every token: those between two seen ones have no children.
        token = parents.tokens[first:last].astype(np.int64)
        following = np.append(parents.tokens[last : last + 1].astype(np.int64), shift)[:1]
        out["offsets"][token[0] + 1 : following[0] + 1] = np.repeat(
            kept_ends, np.diff(np.concatenate((token, following)))
        )
    if number == 1:
        first_seen = int(parents.tokens[:1].min(initial=header.vocab_size))
        out["offsets"][1 : first_seen + 1] = header.vocab_size
        parent = header.vocab_size + 1
    return node, parent


def _codes(counts: Array, above: Array, header: Header) -> Array:
    """Quantised ln(counts / above), [n]."""
    nats = np.log(np.maximum(above, 1).astype(np.float64)) - np.log(np.maximum(counts, 1).astype(np.float64))
    codes = np.rint(np.minimum(nats / header.scale, MAX_CODES[header.bits])).astype(np.int64)
    return np.where(counts == 0, header.none_code, codes)


def create_file(path: Path, header: Header) -> dict[str, npt.NDArray[np.int64]]:
    """An empty safetensors file of the right size, its tensors mapped for writing."""
    fields = {name: json.dumps(getattr(header, name)) for name in header.__dataclass_fields__}
    entries: dict[str, object] = {"__metadata__": {"format": FORMAT, "version": str(VERSION), **fields}}
    begin, layout = 0, {}
    for name in ("offsets", "tokens", "codes"):  # the widest first: each is aligned
        kind, numpy_kind = FILE_TYPES[header.dtypes[name]]
        length = header.lengths[name]
        end = begin + length * np.dtype(numpy_kind).itemsize
        entries[name] = {"dtype": kind, "shape": [length], "data_offsets": [begin, end]}
        layout[name] = (numpy_kind, begin, length)
        begin = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + begin)
    shift = 8 + len(text)
    return {
        name: np.memmap(path, kind, "r+", shift + start, length) if length else np.zeros(0, kind)
        for name, (kind, start, length) in layout.items()
    }
