"""Reads the .trie files that DART publishes (`TrieNgram::save`), with a check of everything they say.

    u64 order, u64 number of nodes, then for each node, in the order of their numbers:
    i32 token, u64 parent, i32 count, u64 number of children, and for each child: i32 token, u64 its number

Numbers are in the byte order of the machine that wrote the file; node 0 is the root. A node's head takes 24 bytes and a
child 12, so every node begins at a multiple of 12 after the file's head. Where each begins follows from all before it;
finding that one by one would take hours for a billion nodes, so chunks are done by pointer doubling: the place after
every possible place, then the place after 2, 4, 8, ... nodes.
"""

import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from crossspec_tools.ngram.levels import Facts, LevelFiles, Progress, blocks, write_store
from vllm_crossspec.arrays import Array, ranges
from vllm_crossspec.ngram_store.store import MAX_CODES, MAX_ORDER, MAX_VOCAB_SIZE, MIN_ORDER, Header

HEAD = 16
CELL = 12
CHUNK = 1 << 20
"""Places of 12 bytes that are looked at together."""
BLOCK = 1 << 20
"""Children that are read together."""


class Trie(NamedTuple):
    """A mapped file: its cells, and the cell that each node begins at."""

    where: str
    order: int
    cells: npt.NDArray[np.uint32]  # [n, 3]
    starts: npt.NDArray[np.int64]  # [number of nodes]


def import_trie(
    path: Path,
    out: Path,
    *,
    vocab_size: int,
    tokenizer_hash: str = "",
    bits: int = 16,
    min_count: int = 1,
    work: Path | None = None,
    progress: Progress = lambda *told: None,
    chunk: int = CHUNK,
) -> Header:
    """Turn a .trie file into a store. Raises ValueError.

    ``vocab_size``: of the tokenizer that the file was made with; ids must lie below it.
    """
    if not 1 <= vocab_size <= MAX_VOCAB_SIZE:
        raise ValueError(f"--vocab-size {vocab_size}: choose 1 to {MAX_VOCAB_SIZE}")
    if bits not in MAX_CODES or min_count < 1:
        raise ValueError(f"--bits {bits}, --min-count {min_count}: choose 8 or 16 bits and a count of 1 or more")
    folder = work if work is not None else out.with_name(out.name + ".work")
    if folder.exists():
        raise ValueError(f"{folder} is there already: delete it, or name another --work")
    order, num_nodes, cells = _open(path)
    folder.mkdir(parents=True)
    try:
        trie = Trie(str(path), order, cells, _find_starts(path, cells, num_nodes, folder, progress, chunk))
        _write_levels(trie, vocab_size, folder, progress)
        # What `reduce` has left with a count of 0 still stops the backoff there.
        facts = Facts(order, vocab_size, tokenizer_hash, bits, min_count if min_count > 1 else 0)
        return write_store(out, folder, facts, progress)
    finally:
        shutil.rmtree(folder)


def _open(path: Path) -> tuple[int, int, npt.NDArray[np.uint32]]:
    """Order, number of nodes, and the rest as cells."""
    if not path.is_file():
        raise ValueError(f"{path}: there is no such .trie file")
    size = path.stat().st_size
    if size < HEAD + 2 * CELL:
        raise ValueError(f"{path} has {size} bytes, too few for a .trie with a root: copy it again")
    order, num_nodes = (int(value) for value in np.fromfile(path, np.uint64, 2))
    if not MIN_ORDER <= order <= MAX_ORDER:
        raise ValueError(
            f"{path} says that its order is {order}, not {MIN_ORDER} to {MAX_ORDER}: it is no .trie, or one of a "
            "machine with another byte order"
        )
    num_cells = (size - HEAD) // CELL
    if (size - HEAD) % CELL or num_nodes < 1 or num_nodes > num_cells // 2:
        raise ValueError(f"{path} ends in the middle: {num_nodes} nodes do not fit its {size} bytes; copy it again")
    return order, num_nodes, np.memmap(path, np.uint32, "r", HEAD, (num_cells, 3))


def _find_starts(
    path: Path, cells: npt.NDArray[np.uint32], num_nodes: int, folder: Path, progress: Progress, chunk: int
) -> npt.NDArray[np.int64]:
    """The cell of every node, int64 [num_nodes], in a file of its own."""
    found = folder / "starts"
    num_cells, at, done = len(cells), 0, 0
    with found.open("wb") as file:
        while done < num_nodes:
            if at + 2 > num_cells:
                raise ValueError(f"{path} ends after {done} of its {num_nodes} nodes: copy it again")
            base = at
            # The last cell that is looked at must have one after it, which holds the number of children.
            window = cells[base : min(base + chunk, num_cells - 1) + 1]
            places, beyond = _chain(window, num_nodes - done)
            if (at := base + beyond) > num_cells:
                raise ValueError(
                    f"{path}: one of the first {done + len(places)} nodes has more children than there is room"
                )
            (places + base).tofile(file)
            done += len(places)
            progress("finding nodes", done, num_nodes)
    if at != num_cells:
        raise ValueError(f"{path} goes on after its {num_nodes} nodes: its head is wrong, or the file is damaged")
    return np.memmap(found, np.int64, "r")


def _chain(window: npt.NDArray[np.uint32], most: int) -> tuple[Array, int]:
    """The nodes that follow from one at the window's first cell, up to ``most``; and the cell after the last."""
    size = len(window) - 1
    kids = _wide(window[1:])
    # A number that no file could hold leads past the end of any.
    after = np.arange(size) + 2 + np.minimum(kids, np.uint64(1 << 48)).astype(np.int64)
    jumps = [np.append(np.minimum(after, size), size).astype(np.int32)]  # `size`: out of the window, for good
    while jumps[-1][0] < size:
        jumps.append(jumps[-1][jumps[-1]])
    places = np.zeros(1, dtype=np.int32)
    for jump in reversed(jumps[:-1]):  # after 2^k nodes: between any two of 2^(k+1) there is one more
        places = np.stack((places, jump[places]), axis=1).reshape(-1)
    nodes = places[places < size][:most].astype(np.int64)
    return nodes, int(after[nodes[-1]])


def _write_levels(trie: Trie, vocab_size: int, folder: Path, progress: Progress) -> None:
    """The trie's nodes in breadth-first order, children by token, every one of them checked."""
    num_nodes = len(trie.starts)
    parents: Array = np.zeros(1, dtype=np.int64)
    kids = _narrow(_wide(trie.cells[trie.starts[:1] + 1]), vocab_size, f"{trie.where}: its root")
    reached = 1
    for level in range(1, trie.order + 1):
        files, known = LevelFiles(folder, level), folder / f"nodes-{level}"
        files.create()
        with known.open("wb") as file:
            for first, last, _, _ in blocks(kids, BLOCK):
                nodes = _add_children(trie, parents[first:last], kids[first:last], level, vocab_size, files)
                nodes.tofile(file)
                reached += len(nodes)
                progress(f"reading level {level}", reached, num_nodes)
        kids = files.read().kids
        parents = np.memmap(known, np.int64, "r") if len(kids) else np.zeros(0, dtype=np.int64)
    if reached != num_nodes:
        raise ValueError(f"{trie.where}: {num_nodes - reached} of its nodes hang on no other one: the file is damaged")


def _add_children(
    trie: Trie, parents: Array, kids: npt.NDArray[np.int32], level: int, vocab_size: int, files: LevelFiles
) -> Array:
    """Check and append the children of some nodes; their numbers, int64 [n]."""
    starts = np.asarray(trie.starts[parents])
    cells = trie.cells[ranges(starts + 2, kids.astype(np.int64))]
    tokens, wide = _signed(cells), _wide(cells)
    rank = np.repeat(np.arange(len(parents)), kids)
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise ValueError(
            f"{trie.where} has token {tokens.min() if tokens.min() < 0 else tokens.max()} where the vocabulary has "
            f"{vocab_size}: give the tokenizer that it was made with"
        )
    if len(wide) and wide.max() >= len(trie.starts):
        raise ValueError(f"{trie.where} names node {wide.max()} and has {len(trie.starts)}: the file is damaged")
    order = np.lexsort((tokens, rank))
    nodes: Array = wide[order].astype(np.int64)
    tokens, rank = tokens[order], rank[order]
    if ((tokens[1:] == tokens[:-1]) & (rank[1:] == rank[:-1])).any():
        raise ValueError(f"{trie.where}: a node has two children with the same token: the file is damaged")
    first = np.asarray(trie.starts[nodes])
    heads, rests = trie.cells[first], trie.cells[first + 1]
    if (_signed(heads) != tokens).any() or (_wide(heads) != parents[rank].astype(np.uint64)).any():
        raise ValueError(f"{trie.where}: a node and its child disagree on each other: the file is damaged")
    counts, above = _signed(rests), _signed(trie.cells[starts + 1])
    # The reference's `reduce` leaves a root whose count means nothing; its probabilities never use that one.
    if (counts < 0).any() or (level > 1 and (counts > above[rank]).any()):
        raise ValueError(f"{trie.where}: a node's count is below 0 or above its parent's: the file is damaged")
    most = vocab_size if level < trie.order else 0
    where = f"{trie.where}: a node of level {level} of {trie.order}"
    files.append(tokens, counts, _narrow(_wide(rests), most, where).astype(np.int64))
    return nodes


def _narrow(kids: npt.NDArray[np.uint64], most: int, where: str) -> npt.NDArray[np.int32]:
    """Numbers of children as int32. Raises ValueError where one is above ``most``."""
    if len(kids) and kids.max() > most:
        raise ValueError(f"{where} has {kids.max()} children, which can be {most} at most: the file is damaged")
    return kids.astype(np.int32)


def _signed(cells: npt.NDArray[np.uint32]) -> Array:
    """The number in the first word of cells."""
    return np.ascontiguousarray(cells[:, 0]).view(np.int32).astype(np.int64)


def _wide(cells: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
    """The 64-bit number in the last two words of cells, the lower one first."""
    low, high = (cells[:, 1], cells[:, 2]) if sys.byteorder == "little" else (cells[:, 2], cells[:, 1])
    return low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))
