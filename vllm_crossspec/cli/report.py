"""What `crossspec bench` measured, for eyes and for programs: a table of speeds, CSV, Markdown, and one HTML page."""

import csv
import html
import importlib.util
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from vllm_crossspec.cli.rows import ALL, PARTS, PERCENTILES, Percentiles, Row

MILLI = 1e3
LATENCIES = ("ttft", "tpot", "itl")

Column = tuple[str, Callable[[Row], str]]


def number(value: float | None, digits: int) -> str:
    """A number, or a dash for none."""
    return "-" if value is None else f"{value:.{digits}f}"


def spread(middle: float | None, ends: Sequence[float] | None, digits: int) -> str:
    """The median, and the least and the most where they differ from it."""
    if ends is None or len({f"{end:.{digits}f}" for end in ends}) == 1:
        return number(middle, digits)
    return f"{number(middle, digits)} ({ends[0]:.{digits}f}-{ends[1]:.{digits}f})"


def milliseconds(found: Percentiles | None) -> str:
    """Percentiles in milliseconds."""
    return "-" if found is None else " ".join(f"{MILLI * value:.{_digits(value)}f}" for value in found.values())


def _digits(seconds: float) -> int:
    return 1 if seconds * MILLI < 100 else 0


def parts(found: Mapping[str, float] | None) -> str:
    """Shares in percent."""
    return "-" if found is None else " ".join(f"{100 * found[part]:.0f}" for part in PARTS)


def identical(row: Row) -> str:
    """Whether texts are plain's, in a word."""
    return {None: "-", True: "yes", False: "no"}[row.identical_to_plain]


def routes(found: Mapping[str, float] | None) -> str:
    """Rounds by drafter, in percent."""
    return "-" if found is None else " ".join(f"{name} {100 * share:.0f}" for name, share in found.items())


def positions(row: Row) -> str:
    """In how many percent of the rounds the first, second, ... draft token was accepted."""
    return " ".join(f"{100 * count / row.num_rounds:.0f}" for count in row.accepted_per_position if row.num_rounds)


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


def speed_table(rows: Sequence[Row], caption: str | None) -> Table:
    """A row a method and batch size, over all categories.

    Args:
        rows: of all runs.
        caption: what its seconds are of.
    """
    grid = Table(caption=caption, caption_justify="left")
    for name, _ in SPEEDS:
        grid.add_column(
            name.replace(" ", "\n", 1), justify="left" if name == "method" else "right", no_wrap=name == "method"
        )
    chosen = [row for row in rows if row.category == ALL]
    for row, following in zip(chosen, [*chosen[1:], None], strict=True):
        ends = following is not None and following.batch_size != row.batch_size
        grid.add_row(*(cell(row) for _, cell in SPEEDS), end_section=ends)
    return grid


def flat(row: Row) -> dict[str, Any]:
    """The row with one value a column, as CSV takes it."""
    cells: dict[str, Any] = {}
    for name, value in asdict(row).items():
        if name in LATENCIES:
            cells |= {f"{name}_p{p}": (value or {}).get(f"p{p}") for p in PERCENTILES}
        elif name.endswith("_range"):
            least, most = value or (None, None)
            base = name.removesuffix("_range")
            cells |= {f"{base}_min": least, f"{base}_max": most}
        elif name == "round_shares":
            cells |= {f"round_{part}": (value or {}).get(part) for part in (*PARTS, "seconds")}
        elif name == "route_shares":
            cells[name] = " ".join(f"{drafter}={share:.4f}" for drafter, share in (value or {}).items())
        elif name in ("accepted_per_position", "seconds_by_repeat"):
            cells[name] = " ".join(map(str, value))
        else:
            cells[name] = value
    return cells


def write_csv(file: Path, rows: Sequence[Row]) -> None:
    """A line a row."""
    lines = [flat(row) for row in rows]
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)


def write_markdown(file: Path, rows: Sequence[Row], caption: str | None) -> None:
    """The tables of speeds and of counts."""
    tables = [_markdown(SPEEDS, (row for row in rows if row.category == ALL)), _markdown(COUNTS, rows)]
    file.write_text("\n\n".join([*tables, *([caption] if caption else [])]) + "\n")


def _markdown(columns: Sequence[Column], rows: Iterable[Row]) -> str:
    lines = [[name for name, _ in columns], ["---"] * len(columns)]
    lines += [[cell(row) for _, cell in columns] for row in rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


# -- the page ---------------------------------------------------------------------------------------------------------

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c1e21; background: #fff; max-width: 96rem; margin: 2rem auto;
  padding: 0 1.5rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.wide { overflow-x: auto; } .plots { display: flex; flex-wrap: wrap; gap: 1rem; }
.plots svg { width: calc(50% - 0.5rem); min-width: 24rem; height: auto; flex-grow: 1; }
table { border-collapse: collapse; font-size: 0.82rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25rem 0.6rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th { vertical-align: bottom; white-space: normal; background: #f4f5f7; }
th:first-child, td:first-child { text-align: left; }
td.no { color: #b00020; font-weight: bold; } tr.all { font-weight: 600; }
p.note { background: #fff6dd; padding: 0.5rem 0.8rem; } pre { background: #f4f5f7; padding: 0.8rem; overflow-x: auto; }
"""


def require_plots() -> None:
    """Find out before the work that plots can be drawn. Raises ValueError."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError('--html draws with matplotlib: run `pip install "vllm-crossspec[bench]"`')


def write_html(file: Path, rows: Sequence[Row], about: Mapping[str, Any], caption: str | None) -> None:
    """One page with everything in it: plots, tables, configs, and what it was measured with."""
    from vllm_crossspec.cli.plots import draw

    hardware, escape = about["hardware"], html.escape
    machine = {
        "model": about["model"],
        "device": hardware["device"],
        "processor": f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['memory_gib']} GiB",
        "versions": ", ".join(f"{name} {version}" for name, version in about["versions"].items()),
        "commit": about["commit"] or "-",
        "date": about["date"],
        "command": about["command"],
        "sampling": json.dumps(about["sampling"]),
        "repeats": f"{about['repeats']}, {about['engines']}",
    }
    facts = "".join(f"<tr><th>{escape(k)}</th><td>{escape(str(v))}</td></tr>" for k, v in machine.items())
    body = [
        f"<h1>Speculative decoding of {escape(Path(about['model']).name)}</h1>",
        *(f'<p class="note">{escape(note)}</p>' for note in [*([caption] if caption else []), *about["notes"]]),
        f'<div class="plots">{"".join(draw(rows))}</div>',
        "<h2>Speed, over all categories</h2>",
        "<p>Medians of the repeats, with the least and the most of them. A speedup is of the same repeat of plain.</p>",
        _table(SPEEDS, [row for row in rows if row.category == ALL]),
        "<h2>Counts, by category</h2>",
        _table(COUNTS, rows),
        "<h2>Speculative configs</h2>",
        f"<pre>{escape(json.dumps(about['configs'], indent=2))}</pre>",
        f'<h2>Measured with</h2><div class="wide"><table class="facts">{facts}</table></div>',
    ]
    title = escape(f"crossspec bench: {about['model']}")
    file.write_text(
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _table(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    lines = ["<tr>" + "".join(f"<th>{html.escape(name)}</th>" for name, _ in columns) + "</tr>"]
    for row in rows:
        cells = ((name, html.escape(cell(row))) for name, cell in columns)
        written = "".join(
            f"<td{' class=no' if name == 'identical to plain' and text == 'no' else ''}>{text}</td>"
            for name, text in cells
        )
        is_sum = columns is COUNTS and row.category == ALL
        lines.append(f"<tr{' class=all' if is_sum else ''}>{written}</tr>")
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'
