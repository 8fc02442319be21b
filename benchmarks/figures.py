"""The picture of the documents' results: acceptance length by method.

It is drawn from the table of docs/results/demo.md into docs/figures, so that both say the same. Needs no engine.
"""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs" / "results" / "demo.md"
CATEGORIES = ("chat", "math", "code", "agentic")
COLOURS = {"chain": "#4c78a8", "tree": "#f58518", "routed": "#54a24b", "plain": "#9d9d9d"}
MARKS = dict(zip(CATEGORIES, "os^D", strict=True))
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "crossspec", "font.family": "sans-serif", "font.size": 9}


class Method(NamedTuple):
    """A row of the table: its name, tokens a round over all prompts, and by category."""

    name: str
    all: float
    by_category: tuple[float, ...]

    @property
    def kind(self) -> str:
        """What it drafts, by which it is coloured."""
        if self.name == "plain":
            return "plain"
        if self.name.startswith("whiflash"):
            return "routed"
        words = ("tree", "dart", "continuity", "heterospec", "suffix", "arm-dflash")
        return "tree" if any(word in self.name for word in words) else "chain"


def read_table(file: Path) -> list[Method]:
    """The methods of the demo's table. Raises ValueError: the file has no such table, or a bad row."""
    lines = file.read_text().splitlines()
    heads = [i for i, line in enumerate(lines) if line.startswith("| method |") and "acceptance length" in line]
    if len(heads) != 1:
        raise ValueError(
            f"{file} has {len(heads)} tables that begin with `method` and name `acceptance length`, not one"
        )
    names = [cell.strip() for cell in lines[heads[0]].strip("| ").split("|")]
    wanted = [names.index("acceptance length"), *(names.index(category) for category in CATEGORIES)]
    found = []
    for line in lines[heads[0] + 2 :]:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        values = [float(cells[i]) for i in wanted]
        found.append(Method(cells[0].split(":")[0].split(",")[0], values[0], tuple(values[1:])))
    return found


def draw_acceptance(plt: Any, methods: list[Method], file: Path) -> None:
    """A bar for each method, the longest on top, and a mark for each category."""
    methods = sorted(methods, key=lambda method: method.all)
    figure, axes = plt.subplots(figsize=(7.6, 7.0), layout="constrained")
    for place, method in enumerate(methods):
        axes.barh(place, method.all, color=COLOURS[method.kind], alpha=0.75, height=0.72)
        axes.text(0.08, place, f"{method.all:.2f}", va="center", color="white", fontsize=8)
        for category, value in zip(CATEGORIES, method.by_category, strict=True):
            axes.plot(value, place, MARKS[category], color="#222222", markersize=3.2, alpha=0.75)
    axes.set_yticks(range(len(methods)), [method.name for method in methods])
    axes.set_ylim(-0.6, len(methods) - 0.4)
    axes.set_xlim(left=0)
    axes.set_xlabel("tokens a round, the target's own included")
    axes.set_title("Acceptance length of the pocket models: 24 prompts, greedy. No time was measured.", fontsize=9)
    kinds = [plt.Rectangle((0, 0), 1, 1, color=colour, alpha=0.75) for colour in COLOURS.values()]
    marks = [plt.Line2D([], [], color="#222222", marker=mark, linestyle="", markersize=3.2) for mark in MARKS.values()]
    names = ["one chain", "one tree", "whiflash: smaller trees", "no drafts", *CATEGORIES]
    axes.legend([*kinds, *marks], names, loc="lower right", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    metadata = {"Date": None} if file.suffix == ".svg" else None  # the same table gives the same file
    figure.savefig(file, dpi=110, metadata=metadata, facecolor="white")


def main(argv: list[str] | None = None) -> None:
    """Draw it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures", help="folder of the pictures")
    parser.add_argument("--format", choices=("svg", "png"), default="svg", help="of the pictures")
    parser.add_argument("--table", type=Path, default=TABLE, help="document with the demo's table")
    options = parser.parse_args(argv)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    options.out.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        draw_acceptance(plt, read_table(options.table), options.out / f"acceptance.{options.format}")
    plt.close("all")


if __name__ == "__main__":
    main()
