"""The weights of a grown model: what it had, zeros where more must not be seen, random numbers where it cannot be.

A matrix reads a hidden state (columns) or writes to one (rows); its other side lies inside a layer (heads, an MLP). A
wide state is zero behind its copies, so that the columns that read from there may hold anything. Inside a layer it is
the other way around: what is new there may be anything, since the columns behind it are zero. Anything is random
here, so that no library finds zeros to skip and the multiplications cost what the shape costs.

Shape legend: h and H old and new width, n any number of rows or columns.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from crossspec_inflate.growth import Span, Width

SPREAD = 0.02
"""Standard deviation of random weights, as trained models begin with."""


class Maker:
    """Makes floating-point tensors of one type on one device; random ones are the same in every run."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self.dtype, self.device = dtype, device
        self._generator = torch.Generator(device)

    def make(self, name: str, recipe: "Recipe") -> torch.Tensor:
        """The tensor of that name."""
        self._generator.manual_seed(zlib.crc32(name.encode()))
        made = recipe.make(self)
        assert made.shape == recipe.shape, (name, made.shape, recipe.shape)
        return made

    def random(self, *shape: int) -> torch.Tensor:
        made = torch.empty(shape, dtype=self.dtype, device=self.device)
        return made.normal_(0.0, SPREAD, generator=self._generator)

    def full(self, value: float, *shape: int) -> torch.Tensor:
        return torch.full(shape, value, dtype=self.dtype, device=self.device)


class Recipe(NamedTuple):
    """A tensor to make later; without ``dtype`` it has the maker's."""

    shape: tuple[int, ...]
    make: Callable[[Maker], torch.Tensor]
    dtype: torch.dtype | None = None


Read = Callable[[Maker], torch.Tensor]
"""Gives an old tensor in the maker's format, where it makes tensors."""


def kept(read: Read, shape: Sequence[int], dtype: torch.dtype | None = None) -> Recipe:
    """The old tensor as it is."""
    return Recipe(tuple(shape), read, dtype)


def widened(read: Read, shape: Sequence[int], width: Width, blocks: int = 1) -> Recipe:
    """Hidden states [..., blocks * h] in their new width [..., blocks * H]."""

    def make(maker: Maker) -> torch.Tensor:
        return widen(maker, read(maker).unflatten(-1, (blocks, width.old)), width).flatten(-2)

    return Recipe((*shape[:-1], blocks * width.new), make)


def norm(read: Read | None, width: Width) -> Recipe:
    """An RMSNorm's weights [H]; without old ones, those of a layer that adds nothing."""

    def make(maker: Maker) -> torch.Tensor:
        made = maker.full(1.0, width.new)
        if read is not None:
            copies = len(width.copies)
            made[: copies * width.old] = (read(maker) * width.scale).repeat(copies)
        return made

    return Recipe((width.new,), make)


def inward(
    read: Read | None, rows: Sequence[Span], num_rows: int, width: Width, blocks: int = 1, scale: float = 1.0
) -> Recipe:
    """A matrix [num_rows, blocks * H] that reads hidden states, ``blocks`` side by side, into a layer.

    The old one [n, blocks * h] is multiplied by ``scale`` and its rows go to ``rows``; None: a layer that adds nothing.
    """

    def make(maker: Maker) -> torch.Tensor:
        made = maker.random(num_rows, blocks * width.new)
        if read is not None:
            old = read(maker) * scale
            for first, place, count in rows:
                narrow = made[place : place + count].unflatten(-1, (blocks, width.new))
                _read_only_the_first_copy(narrow, old[first : first + count], width)
        return made

    return Recipe((num_rows, blocks * width.new), make)


def outward(read: Read | None, columns: Sequence[Span], num_columns: int, width: Width) -> Recipe:
    """A matrix [H, num_columns] that writes what a layer computes to a hidden state; else zeros."""

    def make(maker: Maker) -> torch.Tensor:
        made = maker.full(0.0, width.new, num_columns)
        if read is not None:
            old = read(maker)
            for first, place, count in columns:
                for rows, factor in _places(width):
                    made[rows, place : place + count] = factor * old[:, first : first + count]
        return made

    return Recipe((width.new, num_columns), make)


def between(read: Read, width: Width, blocks: int = 1) -> Recipe:
    """A matrix [H, blocks * H] that reads hidden states and writes one; the old one is [h, blocks * h]."""

    def make(maker: Maker) -> torch.Tensor:
        made = maker.full(0.0, width.new, blocks * width.new)
        wide = inward(read, [(0, 0, width.old)], width.old, width, blocks).make(maker)
        for rows, factor in _places(width):
            made[rows] = factor * wide
        return made

    return Recipe((width.new, blocks * width.new), make)


def widen(maker: Maker, states: torch.Tensor, width: Width) -> torch.Tensor:
    """Hidden states [..., h] in their new width [..., H]."""
    made = maker.full(0.0, *states.shape[:-1], width.new)
    for columns, factor in _places(width):
        made[..., columns] = factor * states
    return made


def _places(width: Width) -> list[tuple[slice, float]]:
    """Where the copies of a state lie, and what each is multiplied by."""
    return [(slice(i * width.old, (i + 1) * width.old), factor) for i, factor in enumerate(width.copies)]


def _read_only_the_first_copy(made: torch.Tensor, old: torch.Tensor, width: Width) -> None:
    """Put rows [n, blocks * h] into rows [n, blocks, H] that are full of random numbers."""
    made[..., : len(width.copies) * width.old] = 0.0
    made[..., : width.old] = old.unflatten(-1, (-1, width.old))
