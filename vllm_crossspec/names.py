"""Names that users write, and the nearest known one where they mistype."""

import difflib
from collections.abc import Collection, Mapping
from typing import TypeVar

DEBUG_VARIABLE = "CROSSSPEC_DEBUG"
"""Environment variable that asks for the traceback of a user's mistake."""

T = TypeVar("T")


def nearest(word: str, known: Collection[str]) -> str:
    """The end of a sentence that refuses ``word``: the nearest known name, or all of them."""
    close = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(sorted(known))}" if known else ""


def look_up(name: str, table: Mapping[str, T], key: str, what: str) -> T:
    """``table[name]``.

    Raises:
        ValueError: there is none; the sentence names ``key``, says ``what`` is meant, and the nearest name.
    """
    if name not in table:
        raise ValueError(f"{key}: no {what} is called {name!r}{nearest(name, table)}")
    return table[name]
