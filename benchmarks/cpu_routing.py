"""A router beside its arms on a CPU, in seconds: over the mix, by category, and beside the best arm of every prompt.

    python benchmarks/cpu_routing.py --out runs/routing --shapes 0.2b
    python benchmarks/cpu_routing.py --out runs/routing --prompts held-out.jsonl --each 5

The arms are those of `goodput` in cpu_speed.py, on the inflated models, one request at a time, every prompt timed by
itself. Each arm is an engine of its own (policy `fixed`), so that an engine's luck at its start is in every quotient;
turns of all are interleaved. Seconds of a prompt are the median of its turns. The best arm of every prompt is chosen
with these seconds themselves, so that their noise flatters it.
"""

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from cpu_speed import ARMS, CROSSSPEC, write_models, write_specs

from vllm_crossspec.cli.demo import POCKET

ROUTER = "goodput"
Times = Mapping[str, Mapping[str, float]]
"""Seconds by method, then by prompt."""


def write_prompts(file: Path, source: Path, each: int) -> dict[str, str]:
    """The first of each category, by turns, each a category of its own; returns whose each one is."""
    of: dict[str, list[dict[str, str]]] = defaultdict(list)
    for line in source.read_text().splitlines():
        row = json.loads(line)
        of[row["category"]].append(row)
    chosen = [row for turn in zip(*(found[:each] for found in of.values()), strict=True) for row in turn]
    names = {f"{row['category']} {index}": row["category"] for index, row in enumerate(chosen)}
    rows = ({"category": name, "prompt": row["prompt"]} for name, row in zip(names, chosen, strict=True))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return names


def summary(seconds: Times, tokens: Mapping[str, int], names: Mapping[str, str]) -> Iterator[str]:
    """Tokens a second by category and over all, and the router over the best arm, as Markdown."""
    groups = {category: [name for name in names if names[name] == category] for category in names.values()}
    groups["all"] = list(names)
    arms = [method for method in seconds if method.startswith("arm-")]

    def speed(method: str, group: str) -> float:
        return sum(tokens[name] for name in groups[group]) / sum(seconds[method][name] for name in groups[group])

    yield f"| tokens/s | {' | '.join(groups)} |"
    yield "|---" * (1 + len(groups)) + "|"
    for method in seconds:
        yield f"| {method} | {' | '.join(f'{speed(method, group):.1f}' for group in groups)} |"
    ratios = {group: speed(ROUTER, group) / max(speed(arm, group) for arm in arms) for group in groups}
    yield f"| router over the best arm | {' | '.join(f'{ratio:.3f}' for ratio in ratios.values())} |"
    best = {
        group: sum(min(seconds[arm][name] for arm in arms) for name in groups[group])
        / sum(seconds[ROUTER][name] for name in groups[group])
        for group in groups
    }
    yield f"| router over the best arm of every prompt | {' | '.join(f'{ratio:.3f}' for ratio in best.values())} |"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every shape, and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of models, configs and documents; cpu_speed.py's will do")
    add("--shapes", default="0.2b", help="of crossspec inflate, comma-separated")
    add("--methods", default=",".join([*(f"arm-{name}" for name in ARMS), ROUTER]), help="arms and the router")
    add("--prompts", type=Path, default=POCKET / "prompts.jsonl", help="JSON lines with `category` and `prompt`")
    add("--each", type=int, default=6, help="prompts of each category")
    add("--repeats", type=int, default=3, help="turns of every method")
    add("--max-tokens", type=int, default=128, help="of an answer at most")
    add("--name", default="routing", help="what the documents' names begin with")
    add("--tables-only", action="store_true", help="print the tables of the documents that are there")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    for shape in options.shapes.split(","):
        document = options.out / f"{options.name}-{shape}.json"
        prompts = document.with_suffix(".jsonl")
        names = write_prompts(prompts, options.prompts, options.each)
        if not options.tables_only:
            models = write_models(shape, options.out)
            command = [*CROSSSPEC, "bench", "--model", str(models / "target"), "--dtype", "float32"]
            for spec in write_specs(models, options.out / "specs" / shape, options.methods.split(",")):
                command += ["--spec", str(spec)]
            command += ["--prompts", str(prompts), "--max-tokens", str(options.max_tokens), "--max-model-len", "1024"]
            command += [
                "--repeats",
                str(options.repeats),
                "--batch-sizes",
                "1",
                "--no-enforce-eager",
                "--json",
                str(document),
            ]
            if code := subprocess.run(command).returncode:
                sys.exit(code)
        seconds: dict[str, dict[str, float]] = defaultdict(dict)
        tokens = {}
        for row in json.loads(document.read_text())["rows"]:
            if row["identical_to_plain"] is False:
                sys.exit(f"{document}: {row['method']} has another text than plain in {row['category']}")
            if row["category"] in names:
                seconds[row["method"]][row["category"]] = row["seconds"]
                tokens[row["category"]] = row["num_tokens"]
            elif row["route_shares"]:
                shares = ", ".join(f"{name} {share:.2f}" for name, share in row["route_shares"].items())
                print(f"{row['method']}: {row['tokens_per_round']:.2f} tokens a round; {shares}")
        print(f"\n{shape}\n", *summary(seconds, tokens, names), sep="\n")


if __name__ == "__main__":
    main()
