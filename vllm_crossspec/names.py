"""Look-up of users' names with suggestions for typing errors, and plurals of nouns."""

import difflib
from collections.abc import Collection, Mapping
from typing import TypeVar

PLUGIN = "crossspec"  # as vLLM knows it
DEBUG_VARIABLE = "CROSSSPEC_DEBUG"
"""Environment variable that shows the traceback of a user's mistake."""

T = TypeVar("T")


def nearest(word: str, known: Collection[str]) -> str:
    """The end of a sentence that refuses ``word``: the nearest known name, or all of them."""
    close = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(sorted(known))}" if known else ""


def counted(count: int, noun: str, spec: str = "") -> str:
    """A number and its noun, given in the singular: "1 prompt", "2 prompts", "3 entries"."""
    if count != 1:
        is_y = noun.endswith("y") and noun[-2] not in "aeiou"
        noun = noun[:-1] + "ies" if is_y else noun + ("es" if noun.endswith(("s", "x", "sh", "tch")) else "s")
    return f"{count:{spec}} {noun}"


def look_up(name: str, table: Mapping[str, T], key: str, what: str) -> T:
    """``table[name]``; an unknown name raises a ValueError with ``key``, the kind of thing, and the nearest name."""
    if name not in table:
        raise ValueError(f"{key}: no {what} is called {name!r}{nearest(name, table)}")
    return table[name]
