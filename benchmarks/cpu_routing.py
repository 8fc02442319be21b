"""A router beside its arms on a CPU, in seconds: over the mix, by category, and beside the best arm of every prompt.

    python benchmarks/cpu_routing.py --out runs/routing --shapes 0.2b
    python benchmarks/cpu_routing.py --out runs/routing --prompts held-out.jsonl --each 5 --router tree,suffix,plain

The arms are those of `goodput` in cpu_speed.py, on the inflated models, one request at a time, every prompt timed by
itself. Each arm is an engine of its own (policy `fixed`), so that an engine's luck at its start is in every quotient;
turns of all are interleaved. With more than four engines up (plain's is one) the last to start, the router's, seemed to
be at a disadvantage: `--arms tree,dart` measures fewer arms alone. The router learns as it goes: its first turn is of
an engine that knows nothing. Seconds of a prompt are the median of its turns; the best arm of every prompt is chosen by
these seconds themselves, so that their noise flatters it. A machine that is slower for a while slows all methods of a
turn, so the quotients within each turn, and their median, say more than those of such seconds.
"""

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from statistics import mean, median
from typing import Any

from cpu_speed import ARMS, CROSSSPEC, SPECS, goodput, write_models, write_specs

from vllm_crossspec.pocket_models import find_pocket

ROUTER = "goodput"


def write_prompts(file: Path, source: Path, each: int) -> dict[str, str]:
    """The first of each category, by turns, each a category of its own; returns whose each one is."""
    of: dict[str, list[str]] = defaultdict(list)
    for line in source.read_text().splitlines():
        row = json.loads(line)
        of[row["category"]].append(row["prompt"])
    turns = zip(*([(category, prompt) for prompt in found[:each]] for category, found in of.items()), strict=True)
    chosen = [pair for turn in turns for pair in turn]
    names = {f"{category} {index}": category for index, (category, _) in enumerate(chosen)}
    rows = ({"category": name, "prompt": prompt} for name, (_, prompt) in zip(names, chosen, strict=True))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return names


class Comparison:
    """What a document of `crossspec bench` says of a router and its arms.

    Args:
        rows: of the document, each prompt a category.
        names: the prompts, and the category of each.
    """

    def __init__(self, rows: Sequence[dict[str, Any]], names: Mapping[str, str]):
        own = [row for row in rows if row["category"] in names]
        self.tokens = {row["category"]: row["num_tokens"] for row in own}
        self.seconds: dict[str, dict[str, list[float]]] = defaultdict(dict)
        self.firsts: dict[str, float] = defaultdict(float)
        self.rounds: dict[str, float] = defaultdict(float)
        self.routes: dict[str, float] = defaultdict(float)
        for row in own:
            method, rounds = row["method"], mean(row["rounds_by_repeat"])
            self.seconds[method][row["category"]] = row["seconds_by_repeat"]
            self.firsts[method] += row["ttft"]["p50"]
            self.rounds[method] += rounds
            if method == ROUTER:
                for arm, share in row["route_shares"].items():
                    if share:
                        self.routes[f"arm-{arm}"] += share * rounds
        self.arms = [method for method in self.seconds if method.startswith("arm-")]
        self.groups = {category: [name for name in names if names[name] == category] for category in names.values()}
        self.groups["all"] = list(names)

    def speed(self, method: str, group: str) -> float:
        """Tokens a second of some prompts, from the median seconds of each."""
        seconds = sum(median(self.seconds[method][name]) for name in self.groups[group])
        return sum(self.tokens[name] for name in self.groups[group]) / seconds

    def speeds_by_turn(self, method: str, group: str = "all") -> list[float]:
        """Tokens a second over some prompts, turn by turn."""
        turns = zip(*(self.seconds[method][name] for name in self.groups[group]), strict=True)
        return [sum(self.tokens[name] for name in self.groups[group]) / sum(turn) for turn in turns]

    def over_best_arm(self, group: str) -> float:
        """The router's tokens a second by those of the arm that is the best of these prompts."""
        return self.speed(ROUTER, group) / max(self.speed(arm, group) for arm in self.arms)

    def over_best_arms(self, group: str) -> float:
        """The router's tokens a second by those of whichever arm is the best of each prompt."""
        seconds = {method: {name: median(own[name]) for name in own} for method, own in self.seconds.items()}
        best = sum(min(seconds[arm][name] for arm in self.arms) for name in self.groups[group])
        return best / sum(seconds[ROUTER][name] for name in self.groups[group])

    def over_best_by_turn(self, group: str = "all") -> list[float]:
        """The router's tokens a second over some prompts by those of the best arm of the same turn."""
        arms = zip(*(self.speeds_by_turn(arm, group) for arm in self.arms), strict=True)
        return [mine / max(theirs) for mine, theirs in zip(self.speeds_by_turn(ROUTER, group), arms, strict=True)]

    def causes(self) -> dict[str, float] | None:
        """What the router's quotient to the best arm is made of; their product is it, by mean seconds of all prompts.

        ``choice``: its rounds, had each cost what a round of that arm costs the arm alone. ``rounds``: what they did
        cost, switches and what all drafters keep among it. ``prompts``: its seconds to the first tokens. None where an
        arm that it chose was not measured.
        """
        if set(self.routes) - set(self.arms):
            return None
        spent = {method: sum(mean(own) for own in found.values()) for method, found in self.seconds.items()}
        decoding = {method: spent[method] - self.firsts[method] for method in spent}
        best = min(self.arms, key=lambda arm: spent[arm])
        alone = sum(count * decoding[arm] / self.rounds[arm] for arm, count in self.routes.items())
        prompts = self.firsts[best]
        return {
            "choice": spent[best] / (prompts + alone),
            "rounds": (prompts + alone) / (prompts + decoding[ROUTER]),
            "prompts": (prompts + decoding[ROUTER]) / spent[ROUTER],
        }

    def table(self) -> Iterator[str]:
        """All of it, as Markdown."""
        yield f"| tokens/s | {' | '.join(self.groups)} | turns |"
        yield "|---" * (2 + len(self.groups)) + "|"
        for method in self.seconds:
            turns = ", ".join(f"{speed:.1f}" for speed in self.speeds_by_turn(method))
            yield f"| {method} | {' | '.join(f'{self.speed(method, group):.1f}' for group in self.groups)} | {turns} |"
        over = " | ".join(f"{self.over_best_arm(group):.2f}" for group in self.groups)
        yield f"| router over the best arm | {over} | {', '.join(f'{x:.2f}' for x in self.over_best_by_turn())} |"
        over = " | ".join(f"{median(self.over_best_by_turn(group)):.2f}" for group in self.groups)
        yield f"| the same, median of the turns | {over} | |"
        over = " | ".join(f"{self.over_best_arms(group):.2f}" for group in self.groups)
        yield f"| router over the best arm of every prompt | {over} | |"
        if causes := self.causes():
            parts = " x ".join(f"{name} {value:.3f}" for name, value in causes.items())
            yield f"\nOver the best arm, by mean seconds: {parts} = {prod(causes.values()):.3f}"


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of models, configs and documents; cpu_speed.py's will do")
    add("--shapes", default="0.2b", help="of crossspec inflate, comma-separated")
    add("--router", default=",".join(ARMS), help="the arms that the router chooses from, comma-separated")
    add("--arms", help="those of them that are measured alone, comma-separated; default: all")
    add("--prompts", type=Path, default=find_pocket() / "prompts.jsonl", help="JSON lines with `category` and `prompt`")
    add("--each", type=int, default=6, help="prompts of each category")
    add("--repeats", type=int, default=3, help="turns of every method")
    add("--max-tokens", type=int, default=128, help="of an answer at most")
    add("--name", default="routing", help="what the documents' names begin with")
    add("--tables-only", action="store_true", help="print the tables of the documents that are there")
    options = parser.parse_args(argv)
    options.arms = options.arms or options.router
    for key, known in (("router", tuple(ARMS)), ("arms", options.router.split(","))):
        if unknown := [name for name in getattr(options, key).split(",") if name not in known]:
            parser.error(f"--{key} {unknown[0]}: choose from {', '.join(known)}")
    return options


def main() -> None:
    """Measure every shape, and print its table."""
    options = arguments()
    specs = {name: SPECS[name] for name in (f"arm-{arm}" for arm in options.arms.split(","))}
    specs[ROUTER] = goodput(options.router.split(","))
    options.out.mkdir(parents=True, exist_ok=True)
    for shape in options.shapes.split(","):
        document = options.out / f"{options.name}-{shape}.json"
        prompts = document.with_suffix(".jsonl")
        names = write_prompts(prompts, options.prompts, options.each)
        if not options.tables_only:
            models = write_models(shape, options.out)
            command = [*CROSSSPEC, "bench", "--model", str(models / "target"), "--dtype", "float32"]
            for spec in write_specs(models, options.out / "specs" / shape, specs):
                command += ["--spec", str(spec)]
            command += ["--prompts", str(prompts), "--max-tokens", str(options.max_tokens), "--max-model-len", "1024"]
            command += ["--batch-sizes", "1", "--repeats", str(options.repeats), "--no-enforce-eager"]
            if code := subprocess.run([*command, "--json", str(document)]).returncode:
                sys.exit(code)
        rows = json.loads(document.read_text())["rows"]
        for row in rows:
            if row["identical_to_plain"] is False:
                sys.exit(f"{document}: {row['method']} has another text than plain in {row['category']}")
            if row["category"] == "all" and row["route_shares"]:
                shares = ", ".join(f"{name} {share:.2f}" for name, share in row["route_shares"].items())
                print(f"{row['method']}: {row['tokens_per_round']:.2f} tokens a round at first; of all rounds {shares}")
        print(f"\n{shape}\n", *Comparison(rows, names).table(), sep="\n")


if __name__ == "__main__":
    main()
