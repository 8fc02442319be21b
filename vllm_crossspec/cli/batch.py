"""`crossspec batch`: a file of prompts, answered by a pool of engines on Ray Data.

Rows are checked before Ray starts. Ray Data hands shards of them to the pool, and restarts engines that die. Each shard
that is done becomes a line of OUT.parts, from which a stopped command resumes.
"""

import hashlib
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from vllm_crossspec.cli import options
from vllm_crossspec.cli.bench import EngineArgs, ModelOption, parse_engine_args, read_configs
from vllm_crossspec.cli.check import checked_first
from vllm_crossspec.cli.cluster import ray_connected
from vllm_crossspec.cli.processes import BOUND_CORES, CHILD_DEFAULTS, EngineError
from vllm_crossspec.cli.prompts import json_rows, parquet_rows
from vllm_crossspec.cli.report import say_nothing_was_drafted
from vllm_crossspec.differences import differences
from vllm_crossspec.files import replacing
from vllm_crossspec.names import counted, nearest

SAMPLING = (
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids",
    "ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty", "bad_words", "structured_outputs",
    "extra_args",
)  # fmt: skip
COLUMNS = ("id", "prompt", "messages", "sampling", *SAMPLING)
ANSWER = ("text", "finish_reason", "prompt_tokens", "tokens", "acceptance", "error")
COUNTS = {"rounds": "drafts", "draft_tokens": "draft_tokens", "accepted_tokens": "accepted_tokens"}
RETRIES = 2  # of a shard whose engine died
Row = dict[str, Any]


@options.grouped
def batch(
    *,
    rows: Annotated[Path, Argument(metavar="IN", help="JSON lines (or .jsonl.gz), or .parquet.", show_default=False)],
    out: Annotated[Path, Argument(metavar="OUT", help="The answers: JSON lines, in the order of IN.")],
    model: ModelOption,
    spec: Annotated[Path | None, Option(help="File of the JSON of --speculative-config. Default: no drafts.")] = None,
    replicas: Annotated[int, Option(min=1, help="Engines side by side.")] = 1,
    max_tokens: options.AnswerTokens = 256,
    temperature: options.Greedy = 0.0,
    top_p: Annotated[float, Option(min=0.0, max=1.0, help="Of sampled answers.")] = 1.0,
    top_k: Annotated[int, Option(min=0, help="Of sampled answers; 0 is all tokens.")] = 0,
    seed: Annotated[int, Option(min=0, help="Of sampled answers; each row adds its number.")] = 0,
    keep: Annotated[list[str] | None, Option(help="A column of IN to copy to OUT; repeatable.")] = None,
    batch_size: options.EngineBatch = 64,
    shard_rows: Annotated[int, Option(min=1, help="Rows that an engine takes at a time: what a stop can lose.")] = 256,
    engine: options.EngineOptions,
    engine_args: EngineArgs = None,
    json_file: options.TableFile = None,
) -> None:
    """Answer every row of a file, with one engine or with several on the machines of a Ray cluster.

    A row's own parameters (`max_tokens`, `stop`, ..., or all of them in `sampling`, and `extra_args` such as
    {"crossspec": "off"}) override the options here. A row that cannot be answered gets an `error`.

    The same command resumes a stopped one, with any number of replicas. Ray restarts a replica that dies. It joins the
    cluster that RAY_ADDRESS or `ray start` names, or starts Ray on this machine: docs/use/batch.md.

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
    checked_first(arguments, {} if spec is None else {spec.stem: arguments["speculative_config"]})
    try:
        import_module("ray.data")
    except ModuleNotFoundError as problem:
        raise ValueError(f'batch needs {problem.name}: run `pip install "vllm-crossspec[ray]"`') from None
    requests, started = read_requests(rows, keep or ()), time.perf_counter()
    sampling = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    job = {"engine": arguments, "sampling": sampling, "seed": seed, "chat": engine.chat}
    done = _claim(out, job, requests)
    answers = {row["row"]: row for part in done for row in part["rows"]}
    missing = [request for request in requests if request["row"] not in answers]
    for part in _answered(job, missing, Path(f"{out}.parts"), replicas, shard_rows) if missing else ():
        done.append(part)
        answers |= {row["row"]: row for row in part["rows"]}
    if len(answers) < len(requests):
        lacks = f"{counted(len(requests) - len(answers), 'row')} missing, whose engines died {RETRIES + 1} times"
        raise EngineError(f"batch: {lacks}; what is done is kept: run it again to go on")
    with replacing(out) as partial, partial.open("w") as file:
        file.writelines(json.dumps(answers[number]) + "\n" for number in range(len(requests)))
    sums = Counter({"rows": len(requests), "answered_now": len(missing)})
    for row in answers.values():
        sums.update(errors=row["error"] is not None, tokens=row["tokens"] or 0)
        sums.update({name: (row["acceptance"] or {}).get(name, 0) for name in COUNTS})
    by_drafter: dict[str, Counter[str]] = {}
    for counts in {part["engine"]: part["drafters"] for part in done}.values():  # what each engine said last
        for name, one in counts.items():
            by_drafter.setdefault(name, Counter()).update({key: one[other] for key, other in COUNTS.items()})
    if arguments["speculative_config"] and not by_drafter:  # one of vLLM's own
        by_drafter[arguments["speculative_config"].get("method")] = Counter({key: sums[key] for key in COUNTS})
    for name, (rounds, drafted, accepted) in ((name, one.values()) for name, one in by_drafter.items()):
        tokens = f"{counted(rounds, 'round')} with drafts, {counted(drafted, 'draft token')}, {accepted} accepted"
        typer.echo(f"{name}: {tokens}, acceptance length {1 + accepted / max(rounds, 1):.2f}")
    if spec is not None and sums["tokens"] and not sums["draft_tokens"]:
        say_nothing_was_drafted([spec.stem])
    typer.echo(f"{counted(len(requests), 'row')} in {out}, {sums['errors']} of them with an error")
    options.write_json(json_file, {**sums, "seconds": time.perf_counter() - started, "drafters": by_drafter})


def read_requests(path: Path, keep: Collection[str] = ()) -> list[Row]:
    """What each row of a file asks for. Raises ValueError with the file and the row that is wrong."""
    found: list[Row] = []
    seen: dict[Any, str] = {}
    for number, (row, where) in enumerate((parquet_rows if path.suffix == ".parquet" else json_rows)(path)):
        if "custom_id" in row:
            raise ValueError(f"{where} is of OpenAI's batch format: have `vllm run-batch` answer it")
        for column in row:
            if column not in COLUMNS and column not in keep:
                hint = f"`{column}`{nearest(column, COLUMNS)}; --keep {column} would hand it on to OUT"
                raise ValueError(f"{where}: no column is called {hint}")
        name, sampling, given = row.get("id"), row.get("sampling", {}), [key for key in COLUMNS[1:3] if row.get(key)]
        if len(given) != 1:
            raise ValueError(f"{where} needs `prompt` or `messages`, not empty{', and not both' if given else ''}")
        asked = row[given[0]]
        kinds = {type(part) for part in asked} if isinstance(asked, list) else set()
        if given == ["prompt"] and not (isinstance(asked, str) or kinds == {int}):
            raise ValueError(f"{where}: `prompt` must be a text, or a list of token ids")
        if given == ["messages"] and kinds != {dict}:
            raise ValueError(f'{where}: `messages` must be a list of {{"role": ..., "content": ...}}')
        if not isinstance(sampling, dict):
            raise ValueError(f'{where}: `sampling` must be an object, like {{"temperature": 0.7}}')
        if not isinstance(name, str | int | float | None):
            raise ValueError(f"{where}: `id` must be a text or a number, not {name!r}")
        if name is not None and (first := seen.setdefault(name, where)) != where:
            raise ValueError(f"{where}: `id` {name!r} is that of {first}, too: give each row its own")
        sampling |= {key: row[key] for key in SAMPLING if key in row}
        sampling = {key: value for key, value in sampling.items() if value is not None}
        kept = {column: row.get(column) for column in keep}
        found.append({"row": number, "id": name, "kept": kept, given[0]: asked, "sampling": sampling})
    if not found:
        raise ValueError(f"{path} holds no row: write one JSON object a line, with `prompt` or `messages`")
    return found


def _claim(out: Path, job: Row, requests: list[Row]) -> list[Row]:
    """The shards that are done. Raises ValueError where OUT or OUT.parts is of another job."""
    parts, digest = Path(f"{out}.parts"), hashlib.sha256(json.dumps(requests, default=str).encode()).hexdigest()
    engine = {name: value for name, value in job["engine"].items() if name != "max_num_seqs" and value is not None}
    settings = json.loads(json.dumps({"IN": digest, **job, **engine, "engine": None}))
    lines = parts.read_text().split("\n")[:-1] if parts.exists() else []  # a stop may have cut the last line
    if not lines and out.exists():
        raise ValueError(f"{out} is there and no job of this command's that could go on: name another OUT")
    found, *done = map(json.loads, lines or [json.dumps(settings)])
    if different := ["IN"] if found["IN"] != digest else differences(found, settings):
        said = f"{', another '.join(different)}: name another OUT, or give what it was begun with"
        raise ValueError(f"{parts} is of a job with another {said}")
    with replacing(parts) as partial:
        partial.write_text("".join(json.dumps(line) + "\n" for line in (settings, *done)))
    return done


def _answered(job: Row, missing: list[Row], parts: Path, replicas: int, shard_rows: int) -> Iterator[Row]:
    """Shards as the pool answers them, each written to the file. Raises ValueError where an engine does not start."""
    with ray_connected() as ray:
        from ray import data

        data.DataContext.get_current().max_errored_blocks = -1  # a shard that is given up does not stop the others
        shards = [json.dumps(missing[start : start + shard_rows]) for start in range(0, len(missing), shard_rows)]
        rows = data.from_items([{"shard": shard} for shard in shards], override_num_blocks=len(shards))
        answers = rows.map_batches(
            Replica,
            fn_constructor_args=({**job, "cwd": os.getcwd()},),
            batch_size=1,
            compute=data.ActorPoolStrategy(size=min(replicas, len(shards)), max_tasks_in_flight_per_actor=1),
            num_cpus=1,
            num_gpus=(job["engine"]["tensor_parallel_size"] or 1) if ray.cluster_resources().get("GPU") else 0,
            max_task_retries=RETRIES,
        )
        with parts.open("a", buffering=1) as file:
            for line in answers.iter_rows():
                part = json.loads(line["answer"])
                if "refused" in part:
                    raise ValueError(f"batch: {part['refused']}")
                file.write(line["answer"] + "\n")
                yield part


class Replica:
    """An engine in an actor of Ray Data's: takes shards and answers them, both as JSON."""

    def __init__(self, job: dict[str, Any]) -> None:
        with suppress(FileNotFoundError):  # a machine without this folder has no relative names, either
            os.chdir(job["cwd"])
        # In one process an engine ends with its actor; and engines of a machine do not keep to the same cores.
        defaults = {**CHILD_DEFAULTS, BOUND_CORES: "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        os.environ.update({**defaults, **os.environ})
        offline, self._job, self._refused = import_module("vllm_crossspec.jobs.offline"), job, {}
        try:
            self._llm, self._name = offline.start_engine(job["engine"]), os.urandom(8).hex()
            ours, method = self._llm.collective_rpc("crossspec_stats")[0], job["engine"]["speculative_config"] or {}
            names = list(ours or [method.get("method")])
            self._drafter = names[0] if len(names) == 1 else None
        except Exception as problem:
            logging.exception("the engine did not start")
            self._refused = {"refused": offline.sentence(problem)}

    def __call__(self, shards: dict[str, Any]) -> dict[str, list[str]]:
        try:
            return {"answer": [json.dumps(self._refused or self.answer(json.loads(one))) for one in shards["shard"]]}
        except Exception:
            logging.exception("the engine died")
            os._exit(1)  # Ray starts another in its place

    def answer(self, requests: list[Row]) -> dict[str, Any]:
        """`rows` of OUT, in the requests' order, and what the device has counted by `drafters` so far."""
        client, engine = import_module("vllm_crossspec.jobs.client"), self._llm.llm_engine
        rows = {}
        for request in requests:
            number, sampling = request["row"], {**self._job["sampling"], **request["sampling"]}
            rows[number] = {"row": number, "id": request["id"], **request["kept"], **dict.fromkeys(ANSWER)}
            if "seed" not in sampling and sampling["temperature"]:  # so that it draws the same in every engine
                sampling["seed"] = self._job["seed"] + number
            try:
                client.add_request(self._llm, str(number), request, sampling, self._job["chat"])
            except ValueError as problem:
                rows[number]["error"] = str(problem)
        for output in (output for outputs in client.finished_outputs(engine) for output in outputs):
            made, row = output.outputs[0], rows[int(output.request_id)]
            if made.finish_reason in ("abort", "error"):
                row["error"] = f"the engine ended the request ({made.finish_reason})"
                continue
            row |= {"text": made.text, "finish_reason": made.finish_reason, "tokens": len(made.token_ids)}
            row["prompt_tokens"] = len(output.prompt_token_ids)
            if (metrics := made.spec_decode_metrics) is not None:
                rounds, accepted = sum(metrics.histogram), sum(j * count for j, count in enumerate(metrics.histogram))
                row["acceptance"] = dict(zip(COUNTS, (rounds, metrics.num_draft_tokens, accepted), strict=True))
                row["acceptance"] |= {"length": round(1 + accepted / rounds, 4) if rounds else None}
                row["acceptance"] |= {"drafter": self._drafter}
        stats = self._llm.collective_rpc("crossspec_stats")[0] or {}
        return {"rows": list(rows.values()), "engine": self._name, "drafters": stats}
