"""`crossspec bench`: methods side by side on any model, with any speculative configs and prompts."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from typer import Option

from vllm_crossspec.cli import options, report, runner
from vllm_crossspec.cli.check import checked_first, read_spec
from vllm_crossspec.cli.demo import demo_prompts, require_identical
from vllm_crossspec.cli.meta import GIB, available_gib
from vllm_crossspec.cli.processes import CHILD_DEFAULTS
from vllm_crossspec.cli.prompts import FORMATS, read_prompts
from vllm_crossspec.cli.rows import PLAIN, Row
from vllm_crossspec.cli.runner import Job, Measurement, Pass, by_category, first_of_each, schedule
from vllm_crossspec.names import counted, look_up
from vllm_crossspec.platform import platform

ENGINE_GIB = 0.75
"""Of memory that an engine on a CPU takes beside its weights and its KV cache."""
GPU_SHARE, DEFAULT_GPU_SHARE = 0.95, 0.92
"""Of a GPU's memory: what engines may take together, and what one takes that was told nothing (vLLM's own)."""

ModelOption = Annotated[str, Option(help="The target: a local folder or a hub id.")]
SpecOption = Annotated[
    list[Path] | None,
    Option("--spec", help="A file with the JSON of --speculative-config; repeatable. Its name is the method's."),
]
PromptsOption = Annotated[
    list[Path] | None,
    Option(
        help="JSON lines with `prompt` or `turns`, and `category`, or a public data set as it is published (see "
        "--dataset-format); repeatable. Default: the demo's."
    ),
]
FormatOption = Annotated[
    str | None, Option(help=f"Of --prompts, where the first row does not tell it: {', '.join(FORMATS)}.")
]
BatchSizes = Annotated[
    str, Option("--batch-sizes", "--batch-size", help="Most requests at a time; several, with commas, are a sweep.")
]
EngineArgs = Annotated[
    str | None,
    Option(help='JSON of further arguments of vLLM\'s engine, over ours: {"max_num_batched_tokens": 4096}.'),
]
Waves = Annotated[
    int | None,
    Option(
        min=1,
        help="Answer at most so many times the batch size of a category's prompts, so that small batches of a sweep do "
        "not take hours. Default: all.",
    ),
]
KeepEngines = Annotated[
    bool | None,
    Option(
        "--keep-engines/--restart-engines",
        help="While others have their turn. Default: keep them with --repeats, if memory is enough for all at once.",
    ),
]

OWN_OPTIONS = {
    # Engine arguments that the command sets itself.
    "model": "name it with --model",
    "speculative_config": "give a file to --spec",
    "max_num_seqs": "it is the largest of --batch-sizes, or --batch-size",
    "disable_log_stats": "the times are vLLM's own metrics of requests",
    "per_request_spec_decode_metrics": "acceptance is vLLM's own count of requests",
}


@options.grouped
def bench(
    *,
    model: ModelOption,
    spec: SpecOption = None,
    prompts: PromptsOption = None,
    dataset_format: FormatOption = None,
    limit: options.Limit = None,
    max_tokens: options.AnswerTokens = 128,
    temperature: options.Greedy = 0.0,
    top_p: Annotated[float, Option(min=0.0, max=1.0, help="Sample from this share of probability.")] = 1.0,
    top_k: Annotated[int, Option(min=0, help="Sample from this many tokens; 0 is all.")] = 0,
    seed: Annotated[int, Option(help="Seed of sampling; each prompt adds its number.")] = 0,
    ignore_eos: Annotated[bool, Option("--ignore-eos", help="Always generate --max-tokens.")] = False,
    batch_sizes: BatchSizes = "8",
    waves: Waves = None,
    repeats: Annotated[int, Option(min=1, help="How often each method answers all prompts, in turns.")] = 1,
    keep_engines: KeepEngines = None,
    baseline: Annotated[bool, Option(help="Run plain generation, too, and compare with it.")] = True,
    require_same: Annotated[
        bool, Option("--require-identical", help="Exit with 1 where a text is not plain's.")
    ] = False,
    engine: options.EngineOptions,
    enforce_eager: Annotated[
        bool | None, Option(help="Without compilation and CUDA graphs. Default: vLLM's on a GPU, yes on CPU.")
    ] = None,
    engine_args: EngineArgs = None,
    files: report.Files,
) -> None:
    """Compare speculative configs on any model and prompts, side by side in one run.

    All configs are checked before the first engine starts. Each method has an engine of its own. Where these stay up
    they take turns, plain first, at every category, and with one request at a time at every prompt: what slows the
    machine down for a while slows all of them down. If one fails, the rows of what is done are printed and written
    all the same.

    A batch size is the most requests at a time: an answer makes room for the next prompt. A row with several turns is
    asked one turn at a time, and each turn counts as a prompt. Prompts of a category are answered together, the
    categories one after the other.

    docs/use/benchmarking.md explains every column.

    Example: crossspec bench --model Qwen/Qwen3-8B --spec eagle3.json --spec dflash.json --prompts my.jsonl
    """
    sizes = options.integers("--batch-sizes", batch_sizes, "numbers of requests")
    if min(sizes) < 1:
        raise ValueError(f"--batch-sizes {batch_sizes}: at least one request at a time")
    sizes = sorted({*sizes})
    arguments = {
        **engine.arguments(model, max(sizes)),
        "enforce_eager": enforce_eager,
        **parse_engine_args(engine_args),
    }
    sampling: dict[str, Any] = {"temperature": temperature, "max_tokens": max_tokens, "ignore_eos": ignore_eos}
    if temperature > 0:
        sampling |= {"top_p": top_p, "top_k": top_k, "seed": seed}
    configs: dict[str, dict[str, Any] | None] = {PLAIN: None} if baseline else {}
    configs |= read_configs(spec or [])
    if not configs:
        raise ValueError("--no-baseline leaves nothing to run: name at least one --spec file")
    if dataset_format is not None:
        look_up(dataset_format, FORMATS, "--dataset-format", "format")
    read = [p for file in prompts or [demo_prompts()] for p in read_prompts(file, dataset_format)]
    chosen = first_of_each(read, limit)
    jobs = [
        Job(
            method=name,
            engine={**arguments, "speculative_config": config},
            sampling=sampling,
            prompts=chosen,
            chat=engine.chat,
            waves=waves,
        )
        for name, config in configs.items()
    ]
    files.check()
    checked_first(arguments, configs)
    if len(jobs) > 1:  # one alone is checked when it starts
        runner.check(jobs)
    groups = by_category(chosen)
    fewest, notes = min(map(len, groups.values())), []
    if max(sizes) > fewest:
        notes.append(
            f"a category has {counted(fewest, 'prompt')}: so many of its requests run at a time, not {max(sizes)}"
        )
    stay_up = bool(keep_engines)
    if repeats > 1:
        stay_up, memory = fits(jobs) if keep_engines is None else (keep_engines, "")
        if memory and not stay_up:
            notes.append(f"engines are started anew for every repeat: {memory}")
    for note in notes:
        Console(stderr=True).print(f"note: {note}", highlight=False, soft_wrap=True)
    about: dict[str, Any] = {
        "model": model,
        "dtype": engine.dtype,
        "batch_sizes": sizes,
        "repeats": repeats,
        "waves": waves,
        "sampling": sampling,
        "engine_args": {name: value for name, value in arguments.items() if value is not None},
        "configs": configs,
        "notes": notes,
        "engines": "one a method, kept" if stay_up else "started for every repeat",
    }
    plan = schedule(list(configs), sizes, repeats, stay_up, jobs[0].at)
    found = report.measure(Measurement(jobs, plan, describe, outcome, stay_up), about, files)
    if require_same:
        require_identical(found)


def describe(one: Pass) -> str:
    """A pass in words."""
    turn = "parts of a round" if one.repeat is None else f"repeat {one.repeat + 1}"
    return f"{one.method}, batch size {one.batch_size}, {turn}"


def outcome(row: Row, number: int) -> str:
    """What a repeat came to, beside plain's where there is one."""
    speed = "" if row.tokens_per_second is None else f", {row.tokens_per_second:.1f} a second"
    done = f"{counted(row.num_tokens, 'token')} in {row.seconds:.1f} s{speed}"
    if row.method == PLAIN or row.speedup is None:
        return done
    same = ", every text plain's" if row.identical_to_plain else ", [red]NOT plain's texts[/red]"
    return f"{done}, {row.speedup:.2f} times plain{same}"


# -- memory -----------------------------------------------------------------------------------------------------------


def fits(jobs: Sequence[Job]) -> tuple[bool, str]:
    """Whether the jobs' engines can be up at the same time, and in words how much they take of how much."""
    engines = counted(len(jobs), "engine")
    if platform().on_cores:
        needed, free = sum(map(_gib_on_cpu, jobs)), available_gib()
        return needed <= free, f"about {needed:.1f} GiB for {engines}, and {free:.1f} are free"
    share = sum(job.engine.get("gpu_memory_utilization") or DEFAULT_GPU_SHARE for job in jobs)
    each = int(100 * GPU_SHARE / len(jobs)) / 100
    advice = f"(--gpu-memory-utilization {each} lets all stay up)"
    return share <= GPU_SHARE, f"{share:.2f} of a GPU's memory for {engines} {advice}"


def _gib_on_cpu(job: Job) -> float:
    """What an engine takes: what it computes with, its KV cache, and the weights that are in folders here."""
    variable = "VLLM_CPU_KVCACHE_SPACE"
    models = [job.engine["model"], *_models_in(job.engine.get("speculative_config"))]
    sizes = [f.stat().st_size for model in models for f in Path(model).glob("*.safetensors")]
    cache = job.engine.get("kv_cache_memory_bytes") or GIB * float(os.environ.get(variable) or CHILD_DEFAULTS[variable])
    return ENGINE_GIB + (cache + sum(sizes)) / GIB


def _models_in(config: Any) -> Iterator[str]:
    if isinstance(config, Mapping):
        for key, value in config.items():
            if key == "model" and isinstance(value, str):
                yield value
            yield from _models_in(value)


# -- what is given ----------------------------------------------------------------------------------------------------


def parse_engine_args(given: str | None) -> dict[str, Any]:
    """Further arguments of vLLM's engine; their names are checked where vLLM is imported. Raises ValueError."""
    if given is None:
        return {}
    found = options.parse_json("--engine-args", given, given)
    if not isinstance(found, dict):
        raise ValueError(f'--engine-args {given} is not an object: write {{"max_num_batched_tokens": 4096}}')
    for name, why in OWN_OPTIONS.items():
        if name in found:
            raise ValueError(f"--engine-args: {name} is not to be set here: {why}")
    return found


def read_configs(files: list[Path]) -> dict[str, dict[str, Any] | None]:
    """Speculative configs by the names of their files.

    Raises ValueError: a file that is not a JSON object, a name that two files share, or JSON in a file's place.
    """
    configs: dict[str, dict[str, Any] | None] = {}
    for file in files:
        if str(file).startswith("{"):
            raise ValueError(f"--spec {file}: write it to a file and name that; the file's name is the row's")
        name = file.stem
        if name in configs or name == PLAIN:
            raise ValueError(f"--spec {file}: another row is called {name!r} already: rename the file")
        configs[name] = read_spec(str(file))
    return configs
