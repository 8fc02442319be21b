"""Where vLLM keeps the texts of its requests."""

import contextlib
from collections.abc import Iterator
from typing import Any

from vllm_crossspec.config.schema import CrossSpecConfig


@contextlib.contextmanager
def texts_where_searched(settings: CrossSpecConfig, vllm_config: Any) -> Iterator[None]:
    """While a runner is made: keep texts in the device's memory where a drafter searches them.

    vLLM's runner keeps them in pinned host memory, which a GPU reads over the bus, except for its own n-gram method. It
    asks the method once, before it makes its request states. Other methods carry our drafters.
    """
    speculative = vllm_config.speculative_config
    if any(drafter.lookup is not None for drafter in settings.drafters.values()):

        def use_ngram() -> bool:
            del speculative.use_ngram  # before the speculator copies the config
            return True

        speculative.use_ngram = use_ngram
    try:
        yield
    finally:
        vars(speculative).pop("use_ngram", None)
