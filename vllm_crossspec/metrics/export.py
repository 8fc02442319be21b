"""From the worker's counters to ``/metrics``, through prometheus_client's multi-process files.

The workers are other processes than the one that serves ``/metrics``. If vLLM runs several API servers, it sets
``PROMETHEUS_MULTIPROC_DIR`` itself and our counters join in. If it runs one, the front end makes a folder, tells the
workers through the environment, and adds a collector of that folder to its registry. Under Ray and on machines without
that folder, counters go to Ray's metrics (``ray_relay``).
"""

import os
import tempfile
import threading
import weakref
from collections.abc import Mapping
from multiprocessing.util import Finalize
from typing import Any

import torch

from vllm_crossspec.devices import thread_stream
from vllm_crossspec.metrics.adaptive import BY_BIN, TreeSizeCounters
from vllm_crossspec.metrics.counters import AcceptanceCounters
from vllm_crossspec.metrics.ray_relay import is_under_ray, start_relay
from vllm_crossspec.metrics.routing import BACKLOG_EDGES, COUNTS, RoutingCounters
from vllm_crossspec.metrics.stages import StageClock

FOLDER_VARIABLE = "CROSSSPEC_METRICS_DIR"
RAY_COPIES = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"
"""Names of variables that vLLM's Ray executor hands to its workers, beside vLLM's own."""

PERIOD_SECONDS = 1.0
FILE_BYTES = 1 << 20
"""Size of a worker's file: ten times what its series fill."""
BACKLOGS = "crossspec:router_backlogs"

_folder: tempfile.TemporaryDirectory[str] | None = None


def prepare_frontend() -> None:
    """In the process that serves ``/metrics``: make the folder and collect from it. Idempotent.

    A folder in the environment belongs to the process that started this one.
    """
    global _folder
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ or _folder is not None:
        return
    from prometheus_client import REGISTRY
    from prometheus_client.multiprocess import MultiProcessCollector

    _folder = tempfile.TemporaryDirectory(prefix="crossspec-metrics-")
    # A process that multiprocessing forked runs its finalizers, and not Python's own at exit.
    Finalize(None, _folder.cleanup, exitpriority=0)
    os.environ[FOLDER_VARIABLE] = f"{os.getpid()}:{_folder.name}"
    copied = [name for name in os.environ.get(RAY_COPIES, "").split(",") if name and name != FOLDER_VARIABLE]
    os.environ[RAY_COPIES] = ",".join([*copied, FOLDER_VARIABLE])
    MultiProcessCollector(REGISTRY, path=_folder.name)  # type: ignore[no-untyped-call]
    if is_under_ray():
        start_relay()


def _use_shared_files() -> None:
    """In a worker: make prometheus_client write the front end's files instead of this process's memory."""
    owner, _, folder = os.environ.get(FOLDER_VARIABLE, "").partition(":")
    if not folder or int(owner) == os.getpid() or "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        return
    if not os.path.isdir(folder):  # the front end is on another machine
        if is_under_ray():
            start_relay()
        return
    from prometheus_client import values

    os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
    values.ValueClass = values.get_value_class()  # type: ignore[no-untyped-call]


def _reserve_files() -> None:
    """Write this process's files before they are mapped: they begin as holes, and on a full disk a write into a hole
    ends the process, and the engine with it.
    """
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if folder is None or not hasattr(os, "posix_fallocate"):
        return
    for kind in ("counter", "histogram"):
        with open(os.path.join(folder, f"{kind}_{os.getpid()}.db"), "ab") as file:
            os.posix_fallocate(file.fileno(), 0, FILE_BYTES)


def _make_counters() -> dict[str, Any]:
    from prometheus_client import REGISTRY, Counter, Histogram

    help_of = {
        (): {"drafting_stops": "Times that drafting stopped for want of memory or of a file, until the next start"},
        ("drafter",): {
            "drafts": "Drafts verified",
            "draft_tokens": "Draft tokens verified",
            "accepted_tokens": "Draft tokens accepted",
            "drafter_swaps": "Times that the drafter got new weights",
            "router_decisions": "Rounds in which a request was routed to the drafter",
            "router_switches": "Decisions for another drafter than the request's last",
            "router_missed_tokens": "Tokens that the drafter had missed when a request was switched to it",
            "router_caught_up_tokens": "Tokens whose keys and values the drafter computed without drafting from them",
            "router_catch_ups": "Passes that computed keys and values alone",
            "heterospec_extra_passes": "Passes of the drafter for levels beyond the ordinary ones",
        },
        ("drafter", "position"): {"accepted_tokens_per_pos": "Draft tokens accepted at each position"},
        ("drafter", "bin"): {
            "heterospec_trees": "Trees drafted, by bin of their Phi, the surest first",
            "heterospec_extra_levels": "Levels of these trees beyond those of an ordinary one",
            "heterospec_nodes": "Most nodes that these trees were allowed, summed up",
        },
        ("stage",): {"round_seconds": "Seconds by stage of the drafting"},
    }
    known, made = REGISTRY._names_to_collectors, {}
    for labels, texts in help_of.items():
        for name, text in texts.items():
            name = f"crossspec:{name}"
            made[name] = known.get(name) or Counter(name, text, ("engine", *labels))
    text, labels = "Tokens that the drafter had missed, of each switch to it", ("engine", "drafter")
    made[BACKLOGS] = known.get(BACKLOGS) or Histogram(BACKLOGS, text, labels, buckets=BACKLOG_EDGES)
    return made


def start_worker_export(
    counters: AcceptanceCounters,
    engine: int,
    routing: RoutingCounters | None = None,
    clock: StageClock | None = None,
    sizes: Mapping[str, TreeSizeCounters] | None = None,
) -> None:
    """Publish the counters once a second from a thread, which ends once they are gone.

    ``engine`` is its number among the data-parallel ones, as in vLLM's own metrics. ``sizes`` are by drafter. Raises
    OSError: the disk has no room for the files; nothing is published then.
    """
    _use_shared_files()
    _reserve_files()
    owner, publisher = weakref.ref(counters), Publisher(_make_counters(), engine)

    def publish_forever() -> None:
        stream: torch.cuda.Stream | None = None
        pause = threading.Event()
        while (counters := owner()) is not None:
            stream = stream or thread_stream(counters.counts.device)
            if stream is None:
                current = counters.counts.clone()
            else:
                with torch.cuda.stream(stream):
                    current = counters.counts.to("cpu", non_blocking=False)
            publisher.add_acceptance(counters.describe(current))
            publisher.add_swaps(counters.swaps)
            publisher.add_stop(counters.has_stopped)
            del counters
            if routing is not None and clock is not None:
                publisher.add_routing(routing.snapshot()["drafters"], dict(clock.seconds))
            publisher.add_sizes({name: counters_of.snapshot() for name, counters_of in (sizes or {}).items()})
            pause.wait(PERIOD_SECONDS)

    threading.Thread(target=publish_forever, daemon=True, name="crossspec-metrics").start()


class Publisher:
    """Adds the growth of an engine's totals since the last time to the Prometheus counters ``metrics``, by name.

    Its methods take the snapshots of the classes that count.
    """

    def __init__(self, metrics: dict[str, Any], engine: int):
        self.metrics, self.engine = metrics, str(engine)
        self._before: dict[tuple[Any, ...], float] = {}

    def _growth(self, total: float, *key: Any) -> float:
        before, self._before[key] = self._before.get(key, 0), total
        return total - before

    def _add(self, name: str, total: float, *labels: Any) -> None:
        self.metrics[f"crossspec:{name}"].labels(self.engine, *labels).inc(self._growth(total, name, *labels))

    def add_acceptance(self, drafters: dict[str, dict[str, Any]]) -> None:
        for drafter, totals in drafters.items():
            for name in ("drafts", "draft_tokens", "accepted_tokens"):
                self._add(name, totals[name], drafter)
            for position, total in enumerate(totals["accepted_per_position"]):
                self._add("accepted_tokens_per_pos", total, drafter, position)

    def add_swaps(self, drafters: dict[str, int]) -> None:
        for drafter, total in drafters.items():
            self._add("drafter_swaps", total, drafter)

    def add_stop(self, has_stopped: bool) -> None:
        self._add("drafting_stops", has_stopped)

    def add_routing(self, drafters: dict[str, dict[str, Any]], seconds: dict[str, float]) -> None:
        for drafter, totals in drafters.items():
            for name in COUNTS:
                self._add(f"router_{name}", totals[name], drafter)
            # `observe` takes values one by one, and ours are counted by bucket. Both become cumulative when collected.
            histogram = self.metrics[BACKLOGS].labels(self.engine, drafter)
            for bucket, (part, total) in enumerate(zip(histogram._buckets, totals["backlog_histogram"], strict=True)):
                part.inc(self._growth(total, BACKLOGS, drafter, bucket))
            histogram._sum.inc(self._growth(totals["missed_tokens"], BACKLOGS, drafter))
        for stage, total in seconds.items():
            self._add("round_seconds", total, stage)

    def add_sizes(self, drafters: dict[str, dict[str, Any]]) -> None:
        for drafter, totals in drafters.items():
            for name in BY_BIN:
                for number, total in enumerate(totals[name]):
                    self._add(f"heterospec_{name}", total, drafter, number)
            self._add("heterospec_extra_passes", totals["extra_passes"], drafter)
