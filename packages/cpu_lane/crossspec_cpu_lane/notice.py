"""What the lane says to its user: one line each."""

import warnings


def warn(sentence: str) -> None:
    """A RuntimeWarning without the line of source that Python shows below one: that would be the lane's own."""
    warnings.warn_explicit(sentence, RuntimeWarning, filename="crossspec-cpu-lane", lineno=0)
