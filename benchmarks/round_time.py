"""Time per decoding round, split into the target's forward, the draft, and the rest.

Runs vLLM's native EAGLE-3 and DFlash and this project's proposers, each in its own process, with dummy weights at real
shapes. The last line is one JSON document:

    python benchmarks/round_time.py --shape 8b --batch-sizes 1,8,32 --context 1024 --tokens 7

Times mean something on a GPU only. benchmarks/README.md describes the figures.
"""

import argparse
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import emit, make_parser, names_of, numbers, origin, spread
from methods import MATCHED, METHODS, TREE_DEPTH, TREES, model_folders, query_lengths, speculative_config, with_nodes
from shapes import SHAPES

GRAPHS = {
    "default": {},
    "full": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    # Steps with prompts in them replay graphs, too, between the attention layers: what `vllm serve` does, uncompiled.
    "piecewise": {"mode": 0, "cudagraph_mode": "FULL_AND_PIECEWISE"},
    "off": {"mode": 0, "cudagraph_mode": "NONE"},
}
PIECEWISE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024)
"""Tokens of the steps with prompts whose graphs are captured: vLLM's own largest is 512, 8 requests of 61 rows."""
BREAKABLE = {"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"}
"""Environment in which vLLM captures such graphs of a model that it has not compiled."""
# Rounds at the start of a run that are not counted: kernels are compiled and pools grow.
NUM_WARM_UP_ROUNDS = 4
NOT_MEANINGFUL = {
    "cpu": "wall clock of a machine without a GPU: no measure of speed",
    "simulated GPU": "kernels did nothing: host milliseconds are host overhead alone, device milliseconds mean nothing",
}


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Options of the engine and its models."""
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="8b", help="sizes of the target and its drafters")
    folders = "target, eagle3, dflash, dart, draft-model, ngram"
    add("--checkpoints", type=Path, help=f"folder of real models ({folders}) in place of the shape's dummies")
    add("--tokens", type=int, default=7, help="draft tokens a round (K); levels of the trees of DFlash and DART")
    add("--graphs", choices=GRAPHS, default="default", help="vLLM's; full, piecewise: no torch.compile; off: none")
    add("--layers", type=int, help="target layers, if not the shape's own (to see that everything runs)")
    add("--gpu-memory", type=float, default=0.6, help="share of the device memory that vLLM may take")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__)
    add = parser.add_argument
    add_engine(parser)
    add("--methods", type=names_of(METHODS, "method"), help="comma-separated, of: " + ", ".join(METHODS))
    add("--batch-sizes", type=numbers, default=[1, 8, 32], help="requests that decode together, comma-separated")
    add("--context", type=int, default=512, help="prompt tokens of each request")
    add("--nodes", type=numbers, default=[60], help="draft tokens a round of the tree methods, comma-separated")
    add("--rounds", type=int, default=64, help="decode rounds to measure, for each batch size")
    add("--threshold", type=float, help="of the routed methods' router (default: as measured at start-up)")
    add("--temperature", type=float, default=0.0, help="of the target's sampling")
    add("--acceptance", type=float, help="accept by chance, this many tokens a round on average (chains only)")
    add("--own-process", action="store_true", help="engine in a process of its own, as `vllm serve` runs it")
    add("--timeout", type=int, default=600, help="seconds for each method")
    add("--folder", type=Path, help="where configs and logs go (default: a temporary folder)")
    add("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.tree_sizes, options.nodes = options.nodes, options.nodes[0]
    by_chance = options.acceptance is not None
    if options.methods is None:
        options.methods = [method for method in METHODS if not (by_chance and method in MATCHED)]
    elif by_chance and any(method in MATCHED for method in options.methods):
        parser.error(
            "--acceptance is of vLLM's rejection sampler, which verifies chains only: leave out the trees and confu"
        )
    return options


# -- one method, in a process of its own ---------------------------------------------------------------------------


def engine_settings(method: str, models: dict[str, str], options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of ``vllm.LLM``."""
    widths = query_lengths(method, options)
    per_round = max(widths)
    num_tokens = _num_tokens(options)
    largest = max(options.batch_sizes)
    compilation = dict(GRAPHS[options.graphs])
    if options.graphs != "off":
        sizes = {n * q for n in options.batch_sizes for q in widths}
        sizes |= set(PIECEWISE_SIZES) if options.graphs == "piecewise" else set()
        compilation["cudagraph_capture_sizes"] = sorted(sizes)
    return {
        "model": models["target"],
        "load_format": "auto" if options.checkpoints else "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": options.context + num_tokens + 2 * per_round,
        "max_num_seqs": largest,
        # All prompts of a batch fit in one step.
        "max_num_batched_tokens": max(8192, largest * (options.context + 2 * per_round)),
        "gpu_memory_utilization": options.gpu_memory,
        "enable_prefix_caching": False,
        "seed": 0,
        "compilation_config": compilation,
        "speculative_config": speculative_config(method, models, options),
    }


def keep_dummy_heads() -> None:
    """Leave EAGLE-3 drafters their own output layer where weights are made up, ours and vLLM's alike.

    vLLM learns from the checkpoint's tensors that there is one. With dummy weights none is read, and the target's
    layer, five times as large at Qwen3's shape, would take its place.
    """
    from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

    Eagle3LlamaForCausalLM.has_own_lm_head = True


def _num_tokens(options: argparse.Namespace) -> int:
    """Enough for every measured round, even where all drafts are accepted."""
    return (options.rounds + NUM_WARM_UP_ROUNDS + 2) * (max(options.tokens, TREE_DEPTH) + 1)


def run_child(options: argparse.Namespace) -> None:
    """Measure one method; the result goes into the file that ``--child`` names, with the method and the models."""
    job = json.loads(options.child)
    options = with_nodes(options, job["num_nodes"])
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if options.own_process else "0"
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # our own functions go to our own engine process
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.update(BREAKABLE if options.graphs == "piecewise" else {})
    import probe
    from vllm import LLM
    from vllm.platforms import current_platform

    from vllm_crossspec.jobs.offline import keep_to_one_process

    settings = engine_settings(job["method"], job["models"], options)
    if current_platform.is_cpu():  # compiling for the CPU says nothing about a GPU, nor does a worker's own process
        keep_to_one_process(settings)
    if settings["load_format"] == "dummy":
        keep_dummy_heads()
    started = time.perf_counter()
    llm = LLM(**settings)
    seconds = time.perf_counter() - started
    engine = llm.collective_rpc(probe.install)[0]
    config = llm.llm_engine.vllm_config
    engine |= {
        "seconds_to_start": round(seconds, 1),
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
        "num_gpu_blocks": config.cache_config.num_gpu_blocks,
    }
    rows = [measure(llm, batch_size, options) for batch_size in options.batch_sizes]
    Path(job["result"]).write_text(json.dumps({"engine": engine, "rows": rows}))


def measure(llm: Any, batch_size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Rounds of one batch size, one run for each mode of the probe, which is installed."""
    import probe

    generate(llm, batch_size, NUM_WARM_UP_ROUNDS, options)
    runs = {}
    for mode in ("time", "count"):
        num_rounds = options.rounds if mode == "time" else min(options.rounds, 16)
        llm.collective_rpc(probe.begin, args=(mode, options.rounds + NUM_WARM_UP_ROUNDS + 8))
        tokens_per_round = generate(llm, batch_size, num_rounds + NUM_WARM_UP_ROUNDS + 1, options)
        runs[mode] = llm.collective_rpc(probe.end)[0] | {"tokens_per_round": tokens_per_round}
    return summarise(runs, batch_size, options)


def generate(llm: Any, batch_size: int, num_rounds: int, options: argparse.Namespace) -> float:
    """Let ``batch_size`` requests of random tokens decode for ``num_rounds`` rounds, then drop them.

    Returns:
        Tokens that a request gets in a round, on average.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    draw = random.Random(batch_size)
    vocab_size = llm.llm_engine.model_config.get_vocab_size()
    params = SamplingParams(
        temperature=options.temperature,
        max_tokens=_num_tokens(options),
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    engine = llm.llm_engine
    names = [f"{time.monotonic_ns()}-{i}" for i in range(batch_size)]
    for name in names:
        prompt = [draw.randrange(16, vocab_size - 1) for _ in range(options.context)]
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
    per_round: list[float] = []  # of the steps that gave every request something; the first is the prompts'
    while engine.has_unfinished_requests() and len(per_round) <= num_rounds:
        outputs = engine.step()
        if len(outputs) == batch_size:
            per_round.append(sum(len(output.outputs[0].token_ids) for output in outputs) / batch_size)
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    return statistics.mean(per_round[1:]) if per_round[1:] else 0.0


def summarise(runs: dict[str, dict[str, Any]], batch_size: int, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one batch size: medians and 90th percentiles of times, means of counts."""
    full = {mode: _full_rounds(run["rounds"], batch_size) for mode, run in runs.items()}
    timed, counted = full["time"], full["count"]
    row: dict[str, Any] = {"batch_size": batch_size, "context": options.context, "num_rounds": len(timed)}
    if not timed:
        return row | {"error": "no round in which all requests decode: the KV cache may be too small"}
    for clock in ("device_ms", "host_ms"):
        row[clock] = None if timed[0][clock] is None else _split([r[clock] for r in timed])
    row["tokens_per_round"] = round(runs["time"]["tokens_per_round"], 3)
    row["per_round"] = _means([r["counts"] for r in counted])
    row["sync_places"] = runs["count"]["sync_places"]
    return row


def _full_rounds(rounds: list[dict[str, Any]], batch_size: int) -> list[dict[str, Any]]:
    """The rounds in which every request decodes, without the first ones."""
    full = [r for r in rounds if r["num_requests"] == batch_size]
    widths = [r["num_tokens"] for r in full]
    # The last chunk of a batch's prompts may be as even as a decode round; decode rounds are the many.
    return [r for r in full if r["num_tokens"] == statistics.mode(widths)][NUM_WARM_UP_ROUNDS:]


def _split(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Round, target, draft and the rest; the rest also by its parts."""
    columns = {stage: [r[stage] for r in rounds] for stage in rounds[0]}
    total = [sum(r.values()) for r in rounds]
    rest = [t - r["target"] - r["draft"] for t, r in zip(total, rounds, strict=True)]
    parts = {part: spread(columns[part], 4) for part in ("prepare", "sample", "between")}
    whole = {"round": total, "target": columns["target"], "draft": columns["draft"], "rest": rest}
    return {name: spread(values, 4) for name, values in whole.items()} | {"rest_parts": parts}


def _means(counts: list[dict[str, int]]) -> dict[str, dict[str, float]]:
    means: dict[str, dict[str, float]] = {}
    for key in sorted({key for count in counts for key in count}):
        what, _, stage = key.partition("/")
        means.setdefault(what, {})[stage] = round(sum(c.get(key, 0) for c in counts) / len(counts), 3)
    return means


# -- all methods ---------------------------------------------------------------------------------------------------


def run_method(method: str, models: dict[str, str], folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One child process; its result, or ``error`` with the last lines that it wrote."""
    name = f"{method}-{options.nodes}" if method in TREES else method
    job = {"method": method, "models": models, "result": str(folder / f"{name}.json"), "num_nodes": options.nodes}
    Path(job["result"]).unlink(missing_ok=True)
    log = folder / f"{name}.log"
    status = _status([*sys.argv[1:], "--child", json.dumps(job)], log, options.timeout)
    if status == 0:
        found: dict[str, Any] = json.loads(Path(job["result"]).read_text())
        return found
    return {"engine": None, "rows": [], "error": f"{status}", "log": log.read_text(errors="replace")[-2000:]}


def _status(command_line: list[str], log: Path, timeout: int) -> int | str:
    """How a child with these arguments ended."""
    command = [sys.executable, str(Path(__file__).resolve()), *command_line]
    with log.open("wb") as output:
        try:
            return subprocess.run(command, stdout=output, stderr=output, timeout=timeout).returncode
        except subprocess.TimeoutExpired:
            return f"no result after {timeout} s"


def document(
    results: dict[tuple[str, int], dict[str, Any]], models: dict[str, str], options: argparse.Namespace
) -> dict[str, Any]:
    """The JSON document: ``meta``, and ``rows``, one for each method, tree size and batch size.

    ``results`` are those of :func:`run_method`, by method and draft tokens of a tree.
    """
    rows = []
    for (method, num_nodes), result in results.items():
        config = speculative_config(method, models, with_nodes(options, num_nodes))
        head = {
            "method": method,
            "num_nodes": num_nodes if method in TREES else None,
            "proposer": None if config is None else ("vllm" if method.startswith("native-") else "vllm_crossspec"),
            "speculative_config": config,
            "engine": result["engine"],
        }
        if "error" in result:
            rows.append(head | {"error": result["error"], "log": result["log"]})
        rows += [head | row for row in result["rows"]]
    return {"meta": meta(results, options), "rows": rows}


def meta(results: dict[Any, dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """What ran, on what."""
    engines = [r["engine"] for r in results.values() if r["engine"]]
    kind = None
    if engines:
        kind = "cpu" if engines[0]["device"] == "cpu" else "simulated GPU" if engines[0]["simulated"] else "gpu"
    about = origin("round_time")
    names = ("vllm", "torch", "triton", "transformers")
    return about | {
        "versions": {"python": platform.python_version()} | {name: metadata.version(name) for name in names},
        "hardware": about["hardware"] | {"kind": kind, "device": engines[0]["device"] if engines else None},
        "times_mean_something": kind == "gpu",
        "note": NOT_MEANINGFUL.get(kind or ""),
        **_weights(options),
        "num_speculative_tokens": options.tokens,
        "num_nodes": options.tree_sizes,
        "graphs": options.graphs,
        "engine_in_own_process": options.own_process,
    }


def _weights(options: argparse.Namespace) -> dict[str, Any]:
    """Of ``meta``: whose weights ran, and what that says about acceptance."""
    shape = SHAPES[options.shape]
    found: dict[str, Any] = {
        "weights": "dummy (random): times are those of the shapes, acceptance is not a drafter's",
        "acceptance": "as random weights give it (about none)",
        "shape": {"name": options.shape, **shape._asdict(), "num_layers": options.layers or shape.num_layers},
    }
    if options.checkpoints:
        found = {"weights": str(options.checkpoints), "acceptance": "of random prompts", "shape": None}
    if options.acceptance is not None:
        found["acceptance"] = f"synthetic: vLLM accepts by chance, {options.acceptance} tokens a round on average"
    return found


def main() -> int:
    """Run all methods; 1 if any failed."""
    options = arguments()
    if options.child:
        run_child(options)
        return 0
    # A child must not outlive this process: subprocess.run ends it where an exception passes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    folder = options.folder or Path(tempfile.mkdtemp(prefix="round-time-"))
    print(f"configs and logs: {folder}", file=sys.stderr)
    results = {}
    for num_nodes in options.tree_sizes:
        sized = with_nodes(options, num_nodes)
        models = model_folders(sized, folder)
        for method in options.methods:
            if method not in TREES and num_nodes != options.nodes:
                continue  # has no tree: once is enough
            started = time.perf_counter()
            found = results[method, num_nodes] = run_method(method, models, folder, sized)
            state = "failed" if "error" in found else "done"
            size = f", {num_nodes} nodes" if method in TREES else ""
            print(f"{method}{size}: {state} in {time.perf_counter() - started:.0f} s", file=sys.stderr)
            whole = document(results, models, options)
            if options.json:  # after each method: what is measured outlasts an end in the next one
                options.json.write_text(json.dumps(whole, indent=1) + "\n")
    emit(whole, None)
    return 1 if any("error" in row for row in whole["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
