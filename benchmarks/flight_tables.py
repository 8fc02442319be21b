"""Tables of a flight's archive, as Markdown: what `flight.py --tables` writes into docs/results/gpu.md."""

import json
import tarfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from vllm_crossspec.cli.rows import ALL, PLAIN, Run, rows

BEGIN, END = "<!-- flights: begin -->", "<!-- flights: end -->"
"""Marks of the page between which the tables stand."""
TOP_KERNELS = 8

Records = dict[str, dict[str, Any]]


def write(page: Path, archives: Sequence[Path]) -> None:
    """Put the archives' tables between the page's marks.

    Raises:
        ValueError: the page has no such marks, or an archive is of a simulated GPU.
    """
    text = page.read_text()
    if BEGIN not in text or END not in text:
        raise ValueError(f"{page} has no lines {BEGIN} and {END}: put them where the tables should stand")
    parts = []
    for archive in archives:
        flown, documents = read(archive)
        if is_simulated(documents):
            raise ValueError(f"{archive} is of a simulated GPU, whose numbers measure nothing")
        parts.append(tables(flown, documents))
    head, rest = text.split(BEGIN, 1)
    tail = rest.split(END, 1)[1]
    page.write_text(f"{head}{BEGIN}\n\n" + "\n\n".join(parts) + f"\n\n{END}{tail}")


def read(archive: Path) -> tuple[dict[str, Any], dict[str, Records]]:
    """How the slots went, and their documents of engines, by slot."""
    with tarfile.open(archive) as tar:
        found = {
            member.name: json.load(tar.extractfile(member))  # type: ignore[arg-type]
            for member in tar.getmembers()
            if member.name.endswith(".json")
        }
    flown = found.pop("flown.json")
    return flown, {name[:-5]: document["engines"] for name, document in found.items() if "engines" in document}


def is_simulated(documents: dict[str, Records]) -> bool:
    """Whether any engine ran on a GPU that computes nothing."""
    environments = [r["environment"] for d in documents.values() for r in d.values() if "environment" in r]
    return any(environment["simulated"] for environment in environments)


def tables(flown: dict[str, Any], documents: dict[str, Records]) -> str:
    """Every table that the documents give."""
    lines = _about(flown, documents)
    for name, records in documents.items():
        for kind, render in RENDERED.items():
            having = {engine: record for engine, record in records.items() if record.get(kind)}
            if having:
                lines += ["", *render(name, having)]
    lines += ["", "#### Slots", "", *_table(["slot", "how it went", "seconds"], map(_slot, flown.items()))]
    return "\n".join(lines)


def _about(flown: dict[str, Any], documents: dict[str, Records]) -> list[str]:
    environments = [r["environment"] for d in documents.values() for r in d.values() if "environment" in r]
    commits = ", ".join(sorted({state["commit"] for state in flown.values()}))
    if not environments:
        return [f"Commit {commits}; no engine ran."]
    versions = ", ".join(f"{name} {version}" for name, version in environments[0]["versions"].items())
    note = " **Simulated: no number is a measurement.**" if is_simulated(documents) else ""
    return [f"{environments[0]['device']}; {versions}; commit {commits}.{note}"]


def _table(head: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return lines + ["| " + " | ".join(row) + " |" for row in body]


def _slot(item: tuple[str, dict[str, Any]]) -> list[str]:
    name, state = item
    why = f": {state['why']}" if state["why"] else ""
    return [name, (state["status"] + why).replace("|", "/"), f"{state['seconds']:.0f}"]


def _curve(name: str, records: Records) -> list[str]:
    points = [point for record in records.values() for point in record["curve"][0]]
    sizes = sorted({point["batch_size"] for point in points})
    widths = sorted({point["rows_per_request"] for point in points})
    by = {(point["batch_size"], point["rows_per_request"]): 1e3 * point["seconds"] for point in points}
    body = [[str(w), *(f"{by[n, w]:.2f}" if (n, w) in by else "" for n in sizes)] for w in widths]
    head = ["rows of a request", *(f"batch {size}" for size in sizes)]
    return ["#### A step of the target by its rows, ms", "", *_table(head, body)]


def _rounds(name: str, records: Records) -> list[str]:
    sizes = sorted({row["batch_size"] for record in records.values() for row in record["rounds"][0]})
    body = []
    for method, record in records.items():
        by = {row["batch_size"]: row for row in record["rounds"][0]}
        body.append([method, *(_round(by.get(size)) for size in sizes)])
    title = f"#### {name}: ms a round (target, draft), random weights; host waits in brackets"
    return [title, "", *_table(["method", *(f"batch {size}" for size in sizes)], body)]


def _round(row: dict[str, Any] | None) -> str:
    if row is None or not row.get("device_ms"):
        return ""
    whole, target, draft = (row["device_ms"][part]["median"] for part in ("round", "target", "draft"))
    waits = sum(row["per_round"].get("explicit_waits", {}).values())
    return f"{whole:.2f} ({target:.2f}, {draft:.2f}) [{waits:g}]"


def _mixed(name: str, records: Records) -> list[str]:
    lengths = [point["prompt_tokens"] for point in next(iter(records.values()))["mixed"][0]]
    body = [[engine, *(f"{p['ms']:.1f}" for p in record["mixed"][0])] for engine, record in records.items()]
    head = ["method and graphs", *(f"{n} prompt tokens" if n else "no prompt" for n in lengths)]
    return ["#### A step in which 7 requests decode and a prompt arrives, ms", "", *_table(head, body)]


def _profile(name: str, records: Records) -> list[str]:
    lines = ["#### Kernels of a round"]
    for engine, record in records.items():
        for one in record["profile"][0]:
            if not one["kernels"]:
                continue
            each = one["rounds"]
            idle = one["span_ms"] - one["busy_ms"]
            lines += [
                "",
                f"{engine}, batch {one['batch_size']}: {one['num_kernels'] / each:.0f} kernels a round, "
                f"{one['busy_ms'] / each:.2f} ms busy, {idle / each:.2f} ms idle",
                "",
                *_table(
                    ["kernel", "ms a round", "launches a round"],
                    [
                        [f"`{k['name'][:80]}`".replace("|", "/"), f"{k['ms'] / each:.3f}", f"{k['launches'] / each:g}"]
                        for k in one["kernels"][:TOP_KERNELS]
                    ],
                ),
            ]
    return lines if len(lines) > 1 else []


def runs_of(records: Records) -> list[Run]:
    """What :mod:`vllm_crossspec.cli.rows` makes rows of, plain's first."""
    return [
        Run(method=method, environment=record["environment"], groups=run["groups"], batch_size=run["batch_size"])
        for method, record in records.items()
        for run in record["answers"][0]
    ]


def _answers(name: str, records: Records) -> list[str]:
    found = [row for row in rows(runs_of(records)) if row.category == ALL]
    sizes = sorted({row.batch_size for row in found})
    body = []
    for method in records:
        by = {row.batch_size: row for row in found if row.method == method}
        cells = []
        for size in sizes:
            row = by.get(size)
            cells.append("" if row is None else _speed(row))
        same = "" if method == PLAIN else "no" if any(r.identical_to_plain is False for r in by.values()) else "yes"
        body.append([method, *cells, same])
    first = found[0]
    title = (
        f"#### {name}: tokens a second (times plain; tokens a round), {first.num_prompts} texts or fewer, one repeat"
    )
    return [title, "", *_table(["method", *(f"batch {size}" for size in sizes), "plain's texts"], body)]


def _speed(row: Any) -> str:
    if row.method == PLAIN or row.speedup is None:
        return f"{row.tokens_per_second or 0:.0f}"
    return f"{row.tokens_per_second or 0:.0f} ({row.speedup:.2f}; {row.tokens_per_round or 0:.2f})"


def _arrivals(name: str, records: Records) -> list[str]:
    body = []
    for method, record in records.items():
        for one in record["arrivals"][0]:
            times = [one[key] for key in ("ttft_ms", "tpot_ms", "latency_ms")]
            cells = [f"{t['p50']:.0f}, {t['p90']:.0f}" if t else "" for t in times]
            answered = f"{one['answered']} of {one['requests']}"
            body.append([method, f"{one['rate']:g}", answered, f"{one['tokens_per_second']:.0f}", *cells])
    head = ["method", "requests a second", "answered", "tokens a second"]
    head += ["first token, ms (p50, p90)", "ms a token", "whole answer, ms"]
    return ["#### Requests that arrive by chance", "", *_table(head, body)]


RENDERED: dict[str, Callable[[str, Records], list[str]]] = {
    "curve": _curve,
    "rounds": _rounds,
    "mixed": _mixed,
    "profile": _profile,
    "answers": _answers,
    "arrivals": _arrivals,
}
"""Tables by the kind of a job of ``flight_engines.py``."""
