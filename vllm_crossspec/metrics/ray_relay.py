"""From this process's Prometheus registry to Ray's metrics.

Ray's own endpoints offer, on every node, what was counted with `ray.util.metrics`. No client reads the registry of a
front end in an actor (`ray.data.llm`, `ray.serve.llm`), or of a worker of vLLM's Ray executor that cannot reach the
front end's folder of files from another machine.
"""

import re
import sys
import threading
from collections import defaultdict
from typing import Any

PREFIX = "crossspec"
PERIOD_SECONDS = 1.0

Series = tuple[str, tuple[tuple[str, str], ...]]
"""Name and labels."""

_relays: list["Relay"] = []


def is_under_ray() -> bool:
    """Whether this process has joined a Ray cluster; does not import Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def start_relay() -> None:
    """Start a thread that hands our counters to Ray's metrics once a second; once a process."""
    if _relays:
        return
    from prometheus_client import REGISTRY

    relay = Relay(REGISTRY)
    _relays.append(relay)
    threading.Thread(target=relay.run_forever, daemon=True, name="crossspec-ray-metrics").start()


class Relay:
    """Adds the growth of our totals in a registry of prometheus_client to Ray's counters, under names that Ray allows.

    ``crossspec:drafts_total`` becomes ``crossspec_drafts``; a histogram's parts become counters, too.
    """

    def __init__(self, registry: Any) -> None:
        self._registry = registry
        self._counters: dict[str, Any] = {}
        self._before: dict[Series, float] = {}

    def run_forever(self) -> None:
        pause = threading.Event()
        while not pause.wait(PERIOD_SECONDS):
            self.push()

    def push(self) -> None:
        """Add the growth since the last call."""
        totals: defaultdict[Series, float] = defaultdict(float)  # two workers have the same names and labels
        for metric in self._registry.collect():
            for sample in metric.samples if metric.name.startswith(PREFIX) else ():
                if not sample.name.endswith("_created"):
                    totals[sample.name, tuple(sorted(sample.labels.items()))] += sample.value
        for (name, labels), total in totals.items():
            growth = total - self._before.get((name, labels), 0.0)
            self._before[name, labels] = total
            if growth > 0:
                self._counter(name, labels).inc(growth, tags=dict(labels))

    def _counter(self, name: str, labels: tuple[tuple[str, str], ...]) -> Any:
        if name not in self._counters:
            from ray.util.metrics import Counter

            allowed = re.sub(r"[^a-zA-Z0-9_]", "_", name.removesuffix("_total"))
            self._counters[name] = Counter(allowed, f"{name} of vllm_crossspec", tuple(key for key, _ in labels))
        return self._counters[name]
