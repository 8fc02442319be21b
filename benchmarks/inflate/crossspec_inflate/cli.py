"""`crossspec inflate`: the pocket models at a real model's shape, with the same text and the same acceptance."""

import os
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.progress import DownloadColumn
from rich.table import Table
from typer import Option

from vllm_crossspec.cli.demo import METHODS, SIDE_BY_SIDE, demo_prompts, job_of, measurement_of
from vllm_crossspec.cli.models import folders_of
from vllm_crossspec.cli.options import grouped, name_list
from vllm_crossspec.cli.prompts import read_prompts
from vllm_crossspec.cli.rows import PLAIN, Run, rows
from vllm_crossspec.cli.runner import first_of_each
from vllm_crossspec.cli.stages import bars
from vllm_crossspec.names import counted, look_up
from vllm_crossspec.pocket_models import find_pocket

if TYPE_CHECKING:  # torch takes seconds to import, and --help needs none of it
    from collections.abc import Iterator

    from crossspec_inflate.folder import Plan

CHECKED_PROMPTS, CHECKED_TOKENS = 1, 32
"""Of each category, and of each answer."""
INFLATED = ", inflated"
DIFFERS = (
    "crossspec: the inflated models differ from their source; a near-tie in float32 may do that where a state lies in "
    "copies (--help), and nothing else should"
)
ROUTER = {"policy": "neural", "model": "{pocket}/router", "threshold": 0.0}
"""One whose threshold does not hang on what rounds cost."""
SMALL_BYTES = 10**9
"""Largest models that several engines may run at a time."""
GREEDY = {"temperature": 0.0, "max_tokens": CHECKED_TOKENS}


class Sizes(NamedTuple):
    """The shape of the target."""

    shape: Annotated[
        str | None,
        Option(
            help="0.2b, 0.6b, 1.7b, 4b or 8b, as Qwen3's. Sizes below take their default from it, else from the source."
        ),
    ] = None
    hidden: Annotated[int | None, Option(min=1, help="Channels: a multiple of the source's.")] = None
    layers: Annotated[int | None, Option(min=1, help="Decoder layers.")] = None
    mlp: Annotated[int | None, Option(min=1, help="Width of the MLPs.")] = None
    heads: Annotated[int | None, Option(min=1, help="Query heads.")] = None
    kv_heads: Annotated[int | None, Option(min=1, help="Key/value heads.")] = None


@grouped
def inflate(
    *,
    out: Annotated[Path, Option(help="Folder to write: target/, and one folder for each drafter.")],
    model: Annotated[
        Path | None, Option(help="Folder of the target; drafters are looked for beside it. Default: the pocket target.")
    ] = None,
    sizes: Sizes,
    drafters: Annotated[
        str | None,
        Option(
            help="Comma-separated folders beside the target: drafters, clusters, router and so on; or `none`. "
            "Default: all that can grow with it."
        ),
    ] = None,
    draft_shape: Annotated[
        str | None, Option(help="Shape of draft models, which read no states of the target. Default: they stay small.")
    ] = None,
    dtype: Annotated[
        str | None, Option(help="float32 or bfloat16. Default: the source's, bfloat16 for pocket.")
    ] = None,
    device: Annotated[str, Option(help="auto, cpu or cuda: where tensors are made.")] = "auto",
    check: Annotated[
        bool,
        Option(
            "--check/--no-check",
            help="Generate with both, in float32 (memory: twice that of bfloat16), and compare texts and acceptance.",
        ),
    ] = True,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace what an earlier run wrote.")] = False,
) -> None:
    """Make a target and its drafters larger without changing a token of what they compute.

    For benchmarks: rounds then cost what the shape costs, while the text, the drafts and their acceptance are those of
    the small models, so that speed-ups are real ones for that text. They say nothing of how well a trained model of
    that size writes, nor of how well its drafter guesses. docs/develop/inflated-models.md has what such a figure shows.

    Channels, heads, MLP columns and layers are added that compute random numbers which nothing reads. Layers are
    placed where drafters' taps see what they saw. Norms are scaled by powers of two alone, so that nothing is rounded
    otherwise than before; only the order of a sum may differ. If the width does not grow by a power of four (2048,
    2560), a state lies there in two or four copies. This changes the order of its mean square, and in float32 a
    near-tie may fall the other way once in a long text.

    The vocabulary, the size of a head and the drafters' number of layers stay the source's; the pocket's DFlash has two
    layers, public ones have five.

    Example: crossspec inflate --out big --shape 0.6b && crossspec demo --pocket big
    """
    from crossspec_inflate import folder

    model = model or find_pocket() / "target"
    folder.check_out(out, overwrite)
    plan = folder.make_plan(_wish(model, sizes, drafters, draft_shape, dtype, device))
    folder.check_space(out, plan.size)
    for sentence in plan.left_out:
        typer.secho(f"left out: {sentence}", err=True)
    with _byte_bars(plan) as report:
        folder.write_plan(plan, out, report)
    Console().print(_description(out, plan))
    if check:
        names, side_by_side = [part.name for part in plan.parts], SIDE_BY_SIDE if plan.size < SMALL_BYTES else 1
        compare(model.resolve().parent, out, names, side_by_side)


def _wish(
    model: Path, sizes: Sizes, drafters: str | None, draft_shape: str | None, dtype: str | None, device: str
) -> Any:
    """What is asked for. Raises ValueError."""
    import torch

    from crossspec_inflate.folder import Wish
    from crossspec_inflate.growth import SHAPES
    from crossspec_tools.devices import choose_device

    given = {name: size for name, size in sizes._asdict().items() if name != "shape" and size is not None}
    if sizes.shape is None and not given:
        raise ValueError(
            f"give --shape ({', '.join(SHAPES)}), or sizes: --hidden, --layers, --mlp, --heads, --kv-heads"
        )
    named = look_up(sizes.shape, SHAPES, "--shape", "shape")._asdict() if sizes.shape is not None else {}
    if dtype not in (None, "float32", "bfloat16"):
        raise ValueError(f"--dtype {dtype}: choose float32 or bfloat16")
    names = None if drafters is None else name_list(drafters)
    return Wish(
        model=model,
        names=[] if names == ["none"] else names,
        sizes={**named, **given},
        draft=look_up(draft_shape, SHAPES, "--draft-shape", "shape") if draft_shape is not None else None,
        dtype=getattr(torch, dtype) if dtype is not None else None,
        device=choose_device(device),
    )


@contextmanager
def _byte_bars(plan: "Plan") -> "Iterator[Callable[[str], Callable[[int], None]]]":
    """A bar for each part, in bytes; yields what makes a part's listener."""
    with bars(DownloadColumn()) as progress:
        tasks = {part.name: progress.add_task(part.name, total=part.size, start=False) for part in plan.parts}

        def begin(name: str) -> Callable[[int], None]:
            progress.start_task(tasks[name])
            return lambda written: progress.advance(tasks[name], written)

        yield begin


def _description(out: Path, plan: "Plan") -> Table:
    old, new = plan.growth.old, plan.growth.new
    table = Table(title=str(out))
    for column in ("", "weights", "MB"):
        table.add_column(column, justify="left" if not column else "right")
    for part in plan.parts:
        table.add_row(
            part.name, f"{part.num_weights / 1e6:,.1f} M" if part.num_weights else "", f"{part.size / 1e6:,.1f}"
        )
    sizes = ", ".join(f"{name} {a} to {b}" for name, a, b in zip(old._fields, old, new, strict=True))
    table.caption = f"{sizes}; the source's layers are {', '.join(map(str, plan.growth.places))}"
    return table


# -- the check ------------------------------------------------------------------------------------------------


def checked_methods(names: Sequence[str]) -> dict[str, dict[str, Any] | None]:
    """Of the demo's methods those that use these folders, one for each; `plain` first."""
    left, methods = set(names) - {"target"}, {PLAIN: METHODS[PLAIN]}
    for name, config in METHODS.items():
        used = set(folders_of(config))
        if used & left and used <= set(names):
            if config is not None and config.get("router"):
                name, config = "whiflash", {**config, "router": ROUTER}
            methods[name] = config
            left -= used
    return methods


def compare(source: Path, out: Path, names: Sequence[str], side_by_side: int) -> None:
    """Generate with both folders' models and print what is the same; exit with 1 where something is not."""
    os.environ.setdefault("CROSSSPEC_FIXED_WIDTHS", "1")  # acceptance is compared, at whatever a round costs
    prompts = first_of_each(read_prompts(demo_prompts()), CHECKED_PROMPTS)
    methods = checked_methods(names)
    jobs = [
        job_of(name + ending, config, folder, prompts, GREEDY)
        for name, config in methods.items()
        for ending, folder in (("", source), (INFLATED, out))
    ]
    measurement = measurement_of(jobs)
    measurement.carry_out(side_by_side)
    runs = {run.method: run for run in measurement.runs}
    table = Table(title=f"{out} beside {source}: {counted(len(prompts), 'prompt')}, {CHECKED_TOKENS} tokens each")
    for column in ("method", "text", "accepted in each round", "acceptance length"):
        table.add_column(column, justify="right" if column == "acceptance length" else "left")
    is_same = []
    for name in methods:
        cells, is_row_same = _compared([runs[name], runs[name + INFLATED]])
        table.add_row(name, *cells)
        is_same.append(is_row_same)
    Console().print(table)
    if not all(is_same):
        typer.secho(DIFFERS, fg=typer.colors.RED, err=True)
        raise typer.Exit(1)


def _compared(runs: Sequence[Run]) -> tuple[list[str], bool]:
    """A row's cells, and whether all is the same."""
    generations = [[g for group in run.groups.values() for g in group["generations"]] for run in runs]
    same = [
        [g[field] for g in generations[0]] == [g[field] for g in generations[1]]
        for field in ("token_ids", "accepted_histogram")
    ]
    lengths = [f"{row.acceptance_length:.4f}" for row in (rows([run])[-1] for run in runs)]
    cells = ["same" if is_same else "DIFFERS" for is_same in same]
    return [*cells, lengths[0] if lengths[0] == lengths[1] else " / ".join(lengths)], all(same)
