"""How a model grows: from which shape to which, and where its channels, heads and layers then lie."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Shape(NamedTuple):
    """Sizes of a decoder: hidden width, layers, width of an MLP, query heads, key/value heads."""

    hidden: int
    layers: int
    mlp: int
    heads: int
    kv_heads: int


SHAPES = {
    "0.2b": Shape(1024, 16, 3072, 16, 8),
    "0.6b": Shape(1024, 28, 3072, 16, 8),
    "1.7b": Shape(2048, 28, 6144, 16, 8),
    "4b": Shape(2560, 36, 9728, 32, 8),
    "8b": Shape(4096, 36, 12288, 32, 8),
}
"""By name: Qwen3's own of 0.6B to 8B, and one of their width with fewer layers."""


class Width(NamedTuple):
    """A hidden state of ``old`` channels among ``new``, a whole multiple.

    A state x lies there as copies of itself, each times a power of two, and zeros behind them. With r = new / old and
    the squares of the factors summing to r / 4^k, RMSNorm's output is that of x times 2^k, which weights times 2^-k
    undo without rounding. One copy is enough where r is a power of four.
    """

    old: int
    new: int

    @property
    def copies(self) -> tuple[float, ...]:
        """The factors, falling from 1: the digits of r to base four say how many of each power."""
        ratio = self.new // self.old
        digits = [(power, ratio >> 2 * power & 3) for power in range(self._power, -1, -1)]
        return tuple(2.0 ** (power - self._power) for power, count in digits for _ in range(count))

    @property
    def scale(self) -> float:
        """What a norm's weights are multiplied by, and its epsilon by the square of."""
        return 2.0**-self._power

    @property
    def _power(self) -> int:
        return ((self.new // self.old).bit_length() - 1) // 2


Span = tuple[int, int, int]
"""Where rows or columns of the old matrix go: their first, its new place, how many."""


class Growth(NamedTuple):
    """From one shape to another.

    Attributes:
        places: [old.layers] the new number of each old layer; the layers between them add nothing.
        draft: what draft models grow to that read no states of this target; None: they stay as they are.
    """

    old: Shape
    new: Shape
    head_dim: int
    places: tuple[int, ...]
    draft: Shape | None = None

    @property
    def width(self) -> Width:
        return Width(self.old.hidden, self.new.hidden)

    @property
    def query_heads(self) -> list[Span]:
        """Rows of the query heads: each stays in the group of its key/value head, which has room for more of them."""
        old, new = self.old.heads // self.old.kv_heads, self.new.heads // self.new.kv_heads
        size = old * self.head_dim
        return [(group * size, group * new * self.head_dim, size) for group in range(self.old.kv_heads)]

    @property
    def kv_heads(self) -> list[Span]:
        """Rows of the key/value heads."""
        return [(0, 0, self.old.kv_heads * self.head_dim)]

    @property
    def mlp(self) -> list[Span]:
        """Rows of the MLP."""
        return [(0, 0, self.old.mlp)]

    def state(self, old: int) -> int:
        """The new number of a state: 0 is the embedding's output, i the output of layer i, counted from 1."""
        return self.places[old - 1] + 1 if old else 0

    def shown(self, new: int) -> int:
        """The old number of the state that is to be seen at a new one."""
        return sum(place < new for place in self.places)

    def of_drafter(self, config: Mapping[str, Any], key: str) -> "Growth":
        """As a drafter grows beside this target: its width and heads become the target's, its layers stay as many.

        ``config`` is of its layers, ``key`` its name in messages. Raises ValueError where it does not fit.
        """
        old, head_dim = shape_of(config, key)
        if old.hidden != self.old.hidden:
            raise ValueError(f"{key} is {old.hidden} channels wide and its target {self.old.hidden}; leave it out")
        new = self.new._replace(layers=old.layers, mlp=max(self.new.mlp, old.mlp))
        return grow(old, new, head_dim, range(old.layers), key)


def shape_of(config: Mapping[str, Any], key: str) -> tuple[Shape, int]:
    """The shape that a config.json names, and its head size. Raises ValueError where it names none."""
    names = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads")
    missing = [name for name in names if not isinstance(config.get(name), int)]
    if missing:
        raise ValueError(f"{key}: config.json has no {missing[0]}; give a model of Qwen3's or Llama's form")
    hidden, layers, mlp, heads = (config[name] for name in names)
    return Shape(hidden, layers, mlp, heads, config.get("num_key_value_heads") or heads), (
        config.get("head_dim") or hidden // heads
    )


def grow(old: Shape, new: Shape, head_dim: int, places: Sequence[int], key: str) -> Growth:
    """A growth with the old layers at ``places``. Raises ValueError where the new shape has no room for the old one."""
    for name, option in (("hidden", "--hidden"), ("mlp", "--mlp"), ("kv_heads", "--kv-heads")):
        wanted, least = getattr(new, name), getattr(old, name)
        if wanted < least:
            raise ValueError(f"{option} {wanted}: {key} has {least}; give that or more")
    if new.hidden % old.hidden:
        nearest = math.ceil(new.hidden / old.hidden) * old.hidden
        raise ValueError(f"--hidden {new.hidden}: give a multiple of {key}'s {old.hidden}, {nearest} for example")
    group = old.heads // old.kv_heads
    if new.heads % new.kv_heads or new.heads // new.kv_heads < group:
        raise ValueError(
            f"--heads {new.heads} --kv-heads {new.kv_heads}: give a multiple of the key/value heads, at least {group} "
            f"for each as {key} has, {group * new.kv_heads} for example"
        )
    if new.hidden % new.heads and new != old:
        raise ValueError(
            f"--heads {new.heads}: give a divisor of the {new.hidden} channels, which Llama's config needs"
        )
    return Growth(old, new, head_dim, tuple(places))


def place_layers(old: int, new: int, taps: Sequence[tuple[int, int]], key: str) -> tuple[int, ...]:
    """Where the old layers go, so that each tapped state shows at its new number what it showed at its old one.

    ``taps`` are (old, new) numbers of states, both rising.

    Returns:
        [old] new numbers, from 0. Between two taps the old layers come first.

    Raises:
        ValueError: there are too few layers between two taps.
    """
    places: list[int] = []
    for (old_from, new_from), (old_to, new_to) in zip([(0, 0), *taps], [*taps, (old, new)], strict=True):
        if new_to - new_from < old_to - old_from:
            raise ValueError(f"--layers {new}: {key} has {old}, whose taps need that or more")
        places += range(new_from, new_from + old_to - old_from)
    return tuple(places)
