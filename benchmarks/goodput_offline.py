"""Routing by experience over records, at the costs of several machines: no engine, and seconds are the tables'.

    crossspec collect --spec configs/pocket-whiflash-goodput.json --prompts PROMPTS.jsonl --out work/records
    python benchmarks/goodput_offline.py --records work/records --costs benchmarks/costs/h100-8b.json

For every table and batch size: tokens a second of the best arm alone, and what `goodput`, the best arm of every text
and the best arm of every round get, over the best arm's; by category over the category's best arm. `goodput` learns as
it goes, so it is given several random orders of the texts, categories by turns: their mean, and their standard
deviation in brackets. `goodput, left out` is the same of a category that comes after all texts of the others, so that
nothing of its kind has been seen. `--half` keeps every second text, so that what is chosen on the one half can be
judged on the other. What the tables are is said in benchmarks/costs/README.md; without one, tokens a round count.
"""

import argparse
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from vllm_crossspec.cli import meta, options
from vllm_crossspec.router import simulate
from vllm_crossspec.router.costs import RoundCosts, read_costs
from vllm_crossspec.router.simulate import Outcome, Value
from vllm_crossspec.training.calibration import by_turns, goodput_rule, groups_of, trajectories
from vllm_crossspec.training.records import Records, choose_drafters, read_records

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
    paths = trajectories(records, records.texts)
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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--records", type=Path, required=True, help="folder that `crossspec collect` wrote")
    add("--costs", type=Path, nargs="*", default=[], help="of `crossspec costs`; without, all rounds are as long")
    add("--drafters", help="of the recorded ones, comma-separated; default: all")
    add("--batch-sizes", default="1,32", help="of the tables, comma-separated")
    add("--orders", type=int, default=8, help="random orders of the texts")
    add("--half", choices=tuple(HALVES), default="all", help="which of the texts")
    add("--json", type=Path, default=None, help="write the figures there")
    given = parser.parse_args(arguments)
    options.check_file("--json", given.json)
    records = read_records(given.records)
    if given.drafters:
        records = choose_drafters(records, given.drafters.split(","))
    groups = {category: texts[HALVES[given.half]] for category, texts in groups_of(records).items()}
    table = Table("costs", "batch", "chosen by", "mean", *groups)
    document = []
    sizes = [int(size) for size in given.batch_sizes.split(",")]
    runs = [(file.stem, file, size) for file in given.costs for size in sizes] or [("equal rounds", None, 1)]
    for name, file, size in track(runs, "tables", console=Console(stderr=True)):
        drafters = records.facts.drafters
        value = Value(read_costs(file, drafters, "--costs") if file else equal_rounds(len(drafters)), size)
        found = compare(records, value, groups, given.orders)
        columns = ("mean", *groups)
        first = (f"{found['best'][column]:.{0 if file else 2}f} ({found['arms'][column]})" for column in columns)
        table.add_row(name, str(size), f"best arm, tokens/{'s' if file else 'round'}", *first)
        for method, rows in found["ratios"].items():
            cells = []
            for column in columns:
                ratios = [row[column] for row in rows]
                spread = f" ({statistics.stdev(ratios):.3f})" if len(ratios) > 1 else ""
                cells.append(f"{statistics.fmean(ratios):.3f}{spread}")
            table.add_row("", "", method, *cells)
        document.append({"costs": name, "batch_size": size, **found})
    Console(width=170).print(table)
    settings = {"texts": sum(map(len, groups.values())), "half": given.half, "orders": given.orders}
    options.write_json(given.json, {"rows": document, "meta": {"settings": settings, "hardware": meta.hardware()}})
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as error:
        sys.exit(str(error))
