"""Operations on host arrays."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.int64]


def ranges(starts: Array, counts: Array) -> Array:
    """``concatenate([arange(s, s + c) for s, c in zip(starts, counts)])``, without the loop."""
    ends = np.cumsum(counts)
    firsts: Array = np.repeat(starts - (ends - counts), counts)
    return firsts + np.arange(int(ends[-1]) if len(ends) else 0)
