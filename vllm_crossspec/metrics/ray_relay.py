"""From this process's Prometheus registry to Ray's metrics, where the process runs under Ray.

Under Ray nobody asks a process for its registry: what Ray's own endpoints offer, on every node, is what was counted
with `ray.util.metrics`. That is so for a front end in an actor (`ray.data.llm`, `ray.serve.llm`) and for a worker of
vLLM's Ray executor on another machine than the front end, whose folder of files it cannot reach.
"""

import re
import sys
import threading
from typing import Any

PREFIX = "crossspec"
PERIOD_SECONDS = 1.0

_relays: list["Relay"] = []


def is_under_ray() -> bool:
    """Whether this process has joined a Ray cluster; Ray is not imported for the question."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def start_relay() -> None:
    """Hand our counters to Ray's metrics once a second, from a thread of their own; once a process."""
    if _relays:
        return
    from prometheus_client import REGISTRY

    relay = Relay(REGISTRY)
    _relays.append(relay)
    threading.Thread(target=relay.run_forever, daemon=True, name="crossspec-ray-metrics").start()


class Relay:
    """Adds what our totals in a registry have grown by to counters of Ray's, under names that Ray allows.

    ``crossspec:drafts_total`` is ``crossspec_drafts`` there; a histogram's parts are counters, too.

    Args:
        registry: of prometheus_client.
    """

    def __init__(self, registry: Any) -> None:
        self._registry = registry
        self._counters: dict[str, Any] = {}
        self._before: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def run_forever(self) -> None:
        """Until the process ends."""
        pause = threading.Event()
        while not pause.wait(PERIOD_SECONDS):
            self.push()

    def push(self) -> None:
        """Once."""
        totals: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for metric in self._registry.collect():
            if metric.name.startswith(PREFIX):
                for sample in metric.samples:
                    if not sample.name.endswith("_created"):
                        # Of two workers, or of files and memory, the same name and labels come twice.
                        key = (sample.name, tuple(sorted(sample.labels.items())))
                        totals[key] = totals.get(key, 0.0) + sample.value
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
