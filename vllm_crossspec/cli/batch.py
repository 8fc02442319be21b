"""`crossspec batch`: a file of prompts answered by one engine, or by several on a Ray cluster."""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer import Argument, Option

from vllm_crossspec.cli import options
from vllm_crossspec.cli.batch_rows import COLUMNS, Request, read_requests
from vllm_crossspec.cli.bench import EngineArgs, ModelOption, parse_engine_args, read_configs
from vllm_crossspec.cli.processes import EngineError
from vllm_crossspec.cli.sharded import Work, run_missing
from vllm_crossspec.files import replacing, write_json

BATCH = Work("batch", "vllm_crossspec.engine.jobs.batch", "rows")
SETTINGS, SUMMARY = "job.json", "summary.json"
"""Files of the folder beside the output: what decides the rows, and what is said of them at the end."""

Summary = dict[str, Any]


@options.grouped
def batch(
    *,
    rows: Annotated[
        Path,
        Argument(
            metavar="IN",
            help="JSON lines (or .jsonl.gz, or .parquet) with `prompt` or `messages`; or OpenAI's batch format.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, Argument(metavar="OUT", help="The answers: JSON lines, in the order of IN.")],
    model: ModelOption,
    spec: Annotated[
        Path | None, Option(help="A file with the JSON of --speculative-config. Default: plain generation.")
    ] = None,
    replicas: Annotated[int, Option(min=1, help="Engines side by side; more than one run on Ray.")] = 1,
    max_tokens: options.AnswerTokens = 256,
    temperature: options.Greedy = 0.0,
    top_p: Annotated[float, Option(min=0.0, max=1.0, help="Of sampled answers.")] = 1.0,
    top_k: Annotated[int, Option(min=0, help="Of sampled answers; 0 is all tokens.")] = 0,
    seed: Annotated[int, Option(min=0, help="Of sampled answers; each row adds its number.")] = 0,
    keep: Annotated[
        list[str] | None, Option(help="A column of IN that is handed on to OUT as it is; repeatable.")
    ] = None,
    batch_size: options.EngineBatch = 64,
    shard_rows: Annotated[int, Option(min=1, help="Rows that an engine takes at a time: what a stop can lose.")] = 256,
    engine: options.EngineOptions,
    engine_args: EngineArgs = None,
    json_file: options.TableFile = None,
) -> None:
    """Answer every row of a file, with one engine or with several on the machines of a Ray cluster.

    What a row says (`max_tokens`, `temperature`, `stop`, ... or all of it in `sampling`, and `extra_args` such as
    {"crossspec": "off"}) goes before the options here. A row that cannot be answered has an `error`, and the others are
    answered all the same. Each answer tells how its drafts fared: rounds, draft tokens, accepted tokens, acceptance
    length. A table at the end has the sums by drafter, over all replicas.

    Finished rows are kept in the folder OUT.parts until all are there. The same command goes on where it was stopped,
    with any number of replicas. A replica that dies is replaced, and the rows that it had are begun anew: every row is
    in OUT once.

    Ray is joined where RAY_ADDRESS or `ray start` says, else started on this machine. docs/batch.md has a cluster, the
    columns of IN and OUT, and what goes wrong.

    Example: crossspec batch prompts.jsonl answers.jsonl --model Qwen/Qwen3-8B --spec eagle3.json --replicas 4
    """
    for column in keep or ():
        if column in COLUMNS:
            raise ValueError(f"--keep {column} is a column that is read: give others")
    arguments = {**engine.arguments(model, batch_size), **parse_engine_args(engine_args)}
    arguments["speculative_config"] = None if spec is None else read_configs([spec])[spec.stem]
    options.check_file("OUT", out)
    options.check_file("--json", json_file)
    if out.resolve() == rows.resolve():
        raise ValueError(f"OUT {out} is IN: name another file")
    requests = read_requests(rows, keep or ())
    job: dict[str, Any] = {
        "engine": arguments,
        "sampling": {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k},
        "seed": seed,
        "chat": engine.chat,
        "out": f"{out}.parts",
    }
    parts = Path(job["out"])
    _claim(out, parts, _describe(job, requests, shard_rows))
    if not out.exists():
        summary = _answer(job, requests, shard_rows, replicas)
        write_json(parts / SUMMARY, summary)
        _gather(out, parts, requests, shard_rows)
        for shard in _shards(requests, shard_rows):
            (parts / shard["file"]).unlink()
    summary = json.loads((parts / SUMMARY).read_text())
    Console(width=max(Console().width, 100)).print(_table(summary))
    typer.echo(f"{summary['rows']} rows in {out}, {summary['errors']} of them with an error")
    options.write_json(json_file, summary)


def _describe(job: dict[str, Any], requests: list[Request], shard_rows: int) -> dict[str, Any]:
    """What decides the rows of the output."""
    digest = hashlib.sha256(json.dumps(requests, default=str).encode()).hexdigest()
    engine = {name: value for name, value in job["engine"].items() if name != "max_num_seqs" and value is not None}
    chosen = {name: job[name] for name in ("sampling", "seed", "chat")}
    return {"IN": digest, "--shard-rows": shard_rows, **chosen, **engine}


def _claim(out: Path, parts: Path, settings: dict[str, Any]) -> None:
    """Make the folder beside the output this job's, or find that it is already.

    Raises:
        ValueError: there is an output without this folder, or the folder is of another job.
    """
    file, settings = parts / SETTINGS, json.loads(json.dumps(settings))
    if not file.is_file():
        if out.exists():
            raise ValueError(f"{out} is there and no job of this command's that could go on: name another OUT")
        parts.mkdir(exist_ok=True)
        write_json(file, settings)
        return
    found = json.loads(file.read_text())
    for name in sorted({*found, *settings}):
        if found.get(name) != settings.get(name):
            differs = name if name == "IN" else f"{name} ({found.get(name)}, here {settings.get(name)})"
            raise ValueError(
                f"{parts} is of a job with another {differs}: name another OUT, or give what it was begun with"
            )


def _shards(requests: list[Request], size: int) -> Iterator[dict[str, Any]]:
    for number, start in enumerate(range(0, len(requests), size)):
        part = requests[start : start + size]
        yield {"number": number, "file": f"rows-{number:06d}.jsonl", "num_texts": len(part), "requests": part}


def _answer(job: dict[str, Any], requests: list[Request], shard_rows: int, replicas: int) -> Summary:
    """Have engines answer what is missing; what is to be said of all rows."""
    shards, started, deaths = list(_shards(requests, shard_rows)), time.perf_counter(), 0

    def listen(event: dict[str, Any]) -> None:
        nonlocal deaths
        deaths += event["event"] == "died"

    made = run_missing(BATCH, job, shards, job["sampling"]["max_tokens"], replicas, listen)
    seconds = time.perf_counter() - started
    summary = {"rows": len(requests), "answered_now": made, "seconds": round(seconds, 1), "engines_died": deaths}
    counts: Counter[str] = Counter(dict.fromkeys(("errors", "tokens", "rounds", "draft_tokens", "accepted_tokens"), 0))
    drafters: dict[str, Counter[str]] = {}
    for shard in shards:
        about, *lines = map(json.loads, (Path(job["out"], shard["file"])).read_text().splitlines())
        for name, counted in about["drafters"].items():
            drafters.setdefault(name, Counter()).update(counted)
        for row in lines:
            counts.update(_counts(row))
    return {**summary, **counts, "drafters": drafters}


def _counts(row: dict[str, Any]) -> dict[str, int]:
    """What a row adds to the sums."""
    if row["error"] is not None:
        return {"errors": 1}
    if "response" in row:
        body = row["response"]["body"]
        tokens, acceptance = body["usage"]["completion_tokens"], body["metrics"]["speculative_decoding"]
    else:
        tokens, acceptance = row["tokens"], row["acceptance"]
    names = ("rounds", "draft_tokens", "accepted_tokens")
    return {"tokens": tokens, **{name: acceptance[name] for name in names if acceptance is not None}}


def _gather(out: Path, parts: Path, requests: list[Request], shard_rows: int) -> None:
    """Write the output, whole or not at all: the rows of all shards. Raises EngineError where one is not its row."""
    number = 0
    with replacing(out) as partial, partial.open("w") as file:
        for shard in _shards(requests, shard_rows):
            lines = (parts / shard["file"]).read_text().splitlines(keepends=True)[1:]
            if len(lines) != shard["num_texts"]:
                raise EngineError(f"{parts / shard['file']} has {len(lines)} rows, not {shard['num_texts']}: delete it")
            file.writelines(lines)
            number += len(lines)
    assert number == len(requests)


def _table(summary: Summary) -> Table:
    """Acceptance by drafter."""
    tokens_a_second = summary["tokens"] / max(summary["seconds"], 1e-9)
    table = Table(
        title=f"{summary['rows']} rows, {summary['tokens']} tokens"
        + (f", {tokens_a_second:.0f} tokens/s" if summary["answered_now"] == summary["rows"] else "")
    )
    for name in ("drafter", "rounds", "draft tokens", "accepted", "acceptance length"):
        table.add_column(name, justify="left" if name == "drafter" else "right")
    for name, counted in sorted(summary["drafters"].items()):
        rounds, accepted = counted["rounds"], counted["accepted_tokens"]
        length = f"{1 + accepted / rounds:.2f}" if rounds else "-"
        table.add_row(name, str(rounds), str(counted["draft_tokens"]), str(accepted), length)
    if not summary["drafters"]:
        table.add_row("none", "-", "-", "-", "1.00")
    return table
