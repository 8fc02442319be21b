"""From the worker's counters to ``/metrics``, through prometheus_client's multi-process files.

The workers are other processes than the one that serves ``/metrics``. Where vLLM runs several API servers it sets
``PROMETHEUS_MULTIPROC_DIR`` itself and our counters join in. Where it runs one, the front end makes a folder, tells
the workers of it through the environment, and adds a collector of that folder to its registry.
"""

import os
import tempfile
import threading
from collections.abc import Mapping
from typing import Any

import torch

from vllm_crossspec.metrics.adaptive import BY_BIN, TreeSizeCounters
from vllm_crossspec.metrics.counters import AcceptanceCounters
from vllm_crossspec.metrics.routing import BACKLOG_EDGES, COUNTS, RoutingCounters
from vllm_crossspec.metrics.stages import StageClock

FOLDER_VARIABLE = "CROSSSPEC_METRICS_DIR"
PERIOD_SECONDS = 1.0
BACKLOGS = "crossspec:router_backlogs"

_folder: tempfile.TemporaryDirectory[str] | None = None


def prepare_frontend() -> None:
    """In the process that serves ``/metrics``: make the folder and collect from it. Idempotent.

    A folder in the environment is that of a process which started this one, an engine's user itself: not ours.
    """
    global _folder
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ or _folder is not None:
        return
    from prometheus_client import REGISTRY
    from prometheus_client.multiprocess import MultiProcessCollector

    _folder = tempfile.TemporaryDirectory(prefix="crossspec-metrics-")
    os.environ[FOLDER_VARIABLE] = f"{os.getpid()}:{_folder.name}"
    MultiProcessCollector(REGISTRY, path=_folder.name)  # type: ignore[no-untyped-call]


def _use_shared_files() -> None:
    """In a worker: make prometheus_client write the front end's files instead of this process's memory."""
    owner, _, folder = os.environ.get(FOLDER_VARIABLE, "").partition(":")
    if not folder or int(owner) == os.getpid() or "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        return
    from prometheus_client import values

    os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
    values.ValueClass = values.get_value_class()  # type: ignore[no-untyped-call]


def _make_counters() -> dict[str, Any]:
    from prometheus_client import REGISTRY, Counter, Histogram

    labels = ["drafter"]
    help_of = {
        "crossspec:drafts": ("Drafts verified", labels),
        "crossspec:draft_tokens": ("Draft tokens verified", labels),
        "crossspec:accepted_tokens": ("Draft tokens accepted", labels),
        "crossspec:accepted_tokens_per_pos": (
            "Draft tokens accepted at each position",
            [*labels, "position"],
        ),
    }
    help_of |= {
        f"crossspec:router_{name}": (text, labels)
        for name, text in (
            ("decisions", "Rounds in which a request was routed to the drafter"),
            ("switches", "Decisions for another drafter than the request's last"),
            ("missed_tokens", "Tokens that the drafter had missed when a request was switched to it"),
            ("caught_up_tokens", "Tokens whose keys and values the drafter computed without drafting from them"),
            ("catch_ups", "Passes that computed keys and values alone"),
        )
    }
    help_of |= {
        f"crossspec:heterospec_{name}": (text, [*labels, "bin"])
        for name, text in (
            ("trees", "Trees drafted, by bin of their Phi, the surest first"),
            ("extra_levels", "Levels of these trees beyond those of an ordinary one"),
            ("nodes", "Most nodes that these trees were allowed, summed up"),
        )
    }
    help_of["crossspec:heterospec_extra_passes"] = ("Passes of the drafter for levels beyond the ordinary ones", labels)
    help_of["crossspec:round_seconds"] = ("Seconds by stage of the drafting", ["stage"])
    known = REGISTRY._names_to_collectors
    made = {name: known.get(name) or Counter(name, text, labels) for name, (text, labels) in help_of.items()}
    made[BACKLOGS] = known.get(BACKLOGS) or Histogram(
        BACKLOGS, "Tokens that the drafter had missed, of each switch to it", labels, buckets=BACKLOG_EDGES
    )
    return made


def start_worker_export(
    counters: AcceptanceCounters,
    routing: RoutingCounters | None = None,
    clock: StageClock | None = None,
    sizes: Mapping[str, TreeSizeCounters] | None = None,
) -> None:
    """Publish the counters once a second from a thread of their own; the decoding path does nothing for it."""
    _use_shared_files()
    arguments = (counters, routing, clock, sizes or {}, _make_counters())
    threading.Thread(target=_publish_forever, args=arguments, daemon=True, name="crossspec-metrics").start()


def _publish_forever(
    counters: AcceptanceCounters,
    routing: RoutingCounters | None,
    clock: StageClock | None,
    sizes: Mapping[str, TreeSizeCounters],
    metrics: dict[str, Any],
) -> None:
    stream = torch.cuda.Stream(counters.counts.device) if counters.counts.is_cuda else None
    published = torch.zeros_like(counters.counts, device="cpu")
    pause, routed, sized = threading.Event(), RoutingPublisher(metrics), SizesPublisher(metrics)
    while True:
        if stream is None:
            current = counters.counts.clone()
        else:
            with torch.cuda.stream(stream):
                current = counters.counts.to("cpu", non_blocking=False)
        publish(counters.describe(current - published), metrics)
        published = current
        if routing is not None and clock is not None:
            routed.publish(routing.snapshot()["drafters"], dict(clock.seconds))
        sized.publish({name: counters_of.snapshot() for name, counters_of in sizes.items()})
        pause.wait(PERIOD_SECONDS)


def publish(delta: dict[str, dict[str, Any]], metrics: dict[str, Any]) -> None:
    """Add a difference of counters to the Prometheus counters."""
    for drafter, values in delta.items():
        for name in ("drafts", "draft_tokens", "accepted_tokens"):
            metrics[f"crossspec:{name}"].labels(drafter).inc(values[name])
        for position, count in enumerate(values["accepted_per_position"]):
            metrics["crossspec:accepted_tokens_per_pos"].labels(drafter, position).inc(count)


class RoutingPublisher:
    """Adds what has come since the last time to the Prometheus counters of routing.

    Args:
        metrics: the counters, by name.
    """

    def __init__(self, metrics: dict[str, Any]):
        self.metrics = metrics
        self._drafters: dict[str, dict[str, Any]] = {}
        self._seconds: dict[str, float] = {}

    def publish(self, drafters: dict[str, dict[str, Any]], seconds: dict[str, float]) -> None:
        """Publish totals: ``RoutingCounters.snapshot``'s by drafter, and seconds by stage."""
        for drafter, totals in drafters.items():
            before = self._drafters.get(drafter)
            for name in COUNTS:
                gain = totals[name] - (before[name] if before else 0)
                self.metrics[f"crossspec:router_{name}"].labels(drafter).inc(gain)
            self._add_backlogs(drafter, totals, before)
        for stage, total in seconds.items():
            self.metrics["crossspec:round_seconds"].labels(stage).inc(total - self._seconds.get(stage, 0.0))
        self._drafters, self._seconds = drafters, seconds

    def _add_backlogs(self, drafter: str, totals: dict[str, Any], before: dict[str, Any] | None) -> None:
        """Add to the histogram what was counted by bucket already; its own `observe` takes values one by one.

        Neither it nor ours is cumulative; what Prometheus reads is made so when it is collected.
        """
        histogram = self.metrics[BACKLOGS].labels(drafter)
        new = totals["backlog_histogram"]
        old = before["backlog_histogram"] if before else [0] * len(new)
        for bucket, count, was in zip(histogram._buckets, new, old, strict=True):
            bucket.inc(count - was)
        histogram._sum.inc(totals["missed_tokens"] - (before["missed_tokens"] if before else 0))


class SizesPublisher:
    """Adds what has come since the last time to the Prometheus counters of adaptive trees.

    Args:
        metrics: the counters, by name.
    """

    def __init__(self, metrics: dict[str, Any]):
        self.metrics = metrics
        self._before: dict[str, dict[str, Any]] = {}

    def publish(self, drafters: dict[str, dict[str, Any]]) -> None:
        """Publish totals: ``TreeSizeCounters.snapshot``'s by drafter."""
        for drafter, totals in drafters.items():
            before = self._before.get(drafter)
            for name in BY_BIN:
                old = before[name] if before else [0] * len(totals[name])
                for number, (new, was) in enumerate(zip(totals[name], old, strict=True)):
                    self.metrics[f"crossspec:heterospec_{name}"].labels(drafter, number).inc(new - was)
            gain = totals["extra_passes"] - (before["extra_passes"] if before else 0)
            self.metrics["crossspec:heterospec_extra_passes"].labels(drafter).inc(gain)
        self._before = drafters
