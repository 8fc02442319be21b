"""`crossspec bench`: methods side by side on any model, with any speculative configs and prompts."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from rich.console import Console
from typer import Option

from vllm_crossspec.cli import meta, options, report
from vllm_crossspec.cli.compare import SAMPLED, check_all, seconds_note, table, wide_console
from vllm_crossspec.cli.demo import demo_prompts, first_of_each, require_identical
from vllm_crossspec.cli.measure import Measurement, fits, measure, schedule
from vllm_crossspec.cli.prompts import FORMATS, read_prompts
from vllm_crossspec.cli.rows import PLAIN, Row, rows
from vllm_crossspec.cli.runner import Job, by_category
from vllm_crossspec.names import look_up

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
    str | None,
    Option(help=f"Of --prompts, where the first row does not tell it: {', '.join(FORMATS)}."),
]
BatchSizes = Annotated[
    str,
    Option("--batch-sizes", "--batch-size", help="Most requests at a time; several, with commas, are a sweep."),
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
        help="Between repeats. Default: keep them where memory is enough for all at once.",
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


class Files(NamedTuple):
    """Where the results go, beside the terminal."""

    json_file: options.TableFile = None
    csv_file: Annotated[Path | None, Option("--csv", help="Write all rows as CSV.")] = None
    markdown: Annotated[Path | None, Option("--markdown", help="Write the tables as Markdown.")] = None
    html: Annotated[
        Path | None, Option("--html", help="Write one page with plots, tables and configs, for a browser.")
    ] = None

    def check(self) -> None:
        """Find out before the work that they can be written. Raises ValueError."""
        for option, file in zip(("--json", "--csv", "--markdown", "--html"), self, strict=True):
            options.check_file(option, file)
        if self.html is not None:
            report.require_plots()

    def write(self, found: Sequence[Row], about: dict[str, Any]) -> None:
        """Write those that are wanted."""
        note = seconds_note(about)
        options.write_json(self.json_file, {"rows": [asdict(row) for row in found], "meta": about})
        if self.csv_file is not None:
            report.write_csv(self.csv_file, found)
        if self.markdown is not None:
            report.write_markdown(self.markdown, found, note)
        if self.html is not None:
            report.write_html(self.html, found, about, note)


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
    files: Files,
) -> None:
    """Compare speculative configs on any model and prompts, side by side in one run.

    All configs are checked before the first engine starts. Each method has an engine of its own; with --repeats
    they take turns at every category, plain first, so that what slows the machine down for a while slows all of
    them down. If one fails, the rows of what is done are printed and written all the same.

    A batch size is the most requests at a time: an answer makes room for the next prompt. A row with several turns is
    asked one turn at a time, and each turn counts as a prompt. Prompts of a category are answered together, the
    categories one after the other.

    docs/benchmarking.md explains every column.

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
    if len(jobs) > 1:  # one alone is checked when it starts
        check_all(jobs)
    about: dict[str, Any] = {
        "model": model,
        "dtype": engine.dtype,
        "batch_sizes": sizes,
        "repeats": repeats,
        "waves": waves,
        "sampling": sampling,
    }
    about |= {
        "engine_args": {name: value for name, value in arguments.items() if value is not None},
        "configs": configs,
    }
    found = run_all(jobs, sizes, repeats, keep_engines, about, files)
    if require_same:
        require_identical(found)


def run_all(
    jobs: Sequence[Job],
    sizes: Sequence[int],
    repeats: int,
    keep_engines: bool | None,
    about: dict[str, Any],
    files: Files,
) -> list[Row]:
    """Measure, print and write; the rows. Whatever ends it, what is done is printed and written."""
    stay_up, notes = choose_engines(jobs, repeats, keep_engines), []
    fewest = min(map(len, by_category(jobs[0].prompts).values()))
    if max(sizes) > fewest:
        notes.append(f"a category has {fewest} prompts: so many of its requests run at a time, not {max(sizes)}")
    if repeats > 1 and not stay_up and keep_engines is None:
        notes.append(f"engines are started anew for every repeat: {fits(jobs)[1]}")
    for note in notes:
        Console(stderr=True).print(f"note: {note}", highlight=False, soft_wrap=True)
    about |= {"notes": notes, "engines": "one a method, kept" if stay_up else "started for every repeat"}
    categories = list(by_category(jobs[0].prompts))
    plan = schedule([job.method for job in jobs], sizes, repeats, stay_up, categories)
    found = Measurement()
    try:
        measure(jobs, plan, stay_up, found)
    except BaseException:
        if found.runs:
            show(jobs, found, about | {"unfinished": found.unfinished(plan)}, files)
        raise
    return show(jobs, found, about, files)


def choose_engines(jobs: Sequence[Job], repeats: int, keep_engines: bool | None) -> bool:
    """Whether engines stay up between repeats; there is no between if there is one."""
    if repeats == 1:
        return False
    return fits(jobs)[0] if keep_engines is None else keep_engines


def show(jobs: Sequence[Job], found: Measurement, settings: dict[str, Any], files: Files) -> list[Row]:
    """Print the tables and write the files; the rows."""
    runs = found.sorted_runs([job.method for job in jobs])
    about = meta.describe(runs, settings)
    measured = rows(runs, shares=found.shares)
    console, smallest = wide_console(), measured[0].batch_size
    console.print(report.speed_table(measured, seconds_note(about)))
    console.print(table([row for row in measured if row.batch_size == smallest], about))
    if settings["sampling"]["temperature"] > 0 and any(row.identical_to_plain is False for row in measured):
        console.print(SAMPLED)
    files.write(measured, about)
    return measured


def parse_engine_args(given: str | None) -> dict[str, Any]:
    """Further arguments of vLLM's engine; their names are checked where vLLM is imported.

    Raises:
        ValueError: no object, or an argument that the command sets itself.
    """
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

    Raises:
        ValueError: a file that is no JSON object, a name that two files share, or JSON in a file's place.
        OSError: a file cannot be read.
    """
    configs: dict[str, dict[str, Any] | None] = {}
    for file in files:
        if str(file).startswith("{"):
            raise ValueError(f"--spec {file}: write it to a file and name that; the file's name is the row's")
        name = file.stem
        if name in configs or name == PLAIN:
            raise ValueError(f"--spec {file}: another row is called {name!r} already: rename the file")
        config = options.parse_json("--spec", file, file.read_text())
        if not isinstance(config, dict):
            raise ValueError(f"--spec {file} is not an object: write what --speculative-config takes")
        configs[name] = config
    return configs
