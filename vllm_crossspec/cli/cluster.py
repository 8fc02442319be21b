"""Ray, for commands that share work among engines or machines."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def ray_connected() -> Iterator[Any]:
    """The module ``ray``, connected to a cluster. A connection made here ends with the block; one made before stays.

    Raises ModuleNotFoundError: Ray is not installed.
    """
    import ray

    ours = not ray.is_initialized()
    if ours:
        ray.init(log_to_driver=False)
    try:
        yield ray
    finally:
        if ours:
            ray.shutdown()
