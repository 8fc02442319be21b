"""ConFu (Qin et al. 2026): a ConFu drafter beside its control, decoded without an engine (``confu_offline``).

The control is an EAGLE-3 drafter that trained from the same start for as long. Whatever a tree has of a text counts as
accepted, as where a target samples each next token and goes on along the tree for as long as it holds it: exact at
every temperature for drafts that were not sampled themselves, as those of the paper's trees are not.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from confu_offline import (
    CHAIN,
    ROWS_AT_ONCE,
    Decoded,
    Models,
    Size,
    add_models,
    decode,
    load_control,
    load_models,
    read_rows,
)
from intervals import Walk, gain, rate
from texts import by_category

from crossspec_tools.train.confu import load_confu
from crossspec_tools.train.eagle3 import Eagle3Drafter
from crossspec_tools.train.generations import Generation
from crossspec_tools.train.states import FrozenTarget
from papers.base import Figures, PaperTable, numbers, read_recipe, say

DEPTH, TOP_K = 8, 10
"""Levels of the trees and candidates of a node, as everywhere here."""

PAPERS = {
    (30, 0.0): ((4.00, 4.41), (4.59, 5.01), (3.57, 4.32)),
    (30, 0.7): ((3.81, 4.29), (4.31, 4.70), (3.56, 4.28)),
    (30, 1.0): ((3.58, 3.82), (3.85, 4.11), (3.53, 4.21)),
    (60, 0.0): ((4.25, 4.76), (4.87, 5.25), (3.81, 4.60)),
    (60, 0.7): ((4.06, 4.54), (4.61, 4.96), (3.80, 4.55)),
    (60, 1.0): ((3.60, 4.08), (4.07, 4.37), (3.76, 4.48)),
}
"""The column AVG of Tables 1, 2 and 3, tokens a round of EAGLE-3 and of ConFu, by nodes and temperature."""


# -- texts ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def sampled(models: Models, rows: Sequence[Generation], temperature: float, most: int, seed: int) -> list[Generation]:
    """What the target answers to the prompts of ``rows`` when it samples.

    Args:
        temperature: above 0.
        most: tokens of an answer.
        seed: of the draws.
    """
    torch.manual_seed(seed)
    end, found = models.target.config.eos_token_id, []
    for begin in range(0, len(rows), ROWS_AT_ONCE):
        group = rows[begin : begin + ROWS_AT_ONCE]
        width = max(len(row.prompt_ids) for row in group)
        padding = torch.tensor([width - len(row.prompt_ids) for row in group])
        prompts = torch.tensor([[0] * (width - len(row.prompt_ids)) + row.prompt_ids for row in group])
        answers = models.target.model.generate(
            input_ids=prompts,
            attention_mask=(torch.arange(width) >= padding[:, None]).long(),
            do_sample=True,
            temperature=temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=most,
        )[:, width:]
        for row, answer in zip(group, answers.tolist(), strict=True):
            length = answer.index(end) + 1 if end in answer else len(answer)
            found.append(row._replace(response_ids=answer[:length], greedy=False))
        say(f"sampled {len(found)} of {len(rows)} texts at temperature {temperature}")
    return found


def decode_all(models: Models, rows: list[Generation], size: Size) -> tuple[Decoded, Decoded]:
    """By ConFu and by its control."""
    return decode_one(models.confu, models, rows, size), decode_one(models.control, models, rows, size)


def decode_one(
    model: Eagle3Drafter, models: Models, rows: list[Generation], size: Size, futures: bool = True
) -> Decoded:
    """By one of them."""
    found = decode(model, models.target, rows, size, futures=futures)
    say(f"{size}: {type(model).__name__} decoded {len(rows)} texts")
    return found


def note_of(rows: Sequence[Generation], more: str) -> str:
    """What to know of a table."""
    kinds = categories(rows)
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
    return f"{len(rows)} held-out texts ({counts}); 95 % intervals, of drawing other texts. {more}"


def categories(rows: Sequence[Generation]) -> list[str]:
    return [row.category for row in rows]


def sizes_of(nodes: Sequence[int], least: int = 1) -> list[Size]:
    """Trees of so many nodes; of 0, a chain. Raises ValueError."""
    sizes = [Size(count, DEPTH, TOP_K) if count else Size(CHAIN, CHAIN, 1) for count in nodes]
    for count in nodes:
        if not least <= count <= (most := Size(count, DEPTH, TOP_K).most):
            raise ValueError(f"--nodes {count}: {least} to {most}")
    return sizes


# -- Tables 1 to 3 --------------------------------------------------------------------------------------------


def add_table_options(parser: ArgumentParser) -> None:
    add_models(parser)
    parser.add_argument("--nodes", default="30,60", help="sizes of trees")
    parser.add_argument("--temperatures", default="0,0.7,1", help="0: the responses; else the target samples others")
    parser.add_argument("--max-tokens", type=int, default=192, help="of a sampled answer")
    parser.add_argument("--seed", type=int, default=0, help="of the sampled answers")


def make_table(options: Namespace) -> list[Figures]:
    """Tables 1, 2 and 3, which differ by their target."""
    sizes = sizes_of(numbers("--nodes", options.nodes, int))
    temperatures = numbers("--temperatures", options.temperatures, float)
    if min(temperatures) < 0:
        raise ValueError(f"--temperatures {options.temperatures}: none may be below 0")
    greedy, models = read_rows(options, DEPTH), load_models(options)
    kinds = sorted(set(categories(greedy)))
    values: list[dict[str, Any]] = []
    for temperature in temperatures:
        rows = greedy
        if temperature:
            rows = sampled(models, greedy, temperature, options.max_tokens, options.seed)
            rows = [row for row in rows if len(row.response_ids) > DEPTH]
        values += [_table_row(models, rows, size, temperature) for size in sizes]
    values.sort(key=lambda row: (row["nodes"], row["temperature"]))
    main, split = [], []
    for row in values:
        head = [str(row["nodes"]), f"{row['temperature']:g}"]
        paper = ", ".join(f"{100 * (confu / eagle3 - 1):+.1f}" for eagle3, confu in row["paper"])
        rates = [f"{row['control']:.2f}", f"{row['confu']:.2f}", f"{row['gain']:+.1f}"]
        main.append([*head, str(row["texts"]), *rates, paper])
        split.append([*head, *(f"{row['by_category'][kind]:+.1f}" for kind in kinds)])
    header = ("nodes", "temperature", "texts", "EAGLE-3", "ConFu", "gain, %", "paper's: 3B, 8B, 4B")
    note = note_of(greedy, "Where the target samples, the texts are its answers to the same prompts.")
    return [
        Figures("Tables 1 to 3: tokens a round, trees", header, main, values, note),
        Figures("ConFu's gain by category, %", ("nodes", "temperature", *kinds), split, values),
    ]


def _table_row(models: Models, rows: list[Generation], size: Size, temperature: float) -> dict[str, Any]:
    confu, control = (found.walk for found in decode_all(models, rows, size))
    of = {kind: [row.category == kind for row in rows] for kind in sorted(set(categories(rows)))}
    return {
        "nodes": size.nodes,
        "temperature": temperature,
        "texts": len(rows),
        "control": rate(control),
        "confu": rate(confu),
        "gain": gain(confu, control),
        "by_category": {kind: gain(confu.of(texts), control.of(texts)) for kind, texts in of.items()},
        "paper": PAPERS.get((size.nodes, temperature), ()),
    }


# -- what futures are worth -----------------------------------------------------------------------------------


def add_futures_options(parser: ArgumentParser) -> None:
    add_models(parser)
    parser.add_argument("--nodes", default="0,60", help=f"sizes of trees; 0 is a chain of {CHAIN} tokens")


def make_futures(options: Namespace) -> list[Figures]:
    """ConFu beside its control and beside itself with ``no_future_embed`` in every round."""
    sizes = sizes_of(numbers("--nodes", options.nodes, int), least=0)
    rows, models = read_rows(options, max(DEPTH, CHAIN)), load_models(options)
    runs = (
        ("confu", models.confu, True),
        ("control", models.control, True),
        ("confu, no futures", models.confu, False),
    )
    cells, values = [], []
    for size in sizes:
        walks = {name: decode_one(model, models, rows, size, futures).walk for name, model, futures in runs}
        for name, walk in walks.items():
            seen = {kind: interval.seen for kind, interval in by_category(walk, categories(rows)).items()}
            seen["mean"] = fmean(value for kind, value in seen.items() if kind != "all")
            more = None if name == "confu" else gain(walks["confu"], walk)
            drafts = f"chain of {CHAIN}" if size.top_k == 1 else f"{size.nodes} nodes"
            cells.append([drafts, name, *(f"{value:.2f}" for value in seen.values()), f"{more:+.1f}" if more else ""])
            nodes = 0 if size.top_k == 1 else size.nodes
            values.append({"nodes": nodes, "drafter": name, "tokens_per_round": seen, "confu_gain_percent": more})
    header = ("drafts", "drafter", *seen, "confu's gain, %")
    return [Figures("Tokens a round with and without futures", header, cells, values, note_of(rows, ""))]


# -- Figure 5 -------------------------------------------------------------------------------------------------


def add_figure_options(parser: ArgumentParser) -> None:
    add_models(parser)
    parser.add_argument("--length", type=int, default=12, help="tokens of a draft")


def make_figure(options: Namespace) -> list[Figures]:
    """The survival of accepted lengths: greedy chains, longer than training unrolls."""
    length = options.length
    if length < 1:
        raise ValueError(f"--length {length}: give 1 or more")
    rows, models = read_rows(options, length), load_models(options)
    confu, control = decode_all(models, rows, Size(length, length, 1))
    cells, values = [], []
    for place in range(length):
        ours, theirs = (Walk(found.reached[:, place], found.walk.rounds) for found in (confu, control))
        more = gain(ours, theirs)
        cells.append([str(place + 1), *(f"{rate(one).times(100):.1f}" for one in (theirs, ours)), f"{more:+.1f}"])
        values.append({"place": place + 1, "control": rate(theirs), "confu": rate(ours), "gain": more})
    lengths = " and ".join(f"{rate(found.walk):.2f}" for found in (control, confu))
    overall = f"Tokens a round are {lengths}: ConFu's gain is {gain(confu.walk, control.walk):+.1f} %."
    header = ("drafts", "EAGLE-3, %", "ConFu, %", "gain, %")
    title = f"Figure 5: share of the rounds that accept at least so many of {length} drafts"
    return [Figures(title, header, cells, values, note_of(rows, overall))]


# -- Tables 4 and 6 -------------------------------------------------------------------------------------------

UNTOLD = ("data", "target", "start", "save_every", "eval_every", "eval_rows")
"""Of a recipe, what does not change a drafter."""


class Training(NamedTuple):
    """A finished ``--out`` of `crossspec train confu` or `eagle3`."""

    folder: Path
    recipe: dict[str, Any]

    @property
    def is_confu(self) -> bool:
        return "num_soft_prompts" in self.recipe

    def model(self, target: FrozenTarget, target_folder: Path) -> Eagle3Drafter:
        """Its drafter."""
        if self.is_confu:
            return load_confu(self.folder / "model", target_folder, target.config, "--runs")
        return load_control(self.folder / "model", target)

    def beside(self, first: "Training") -> str:
        """What is other than in the first of them."""
        if not self.is_confu:
            return "EAGLE-3"
        changes = {name: x for name, x in self.recipe.items() if name not in UNTOLD and x != first.recipe.get(name)}
        return ", ".join(f"{name} {x}" for name, x in changes.items()) or "ConFu"


def add_runs(parser: ArgumentParser) -> None:
    add_models(parser)
    told = "folders that `crossspec train confu --out` wrote, the whole method first, and one of `train eagle3` beside"
    parser.add_argument("--runs", type=Path, nargs="+", required=True, help=told)
    parser.add_argument("--nodes", type=int, default=30, help="of a tree")


def make_runs(options: Namespace) -> list[Figures]:
    """Tables 4 and 6: trainings beside the first of them."""
    trainings = [Training(folder, read_recipe(folder, "confu", "num_steps", "eagle3")) for folder in options.runs]
    if not trainings[0].is_confu:
        raise ValueError(
            f"--runs {options.runs[0]}: the first is of `crossspec train confu`, which the others differ from"
        )
    (size,) = sizes_of([options.nodes])
    rows, models = read_rows(options, DEPTH), load_models(options)
    cells, values, first = [], [], None
    for training in trainings:
        walk = decode_one(training.model(models.target, options.target), models, rows, size).walk
        tau, *of = (found := by_category(walk, categories(rows))).values()
        name, more = training.beside(trainings[0]), gain(walk, first or walk)
        cells.append([name, f"{tau:.2f}", *(f"{part.seen:.2f}" for part in of), f"{more:+.1f}" if first else ""])
        values.append({"training": name, "tau": found.pop("all"), "by_category": found, "gain": more})
        first = first or walk
    header = ("training", "tokens a round", *found, "% beside the first")
    title = f"Tables 4 and 6: trainings that differ, trees of {size.nodes} nodes"
    return [Figures(title, header, cells, values, note_of(rows, f"{trainings[0].recipe['steps']} steps each."))]


TABLES: Mapping[str, PaperTable] = {
    "table-3": PaperTable(
        "tokens a round by size of the tree and temperature, and ConFu's gain (as Tables 1 and 2)",
        add_table_options,
        make_table,
    ),
    "table-4": PaperTable(
        "trainings without a part, beside the whole (as Table 6, other --num-steps)", add_runs, make_runs
    ),
    "figure-5": PaperTable("how often chains of 12 are accepted as far as each place", add_figure_options, make_figure),
    "futures": PaperTable(
        "what futures are worth, in chains and in trees (no table of the paper's)", add_futures_options, make_futures
    ),
}
