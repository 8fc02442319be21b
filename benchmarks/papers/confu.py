"""ConFu (Qin et al. 2026): a ConFu drafter beside its control, decoded without an engine (``confu_offline``).

The control is an EAGLE-3 drafter that trained from the same start for as long. Whatever a tree has of a text counts as
accepted, as where a target samples each next token and goes on along the tree for as long as it holds it: exact at
every temperature for drafts that were not sampled themselves, as those of the paper's trees are not.
"""

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from confu_offline import Decoded, Models, Size, add_models, decode, load_control, load_models, read_rows
from intervals import Interval, Walk, gain, rate

from papers.base import Figures, PaperTable
from vllm_crossspec.training.confu_head_states import load_confu
from vllm_crossspec.training.eagle3 import Eagle3Drafter
from vllm_crossspec.training.generations import Generation
from vllm_crossspec.training.states import FrozenTarget

DEPTH, TOP_K = 8, 10
"""Levels of the trees and candidates of a node, as everywhere here."""
ROWS_AT_ONCE = 32

PAPERS = {
    (30, 0.0): ((4.00, 4.41), (4.59, 5.01), (3.57, 4.32)),
    (30, 0.7): ((3.81, 4.29), (4.31, 4.70), (3.56, 4.28)),
    (30, 1.0): ((3.58, 3.82), (3.85, 4.11), (3.53, 4.21)),
    (60, 0.0): ((4.25, 4.76), (4.87, 5.25), (3.81, 4.60)),
    (60, 0.7): ((4.06, 4.54), (4.61, 4.96), (3.80, 4.55)),
    (60, 1.0): ((3.60, 4.08), (4.07, 4.37), (3.76, 4.48)),
}
"""The column AVG of Tables 1, 2 and 3, tokens a round of EAGLE-3 and of ConFu, by nodes and temperature."""


def numbers(option: str, given: str, kind: Callable[[str], Any]) -> list[Any]:
    """Of an option. Raises ValueError."""
    try:
        return [kind(part) for part in given.split(",")]
    except ValueError:
        raise ValueError(f"{option} {given}: give numbers with commas between them") from None


def say(words: str) -> None:
    """Progress."""
    print(words, file=sys.stderr, flush=True)


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


def decode_one(model: Eagle3Drafter, models: Models, rows: list[Generation], size: Size) -> Decoded:
    """By one of them."""
    found = decode(model, models.target, rows, size)
    say(f"{size}: {type(model).__name__} decoded {len(rows)} texts")
    return found


def note_of(rows: Sequence[Generation], more: str) -> str:
    """What to know of a table."""
    kinds = sorted({row.category for row in rows})
    counts = ", ".join(f"{sum(row.category == kind for row in rows)} {kind}" for kind in kinds)
    return f"{len(rows)} held-out texts ({counts}); 95 % intervals, of drawing other texts. {more}"


# -- Tables 1 to 3 --------------------------------------------------------------------------------------------


def add_inputs(parser: ArgumentParser) -> None:
    parser.add_argument("--responses", type=Path, required=True, help="folder that `crossspec train generate` wrote")
    parser.add_argument("--rows", type=int, help="at most so many responses")
    add_models(parser)


def add_table_options(parser: ArgumentParser) -> None:
    add_inputs(parser)
    parser.add_argument("--nodes", default="30,60", help="sizes of trees")
    parser.add_argument("--temperatures", default="0,0.7,1", help="0: the responses; else the target samples others")
    parser.add_argument("--max-tokens", type=int, default=192, help="of a sampled answer")
    parser.add_argument("--seed", type=int, default=0, help="of the sampled answers")


def make_table(options: Namespace) -> list[Figures]:
    """Tables 1, 2 and 3, which differ by their target."""
    sizes = [Size(nodes, DEPTH, TOP_K) for nodes in numbers("--nodes", options.nodes, int)]
    for size in sizes:
        if not 0 < size.nodes <= size.most:
            raise ValueError(f"--nodes {size.nodes}: 1 to {size.most}")
    temperatures = numbers("--temperatures", options.temperatures, float)
    if min(temperatures) < 0:
        raise ValueError(f"--temperatures {options.temperatures}: none may be below 0")
    torch.set_num_threads(options.threads)
    models = load_models(options)
    greedy = read_rows(options, models.target.config.vocab_size, DEPTH)
    kinds = sorted({row.category for row in greedy})
    values: list[dict[str, Any]] = []
    for temperature in temperatures:
        rows = greedy
        if temperature:
            rows = sampled(models, greedy, temperature, options.max_tokens, options.seed)
            rows = [row for row in rows if len(row.response_ids) > DEPTH]
        values += [_table_row(models, rows, size, temperature, kinds) for size in sizes]
    values.sort(key=lambda row: (row["nodes"], row["temperature"]))
    main = [
        [
            str(row["nodes"]),
            f"{row['temperature']:g}",
            str(row["texts"]),
            f"{row['control']:.2f}",
            f"{row['confu']:.2f}",
            f"{row['gain']:+.1f}",
            ", ".join(f"{100 * (confu / eagle3 - 1):+.1f}" for eagle3, confu in row["paper"]) or "",
        ]
        for row in values
    ]
    split = [
        [str(row["nodes"]), f"{row['temperature']:g}", *(f"{row['by_category'][kind]:+.1f}" for kind in kinds)]
        for row in values
    ]
    header = ("nodes", "temperature", "texts", "EAGLE-3", "ConFu", "gain, %", "paper's: 3B, 8B, 4B")
    note = note_of(greedy, "Where the target samples, the texts are its answers to the same prompts.")
    return [
        Figures("Tables 1 to 3: tokens a round, trees", header, main, values, note),
        Figures("ConFu's gain by category, %", ("nodes", "temperature", *kinds), split, values),
    ]


def _table_row(
    models: Models, rows: list[Generation], size: Size, temperature: float, kinds: Sequence[str]
) -> dict[str, Any]:
    confu, control = (found.walk for found in decode_all(models, rows, size))
    categories = np.array([row.category for row in rows])
    of = lambda walk, kind: Walk(*(part[categories == kind] for part in walk))  # noqa: E731
    return {
        "nodes": size.nodes,
        "temperature": temperature,
        "texts": len(rows),
        "control": rate(control),
        "confu": rate(confu),
        "gain": gain(confu, control),
        "by_category": {kind: gain(of(confu, kind), of(control, kind)) for kind in kinds},
        "paper": PAPERS.get((size.nodes, temperature), ()),
    }


# -- Figure 5 -------------------------------------------------------------------------------------------------


def add_figure_options(parser: ArgumentParser) -> None:
    add_inputs(parser)
    parser.add_argument("--length", type=int, default=12, help="tokens of a draft")


def make_figure(options: Namespace) -> list[Figures]:
    """The survival of accepted lengths: greedy chains, longer than training unrolls."""
    length = options.length
    if length < 1:
        raise ValueError(f"--length {length}: give 1 or more")
    torch.set_num_threads(options.threads)
    models = load_models(options)
    rows = read_rows(options, models.target.config.vocab_size, length)
    confu, control = decode_all(models, rows, Size(length, length, 1))
    values = []
    for place in range(length):
        ours, theirs = (Walk(found.reached[:, place], found.walk.rounds) for found in (confu, control))
        values.append({"place": place + 1, "control": rate(theirs), "confu": rate(ours), "gain": gain(ours, theirs)})
    percent = lambda share: f"{Interval(*(100 * part for part in share)):.1f}"  # noqa: E731
    cells = [
        [str(row["place"]), percent(row["control"]), percent(row["confu"]), f"{row['gain']:+.1f}"] for row in values
    ]
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


def read_training(folder: Path) -> Training:
    """Of a folder. Raises ValueError."""
    if not ((folder / "recipe.json").is_file() and (folder / "model" / "config.json").is_file()):
        raise ValueError(f"--runs {folder} is no finished --out of `crossspec train confu`: recipe.json and model/")
    recipe = json.loads((folder / "recipe.json").read_text())
    if "num_steps" not in recipe:
        raise ValueError(f"--runs {folder} is of another drafter; give an --out of `crossspec train confu` or `eagle3`")
    return Training(folder, recipe)


def add_runs(parser: ArgumentParser) -> None:
    add_inputs(parser)
    told = "folders that `crossspec train confu --out` wrote, the whole method first, and one of `train eagle3` beside"
    parser.add_argument("--runs", type=Path, nargs="+", required=True, help=told)
    parser.add_argument("--nodes", type=int, default=30, help="of a tree")


def make_runs(options: Namespace) -> list[Figures]:
    """Tables 4 and 6: trainings beside the first of them."""
    trainings = [read_training(folder) for folder in options.runs]
    if not trainings[0].is_confu:
        raise ValueError(
            f"--runs {options.runs[0]}: the first is of `crossspec train confu`, which the others differ from"
        )
    size = Size(options.nodes, DEPTH, TOP_K)
    if not 0 < size.nodes <= size.most:
        raise ValueError(f"--nodes {size.nodes}: 1 to {size.most}")
    torch.set_num_threads(options.threads)
    models = load_models(options)
    rows = read_rows(options, models.target.config.vocab_size, DEPTH)
    categories, found = np.array([row.category for row in rows]), []
    for training in trainings:
        model = training.model(models.target, options.target)
        found.append((training.beside(trainings[0]), decode_one(model, models, rows, size).walk))
    kinds = sorted(set(categories))
    cells, values = [], []
    for name, walk in found:
        of = {kind: rate(Walk(*(part[categories == kind] for part in walk))) for kind in kinds}
        more = gain(walk, found[0][1])
        seen = "" if walk is found[0][1] else f"{more:+.1f}"
        cells.append([name, f"{rate(walk):.2f}", *(f"{of[kind].seen:.2f}" for kind in kinds), seen])
        values.append({"training": name, "tau": rate(walk), "by_category": of, "gain": more})
    header = ("training", "tokens a round", *kinds, "% beside the first")
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
}
