"""The hunt for a text that is not plain's: methods, sizes, settings and requests drawn at random, token for token.

    python benchmarks/lossless.py --texts 10000 --seed 1 --json hunt.json
    python benchmarks/lossless.py --texts 400 --dtype bfloat16 --json near.json

Each case is an engine (pocket target, float32) with a speculative config and settings of its own and `--each`
requests, greedy and seeded, that come at different steps; some are aborted. Plain decoding answers the same requests in
another process, which loads no plugin at all. A text that differs is shrunk to few requests and keys and written to
`--found` as a JSON file, which `tests/nightly/test_hunt.py` runs from then on. The hunt goes on, and exits with 1.

With `--dtype bfloat16` greedy requests alone are drawn. For each text that differs the document has the gap between the
two tokens in nats, by plain decoding one request at a time: for ours, and for plain decoding with eight at a time.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import hunt_cases
from common import make_parser
from hunt_cases import Case, Texts
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

FOUND = Path(__file__).resolve().parents[1] / "tests" / "nightly" / "hunted"
BLOCK = 16
"""Cases that plain decoding answers together."""
MAX_TRIES = 60
"""Engines that shrinking a case may start."""
LOGPROBS = 20
KNOWN = 300
"""Cases that are looked at for what cases can have."""


class Plain:
    """Plain decoding in a process of its own, without a plugin; ``settings`` go over those of every case."""

    def __init__(self, **settings: Any):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_answer, args=(theirs, settings), daemon=True)
        self._process.start()
        theirs.close()

    def texts(self, requests: list[dict[str, Any]]) -> Texts:
        """Token ids of the answers."""
        self.ask(requests)
        return self.collect()

    def ask(self, requests: list[dict[str, Any]], scores: bool = False) -> None:
        """Begin to answer; :meth:`collect` waits for it."""
        self._pipe.send((requests, scores))

    def collect(self) -> Any:
        """Token ids of the answers, or with their scores (see :func:`_scored`)."""
        try:
            answer = self._pipe.recv()
        except EOFError:
            raise SystemExit("lossless: plain decoding has ended; its last words are above") from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """End it."""
        self._pipe.send(None)
        self._process.join(60)


def _answer(pipe: Connection, settings: dict[str, Any]) -> None:
    os.environ.update(VLLM_PLUGINS="", VLLM_USE_V2_MODEL_RUNNER="1", VLLM_LOGGING_LEVEL="ERROR")
    with hunt_cases.engine(None, **settings) as llm:
        while (asked := pipe.recv()) is not None:
            requests, scores = asked
            try:
                answer = _scored(llm, requests) if scores else hunt_cases.answers(llm, requests, is_plain=True)
                pipe.send(answer)
            except Exception as problem:  # noqa: BLE001 - raised where it was asked for
                pipe.send(problem)


def _scored(llm: Any, requests: list[dict[str, Any]]) -> list[tuple[list[int], list[dict[int, float]]]]:
    """One request after another: token ids, and at each step the log-probabilities of the likeliest tokens."""
    found = []
    for request in requests:
        sampling = hunt_cases.parameters(request["sampling"] | {"logprobs": LOGPROBS})
        (output,) = llm.generate([request["prompt"]], sampling, use_tqdm=False)
        best = output.outputs[0]
        found.append((list(best.token_ids), [{t: e.logprob for t, e in step.items()} for step in best.logprobs]))
    return found


# -- shrinking --------------------------------------------------------------------------------------------------------


def simpler(case: Case) -> Iterator[Case]:
    """Cases with less in them: half of the requests, one request less, one key less."""
    requests = case["requests"]
    half = len(requests) // 2
    if half > 1:
        yield case | {"requests": requests[:half]}
        yield case | {"requests": requests[half:]}
    for number in range(len(requests) if len(requests) > 1 else 0):
        yield case | {"requests": requests[:number] + requests[number + 1 :]}
    if case["widths"]:
        yield case | {"widths": False}
    for key in case["engine"]:
        yield case | {"engine": {k: v for k, v in case["engine"].items() if k != key}}
    for spec in _simpler_specs(case["spec"]):
        yield case | {"spec": spec}
    for number, request in enumerate(requests):
        for less in _simpler_requests(request):
            yield case | {"requests": [*requests[:number], less, *requests[number + 1 :]]}


def _simpler_specs(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    drafters = spec.get("drafters", {})
    for name, own in drafters.items():
        yield {"method": name, **own}  # it alone
    if len(drafters) > 2:
        for name in drafters:
            yield spec | {"drafters": {k: v for k, v in drafters.items() if k != name}}
    for name, own in drafters.items():
        for less in _simpler_specs(own):
            yield spec | {"drafters": drafters | {name: less}}
    for key, value in spec.items():
        if key in ("method", "model", "drafters"):
            continue
        if isinstance(value, dict):
            for inner in value if key != "by_batch_size" else ():
                if inner not in ("model", "type"):
                    yield spec | {key: {k: v for k, v in value.items() if k != inner}}
        yield {k: v for k, v in spec.items() if k != key}


def _simpler_requests(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if "abort_after" in request:
        yield {k: v for k, v in request.items() if k != "abort_after"}
    if request["at"]:
        yield request | {"at": 0}
    sampling = request["sampling"]
    for key in sampling:
        if key not in ("max_tokens", "temperature", "seed"):
            yield request | {"sampling": {k: v for k, v in sampling.items() if k != key}}
    if sampling["temperature"]:
        yield request | {"sampling": {k: v for k, v in sampling.items() if k != "seed"} | {"temperature": 0.0}}


def shrink(case: Case, fails: Callable[[Case], bool], tries: int = MAX_TRIES) -> Case:
    """The smallest case that was found to fail still, after at most so many calls of ``fails``."""
    left = itertools.repeat(None, tries)
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in simpler(case):
            if next(left, ...) is ...:
                return case
            if fails(candidate):
                case, is_smaller = candidate, True
                break
    return case


# -- the command ------------------------------------------------------------------------------------------------------


def run_case(case: Case, **over: Any) -> tuple[Texts, dict[str, int]]:
    """Token ids of the answers, and what was drafted and accepted, by an engine with settings over the case's."""
    with hunt_cases.engine(case, **over) as llm:
        texts = hunt_cases.answers(llm, case["requests"])
        drafters = llm.collective_rpc("crossspec_stats")[0].values()
        preempted = sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
    sums = {key: sum(own[key] for own in drafters) for key in ("drafts", "accepted_tokens")}
    return texts, sums | {"tokens": sum(map(len, texts)), "preemptions": int(preempted)}


def chosen(given: argparse.Namespace) -> list[tuple[int, Case]]:
    """The cases of a hunt, with their numbers."""
    every = ((number, hunt_cases.draw(given.seed, number, given.each)) for number in itertools.count(given.first))
    wanted = (one for one in every if given.has in (None, *hunt_cases.features(one[1])))
    return list(itertools.islice(wanted, -(-given.texts // given.each)))


def hunt(given: argparse.Namespace, plain: Plain, console: Console) -> dict[str, Any]:
    """Every case of the hunt beside plain decoding; the document."""
    cases = chosen(given)
    pairs: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    refused, found, began = [], [], time.time()
    columns = (TextColumn("[progress.description]{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("texts", total=len(cases) * given.each)
        for start in range(0, len(cases), BLOCK):
            block = cases[start : start + BLOCK]
            wanted = plain.texts([request for _, case in block for request in case["requests"]])
            for place, (number, case) in enumerate(block):
                expected = wanted[place * given.each : (place + 1) * given.each]
                try:
                    texts, sums = run_case(case)
                except ValueError as problem:  # a setting that was refused
                    refused.append({"case": number, "sentence": str(problem).splitlines()[-1]})
                    bar.update(task, advance=given.each)
                    continue
                totals.update(sums | {"texts": len(texts)})
                pairs.update(f"{a} + {b}" for a, b in itertools.combinations(hunt_cases.features(case), 2))
                for wrong in hunt_cases.differing(case, expected, texts):
                    found.append({"case": number, "request": wrong, "plain": expected[wrong], "ours": texts[wrong]})
                if found and found[-1]["case"] == number:
                    _write_found(given, number, case, plain, console)
                bar.update(task, advance=given.each, description=f"texts, {len(found)} differing")
            if not console.is_terminal:
                console.print(f"{totals['texts']} texts, {len(found)} differing, {len(refused)} cases refused")
            document = {"differing": len(found), **totals, "found": found, "refused": refused, "pairs": dict(pairs)}
            _write(given, document, began)
    return document


def _write(given: argparse.Namespace, document: dict[str, Any], began: float) -> None:
    """So far: a hunt takes hours."""
    seconds = round(time.time() - began)
    if given.json:
        document = {"seed": given.seed, "first": given.first, "each": given.each, **document, "seconds": seconds}
        given.json.write_text(json.dumps(document, indent=1) + "\n")


def _write_found(given: argparse.Namespace, number: int, case: Case, plain: Plain, console: Console) -> None:
    def fails(candidate: Case) -> bool:
        wanted = plain.texts(candidate["requests"])
        try:
            return bool(hunt_cases.differing(candidate, wanted, run_case(candidate)[0]))
        except ValueError:
            return False

    smallest = shrink(case, fails) if given.shrink else case
    given.found.mkdir(parents=True, exist_ok=True)
    file = given.found / f"seed-{given.seed}-case-{number}.json"
    file.write_text(json.dumps(smallest, indent=1) + "\n")
    console.print(f"case {number}: {len(smallest['requests'])} requests are left, in {file}")


def near_ties(given: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Greedy texts in bfloat16: plain one at a time, plain eight at a time, ours; how near each difference is."""
    form = {"dtype": "bfloat16"}
    together, alone = Plain(**form, max_num_seqs=8), Plain(**form, max_num_seqs=1)
    gaps: dict[str, list[float]] = {"plain, eight at a time": [], "ours": []}
    count, began = 0, time.time()
    for number in range(given.first, given.first + -(-given.texts // given.each)):
        case = hunt_cases.draw(given.seed, number, given.each)
        case["requests"] = [
            {"prompt": r["prompt"], "at": r["at"], "sampling": {"temperature": 0.0, "max_tokens": 40}}
            for r in case["requests"]
        ]
        together.ask(case["requests"])
        alone.ask(case["requests"], scores=True)
        others = {"plain, eight at a time": together.collect(), "ours": run_case(case, **form)[0]}
        for (tokens, scores), *rest in zip(alone.collect(), *others.values(), strict=True):
            count += 1
            for name, text in zip(others, rest, strict=True):
                step = next((i for i, pair in enumerate(zip(tokens, text, strict=False)) if pair[0] != pair[1]), None)
                if step is not None:
                    gaps[name].append(scores[step][tokens[step]] - scores[step].get(text[step], float("-inf")))
        console.print(f"{count} texts; differing: " + ", ".join(f"{name} {len(own)}" for name, own in gaps.items()))
        document = {
            "texts": count,
            "gaps": gaps,
            "largest": {name: max(own, default=0.0) for name, own in gaps.items()},
        }
        _write(given, document, began)
    for process in (together, alone):
        process.close()
    return document


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--texts", type=int, default=400, help="how many, rounded up to whole cases (default: 400)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default: 0)")
    parser.add_argument("--first", type=int, default=0, help="number of the first case: to go on, or to see one again")
    parser.add_argument("--each", type=int, default=40, help="requests of a case (default: 40)")
    parser.add_argument("--has", help="only cases that have it: 'budget', 'router goodput', 'async', ...")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--found", type=Path, default=FOUND, help="where cases that differ go (default: the tests')")
    parser.add_argument("--no-shrink", dest="shrink", action="store_false", help="write them as they were drawn")
    given = parser.parse_args()
    if given.texts < 1 or given.each < 1:
        parser.error("--texts and --each are 1 or more")
    known = {name for number in range(KNOWN) for name in hunt_cases.features(hunt_cases.draw(given.seed, number, 8))}
    if given.has is not None and given.has not in known:
        parser.error(f"--has {given.has}: no case has that; what cases have: {', '.join(sorted(known))}")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    console = Console(stderr=True)
    if given.dtype == "bfloat16":
        document = near_ties(given, console)
    else:
        plain = Plain()
        document = hunt(given, plain, console)
        plain.close()
    print(json.dumps({key: value for key, value in document.items() if key not in ("pairs", "found", "gaps")}))
    return int(bool(document.get("differing")))


if __name__ == "__main__":
    sys.exit(main())
