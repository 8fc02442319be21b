"""What the scripts share: the command line, and the JSON document that is the last line of their output."""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_crossspec.cli import meta


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser that shows a script's docstring and has ``--json``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the document to this file")
    return parser


def numbers(text: str) -> list[int]:
    """Whole numbers with commas between them."""
    return [int(part) for part in text.split(",")]


def names_of(known: Sequence[str], what: str) -> Any:
    """The type of an option that lists some of the ``known`` names; ``what`` one of them is, for the message."""

    def parse(text: str) -> list[str]:
        for name in (names := text.split(",")):
            if name not in known:
                raise argparse.ArgumentTypeError(f"there is no {what} {name!r}; known: {', '.join(known)}")
        return names

    return parse


def origin(benchmark: str) -> dict[str, Any]:
    """What a document's ``meta`` begins with: the command, the commit, the time and the machine."""
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return {"benchmark": benchmark, **meta.origin(), "command": command, "hardware": meta.hardware()}


def spread(values: Sequence[float], digits: int) -> dict[str, float]:
    """Median and 90th percentile."""
    ordered = sorted(values)
    p90 = ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
    return {"median": round(statistics.median(ordered), digits), "p90": round(p90, digits)}


def emit(document: dict[str, Any], file: Path | None) -> None:
    """Print the document as one line, and write it to ``file``."""
    if file is not None:
        file.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))
