"""From the worker's counters to ``/metrics``, through prometheus_client's multi-process files.

The workers are other processes than the one that serves ``/metrics``. Where vLLM runs several API servers it sets
``PROMETHEUS_MULTIPROC_DIR`` itself and our counters join in. Where it runs one, the front end makes a folder, tells
the workers of it through the environment, and adds a collector of that folder to its registry.
"""

import os
import tempfile
import threading
from typing import Any

import torch

from vllm_crossspec.metrics.counters import AcceptanceCounters

FOLDER_VARIABLE = "CROSSSPEC_METRICS_DIR"
PERIOD_SECONDS = 1.0

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
    MultiProcessCollector(REGISTRY, path=_folder.name)


def _use_shared_files() -> None:
    """In a worker: make prometheus_client write the front end's files instead of this process's memory."""
    owner, _, folder = os.environ.get(FOLDER_VARIABLE, "").partition(":")
    if not folder or int(owner) == os.getpid() or "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        return
    from prometheus_client import values

    os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
    values.ValueClass = values.get_value_class()


def _make_counters() -> dict[str, Any]:
    from prometheus_client import REGISTRY, Counter

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
    known = REGISTRY._names_to_collectors
    return {name: known.get(name) or Counter(name, text, labels) for name, (text, labels) in help_of.items()}


def start_worker_export(counters: AcceptanceCounters) -> None:
    """Publish ``counters`` once a second from a thread of their own; the decoding path does nothing for it."""
    _use_shared_files()
    arguments = (counters, _make_counters())
    threading.Thread(target=_publish_forever, args=arguments, daemon=True, name="crossspec-metrics").start()


def _publish_forever(counters: AcceptanceCounters, metrics: dict[str, Any]) -> None:
    stream = torch.cuda.Stream(counters.counts.device) if counters.counts.is_cuda else None
    published = torch.zeros_like(counters.counts, device="cpu")
    pause = threading.Event()
    while True:
        if stream is None:
            current = counters.counts.clone()
        else:
            with torch.cuda.stream(stream):
                current = counters.counts.to("cpu", non_blocking=False)
        publish(counters.describe(current - published), metrics)
        published = current
        pause.wait(PERIOD_SECONDS)


def publish(delta: dict[str, dict[str, Any]], metrics: dict[str, Any]) -> None:
    """Add a difference of counters to the Prometheus counters."""
    for drafter, values in delta.items():
        for name in ("drafts", "draft_tokens", "accepted_tokens"):
            metrics[f"crossspec:{name}"].labels(drafter).inc(values[name])
        for position, count in enumerate(values["accepted_per_position"]):
            metrics["crossspec:accepted_tokens_per_pos"].labels(drafter, position).inc(count)
