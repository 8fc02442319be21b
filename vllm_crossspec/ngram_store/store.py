"""The file of an n-gram store, and its place in memory.

A trie in breadth-first order, children sorted by token, in three flat arrays of one safetensors file. Node ``i`` of
level 1 is token ``i`` itself, whether it was seen or not (so the first step of a walk is no search); level 2 and the
rest follow. With V = vocabulary, N = all nodes, I = nodes above the last level:

    offsets: int32 or int64 [I + 1], the children of node i are the nodes offsets[i] .. offsets[i + 1] - 1
    tokens: int16 or int32 [N - V], token of node V + j
    codes: int16 or uint8 [N], ln p(token | the nodes above it) = -code * scale; the highest pattern is p = 0

A leaf takes 6 bytes (5 with 8-bit codes), a node above it 10; the .trie file of the public implementation takes 36.

The longest match answers, the reference's rule (`TrieNgram::get_probability`): of the contexts' suffixes, from
``order - 1`` tokens down to one, the first one in which the candidate was seen gives p = count(suffix, token) /
count(suffix). A candidate seen after none of them has p = 0. Stupid backoff (Brants et al. 2007) multiplies p by a
factor for every token that was dropped, and ends at single tokens: p = count(token) / all tokens.
"""

import hashlib
import json
import math
import os
import warnings
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from vllm_crossspec.ngram_store import NO_STORE

FORMAT, VERSION = "crossspec-ngram", 1
MIN_ORDER, MAX_ORDER = 2, 5
MAX_VOCAB_SIZE = (1 << 21) - 2
"""Three tokens, shifted by one, must fit 64 bits while counting."""
MAX_CODES = {16: 32766, 8: 254}
FILE_TYPES = {
    torch.int16: ("I16", "<i2"), torch.int32: ("I32", "<i4"), torch.int64: ("I64", "<i8"), torch.uint8: ("U8", "<u1"),
}  # fmt: skip
"""What safetensors and NumPy call the types of the arrays."""
CODE_DTYPES = {16: torch.int16, 8: torch.uint8}
TENSORS = ("offsets", "tokens", "codes")
PLACEMENTS = ("host", "gpu")
EPSILON = 1e-10
"""What the paper adds to a probability before its logarithm (Liu et al. 2026, appendix D)."""
FLOOR = math.log(EPSILON)
"""ln p of what was not seen."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """What the file says about itself.

    Attributes:
        order: the longest n-gram, in tokens; contexts have up to ``order - 1``.
        vocab_size: V; token ids lie below it.
        tokenizer: hash of the tokenizer's vocabulary (:func:`tokenizer_hash`), "" where none was given.
        num_tokens: tokens that were counted.
        num_unigrams: different tokens among them.
        level_sizes: nodes of each level, the first one V.
        max_children: the most children of any node, for each level but the last.
        bits: of a code, 8 or 16.
        scale: nats between two codes. A log-probability is off by at most half of it.
    """

    order: int
    vocab_size: int
    tokenizer: str
    num_tokens: int
    num_unigrams: int
    level_sizes: tuple[int, ...]
    max_children: tuple[int, ...]
    bits: int
    scale: float

    @property
    def total(self) -> int:
        """N, entries of ``codes``: all nodes, unseen tokens at level 1 included."""
        return sum(self.level_sizes)

    @property
    def num_inner(self) -> int:
        """I, nodes that may have children."""
        return sum(self.level_sizes[:-1])

    @property
    def num_nodes(self) -> int:
        """N-grams of every length that were seen."""
        return self.num_unigrams + sum(self.level_sizes[1:])

    @property
    def max_error(self) -> float:
        """The most that a log-probability is off, in nats."""
        return self.scale / 2

    @property
    def none_code(self) -> int:
        """The code of p = 0, as a tensor holds it."""
        return 255 if self.bits == 8 else -1

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Of the three tensors."""
        return {
            "offsets": torch.int32 if self.total < 1 << 31 else torch.int64,
            "tokens": torch.int16 if self.vocab_size <= 1 << 15 else torch.int32,
            "codes": CODE_DTYPES[self.bits],
        }

    @property
    def lengths(self) -> dict[str, int]:
        """Of the three tensors."""
        return {"offsets": self.num_inner + 1, "tokens": self.total - self.vocab_size, "codes": self.total}

    @property
    def num_bytes(self) -> int:
        """Of the three tensors together."""
        return sum(self.dtypes[name].itemsize * self.lengths[name] for name in TENSORS)


class NgramStore(NamedTuple):
    """An open store. ``order`` is what lookups use, at most the header's."""

    header: Header
    order: int
    offsets: torch.Tensor  # int [I + 1]
    tokens: torch.Tensor  # int [N - V]
    codes: torch.Tensor  # int16 or uint8 [N]

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.codes.device


def open_store(
    path: Path,
    *,
    key: str = "the n-gram store",
    order: int | None = None,
    vocab_size: int | None = None,
    tokenizer: str | None = None,
) -> NgramStore:
    """Map a store into memory; nothing but its header is read, whatever its size.

    Args:
        path: the file.
        key: what the setting is called that named the file, for messages.
        order: use n-grams of this length at most. Default: the store's own order.
        vocab_size: of the model that asks; refused where the store has ids beyond it, or where neither side has a
            tokenizer to compare and the sizes differ.
        tokenizer: hash of the asking model's tokenizer; refused where the store was built with another one.
    """
    where = f"{key} {path}"
    if not path.is_file():
        raise ValueError(f"{where}: {NO_STORE}")
    try:
        with safe_open(path, framework="pt") as file:
            header = _read_header(file.metadata() or {}, where)
            _check_shapes(file, header, where)
            tensors = {name: file.get_tensor(name) for name in TENSORS}
    except SafetensorError as problem:
        raise ValueError(f"{where} is no whole safetensors file ({problem}): write or copy it again") from problem
    store = NgramStore(header, header.order, **tensors)
    _check_ends(store, where)
    _check_model(header, where, vocab_size, tokenizer)
    if order is None:
        return store
    if not MIN_ORDER <= order <= header.order:
        raise ValueError(f"{where} has n-grams of up to {header.order} tokens: choose an order of 2 to {header.order}")
    return store._replace(order=order)


def _read_header(metadata: dict[str, str], where: str) -> Header:
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{where} is a safetensors file but no n-gram store: `crossspec ngram build` writes stores")
    if metadata.get("version") != str(VERSION):
        raise ValueError(
            f"{where} has format version {metadata.get('version')}, this release reads {VERSION}: build it again"
        )
    try:
        fields: dict[str, Any] = {name: json.loads(metadata[name]) for name in Header.__dataclass_fields__}
        fields |= {name: tuple(int(size) for size in fields[name]) for name in ("level_sizes", "max_children")}
        header = Header(**fields)
        sizes, widest = header.level_sizes, header.max_children
        whole = all(isinstance(fields[name], int) for name in ("order", "vocab_size", "num_tokens", "num_unigrams"))
        is_sound = (
            whole
            and isinstance(header.tokenizer, str)
            and MIN_ORDER <= header.order <= MAX_ORDER
            and 0 < header.vocab_size <= MAX_VOCAB_SIZE
            and len(sizes) == header.order == len(widest) + 1
            and sizes[0] == header.vocab_size
            and min(sizes) >= 0
            and all(0 <= most <= header.vocab_size for most in widest)
            and 0 <= header.num_unigrams <= header.vocab_size
            and header.bits in MAX_CODES
            and 0 < float(header.scale) < math.inf
        )
    except (KeyError, TypeError, ValueError) as problem:
        raise ValueError(f"{where} has a damaged header ({problem}): write or copy the file again") from problem
    if not is_sound:
        raise ValueError(f"{where} has a header whose figures contradict each other: write or copy the file again")
    return header


def _check_shapes(file: Any, header: Header, where: str) -> None:
    if sorted(file.keys()) != sorted(TENSORS):
        raise ValueError(f"{where} has the tensors {sorted(file.keys())}, not {sorted(TENSORS)}: write it again")
    for name in TENSORS:
        piece = file.get_slice(name)
        wanted = FILE_TYPES[header.dtypes[name]][0], [header.lengths[name]]
        if (piece.get_dtype(), piece.get_shape()) != wanted:
            raise ValueError(
                f"{where}: `{name}` is {piece.get_dtype()} {piece.get_shape()} where its header says "
                f"{wanted[0]} {wanted[1]}: write or copy the file again"
            )


def _check_ends(store: NgramStore, where: str) -> None:
    """The two offsets that every other one lies between; lookups clamp the rest to the arrays."""
    first, last = int(store.offsets[0]), int(store.offsets[-1])
    if (first, last) != (store.header.vocab_size, store.header.total):
        raise ValueError(
            f"{where}: its offsets go from {first} to {last}, not from {store.header.vocab_size} to "
            f"{store.header.total}: write or copy the file again"
        )


def _check_model(header: Header, where: str, vocab_size: int | None, tokenizer: str | None) -> None:
    has_both = bool(header.tokenizer and tokenizer)
    if has_both and header.tokenizer != tokenizer:
        raise ValueError(f"{where} was built with another tokenizer than the model's: build one with the model's own")
    if vocab_size is None:
        return
    # Models pad their vocabularies, so a store of the very tokenizer may know of fewer ids.
    if header.vocab_size > vocab_size or (header.vocab_size < vocab_size and not has_both):
        raise ValueError(
            f"{where} is for a vocabulary of {header.vocab_size} tokens and the model has {vocab_size}: "
            "build one with the model's own tokenizer"
        )


class MappedFile:
    """Sees that a file which is mapped into memory was not cut short: reading what is gone ends the process."""

    def __init__(self, path: Path, key: str):
        self.where = f"{key} {path}"
        self._descriptor = os.open(path, os.O_RDONLY)  # of the file itself, whatever takes its name later
        self._size = os.fstat(self._descriptor).st_size
        weakref.finalize(self, os.close, self._descriptor)

    def check(self) -> None:
        """Raises LostFileError where the file has shrunk; one call of the system."""
        if os.fstat(self._descriptor).st_size < self._size:
            raise LostFileError(f"{self.where} was cut short while it was in use: copy or build it again")


class LostFileError(RuntimeError):
    """A file that is read while texts are generated is no longer whole; one sentence."""


def check_backoff(factor: float | None, key: str = "backoff") -> None:
    """Raises ValueError: not a factor of stupid backoff."""
    if factor is not None and not 0 < factor <= 1:
        raise ValueError(f"{key} {factor}: give a factor above 0 and up to 1 (0.4 is usual)")


# -- placement ----------------------------------------------------------------------------------------------------


def place(
    store: NgramStore, placement: str, device: torch.device, budget_bytes: int | None = None, key: str = "placement"
) -> NgramStore:
    """A store where lookups of a device can read it.

    "host" is the mapped file itself for a CPU. A GPU reads pinned host memory over the bus, without the host's help, so
    for one the arrays are copied into that; "gpu" copies them onto the device. A copy of more than ``budget_bytes``
    (default: what is free) stays on the host, with a warning.
    """
    if placement not in PLACEMENTS:
        raise ValueError(f"{key} {placement!r}: choose one of {', '.join(PLACEMENTS)}")
    if placement == "gpu":
        reason = _why_not(store, device, budget_bytes)
        if reason is None:
            try:
                return _copy(store, device)
            except torch.OutOfMemoryError:
                reason = f"{device} has no room for {store.header.num_bytes / (1 << 30):.2f} GiB"
        warnings.warn(f"the n-gram store stays in host memory: {reason}", stacklevel=2)
    if device.type != "cuda":
        return store
    return store._replace(**{name: getattr(store, name).pin_memory() for name in TENSORS})


def _why_not(store: NgramStore, device: torch.device, budget_bytes: int | None) -> str | None:
    if device.type == "cpu":
        return "there is no GPU to copy it to"
    wanted = store.header.num_bytes
    if budget_bytes is None:
        budget_bytes = torch.cuda.mem_get_info(device)[0]
    if wanted <= budget_bytes:
        return None
    return f"its {wanted / (1 << 30):.2f} GiB are more than the {budget_bytes / (1 << 30):.2f} GiB that it may take"


def _copy(store: NgramStore, device: torch.device) -> NgramStore:
    return store._replace(**{name: getattr(store, name).to(device) for name in TENSORS})


# -- tokenizers ---------------------------------------------------------------------------------------------------


def tokenizer_hash(folder: Path, key: str = "--tokenizer") -> str:
    """SHA-256 of the vocabulary of a folder's ``tokenizer.json``, or that file's: which token has which id, no more."""
    path = folder / "tokenizer.json" if folder.is_dir() else folder
    if not path.is_file():
        raise ValueError(f"{key} {folder}: there is no tokenizer.json; name the folder of a model that has one")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        added = sorted((int(token["id"]), token["content"]) for token in content.get("added_tokens", []))
        canonical = json.dumps([content["model"]["vocab"], added], sort_keys=True)
    except (KeyError, TypeError, ValueError) as problem:
        raise ValueError(f"{key} {path} is no tokenizer file ({problem}): name the model's own") from problem
    return hashlib.sha256(canonical.encode()).hexdigest()
