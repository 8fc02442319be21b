"""The order in memory that the interpreter's numpy array of a value would have.

Our own arrays are always in C's order. But numpy adds the elements of an axis pairwise only where they follow each
other closest in memory, and an array that was transposed, or computed from one that was, is laid out the other way.
"""

from collections.abc import Sequence

Strides = tuple[int, ...]
"""In elements; 0 where an axis is broadcast."""


def c_order(shape: Sequence[int]) -> Strides:
    return in_order(shape, range(len(shape) - 1, -1, -1))


def in_order(shape: Sequence[int], order: Sequence[int]) -> Strides:
    """Of a new array whose axes are laid out in an order, the closest first."""
    strides, stride = [0] * len(shape), 1
    for axis in order:
        strides[axis] = stride
        stride *= shape[axis]
    return tuple(strides)


def axis_order(rank: int, operands: Sequence[Strides]) -> list[int]:
    """The axes as numpy goes through them, the innermost first: by stride, and C's order where operands disagree."""
    order: list[int] = []
    for axis in range(rank - 1, -1, -1):
        place = len(order)
        for at in range(len(order) - 1, -1, -1):
            closer = [(abs(s[order[at]]), abs(s[axis])) for s in operands if s[order[at]] and s[axis]]
            if closer and any(inner <= outer for inner, outer in closer):
                break
            if closer:
                place = at
        order.insert(place, axis)
    return order


def elementwise(shape: Sequence[int], operands: Sequence[Strides]) -> Strides:
    """Of the result of an operation on tensors of one shape."""
    return in_order(shape, axis_order(len(shape), operands)) if operands else c_order(shape)


def reduced(shape: Sequence[int], strides: Strides, axis: int) -> Strides:
    """Of what numpy makes of a tensor without an axis."""
    rest = strides[:axis] + strides[axis + 1 :]
    return elementwise([*shape[:axis], *shape[axis + 1 :]], [rest])


def is_innermost(shape: Sequence[int], strides: Strides, axis: int) -> bool:
    """Whether a reduction of an axis goes along it, and not from row to row."""
    axes = [d for d, size in enumerate(shape) if size > 1]
    if axis not in axes:
        return True
    kept = [shape[d] for d in axes], tuple(strides[d] for d in axes)
    result = list(reduced(*kept, axes.index(axis)))
    result.insert(axes.index(axis), 0)
    return axes[axis_order(len(axes), [tuple(result), kept[1]])[0]] == axis
