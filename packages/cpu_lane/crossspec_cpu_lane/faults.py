"""Why a kernel stopped before its end: the bounds of its tensors, and the sentence for the user."""

import ctypes
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ANYWHERE = (0, 2**64 - 1)


class Report(ctypes.Structure):
    """`struct report` of prelude.h."""

    _fields_ = [
        ("site", ctypes.c_int),
        ("argument", ctypes.c_int),
        ("program", ctypes.c_int * 3),
        ("accessed", ctypes.c_uint64),
    ]

    def address(self) -> int:
        return ctypes.addressof(self)


def extent_of(tensor: Any) -> tuple[int, int]:
    """The addresses from a tensor's first element to behind its last.

    The tensor's own and not its storage's: a kernel that is handed a view, a slice of a buffer that the engine keeps
    for its largest batch, must stay in it.
    """
    if tensor is None or not hasattr(tensor, "element_size") or not hasattr(tensor, "stride"):
        return ANYWHERE if tensor is not None else (0, 0)
    low = tensor.data_ptr()
    if tensor.numel() == 0:
        return low, low
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return low, low + (last + 1) * tensor.element_size()


def extents_of(tensors: Sequence[Any]) -> bytes:
    """An array of `struct extent`, one for each argument."""
    return struct.pack(f"@{2 * len(tensors)}Q", *(bound for t in tensors for bound in extent_of(t)))


def relocated(where: str, compiled: str | None, file: str | None) -> str:
    """A place in the source as it is found here, when it was compiled from another copy of the source.

    `compiled` and `file` are the kernel's own file, there and here: the folders above what they have in common are
    those of the two copies.
    """
    if compiled is None or file is None:
        return where
    there, here = Path(compiled).parts, Path(file).parts
    while there and here and there[-1] == here[-1]:
        there, here = there[:-1], here[:-1]
    place = Path(where)
    return str(Path(*here, place.relative_to(Path(*there)))) if place.is_relative_to(Path(*there)) else where


def explain(
    translation: Mapping[str, Any], report: Report, tensors: Sequence[Any], file: str | None = None
) -> Exception:
    """The exception for what a kernel reported, whose source is `file` in this process."""
    site = translation["sites"][report.site]
    place = f"{translation['name']} ({relocated(site['where'], translation['file'], file)})"
    program = f"program ({', '.join(str(p) for p in report.program)})"
    if site["kind"] == "assertion":
        return AssertionError(f"{place}: {site['text']} ({program})")
    low, high = extent_of(tensors[report.argument])
    size = site["size"]
    index = (report.accessed - low if report.accessed >= low else -(low - report.accessed)) // size
    name = translation["arguments"][report.argument]
    return IndexError(
        f"{place}: the {site['kind']} is out of bounds, at element {index} of {name}, which has {(high - low) // size}"
        f" elements ({program})"
    )
