"""What was measured, for eyes and for programs: tables, notes below them, CSV, Markdown, and one HTML page."""

import csv
import html
import importlib.util
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from string import Template
from typing import Annotated, Any, NamedTuple

from rich.console import Console
from rich.table import Table
from typer import Option

from vllm_crossspec.cli import meta, options
from vllm_crossspec.cli.rows import ALL, PARTS, PERCENTILES, PLAIN, Percentiles, Row, rows
from vllm_crossspec.cli.runner import Measurement
from vllm_crossspec.cli.stages import wide_console
from vllm_crossspec.load.schedule import LOAD_PAGE
from vllm_crossspec.names import counted

MILLI = 1e3

CPU_SPEEDUP = (
    "On a CPU a part of the speedup is not speculation: without drafts, too, our engine is faster than plain vLLM "
    "(docs/develop/cpu-lane.md#products). To see that part, add a --spec row that never drafts, the same config with "
    '"by_batch_size": {"1": 0} in its `tree`; or send a server\'s requests with "crossspec": "off".'
)
SAMPLED = "not identical: sampled texts follow plain's distribution, and other draws of it are as good"
COMPILED = "seconds: of generating, with kernels compiled for this CPU ({cpu}); they say nothing of a GPU"


class Files(NamedTuple):
    """Where the results go, beside the terminal."""

    json_file: options.TableFile = None
    csv_file: Annotated[Path | None, Option("--csv", help="Write all rows as CSV.")] = None
    markdown: Annotated[Path | None, Option("--markdown", help="Write the tables as Markdown.")] = None
    html: Annotated[
        Path | None, Option("--html", help="Write one page with plots, tables and configs, for a browser.")
    ] = None

    def check(self) -> None:
        """Find out before the work that they can be written. Raises ValueError."""
        for option, file in zip(("--json", "--csv", "--markdown", "--html"), self, strict=True):
            options.check_file(option, file)
        if self.html is not None and importlib.util.find_spec("matplotlib") is None:
            raise ValueError('--html draws with matplotlib: run `pip install "vllm-crossspec[bench]"`')

    def write(self, found: Sequence[Row], about: dict[str, Any]) -> None:
        """Write those that are wanted."""
        options.write_json(self.json_file, {"rows": [asdict(row) for row in found], "meta": about})
        if self.csv_file is not None:
            with self.csv_file.open("w", newline="") as out:
                writer = csv.DictWriter(out, list(flat(found[0])))
                writer.writeheader()
                writer.writerows(map(flat, found))
        if self.markdown is not None:
            write_markdown(self.markdown, found, about)
        if self.html is not None:
            write_html(self.html, found, about)


def measure(
    measurement: Measurement, settings: dict[str, Any], files: Files, side_by_side: int = 1, tables: str = "both"
) -> list[Row]:
    """Carry a measurement out, print its tables and write the files; the rows.

    If an engine fails or the user ends it, what is done is shown and written all the same. The document's ``meta`` has
    the ``settings``, and then the ``unfinished`` methods. The tables are ``both``, of speeds and of counts, or
    ``counts`` alone, or ``timed``: counts with tokens a second.
    """
    try:
        measurement.carry_out(side_by_side)
    except BaseException:
        if measurement.runs:
            _show(measurement, settings | {"unfinished": measurement.unfinished}, files, tables)
        raise
    return _show(measurement, settings, files, tables)


def _show(measurement: Measurement, settings: dict[str, Any], files: Files, tables: str) -> list[Row]:
    runs = measurement.runs
    about = meta.describe(runs, settings)
    measured = rows(runs, shares=measurement.shares)
    console, caption, smallest = wide_console(), seconds_note(about), measured[0].batch_size
    if tables == "both":
        console.print(speed_table(measured, caption))
    console.print(count_table([row for row in measured if row.batch_size == smallest], caption, tables == "timed"))
    if tables != "counts" and (note := speedup_note(measured, about)):
        console.print(note, highlight=False, markup=False)
    if settings["sampling"]["temperature"] > 0 and any(row.identical_to_plain is False for row in measured):
        console.print(SAMPLED)
    ours = [row for row in measured if row.category == ALL and row.method != PLAIN and row.num_target_calls]
    size = " (batch size {})" if len({row.batch_size for row in ours}) > 1 else ""
    idle = [row for row in ours if not row.num_draft_tokens and not any(row.accepted_per_position)]
    if idle:
        say_nothing_was_drafted(row.method + size.format(row.batch_size) for row in idle)
    files.write(measured, about)
    return measured


def say_nothing_was_drafted(names: Iterable[str]) -> None:
    """On stderr, beside the table: it is no result."""
    Console(stderr=True).print(
        f"note: {', '.join(names)}: nothing was drafted. Drafts did not pay on this machine at this load, or requests "
        f'asked for none. To draft all the same, put "by_batch_size": {{"1": 60}} into the tree ({LOAD_PAGE}).',
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def seconds_note(about: Mapping[str, Any]) -> str | None:
    """Of what the seconds are, by the document's `meta`; None on a GPU."""
    return COMPILED.format(**about["hardware"]) if about["hardware"]["device"] == "cpu" else None


# -- columns ----------------------------------------------------------------------------------------------------------

Column = tuple[str, Callable[[Row], str]]


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def spread(middle: float | None, ends: Sequence[float] | None, digits: int) -> str:
    """The median, and the least and the most where they differ from it."""
    if ends is None or len({f"{end:.{digits}f}" for end in ends}) == 1:
        return number(middle, digits)
    return f"{number(middle, digits)} ({ends[0]:.{digits}f}-{ends[1]:.{digits}f})"


def milliseconds(found: Percentiles | None) -> str:
    values = () if found is None else [MILLI * value for value in found.values()]
    return " ".join(f"{value:.{1 if value < 100 else 0}f}" for value in values) or "-"


def parts(found: Mapping[str, float] | None) -> str:
    return "-" if found is None else " ".join(f"{100 * found[part]:.0f}" for part in PARTS)


def identical(row: Row) -> str:
    return {None: "-", True: "yes", False: "no"}[row.identical_to_plain]


def routes(found: Mapping[str, float] | None) -> str:
    return "-" if found is None else " ".join(f"{name} {100 * share:.0f}" for name, share in found.items())


def positions(row: Row, width: int = 1) -> str:
    """In how many percent of the rounds the first, second, ... draft token was accepted."""
    shares = [100 * count / row.num_rounds for count in row.accepted_per_position if row.num_rounds]
    return " ".join(f"{share:{width}.0f}" for share in shares)


_ORDER = "p" + "/".join(map(str, PERCENTILES))
SPEEDS: tuple[Column, ...] = (
    ("method", lambda row: row.method),
    ("batch size", lambda row: str(row.batch_size)),
    ("tokens a second", lambda row: spread(row.tokens_per_second, row.tokens_per_second_range, 1)),
    ("speedup", lambda row: spread(row.speedup, row.speedup_range, 2)),
    (f"TTFT ms {_ORDER}", lambda row: milliseconds(row.ttft)),
    (f"TPOT ms {_ORDER}", lambda row: milliseconds(row.tpot)),
    (f"ITL ms {_ORDER}", lambda row: milliseconds(row.itl)),
    ("tokens a call", lambda row: number(row.tokens_per_call, 2)),
    ("target draft rest %", lambda row: parts(row.round_shares)),
    ("identical to plain", identical),
)
"""Columns of the table of speeds."""

COUNTS: tuple[Column, ...] = (
    ("method", lambda row: row.method),
    ("batch size", lambda row: str(row.batch_size)),
    ("category", lambda row: row.category),
    ("prompts", lambda row: str(row.num_prompts)),
    ("tokens", lambda row: str(row.num_tokens)),
    ("target calls", lambda row: str(row.num_target_calls)),
    ("rounds", lambda row: str(row.num_rounds)),
    ("rounds with drafts", lambda row: str(row.num_drafted_rounds)),
    ("verified tokens", lambda row: "-" if row.num_verified_tokens is None else str(row.num_verified_tokens)),
    ("tokens a round", lambda row: number(row.tokens_per_round, 2)),
    ("acceptance length", lambda row: number(row.acceptance_length, 2)),
    ("acceptance rate", lambda row: number(row.acceptance_rate, 3)),
    ("accepted per position (% of rounds)", positions),
    ("rounds by drafter %", lambda row: routes(row.route_shares)),
    ("speedup", lambda row: spread(row.speedup, row.speedup_range, 2)),
    ("identical to plain", identical),
)
"""Columns of the table of counts."""


def speedup_note(rows: Sequence[Row], about: Mapping[str, Any]) -> str | None:
    """What else a speedup shows beside speculation, by the document's `meta`; None on a GPU and without a speedup."""
    has_speedup = any(row.method != PLAIN and row.speedup is not None for row in rows)
    return CPU_SPEEDUP if has_speedup and about["hardware"]["device"] == "cpu" else None


def speed_table(rows: Sequence[Row], caption: str | None) -> Table:
    """A row a method and batch size, over all categories; the caption says of what its seconds are."""
    grid = Table(caption=caption, caption_justify="left")
    for name, _ in SPEEDS:
        is_method = name == "method"
        grid.add_column(name.replace(" ", "\n", 1), justify="left" if is_method else "right", no_wrap=is_method)
    chosen = [row for row in rows if row.category == ALL]
    for row, following in zip(chosen, [*chosen[1:], None], strict=True):
        ends = following is not None and following.batch_size != row.batch_size
        grid.add_row(*(cell(row) for _, cell in SPEEDS), end_section=ends)
    return grid


def count_table(rows: Sequence[Row], caption: str | None, is_timed: bool = False) -> Table:
    """A row a method and category; with tokens a second and speedup in place of rounds and verified tokens."""
    work, speeds = ("rounds with drafts", "verified tokens"), ("tokens a second", "speedup")
    names = ("prompts", "tokens", "target calls", *(speeds if is_timed else work), "acceptance length")
    cells = dict([*SPEEDS, *COUNTS])
    grid = Table(caption=caption, caption_justify="left")
    grid.add_column("method", min_width=max(len(row.method) for row in rows))
    grid.add_column("category")
    for name in names:
        grid.add_column("\n".join(name.rsplit(" ", 1)), justify="right")
    grid.add_column("accepted per position\n(% of rounds)", no_wrap=True)
    grid.add_column("identical\nto plain", justify="center")
    grid.add_column("seconds", justify="right")
    for row in rows:
        numbers = (cells[name](row) for name in names)
        same, is_sum = identical(row).replace("no", "[red]no[/red]"), row.category == ALL
        words = (row.method, row.category, *numbers, positions(row, width=2), same, f"{row.seconds:.2f}")
        grid.add_row(*words, style="bold" if is_sum else None, end_section=is_sum)
    return grid


def flat(row: Row) -> dict[str, Any]:
    """The row with one value a column, as CSV takes it."""
    cells: dict[str, Any] = {}
    for name, value in asdict(row).items():
        if name in ("ttft", "tpot", "itl"):
            cells |= {f"{name}_p{p}": (value or {}).get(f"p{p}") for p in PERCENTILES}
        elif name.endswith("_range"):
            base = name.removesuffix("_range")
            cells[f"{base}_min"], cells[f"{base}_max"] = value or (None, None)
        elif name == "round_shares":
            cells |= {f"round_{part}": (value or {}).get(part) for part in (*PARTS, "seconds")}
        elif name == "route_shares":
            cells[name] = " ".join(f"{drafter}={share:.4f}" for drafter, share in (value or {}).items())
        elif name in ("accepted_per_position", "seconds_by_repeat"):
            cells[name] = " ".join(map(str, value))
        else:
            cells[name] = value
    return cells


def write_markdown(file: Path, rows: Sequence[Row], about: Mapping[str, Any]) -> None:
    """The tables of speeds and of counts, with the notes below them."""
    tables = [_markdown(SPEEDS, (row for row in rows if row.category == ALL)), _markdown(COUNTS, rows)]
    notes = filter(None, (seconds_note(about), speedup_note(rows, about)))
    file.write_text("\n\n".join([*tables, *notes]) + "\n")


def _markdown(columns: Sequence[Column], rows: Iterable[Row]) -> str:
    lines = [[name for name, _ in columns], ["---"] * len(columns)]
    lines += [[cell(row) for _, cell in columns] for row in rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def write_html(file: Path, rows: Sequence[Row], about: Mapping[str, Any]) -> None:
    """One page with everything in it: plots, tables, configs, and what it was measured with."""
    from vllm_crossspec.cli.plots import draw

    hardware, escape = about["hardware"], html.escape
    machine = {
        "model": about["model"],
        "device": hardware["device"],
        "processor": f"{hardware['cpu']}, {counted(hardware['cores'], 'core')}, {hardware['memory_gib']} GiB",
        "versions": ", ".join(f"{name} {version}" for name, version in about["versions"].items()),
        "commit": about["commit"] or "-",
        "date": about["date"],
        "command": about["command"],
        "sampling": json.dumps(about["sampling"]),
        "repeats": f"{about['repeats']}, {about['engines']}",
    }
    page = Template(Path(__file__).with_name("page.html").read_text())
    content = page.substitute(
        title=escape(f"crossspec bench: {about['model']}"),
        model=escape(Path(about["model"]).name),
        notes="\n".join(map(_note, [seconds_note(about), *about["notes"]])),
        plots="".join(draw(rows)),
        speeds=_table(SPEEDS, [row for row in rows if row.category == ALL]),
        counts=_table(COUNTS, rows),
        speedup=_note(speedup_note(rows, about)),
        configs=escape(json.dumps(about["configs"], indent=2)),
        facts="".join(f"<tr><th>{escape(k)}</th><td>{escape(str(v))}</td></tr>" for k, v in machine.items()),
    )
    file.write_text(content)


def _note(text: str | None) -> str:
    return f'<p class="note">{html.escape(text)}</p>' if text else ""


def _table(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    lines = ["<tr>" + "".join(f"<th>{html.escape(name)}</th>" for name, _ in columns) + "</tr>"]
    for row in rows:
        cells = ((name, html.escape(cell(row))) for name, cell in columns)
        written = "".join(f"<td{_style(name, text)}>{text}</td>" for name, text in cells)
        is_sum = columns is COUNTS and row.category == ALL
        lines.append(f"<tr{' class=all' if is_sum else ''}>{written}</tr>")
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def _style(name: str, text: str) -> str:
    """The class of a cell: a list of numbers needs width, a text unlike plain's is marked."""
    is_marked = name == "identical to plain" and text == "no"
    return " class=no" if is_marked else " class=list" if text.count(" ") > 2 else ""
