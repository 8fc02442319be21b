"""The differences between two settings in words: the options of a command, or the keys of an object."""

import json
import shlex
from collections.abc import Mapping
from typing import Any

LONGEST = 60
"""Most characters shown of a value; a longer one is cut to the part that differs."""


def differences(found: Mapping[str, Any], here: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Sorted "KEY (VALUE, here VALUE)" of every key that differs between the stored and the current settings."""
    said = []
    for name in sorted({*found, *here}):
        before, now = found.get(name), here.get(name)
        if before == now:
            continue
        if isinstance(before, dict) and isinstance(now, dict):
            said += differences(before, now, f"{prefix}{name}.")
        elif name == "command" and isinstance(before, str) and isinstance(now, str):
            said += differences(_options(before), _options(now))
        else:
            said.append(f"{prefix}{name} ({_short(before, now)}, here {_short(now, before)})")
    return said


def _options(command: str) -> dict[str, Any]:
    """Options of a command line, with their values."""
    options: dict[str, Any] = {}
    name = "command"
    for word in shlex.split(command):
        if word.startswith("--"):
            name = word
            options.setdefault(name, "")
        else:
            options[name] = f"{options.get(name, '')} {word}".strip()
    return options


def _short(value: Any, other: Any) -> str:
    if value is None or value == "":
        return "none" if value is None else "given"
    text, beside = (one if isinstance(one, str) else json.dumps(one) for one in (value, other))
    if len(text) <= LONGEST:
        return text
    same = next((i for i, (a, b) in enumerate(zip(text, beside, strict=False)) if a != b), len(text))
    start = max(0, min(same - 10, len(text) - LONGEST))
    end = start + LONGEST
    return "..." * bool(start) + text[start:end] + "..." * (end < len(text))
