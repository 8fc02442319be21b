"""Commands about a running server: `crossspec stats`, how its drafts fare, and `swap`, new weights for a drafter."""

import http.client
import json
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from typer import Argument, Option

from vllm_crossspec.cli.stages import grid, wide_console

ANSWER_SECONDS, SWAP_SECONDS = 30, 600
COLUMNS = {
    "rounds": "crossspec:router_decisions_total",
    "rounds with drafts": "crossspec:drafts_total",
    "draft tokens": "crossspec:draft_tokens_total",
    "accepted": "crossspec:accepted_tokens_total",
}
"""Columns of the table, and the metric that each shows by drafter."""
ALL_ROUNDS = "vllm:inter_token_latency_seconds_count"
"""vLLM's count of a request's steps after its first token: its rounds, with and without drafts."""
ALL = "all"

Totals = dict[tuple[str, str], float]
"""By drafter (or ``ALL``) and column, summed over engines."""


def stats(
    url: Annotated[str, Argument(help="The server's, as http://127.0.0.1:8000.")],
    watch: Annotated[
        float | None,
        Option(metavar="SECONDS", min=1, help="Print what is new after so many seconds, until stopped."),
    ] = None,
) -> None:
    """Print how the drafts of a running server fare: rounds, draft tokens, accepted tokens, by drafter.

    A round is a step of one request after its first token. The acceptance length is 1 + accepted / rounds. Of several
    drafters, each has the rounds that the router gave it, and the last row has all. Where there is one drafter, and in
    the last row, rounds of requests that are "off" count, too.

    The server publishes its counts once a second.

    Example: crossspec stats http://localhost:8000 --watch 10
    """
    address = f"{_address(url).removesuffix('/metrics')}/metrics"
    found = totals(_read(address), url)
    if watch is None:
        wide_console().print(_table(found, "since the server started"))
        return
    while True:
        time.sleep(watch)
        before, found = found, totals(_read(address), url)
        wide_console().print(_table(growth(before, found), f"the last {watch:g} seconds"))


def _address(url: str) -> str:
    """Of the server, without a slash at its end. Raises ValueError."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"URL {url!r} is not an address; give the server's, as http://127.0.0.1:8000")
    return url.rstrip("/")


def totals(text: str, url: str) -> Totals:
    """The counts in the text of ``/metrics``. Raises ValueError where there are none of ours."""
    from prometheus_client.parser import text_string_to_metric_families

    columns, found = {metric: column for column, metric in COLUMNS.items()}, Totals()
    columns[ALL_ROUNDS] = "rounds"
    samples = []
    with suppress(ValueError):  # no text of Prometheus
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    for sample in samples:
        if (column := columns.get(sample.name)) is not None:
            key = ALL if sample.name == ALL_ROUNDS else sample.labels["drafter"], column
            found[key] = found.get(key, 0.0) + sample.value
    if not any(column == "rounds with drafts" for _, column in found):
        raise ValueError(
            f"{url} has no metrics of crossspec: they begin with the first request, and need the plugin (its lines in "
            "the server's log begin with `crossspec:`) and a --speculative-config"
        )
    return found


def growth(before: Totals, now: Totals) -> Totals:
    """What was counted in between; a server that was started anew counts from 0."""
    restarted = any(value < before.get(key, 0.0) for key, value in now.items())
    return now if restarted else {key: value - before.get(key, 0.0) for key, value in now.items()}


def _read(address: str) -> str:
    """The text of ``/metrics``. Raises ValueError."""
    try:
        with urllib.request.urlopen(address, timeout=ANSWER_SECONDS) as answer:
            return str(answer.read().decode(errors="replace"))
    except urllib.error.HTTPError as problem:
        raise ValueError(f"{address} answers {problem.code} ({problem.reason}): is it a vLLM server?") from None
    except (OSError, http.client.HTTPException) as problem:
        raise ValueError(f"{address} does not answer ({getattr(problem, 'reason', problem)})") from None


def _table(found: Totals, title: str) -> Table:
    """A row for each drafter; of several their sum, too, with the rounds of all requests."""
    table = grid(title, ("drafter", *COLUMNS, "acceptance length"), ["drafter"])
    drafters = sorted({drafter for drafter, _ in found} - {ALL})
    rows = {name: {column: found[name, column] for column in COLUMNS if (name, column) in found} for name in drafters}
    everything = {column: sum(row.get(column, 0.0) for row in rows.values()) for column in COLUMNS}
    everything.pop("rounds")
    if (ALL, "rounds") in found:
        everything["rounds"] = found[ALL, "rounds"]
    if len(drafters) == 1:  # all rounds are its own
        rows = {drafters[0]: {**everything, **rows[drafters[0]]}}
    else:
        rows[ALL] = everything
    for name, row in rows.items():
        rounds = row.get("rounds", 0.0)
        length = f"{1 + row['accepted'] / rounds:.2f}" if rounds else "-"
        table.add_row(name, *(f"{row[column]:.0f}" if column in row else "-" for column in COLUMNS), length)
    return table


def swap(
    url: Annotated[str, Argument(help="The server's, as http://127.0.0.1:8000.")],
    drafter: Annotated[str, Argument(help="Its name: the key in `drafters`, or the method.")],
    folder: Annotated[Path, Argument(help="Of the checkpoint, on the server's machine.")],
) -> None:
    """Give a drafter of a running server the weights of another checkpoint of its shape.

    The server must have been started with VLLM_SERVER_DEV_MODE=1. Everyone who reaches such a server can call its
    workers: keep it to a network of your own. Requests go on, and a checkpoint that does not fit changes nothing.

    Example: crossspec swap http://127.0.0.1:8000 eagle3 runs/eagle3/model
    """
    content = {"method": "crossspec_swap_drafter", "args": [drafter, str(folder.absolute())]}
    request = urllib.request.Request(
        f"{_address(url)}/collective_rpc", json.dumps(content).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=SWAP_SECONDS) as done:
            changed = json.load(done)["results"][0]
    except urllib.error.HTTPError as problem:
        if problem.code == 404:
            raise ValueError(f"{url} takes no such calls; start the server with VLLM_SERVER_DEV_MODE=1") from None
        answer = problem.read().decode()
        with suppress(ValueError, KeyError, TypeError):
            answer = str(json.loads(answer)["error"]["message"])
        said = answer.removeprefix("Call to collective_rpc method failed: ")  # what vLLM puts before it
        raise ValueError(f"{url}: {said}") from None
    except urllib.error.URLError as problem:
        raise ValueError(f"{url} does not answer ({problem.reason})") from None
    typer.echo(f"new weights: {', '.join(changed)}")
