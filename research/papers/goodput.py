"""Routing by experience over records, at the costs of several machines: no engine, and seconds are the tables'.

    crossspec collect --spec configs/pocket-whiflash-goodput.json --prompts PROMPTS.jsonl --out work/records

For every table and batch size: tokens a second of the best arm alone, and what `goodput`, the best arm of every text
and the best arm of every round get, over the best arm's; by category over the category's best arm. `goodput` learns as
it goes, so it is given several random orders of the texts, categories by turns: their mean, and their standard
deviation in brackets. `goodput, left out` is the same of a category that comes after all texts of the others, so that
nothing of its kind has been seen. What the tables are is said in benchmarks/costs/README.md.
"""

import random
import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from crossspec_tools.records import simulate
from crossspec_tools.records.simulate import Outcome, Value
from crossspec_tools.train.calibration import by_turns, goodput_rule, groups_of, trajectories
from crossspec_tools.train.records import Records, choose_drafters, read_records
from papers.base import Figures, PaperTable, numbers, say
from vllm_crossspec.load.costs import RoundCosts, read_costs

HALVES = {"all": slice(None), "even": slice(0, None, 2), "odd": slice(1, None, 2)}


def worth(value: Value, outcome: Outcome, groups: dict[str, list[int]]) -> dict[str, float]:
    """Tokens a second by category, and their mean."""
    found = {category: value(outcome.of(texts)) for category, texts in groups.items()}
    return {**found, "mean": statistics.fmean(found.values())}


def equal_rounds(num_drafters: int) -> RoundCosts:
    """A second for every round, and none for a switch: tokens a second are tokens a round."""
    nothing = ((0.0,) * num_drafters,)
    return RoundCosts((1,), nothing, ((1.0,) * num_drafters,), nothing)


def goodput(records: Records, value: Value, groups: Sequence[Sequence[list[int]]], seed: int) -> simulate.Rule:
    """Policy `goodput` without a model, one group after the other; in each, categories by turns in a random order."""
    generator, turns = random.Random(seed), []
    for group in groups:
        turns += by_turns([generator.sample(texts, len(texts)) for texts in group])
    return goodput_rule(records, value, turns)


def compare(records: Records, value: Value, groups: dict[str, list[int]], orders: int) -> dict[str, Any]:
    """What every way of choosing gets at these costs: the best arm's tokens a second, and ratios to it."""
    paths = trajectories(records)
    names = records.facts.drafters
    alone = [worth(value, simulate.walk(paths, simulate.always(i)), groups) for i in range(len(names))]
    best = {column: max(own[column] for own in alone) for column in (*groups, "mean")}
    rules = {
        "best arm of every text": simulate.oracle_by_group(paths, [[i] for i in range(len(records.texts))], value),
        "best arm of every round": simulate.oracle_token(paths, value),
    }
    ratios: dict[str, list[dict[str, float]]] = {}
    for name, rule in rules.items():
        found = worth(value, simulate.walk(paths, rule), groups)
        ratios[name] = [{column: found[column] / best[column] for column in found}]
    ratios["goodput"], ratios["goodput, left out"] = [], []
    for seed in range(orders):
        found = worth(value, simulate.walk(paths, goodput(records, value, [list(groups.values())], seed)), groups)
        ratios["goodput"].append({column: found[column] / best[column] for column in found})
        last: dict[str, float] = {}
        for category, texts in groups.items():
            others = [own for name, own in groups.items() if name != category]
            rule = goodput(records, value, [others, [texts]], seed)
            last[category] = value(simulate.walk(paths, rule).of(texts)) / best[category]
        ratios["goodput, left out"].append({**last, "mean": statistics.fmean(last.values())})
    arms = {column: names[max(range(len(names)), key=lambda i: alone[i][column])] for column in best}
    return {"best": best, "arms": arms, "ratios": ratios}


def add_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--records", type=Path, required=True, help="folder that `crossspec collect` wrote")
    add("--costs", type=Path, nargs="*", default=[], help="of `crossspec costs`; without, all rounds are as long")
    add("--drafters", help="of the recorded ones, comma-separated; default: all")
    add("--batch-sizes", default="1,32", help="of the tables, comma-separated")
    add("--orders", type=int, default=8, help="random orders of the texts")
    add(
        "--half", choices=tuple(HALVES), default="all", help="every second text: judge on one half what the other chose"
    )


def make_table(options: Namespace) -> list[Figures]:
    """A row for every table of costs, batch size and way of choosing."""
    records = read_records(options.records)
    if options.drafters:
        records = choose_drafters(records, options.drafters.split(","))
    groups = {category: texts[HALVES[options.half]] for category, texts in groups_of(records).items()}
    drafters, columns, cells, values = records.facts.drafters, ("mean", *groups), [], []
    sizes = numbers("--batch-sizes", options.batch_sizes, int)
    runs = [(file.stem, file, size) for file in options.costs for size in sizes] or [("equal rounds", None, 1)]
    for name, file, size in runs:
        say(f"{name}, batch {size}")
        value = Value(read_costs(file, drafters, "--costs") if file else equal_rounds(len(drafters)), size)
        found = compare(records, value, groups, options.orders)
        best = [f"{found['best'][column]:.{0 if file else 2}f} ({found['arms'][column]})" for column in columns]
        cells.append([name, str(size), f"best arm, tokens/{'s' if file else 'round'}", *best])
        for method, rows in found["ratios"].items():
            ratios = [[row[column] for row in rows] for column in columns]
            spread = [f" ({statistics.stdev(each):.3f})" if len(each) > 1 else "" for each in ratios]
            shown = [f"{statistics.fmean(each):.3f}{more}" for each, more in zip(ratios, spread, strict=True)]
            cells.append(["", "", method, *shown])
        values.append({"costs": name, "batch_size": size, **found})
    note = f"{sum(map(len, groups.values()))} texts ({options.half}), {options.orders} orders of them."
    return [
        Figures(
            "Routing by experience over the best arm", ("costs", "batch", "chosen by", *columns), cells, values, note
        )
    ]


TABLES: Mapping[str, PaperTable] = {
    "costs": PaperTable("what goodput without a model gets at the costs of several machines", add_options, make_table)
}
