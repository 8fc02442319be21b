"""Where a round's time goes on the host, function by function: one engine in this process, under cProfile.

    python benchmarks/profile_round.py --model runs/cpu/models/0.2b/target --spec runs/cpu/specs/0.2b/eagle3-tree.json
    python benchmarks/profile_round.py --model ... --spec ... --json after.json
    python benchmarks/profile_round.py --compare before.json after.json

Times are milliseconds a step of the engine, a function's own (what it calls is not in it), sorted by it. cProfile makes
each call of Python a little slower, so that many small calls look worse than they are; products and kernels do not.
"""

import argparse
import cProfile
import json
import os
import pstats
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
PROMPTS = HERE / "vllm_crossspec" / "pocket" / "prompts.jsonl"


def named(function: tuple[str, int, str]) -> str:
    """A function's name without this machine's folders."""
    file, _, name = function
    for root in ("site-packages/", "vllm_crossspec/", "lib/python3.11/"):
        if root in file:
            kept = file.split(root, 1)[1]
            return f"{'vllm_crossspec/' + kept if root == 'vllm_crossspec/' else kept}: {name}"
    return name if file == "~" else f"{Path(file).name}: {name}"


def room(name: str) -> str:
    """Whose time it is."""
    if name.startswith("vllm_crossspec/"):
        return "ours"
    if name.startswith("vllm/") or "_C" in name or "onednn" in name:
        return "vLLM"
    return "Python, PyTorch, numpy"


def profile(options: argparse.Namespace) -> dict[str, Any]:
    """Generate, once to warm up and once profiled; milliseconds a step by function."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    spec = json.loads(options.spec.read_text()) if options.spec else None
    llm = LLM(
        str(options.model),
        speculative_config=spec,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=options.batch_size,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    rows = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    prompts = [row.get("prompt") or row["turns"][0] for row in rows][:: len(rows) // options.batch_size]
    sampling = SamplingParams(temperature=0.0, max_tokens=options.max_tokens, ignore_eos=True)
    llm.generate(prompts[: options.batch_size], sampling, use_tqdm=False)
    engine, steps = llm.llm_engine, 0
    for number, prompt in enumerate(prompts[: options.batch_size]):
        engine.add_request(str(number), prompt, sampling)
    engine.step()  # the prompts
    profiler, start = cProfile.Profile(), time.perf_counter()
    profiler.enable()
    while engine.has_unfinished_requests():
        engine.step()
        steps += 1
    profiler.disable()
    seconds = time.perf_counter() - start
    functions: dict[str, list[float]] = {}
    for function, (_, calls, own, _, _) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        found = functions.setdefault(named(function), [0.0, 0.0])
        found[0] += 1e3 * own / steps
        found[1] += calls / steps
    return {"steps": steps, "ms": 1e3 * seconds / steps, "functions": functions}


def show(documents: list[dict[str, Any]], top: int) -> None:
    """A table of the functions that take most, as Markdown; two documents beside each other."""

    print("steps", *(d["steps"] for d in documents), "ms a step", *(f"{d['ms']:.1f}" for d in documents))
    rooms = [dict.fromkeys(("ours", "vLLM", "Python, PyTorch, numpy"), 0.0) for _ in documents]
    for sums, document in zip(rooms, documents, strict=True):
        for name, (own, _) in document["functions"].items():
            sums[room(name)] += own
    print("| function |" + " ms a step | calls |" * len(documents))
    print("|---|" + "---|---|" * len(documents))
    for name in rooms[0]:
        print(f"| **{name}** | " + " | ".join(f"{sums[name]:.2f} | " for sums in rooms) + " |")
    names = sorted(
        {name for d in documents for name in d["functions"]},
        key=lambda name: -max(d["functions"].get(name, (0, 0))[0] for d in documents),
    )
    for name in names[:top]:
        cells = [document["functions"].get(name, (0.0, 0.0)) for document in documents]
        print(f"| `{name}` | " + " | ".join(f"{own:.2f} | {calls:.0f}" for own, calls in cells) + " |")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, help="the target's folder")
    add("--spec", type=Path, help="file of a --speculative-config; none is plain generation")
    add("--batch-size", type=int, default=1)
    add("--max-tokens", type=int, default=64)
    add("--top", type=int, default=30, help="functions to show")
    add("--json", type=Path, help="write the profile to this file")
    add("--compare", type=Path, nargs="+", help="show profiles that were written before")
    options = parser.parse_args(argv)
    if not (options.model or options.compare):
        parser.error("give --model, or --compare")
    return options


def main() -> None:
    """Profile, or compare two profiles."""
    options = arguments()
    documents = [json.loads(file.read_text()) for file in options.compare or ()] or [profile(options)]
    if options.json:
        options.json.write_text(json.dumps(documents[0], indent=1) + "\n")
    show(documents, options.top)


if __name__ == "__main__":
    main()
