"""The pictures of the documents: acceptance length by method, and one round.

    python benchmarks/figures.py                    # into docs/figures
    python benchmarks/figures.py --out /tmp/figures --format png

The first is drawn from the table of docs/results/demo.md, so that both say the same; the second shows made-up tokens.
Needs matplotlib, no engine; a second of work.
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
    """The methods of the demo's table.

    Raises:
        ValueError: the file has no such table, or a row of it is none.
    """
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
    _save(figure, file)


# Nodes of the drawn tree by row, the root first: token, parent's row, place.
TREE = (
    ("the", None, (0.0, 0.0)),
    ("cat", 0, (1.0, 0.8)),
    ("dog", 0, (1.0, -0.8)),
    ("sat", 1, (2.0, 1.3)),
    ("is", 1, (2.0, 0.3)),
    ("ran", 2, (2.0, -0.8)),
)
PATH = (0, 1, 4)
SAMPLED = {0: "cat", 1: "is", 4: "up"}


def draw_round(plt: Any, file: Path) -> None:
    """A draft, its pass through the target, the walk, and what is kept."""
    figure, panels = plt.subplots(1, 4, figsize=(11.0, 3.1), layout="constrained", width_ratios=(3, 3.2, 3, 3.3))
    titles = (
        "1  The drafter drafts a tree\nbehind the last token",
        "2  One pass of the target\nover all rows, each seeing its path",
        "3  Its sampler samples at each row;\nwalk while that was drafted",
        "4  The path's K, V and states move up;\nthe drafter reads them and drafts",
    )
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title, fontsize=9, loc="left")
        axes.axis("off")
    _draw_tree(panels[0], accepted=())
    _draw_mask(panels[1])
    _draw_tree(panels[2], accepted=PATH)
    panels[2].text(
        3.0, 0.3, SAMPLED[PATH[-1]], ha="center", va="center", fontsize=9, color="white", bbox=_box("#f58518")
    )
    panels[2].annotate("", (2.68, 0.3), (2.3, 0.3), arrowprops={"arrowstyle": "->", "color": "#f58518", "lw": 1.6})
    panels[2].text(3.0, -0.15, "bonus", ha="center", va="center", fontsize=8, color="#f58518")
    panels[2].set_xlim(-0.5, 3.5)
    _draw_commit(panels[3])
    _save(figure, file)


def _box(colour: str) -> dict[str, Any]:
    return {"boxstyle": "round,pad=0.3", "facecolor": colour, "edgecolor": "#444444", "linewidth": 0.8}


def _draw_tree(axes: Any, accepted: tuple[int, ...]) -> None:
    for row, (token, parent, (x, y)) in enumerate(TREE):
        is_kept = row in accepted
        if parent is not None:
            start = TREE[parent][2]
            colour = "#54a24b" if is_kept else "#888888"
            axes.plot((start[0], x), (start[1], y), color=colour, linewidth=2.2 if is_kept else 1.0, zorder=1)
        face = "#cfe6cc" if is_kept else "#dddddd" if row == 0 else "white"
        axes.text(x, y, token, ha="center", va="center", fontsize=9, bbox=_box(face), zorder=2)
        axes.text(x, y - 0.42, f"row {row}", ha="center", va="center", fontsize=7, color="#666666", zorder=2)
    axes.set_xlim(-0.5, 2.5)
    axes.set_ylim(-1.6, 1.8)


def _draw_mask(axes: Any) -> None:
    """Rows over what they see: the prefix, and of the draft their ancestors and themselves."""
    for row, (token, _, _) in enumerate(TREE):
        seen, node = {row}, TREE[row][1]
        while node is not None:
            seen.add(node)
            node = TREE[node][1]
        y = -row
        axes.add_patch(_square(-2.6, y, 2.3, "#b8cbe0"))
        for column in range(len(TREE)):
            axes.add_patch(_square(column, y, 0.9, "#4c78a8" if column in seen else "#f2f2f2"))
        axes.text(-2.8, y + 0.45, token, ha="right", va="center", fontsize=8)
    axes.text(-1.45, 1.35, "prefix", ha="center", va="center", fontsize=8)
    for column in range(len(TREE)):
        axes.text(column + 0.45, 1.35, str(column), ha="center", va="center", fontsize=7, color="#666666")
    axes.set_xlim(-4.3, 6.2)
    axes.set_ylim(-5.6, 2.0)


def _draw_commit(axes: Any) -> None:
    """The cache's slots before and after, and the way back to the drafter."""
    before = [
        ("...", "#b8cbe0"),
        *((token, "#cfe6cc" if row in PATH else "white") for row, (token, *_) in enumerate(TREE)),
    ]
    after = [("...", "#b8cbe0"), *((TREE[row][0], "#cfe6cc") for row in PATH)]
    for y, cells in ((1.0, before), (-0.6, after)):
        for place, (token, colour) in enumerate(cells):
            axes.add_patch(_square(place, y, 0.92, colour, height=0.7))
            axes.text(place + 0.46, y + 0.35, token, ha="center", va="center", fontsize=8)
    for place, row in enumerate(PATH):
        arrow = {"arrowstyle": "->", "color": "#54a24b", "lw": 1.2}
        axes.annotate("", (place + 1.46, 0.14), (row + 1.46, 0.96), arrowprops=arrow)
    axes.text(0, 1.9, "slots of the KV cache", fontsize=8, color="#666666")
    axes.text(0, -1.15, "text so far: ... the cat is up", fontsize=8)
    axes.text(0, -1.65, "tapped states of the cat is  ->  drafter", fontsize=8)
    axes.set_xlim(-0.2, 7.2)
    axes.set_ylim(-2.0, 2.3)


def _square(x: float, y: float, width: float, colour: str, height: float = 0.9) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, facecolor=colour, edgecolor="#888888", linewidth=0.6)


def _save(figure: Any, file: Path) -> None:
    metadata = {"Date": None} if file.suffix == ".svg" else None  # the same table gives the same file
    figure.savefig(file, dpi=110, metadata=metadata, facecolor="white")


def main(argv: list[str] | None = None) -> None:
    """Draw both."""
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
        draw_round(plt, options.out / f"round.{options.format}")
    plt.close("all")


if __name__ == "__main__":
    main()
