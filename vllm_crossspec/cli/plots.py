"""The plots of a benchmark's page, as SVG that stands in the page itself."""

import io
from collections.abc import Iterator, Sequence
from typing import Any

from vllm_crossspec.cli.rows import ALL, PARTS, PLAIN, Row

COLOURS = ("#9d9d9d", "#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#eeca3b", "#9d755d", "#ff9da6")
"""Of methods, in their order; plain is grey."""
PART_COLOURS = dict(zip(PARTS, ("#4c78a8", "#f58518", "#cccccc"), strict=True))
STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "crossspec", "font.family": "sans-serif", "font.size": 9}
SIZE = (6.0, 3.4)
"""Inches of a plot."""


def draw(rows: Sequence[Row]) -> Iterator[str]:
    """SVG elements: speed by batch size, acceptance by position, tokens a round by category, parts of a round.

    A plot of nothing is left out. Counts are those of the smallest batch size.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    methods = list(dict.fromkeys(row.method for row in rows))
    others = iter(COLOURS[1:] * (1 + len(methods) // (len(COLOURS) - 1)))
    colours = {method: COLOURS[0] if method == PLAIN else next(others) for method in methods}
    smallest = min(row.batch_size for row in rows)
    counted = [row for row in rows if row.batch_size == smallest]
    for plot, chosen in ((_speeds, rows), (_positions, counted), (_categories, counted), (_parts, rows)):
        with plt.rc_context(STYLE):
            figure, axes = plt.subplots(figsize=SIZE, layout="constrained")
            if plot(axes, chosen, colours):
                content = io.StringIO()
                figure.savefig(content, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
                yield content.getvalue()[content.getvalue().index("<svg") :]
            plt.close(figure)


def _grouped(axes: Any, groups: Sequence[Any], bars: dict[str, list[Any]], colours: dict[str, str]) -> None:
    """Bars side by side: of each, its value a group, or None; or (value, least, most)."""
    width = 0.82 / max(len(bars), 1)
    for place, (name, values) in enumerate(bars.items()):
        for group, value in enumerate(values):
            if value is None:
                continue
            height, *ends = value if isinstance(value, tuple) else (value,)
            x = group + (place - (len(bars) - 1) / 2) * width
            axes.bar(x, height, width * 0.94, color=colours[name], label=name if not group else None)
            if ends and ends[0] < ends[1]:
                axes.vlines(x, *ends, color="#222222", linewidth=1)
    axes.set_xticks(range(len(groups)), [str(group) for group in groups])
    axes.legend(fontsize=7, frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.08))


def _speeds(axes: Any, rows: Sequence[Row], colours: dict[str, str]) -> bool:
    found = {(row.method, row.batch_size): row for row in rows if row.category == ALL}
    sizes = sorted({size for _, size in found})
    has_plain = any(row.speedup is not None for row in found.values())
    what = "speedup" if has_plain else "tokens_per_second"

    def bar(row: Row | None) -> tuple[float, ...] | None:
        middle = getattr(row, what, None)
        return None if middle is None else (middle, *getattr(row, f"{what}_range"))

    names = [name for name in colours if name != PLAIN or not has_plain]
    _grouped(axes, sizes, {name: [bar(found.get((name, size))) for size in sizes] for name in names}, colours)
    if has_plain:
        axes.axhline(1.0, color=colours.get(PLAIN, COLOURS[0]), linewidth=1, linestyle="--")
    axes.set(xlabel="batch size", ylabel="speedup over plain" if has_plain else "tokens a second")
    axes.set_title("Speedup by batch size" if has_plain else "Tokens a second by batch size", fontsize=9)
    return bool(names)


def _positions(axes: Any, rows: Sequence[Row], colours: dict[str, str]) -> bool:
    drafted = [row for row in rows if row.category == ALL and row.accepted_per_position and row.num_rounds]
    for row in drafted:
        shares = [100 * count / row.num_rounds for count in row.accepted_per_position]
        axes.plot(range(1, len(shares) + 1), shares, "o-", markersize=3, color=colours[row.method], label=row.method)
    axes.set(xlabel="position of the draft token", ylabel="% of rounds", ylim=(0, 105))
    axes.set_title("Accepted by position", fontsize=9)
    if drafted:
        axes.legend(fontsize=7, frameon=False)
    return bool(drafted)


def _categories(axes: Any, rows: Sequence[Row], colours: dict[str, str]) -> bool:
    found = {(row.method, row.category): row.tokens_per_round for row in rows}
    names = list(dict.fromkeys(category for _, category in found))
    _grouped(axes, names, {m: [found.get((m, category)) for category in names] for m in colours}, colours)
    axes.set(ylabel="tokens a round")
    axes.set_title("Tokens a round by category", fontsize=9)
    return any(value is not None for value in found.values())


def _parts(axes: Any, rows: Sequence[Row], colours: dict[str, str]) -> bool:
    measured = [row for row in rows if row.category == ALL and row.round_shares][::-1]
    for place, row in enumerate(measured):
        assert row.round_shares is not None
        left = 0.0
        for part in PARTS:
            milliseconds = 1e3 * row.round_shares["seconds"] * row.round_shares[part]
            label = part if not place else None
            axes.barh(place, milliseconds, left=left, height=0.7, color=PART_COLOURS[part], label=label)
            left += milliseconds
    axes.set_yticks(range(len(measured)), [f"{row.method}, {row.batch_size}" for row in measured])
    axes.set(xlabel="milliseconds of a round, by method and batch size")
    axes.set_title("Parts of a round", fontsize=9)
    if measured:
        axes.legend(fontsize=7, frameon=False)
    return bool(measured)
