"""Tokens a second on a CPU, of plain generation, vLLM's own drafters and each of ours, at a real model's shape.

    python benchmarks/cpu_speed.py --out runs/cpu                      # both shapes, two to three hours on two cores
    python benchmarks/cpu_speed.py --out runs/cpu --shapes 0.2b --report docs/results

The models are the pocket's, inflated (docs/develop/inflated-models.md). Methods answer the same prompts in turns, in
float32, and every text must be plain's. Plain engines and vLLM's methods have the CPU lane's products only with
`CROSSSPEC_CPU_PRODUCTS=all`. `arm-plain` is an engine of ours without drafts. A row's *limit* is its speedup if a round
were the target's pass alone: its tokens a round, times plain's round, by its own target's pass.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_crossspec.cli.models import located
from vllm_crossspec.heterospec.calibration import read_calibration, write_calibration
from vllm_crossspec.kinds.identity import identify
from vllm_crossspec.pocket_models import find_pocket

POCKET = find_pocket()
BFLOAT16 = {"dtype": "bfloat16"}
EAGLE3 = {"method": "eagle3", "model": "{pocket}/eagle3"}
DFLASH = {"method": "dflash", "model": "{pocket}/dflash"}
DRAFT_MODEL = {"method": "draft_model", "model": "{pocket}/draft-model"}
NGRAMS = "{pocket}/ngram/store.safetensors"
CHAIN = {"tree": {"type": "chain"}}
DYNAMIC = {"type": "dynamic", "depth": 8, "top_k": 2, "num_nodes": 12}
DRAFT_MODEL_TREE = {"type": "dynamic", "depth": 10, "top_k": 2, "num_nodes": 14}
BEST_FIRST = {"type": "best_first", "num_nodes": 16}
CHEAP_DRAFTS = 7
"""Draft tokens of an arm: on an AMD with two cores a pass over eight rows takes as long as one over one."""
ALL_DRAFTS = {"num_nodes": CHEAP_DRAFTS, "by_batch_size": {"1": CHEAP_DRAFTS}}
"""An arm alone keeps all as well: where "auto" cuts some by chance, the router would be beside a weaker one."""
TREE_OF_ALL = {"type": "dynamic", "depth": 6, "top_k": 2, **ALL_DRAFTS}
DART = {"model": "{pocket}/dart", "ngram": NGRAMS, **BFLOAT16}
ARMS: dict[str, dict[str, Any]] = {
    "tree": {"type": "eagle3", "model": "{pocket}/eagle3", **BFLOAT16, "tree": TREE_OF_ALL},
    "dart": {**DART, "tree": {"type": "continuity", "top_k": 8, **ALL_DRAFTS}},
    "suffix": {"tree": ALL_DRAFTS},
    "plain": {"type": "nothing"},
}
"""What a router by goodput chooses from; alone, by policy `fixed`, each is a method of its own. No DFlash: what a pass
over a block of 16 costs two cores is more than it brings beside these."""


def goodput(arms: Sequence[str]) -> dict[str, Any]:
    """A router over some of the arms, by tokens a second."""
    drafters = {name: ARMS[name] for name in arms}
    return {"method": "whiflash", "drafters": drafters, "router": {"policy": "goodput", "max_backlog": 1024}}


HEAD = {"model": "{pocket}/draft-model", "head": "{pocket}/flashhead-draft-model"}
BLOCK_TREE = {**BFLOAT16, "num_speculative_tokens": 7, "tree": BEST_FIRST}
PAIR = {
    "eagle3": {"model": "{pocket}/eagle3", **BFLOAT16, "tree": DYNAMIC},
    "dflash": {"model": "{pocket}/dflash", **BLOCK_TREE},
}
SPECS: dict[str, dict[str, Any]] = {
    "vllm-draft-model": {**DRAFT_MODEL, "num_speculative_tokens": 7},
    "draft-model": {**DRAFT_MODEL, **CHAIN, "num_speculative_tokens": 7},
    "draft-model-tree": {**DRAFT_MODEL, "tree": DRAFT_MODEL_TREE},
    "vllm-eagle3": {**EAGLE3, "num_speculative_tokens": 4},
    "eagle3": {**EAGLE3, **BFLOAT16, **CHAIN, "num_speculative_tokens": 4},
    "eagle3-tree": {**EAGLE3, **BFLOAT16, "tree": DYNAMIC},
    "vllm-dflash": {**DFLASH, "num_speculative_tokens": 7},
    "dflash": {**DFLASH, **BFLOAT16, **CHAIN, "num_speculative_tokens": 7},
    "dflash-tree": {**DFLASH, **BLOCK_TREE},
    "dart": {"method": "dart", **DART, "tree": {"type": "continuity", "num_nodes": 16, "beam_width": 8, "top_k": 8}},
    "confu": {"method": "confu", "model": "{pocket}/confu", **BFLOAT16, "num_speculative_tokens": 4},
    "flashhead": {**HEAD, "method": "flashhead", "num_speculative_tokens": 7},
    "heterospec": {**EAGLE3, **BFLOAT16, "tree": DYNAMIC, "adaptive": "{pocket}/heterospec-small/calibration.json"},
    "whiflash": {"method": "whiflash", "drafters": PAIR, "router": {"policy": "neural", "model": "{pocket}/router"}},
    "goodput": goodput(tuple(ARMS)),
    "suffix": {"method": "suffix", "tree": {"num_nodes": CHEAP_DRAFTS}},
    **{
        f"arm-{name}": {"method": "whiflash", "drafters": ARMS, "router": {"policy": "fixed", "drafter": name}}
        for name in ARMS
    },
}
"""What is compared; a config without a key of ours is vLLM's own method."""
METHODS = [*(name for name in SPECS if not name.startswith("arm-")), "arm-plain"]
CROSSSPEC = (sys.executable, "-m", "vllm_crossspec.cli.app")


def write_models(shape: str, folder: Path) -> Path:
    """The inflated models of a shape; made once."""
    models = folder / "models" / shape
    if not (models / "inflated.json").is_file():
        command = [*CROSSSPEC, "inflate", "--shape", shape, "--dtype", "float32", "--device", "cpu", "--no-check"]
        subprocess.run([*command, "--overwrite", "--out", str(models)], check=True)
    return models


def write_calibration_of_small_trees(models: Path, folder: Path) -> None:
    """HeteroSpec's table for trees of this file's size: of the pocket's text, and so of the inflated pair's."""
    own = models / "heterospec-small" / "calibration.json"
    spec = json.dumps(located({**EAGLE3, "tree": DYNAMIC}, POCKET))
    made = folder / "models" / f"pocket-heterospec-{DYNAMIC['depth']}-{DYNAMIC['top_k']}-{DYNAMIC['num_nodes']}.json"
    if not made.is_file():
        command = [*CROSSSPEC, "calibrate", "heterospec", "--spec", spec, "--max-tokens", "128", "--out", str(made)]
        subprocess.run(command, check=True)
    own.parent.mkdir(exist_ok=True)
    target, drafter = (identify(str(models / name), str(models)) for name in ("target", "eagle3"))
    write_calibration(own, replace(read_calibration(made, str(made)), target=target, drafter=drafter))


def write_specs(models: Path, folder: Path, specs: Mapping[str, dict[str, Any]]) -> Iterator[Path]:
    """One file for each method."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, spec in specs.items():
        file = folder / f"{name}.json"
        file.write_text(json.dumps(located(spec, models), indent=1) + "\n")
        yield file


def write_prompts(file: Path, each: int) -> Path:
    """The first of each category of the demo's prompts, as one category: more than the most requests at a time."""
    rows = [json.loads(line) for line in (POCKET / "prompts.jsonl").read_text().splitlines()]
    of: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        of.setdefault(row["category"], []).append({**row, "category": "mixed"})
    chosen = [row for turn in zip(*(found[:each] for found in of.values()), strict=True) for row in turn]
    file.write_text("".join(json.dumps(row) + "\n" for row in chosen))
    return file


def table(rows: Sequence[dict[str, Any]], batch_size: int) -> Iterator[str]:
    """The rows of one batch size, as Markdown."""
    own = {row["method"]: row for row in rows if row["batch_size"] == batch_size and row["category"] == "all"}
    columns = ("tokens/s", "times plain", "limit", "tokens a round", "drafts", "ms a round: target, draft, rest")
    yield f"| batch {batch_size} | {' | '.join(columns)} |"
    yield "|---|---|---|---|---|---|---|"
    for name, row in own.items():
        shares = row["round_shares"]
        parts = ", ".join(f"{1e3 * shares['seconds'] * shares[part]:.0f}" for part in ("target", "draft", "rest"))
        limit = row["tokens_per_round"] * row["plain_seconds"] / (shares["seconds"] * shares["target"])
        least, most = row["speedup_range"]
        drafts = row["num_draft_tokens"] / row["num_rounds"]
        different = " (**another text**)" if row["identical_to_plain"] is False else ""
        yield (
            f"| {name}{different} | {row['tokens_per_second']:.1f} | {row['speedup']:.2f} ({least:.2f} to {most:.2f}) "
            f"| {limit:.2f} | {row['tokens_per_round']:.2f} | {drafts:.1f} | {1e3 * shares['seconds']:.0f}: {parts} |"
        )


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of models, configs and documents")
    add("--shapes", default="0.2b,0.6b", help="of crossspec inflate, comma-separated")
    told = "comma-separated, beside plain; arm-tree and so on: goodput's, alone"
    add("--methods", default=",".join(METHODS), help=told)
    add("--name", default="cpu", help="what the documents' names begin with")
    add("--batch-sizes", default="1,4", help="requests at a time, comma-separated")
    add("--repeats", type=int, default=3, help="turns of every method")
    add("--each", type=int, default=2, help="prompts of each of the four categories")
    add("--max-tokens", type=int, default=128, help="of an answer at most")
    add("--enforce-eager", action="store_true", help="without vLLM's compilation, which takes a minute an engine")
    add("--together", type=int, default=5, help="methods beside plain whose engines are up at once: about 2.6 GiB each")
    add("--report", type=Path, help="write the HTML reports to this folder")
    add("--tables-only", action="store_true", help="print the tables of the documents that are there")
    options = parser.parse_args(argv)
    options.names = options.methods.split(",")
    if unknown := [name for name in options.names if name not in SPECS]:
        parser.error(f"--methods {unknown[0]}: choose from {', '.join(SPECS)}")
    return options


def main() -> None:
    """Measure every shape in groups of methods, and print its tables."""
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    names = options.names
    groups = [names[i : i + options.together] for i in range(0, len(names), options.together)]
    for shape in options.shapes.split(","):
        rows: list[dict[str, Any]] = []
        for number, group in enumerate(groups, start=1):
            document = options.out / f"{options.name}-{shape}-{number}.json"
            if not options.tables_only:
                run_group(shape, group, document, options)
            found = json.loads(document.read_text())["rows"]
            for row in found:  # plain is compared with in its own run
                row["plain_seconds"] = plain_seconds(found, row["batch_size"])
            rows += [row for row in found if number == 1 or row["method"] != "plain"]
        for size in options.batch_sizes.split(","):
            print(f"\n{shape}\n", *table(rows, int(size)), sep="\n")
            if over := over_best_arm(rows, int(size)):
                print(f"\ngoodput over the best arm, turn by turn: {', '.join(f'{turn:.2f}' for turn in over)}")


def run_group(shape: str, names: Sequence[str], document: Path, options: argparse.Namespace) -> None:
    """Plain generation and some methods in turns, in engines that all stay up."""
    models = write_models(shape, options.out)
    if "heterospec" in names:
        write_calibration_of_small_trees(models, options.out)
    prompts = write_prompts(options.out / "prompts.jsonl", options.each)
    command = [*CROSSSPEC, "bench", "--model", str(models / "target"), "--dtype", "float32"]
    for spec in write_specs(models, options.out / "specs" / shape, {name: SPECS[name] for name in names}):
        command += ["--spec", str(spec)]
    command += ["--prompts", str(prompts), "--batch-sizes", options.batch_sizes]
    command += ["--max-tokens", str(options.max_tokens), "--repeats", str(options.repeats)]
    report = (options.report or options.out) / f"{document.stem}.html"
    report.parent.mkdir(parents=True, exist_ok=True)
    command += ["--max-model-len", "512", "--json", str(document), "--html", str(report)]
    command += ["--enforce-eager" if options.enforce_eager else "--no-enforce-eager"]
    if code := subprocess.run(command).returncode:
        sys.exit(code)


def over_best_arm(rows: Sequence[dict[str, Any]], batch_size: int) -> list[float]:
    """The router's tokens a second by those of the best arm of the same turn."""
    own = {row["method"]: row for row in rows if row["batch_size"] == batch_size and row["category"] == "all"}
    arms = [row["seconds_by_repeat"] for name, row in own.items() if name.startswith("arm-")]
    if "goodput" not in own or not arms:
        return []
    return [min(turn) / mine for mine, *turn in zip(own["goodput"]["seconds_by_repeat"], *arms, strict=True)]


def plain_seconds(rows: Sequence[dict[str, Any]], batch_size: int) -> float:
    """Of a round of plain generation."""
    shares = [row["round_shares"] for row in rows if row["method"] == "plain" and row["batch_size"] == batch_size]
    return float(shares[0]["seconds"])


if __name__ == "__main__":
    main()
