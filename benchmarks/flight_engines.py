"""Several engines one after the other in one process: what `flight.py` measures with vLLM.

    python benchmarks/flight_engines.py PLAN.json --json OUT.json

PLAN lists engines, each with the arguments of vLLM's LLM and jobs; OUT gets one record an engine as soon as it is done.
Importing vLLM takes as long as starting a small engine, so one process imports it once. A crash ends the process: the
engine that was begun is marked, and the same command starts with the next one.
"""

import argparse
import contextlib
import gc
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import round_time

from vllm_crossspec.jobs.offline import Measured, environment, start_engine

MIXED_STEPS = 16
"""Steps that are timed while a prompt arrives in each."""
PROFILED_ROUNDS = 8
TOP_KERNELS = 25

Job = dict[str, Any]
Record = dict[str, Any]


class Document:
    """The file of records; it is whole after every engine. Engines that are in it are not started again."""

    def __init__(self, file: Path):
        self._file = file
        self.records: dict[str, Record] = json.loads(file.read_text())["engines"] if file.is_file() else {}

    def write(self, name: str, record: Record) -> None:
        """Set the record of an engine."""
        self.records[name] = record
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps({"engines": self.records}, indent=1) + "\n")
        new.replace(self._file)


def fly(plan: dict[str, Any], document: Document) -> None:
    """Start the ``engines`` of a plan in order; one that has a record, or would end after ``until``, is left out."""
    for entry in plan["engines"]:
        if entry["name"] in document.records:
            continue
        if time.time() + entry["seconds"] > plan["until"]:
            document.write(entry["name"], {"status": "no time left"})
            continue
        document.write(entry["name"], {"status": "begun"})
        started = time.perf_counter()
        with engine(entry) as llm:
            record: Record = {"status": "passed", "start_seconds": round(time.perf_counter() - started, 1)}
            record["environment"] = environment() | {"simulated": _is_simulated()}
            for job in entry["jobs"]:
                record.setdefault(job["kind"], []).append(JOBS[job["kind"]](llm, job))
        record["seconds"] = round(time.perf_counter() - started, 1)
        document.write(entry["name"], record)


@contextlib.contextmanager
def engine(entry: dict[str, Any]) -> Iterator[Any]:
    """vLLM's LLM in this process; its memory is free again at the end."""
    import torch
    from vllm.platforms import current_platform

    os.environ.update({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **entry.get("env", {})})
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # our functions go to our own worker
    settings = dict(entry["engine"])
    if settings.get("load_format") == "dummy":
        round_time.keep_dummy_heads()
    llm = start_engine({**settings, "disable_log_stats": False})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        # vLLM keeps one pool of graphs for a process; PyTorch frees it with the engine's last graph.
        type(current_platform)._global_graph_pool = None
        for name in entry.get("env", {}):
            os.environ.pop(name, None)
        del llm
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _is_simulated() -> bool:
    import torch

    return torch.cuda.is_available() and torch.ones(1, device="cuda").item() != 1.0


# -- jobs ------------------------------------------------------------------------------------------------------------


def curve(llm: Any, job: Job) -> list[dict[str, Any]]:
    """Median seconds of dummy target steps by running requests and rows of a request.

    Job: ``points``, pairs of both; ``context``, tokens before the step.
    """
    points = [(size, rows_of - 1) for size, rows_of in job["points"]]
    seconds = llm.collective_rpc(_time_steps, args=(points, job["context"]))[0]
    return [
        {"batch_size": size, "rows": size * (width + 1), "rows_per_request": width + 1, "seconds": seconds[i]}
        for i, (size, width) in enumerate(points)
    ]


def _time_steps(worker: Any, points: list[tuple[int, int]], context: int) -> list[float]:
    import torch

    from vllm_crossspec.load.measure import time_steps

    with torch.inference_mode():
        found = time_steps(worker.model_runner, points, context)
    return [found[point].step for point in points]


def rounds(llm: Any, job: Job) -> list[dict[str, Any]]:
    """Times and counts of decode rounds, as ``round_time.py`` has them. Job: ``options``, its command line."""
    import probe

    options = round_time.arguments(job["options"])
    llm.collective_rpc(probe.install)
    found = [round_time.measure(llm, size, options) for size in options.batch_sizes]
    llm.collective_rpc(probe.uninstall)
    return found


def profile(llm: Any, job: Job) -> list[dict[str, Any]]:
    """Kernels of a few rounds by their time on the device, and how long the device had nothing to do.

    Job: ``options``, of ``round_time.py``. The first kernel and the last one bound the span.
    """
    import torch

    options = round_time.arguments(job["options"])
    found = []
    for batch_size in options.batch_sizes:
        round_time.generate(llm, batch_size, round_time.NUM_WARM_UP_ROUNDS, options)
        activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities) as profiler:
            round_time.generate(llm, batch_size, PROFILED_ROUNDS, options)
        found.append({"batch_size": batch_size, "rounds": PROFILED_ROUNDS, **_kernels(profiler)})
    return found


def _kernels(profiler: Any) -> dict[str, Any]:
    import torch

    on_device = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    if not on_device:
        return {"busy_ms": None, "span_ms": None, "kernels": []}
    time_by, count = Counter[str](), Counter[str]()
    busy, last = 0.0, float("-inf")
    for event in sorted(on_device, key=lambda e: e.time_range.start):
        start, end = event.time_range.start, event.time_range.end
        time_by[event.name] += end - start
        count[event.name] += 1
        busy += max(0.0, end - max(start, last))
        last = max(last, end)
    span = last - min(event.time_range.start for event in on_device)
    top = [{"name": n[:120], "ms": t / 1e3, "launches": count[n]} for n, t in time_by.most_common(TOP_KERNELS)]
    return {"busy_ms": busy / 1e3, "span_ms": span / 1e3, "num_kernels": sum(count.values()), "kernels": top}


def mixed(llm: Any, job: Job) -> list[dict[str, Any]]:
    """Milliseconds of a step in which requests decode, without and with a prompt that arrives in it.

    Job: ``decoding``, requests that decode meanwhile; ``prompts``, the prompts' tokens, one length after the other.
    """
    return [_mixed(llm, job["decoding"], prompt) for prompt in (0, *job["prompts"])]


def _mixed(llm: Any, decoding: int, prompt: int) -> dict[str, Any]:
    draw, core = random.Random(prompt), llm.llm_engine
    vocabulary = llm.llm_engine.model_config.get_vocab_size()

    def ask(name: str, length: int, answer: int) -> None:
        tokens = [draw.randrange(16, vocabulary - 1) for _ in range(length)]
        core.add_request(name, {"prompt_token_ids": tokens}, _greedy(answer, ignore_eos=True))

    # So many that none of them ends meanwhile, even where every draft is accepted.
    for i in range(decoding):
        ask(f"decoding-{prompt}-{i}", 256, 1024)
    for _ in range(8):
        core.step()
    _wait()
    started = time.perf_counter()
    for i in range(MIXED_STEPS):
        if prompt:
            ask(f"arriving-{prompt}-{i}", prompt, 1)
        core.step()
    _wait()
    seconds = (time.perf_counter() - started) / MIXED_STEPS
    core.abort_request([f"decoding-{prompt}-{i}" for i in range(decoding)])
    while core.has_unfinished_requests():
        core.step()
    return {"decoding": decoding, "prompt_tokens": prompt, "ms": 1e3 * seconds}


def _greedy(max_tokens: int, ignore_eos: bool = False) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos, detokenize=False)


def _wait() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def answers(llm: Any, job: Job) -> list[dict[str, Any]]:
    """Prompts answered at several batch sizes; what ``vllm_crossspec.cli.rows`` makes rows of, with the texts.

    Job: ``prompts``, a file; ``batch_sizes``; ``sampling``; ``waves``; ``limit``, prompts of each category.
    """
    lines = [json.loads(line) for line in Path(job["prompts"]).read_text().splitlines()]
    lines = [{"turns": row.get("turns") or [row["prompt"]], "where": "prompts"} for row in lines][: job.get("limit")]
    groups = [{"category": "mixed", "prompts": lines}]
    found: list[dict[str, Any]] = []

    def keep(event: str, **fields: Any) -> None:
        if event == "group":
            category = fields.pop("category")
            found[-1]["groups"][category] = fields

    measured = Measured(llm, {"groups": groups, "sampling": job["sampling"], "chat": False}, keep)
    for size in job["batch_sizes"]:
        found.append({"batch_size": size, "groups": {}})
        measured.follow({"batch_size": size, "warm_up": True, "waves": job.get("waves")})
    return found


def arrivals(llm: Any, job: Job) -> list[dict[str, Any]]:
    """An open loop: requests arrive by chance at a rate, however busy the engine is; the same ones for every engine.

    Job: ``prompts``; ``rates``, requests a second; ``seconds``, how long they arrive; ``max_tokens``.
    """
    rows_of = [json.loads(line) for line in Path(job["prompts"]).read_text().splitlines()]
    prompts = [llm.get_tokenizer().encode(row.get("prompt") or row["turns"][0]) for row in rows_of]
    return [_open_loop(llm, prompts, rate, job) for rate in job["rates"]]


def _open_loop(llm: Any, prompts: list[list[int]], rate: float, job: Job) -> dict[str, Any]:
    draw, core = random.Random(0), llm.llm_engine
    due, at = [], 0.0
    while (at := at + draw.expovariate(rate)) < job["seconds"]:
        due.append(at)
    ends: dict[int, tuple[float, float, int]] = {}
    first: dict[int, float] = {}
    asked, started, most = 0, time.perf_counter(), 0
    while len(ends) < len(due):
        now = time.perf_counter() - started
        if now > 2 * job["seconds"]:
            break  # it does not keep up
        while asked < len(due) and due[asked] <= now:
            prompt = {"prompt_token_ids": prompts[asked % len(prompts)]}
            core.add_request(f"{rate}-{asked}", prompt, _greedy(job["max_tokens"]))
            asked += 1
        if not core.has_unfinished_requests():
            time.sleep(max(0.0, due[asked] - (time.perf_counter() - started)) if asked < len(due) else 0.0)
            continue
        most = max(most, asked - len(ends))
        for output in core.step():
            number, tokens = int(output.request_id.rpartition("-")[2]), len(output.outputs[0].token_ids)
            now = time.perf_counter() - started
            if tokens:
                first.setdefault(number, now)
            if output.finished:
                ends[number] = (now - due[number], (now - first[number]) / max(tokens - 1, 1), tokens)
    unanswered = [f"{rate}-{i}" for i in range(asked) if i not in ends]
    core.abort_request(unanswered)
    while core.has_unfinished_requests():
        core.step()
    seconds = time.perf_counter() - started
    return {
        "rate": rate,
        "requests": len(due),
        "answered": len(ends),
        "most_at_once": most,
        "tokens_per_second": sum(tokens for *_, tokens in ends.values()) / seconds,
        "ttft_ms": _percentiles([1e3 * (first[i] - due[i]) for i in ends]),
        "tpot_ms": _percentiles([1e3 * each for _, each, _ in ends.values()]),
        "latency_ms": _percentiles([1e3 * whole for whole, *_ in ends.values()]),
    }


def _percentiles(values: list[float]) -> dict[str, float] | None:
    if len(values) < 2:
        return None
    cuts = statistics.quantiles(values, n=10, method="inclusive")
    return {"p50": cuts[4], "p90": cuts[8]}


def publishing(llm: Any, job: Job) -> list[dict[str, Any]]:
    """Answers while the shared corpus of a lookup publishes new versions as fast as it can.

    Job: that of :func:`answers`. It ends in an illegal access where a kernel still reads what was freed.
    """
    from vllm_crossspec.drafters.lookup import corpus

    kept, corpus.REST = corpus.REST, 0
    try:
        return answers(llm, job)
    finally:
        corpus.REST = kept


JOBS: dict[str, Callable[[Any, Job], list[dict[str, Any]]]] = {
    "curve": curve,
    "rounds": rounds,
    "profile": profile,
    "mixed": mixed,
    "answers": answers,
    "arrivals": arrivals,
    "publishing": publishing,
}


def main() -> None:
    """Fly a plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    fly(json.loads(options.plan.read_text()), Document(options.json))


if __name__ == "__main__":
    main()
