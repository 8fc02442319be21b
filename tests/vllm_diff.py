"""What changed between two releases of vLLM of all that this project relies on below vLLM's public surface.

Releases are wheels, folders into which one was unpacked, or installed packages; their syntax is read, and nothing is
imported or installed:

    pip download vllm==0.33.0 --no-deps --only-binary :all: --python-version 3.12 --platform manylinux_2_28_x86_64
    python tests/vllm_diff.py vllm-0.32.0-*.whl vllm-0.33.0-*.whl
    python tests/vllm_diff.py vllm-0.33.0-*.whl      # against our list of that version

Exit code 1 where something is gone, has other parameters, or is read of an object of ours that does not have it.
"""

import difflib
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from vllm_source import Place, Release  # noqa: E402

from vllm_crossspec.vllm_api.points import INVENTORIES, inventory_of  # noqa: E402

ReleasePath = Annotated[Path, Argument(help="A wheel of vLLM, an unpacked one, or an installed vllm/.")]


def main(
    first: ReleasePath,
    second: Annotated[
        Path | None, Argument(help="The later one; without it the first is held against our list.")
    ] = None,
    bodies: Annotated[bool, Option("--bodies", help="Show how the bodies of functions and classes differ.")] = False,
) -> None:
    """Print what two vLLMs have differently of our touch points, or what one has differently from our list of it."""
    try:
        release = Release(first)
        found = against_list(release) if second is None else between(release, Release(second), bodies)
    except (ValueError, OSError) as problem:
        typer.echo(str(problem), err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(found)


def against_list(release: Release) -> bool:
    """Print what is not as in our list of the release's version; whether something is."""
    inventory = inventory_of(release.version)
    if inventory is None:
        known = ", ".join(f"{major}.{minor}" for major, minor in INVENTORIES)
        raise ValueError(
            f"there is no list for vLLM {release.version} (there are {known}): compare it with the last that has one, "
            "`vllm_diff.py LAST THIS`"
        )
    found = [sentence for point in inventory.touch_points if (sentence := release.problem(point))]
    found += [sentence for stand_in in inventory.stand_ins for sentence in release.unknown_reads(stand_in)]
    for sentence in found:
        typer.echo(sentence)
    typer.echo(f"vLLM {release.version}: {len(inventory.touch_points)} touch points, {len(found)} not as listed")
    return bool(found)


def between(first: Release, second: Release, shows_bodies: bool) -> bool:
    """Print what the second has differently; whether names, parameters or reads are."""
    inventory = inventory_of(first.version) or INVENTORIES[max(INVENTORIES)]
    gone, moved, changed = [], [], []
    for point in inventory.touch_points:
        was, now, where = first.place(point), second.place(point), f"{point.module}.{point.name}"
        if was is None:
            continue
        if now is None:
            gone.append(f"{where} ({point.reason})")
        elif _parameters(was) != _parameters(now) and point.parameters is not None:
            moved.append(f"{where} ({point.reason})\n      was ({_parameters(was)})\n      now ({_parameters(now)})")
        if now is not None and point.parameters is not None and was.body != now.body:
            changed.append(where + (_lines(was, now) if shows_bodies else ""))
    reads = [
        sentence
        for stand_in in inventory.stand_ins
        for sentence in second.unknown_reads(stand_in)
        if sentence not in first.unknown_reads(stand_in)
    ]
    typer.echo(
        f"vLLM {first.version} -> {second.version}: {len(inventory.touch_points)} touch points of {inventory.release}"
    )
    titles = ("gone", "other parameters", "read of our objects, and new", "the same name, another body")
    for title, rows in zip(titles, (gone, moved, reads, changed), strict=True):
        typer.echo(f"\n{title}: {len(rows)}")
        for row in rows:
            typer.echo(f"  {row}")
    return bool(gone or moved or reads)


def _parameters(place: Place) -> str:
    """Names in order, optional ones with a mark."""
    return " ".join(p.name if p.default is p.empty else f"{p.name}?" for p in place.parameters or ())


def _lines(was: Place, now: Place) -> str:
    lines = list(difflib.unified_diff(was.body.splitlines(), now.body.splitlines(), lineterm="", n=1))[2:]
    return "".join(f"\n      {line}" for line in lines)


if __name__ == "__main__":
    typer.run(main)
