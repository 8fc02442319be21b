"""`crossspec bench`: the demo's comparison for any model, any speculative configs and any prompts."""

from pathlib import Path
from typing import Annotated, Any

from typer import Option

from vllm_crossspec.cli import options
from vllm_crossspec.cli.compare import check_all, compare
from vllm_crossspec.cli.demo import POCKET, first_of_each, require_identical
from vllm_crossspec.cli.prompts import read_prompts
from vllm_crossspec.cli.runner import PLAIN, Job

ModelOption = Annotated[str, Option(help="The target: a local folder or a hub id.")]
SpecOption = Annotated[
    list[Path] | None,
    Option("--spec", help="A file with the JSON of --speculative-config; repeatable. Its name is the method's."),
]
PromptsOption = Annotated[
    Path | None, Option(help="JSON lines with `prompt`, or Spec-Bench's `turns`, and `category`. Default: the demo's.")
]


@options.grouped
def bench(
    *,
    model: ModelOption,
    spec: SpecOption = None,
    prompts: PromptsOption = None,
    limit: options.Limit = None,
    max_tokens: options.AnswerTokens = 128,
    temperature: options.Greedy = 0.0,
    top_p: Annotated[float, Option(min=0.0, max=1.0, help="Sample from this share of probability.")] = 1.0,
    top_k: Annotated[int, Option(min=0, help="Sample from this many tokens; 0 is all.")] = 0,
    seed: Annotated[int, Option(help="Seed of sampling; each prompt adds its number.")] = 0,
    ignore_eos: Annotated[bool, Option("--ignore-eos", help="Always generate --max-tokens.")] = False,
    batch_size: Annotated[int, Option(min=1, help="Most requests at a time.")] = 8,
    baseline: Annotated[bool, Option(help="Run plain generation, too, and compare with it.")] = True,
    require_same: Annotated[
        bool, Option("--require-identical", help="Exit with 1 where a text is not plain's.")
    ] = False,
    engine: options.EngineOptions,
    enforce_eager: Annotated[
        bool | None, Option(help="Without compilation and CUDA graphs. Default: vLLM's on a GPU, yes on CPU.")
    ] = None,
    json_file: options.TableFile = None,
) -> None:
    """Compare speculative configs on any model and prompts, side by side in one run.

    All configs are checked before the first engine starts. Then each runs in an engine of its own, one after the
    other, after plain generation; if one fails, the rows of those before it are printed and written all the same.
    Columns and JSON document are those of `crossspec demo`; its help explains them. A row with several turns is
    asked one turn at a time, and each turn counts as a prompt.

    Example: crossspec bench --model Qwen/Qwen3-8B --spec eagle3.json --spec dflash.json --prompts my.jsonl
    """
    arguments = {**engine.arguments(model, batch_size), "enforce_eager": enforce_eager}
    sampling: dict[str, Any] = {"temperature": temperature, "max_tokens": max_tokens, "ignore_eos": ignore_eos}
    if temperature > 0:
        sampling |= {"top_p": top_p, "top_k": top_k, "seed": seed}
    configs: dict[str, dict[str, Any] | None] = {PLAIN: None} if baseline else {}
    configs |= read_configs(spec or [])
    if not configs:
        raise ValueError("--no-baseline leaves nothing to run: name at least one --spec file")
    chosen = first_of_each(read_prompts(prompts or POCKET / "prompts.jsonl"), limit)
    jobs = [
        Job(
            method=name,
            engine={**arguments, "speculative_config": config},
            sampling=sampling,
            prompts=chosen,
            chat=engine.chat,
        )
        for name, config in configs.items()
    ]
    about = {"model": model, "dtype": engine.dtype, "batch_size": batch_size, "sampling": sampling, "configs": configs}
    if len(jobs) > 1:  # one alone is checked when it starts
        check_all(jobs, json_file)
    rows, _ = compare(jobs, about, json_file)
    if require_same:
        require_identical(rows)


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
