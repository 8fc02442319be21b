"""Marks the stages of every decoding round inside the engine, without stopping it.

:func:`install`, :func:`begin` and :func:`end` run in vLLM's worker (``LLM.collective_rpc``). Each round is a list of
marks, one where each stage begins. A mark is a reading of the host's clock and, on a GPU, an event recorded on the
stream that the model runs on; events are read after the run. The stages, in their order:

    prepare   the scheduler's output becomes the step's inputs on the device
    target    the target's forward
    between   nothing of the worker's: scheduling, output, and whatever else the engine does
    sample    logits, sampling, verification, request states
    draft     the speculator's ``propose``
"""

import time
import warnings
from collections import Counter
from itertools import pairwise
from typing import Any

import torch
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

from vllm_crossspec.host_copy import HostCopy

STAGES = ("prepare", "target", "between", "sample", "draft")
MARKS_PER_ROUND = 8


class Round:
    """One step of the engine; it ``is_decode`` where every request is past its prompt.

    Attributes:
        marks: (stage that begins, host clock in seconds, event or None, allocations of the process so far or None).
        counts: by (what, stage); filled in counting mode.
    """

    def __init__(self, scheduled: Any):
        self.num_requests = len(scheduled.num_scheduled_tokens)
        self.num_tokens = scheduled.total_num_scheduled_tokens
        tokens = set(scheduled.num_scheduled_tokens.values())
        self.is_decode = not scheduled.scheduled_new_reqs and len(tokens) == 1
        self.marks: list[tuple[str, float, Any, int | None]] = []
        self.counts: Counter[tuple[str, str]] = Counter()


class Probe:
    """Wraps one model runner; at most one per process."""

    def __init__(self, runner: Any):
        self.runner = runner
        self.on_gpu = runner.device.type == "cuda"
        self.rounds: list[Round] | None = None
        self.mode = "time"
        self._events: list[Any] = []
        self._undo: list[Any] = []
        self._wrap()

    def _wrap(self) -> None:
        runner = self.runner
        self._around(runner, "execute_model", "prepare", "between", opens=True)
        self._around(runner.step_timing, "forward_start", "target", None)
        self._around(runner, "sample_tokens", "sample", "between")
        if runner.speculator is not None:
            self._around(runner.speculator, "propose", "draft", "sample")
        replay = torch.cuda.CUDAGraph.replay

        def count_and_replay(graph: Any) -> None:
            self._count("graph_replays")
            replay(graph)

        torch.cuda.CUDAGraph.replay = count_and_replay  # type: ignore[method-assign]
        self._replay = replay

    def unwrap(self) -> None:
        """Give back what outlives the runner."""
        torch.cuda.CUDAGraph.replay = self._replay  # type: ignore[method-assign]

    def _around(self, owner: Any, name: str, before: str, after: str | None, opens: bool = False) -> None:
        inner = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.rounds is None:
                return inner(*args, **kwargs)
            if opens:
                self.rounds.append(Round(args[0]))
            self._mark(before)
            result = inner(*args, **kwargs)
            if after is not None:
                self._mark(after)
            return result

        setattr(owner, name, call)

    def _mark(self, stage: str) -> None:
        if not self.rounds:
            return
        event = allocations = None
        if self.on_gpu and self.mode == "time":
            event = self._events.pop() if self._events else torch.cuda.Event(enable_timing=True)
            event.record()
        if self.on_gpu and self.mode == "count":
            allocations = _allocations(self.runner.device)
        self.rounds[-1].marks.append((stage, time.perf_counter(), event, allocations))

    def _count(self, what: str) -> None:
        if self.rounds and self.rounds[-1].marks:
            self.rounds[-1].counts[what, self.rounds[-1].marks[-1][0]] += 1

    # -- a run ------------------------------------------------------------------------------------------------

    def begin(self, mode: str, num_rounds: int) -> None:
        """Start recording; ``mode`` is ``time`` or ``count``, each blind to the other's figures."""
        self.mode, self.rounds = mode, []
        if self.on_gpu and mode == "time":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(num_rounds * MARKS_PER_ROUND)]
            for event in self._events:
                event.record()  # an event comes to be at its first record, which must not be the timed one
            torch.cuda.synchronize()
        if self.on_gpu and mode == "count":
            self._start_counting()

    def end(self) -> dict[str, Any]:
        """Stop recording.

        Returns:
            ``rounds``: every decode round that another follows, see :func:`_describe`. ``sync_places``: where the host
            waited for the device, by file and line.
        """
        rounds, self.rounds = self.rounds or [], None
        if self.on_gpu:
            torch.cuda.synchronize()
        for undo in reversed(self._undo):
            undo()
        self._undo = []
        found: dict[str, Any] = {"rounds": [], "sync_places": {}}
        for this, following in pairwise(rounds):
            if this.is_decode and any(stage == "target" for stage, *_ in this.marks):
                found["rounds"].append(_describe(this, following.marks[0]))
        if self.mode == "count":
            found["sync_places"] = dict(self._sync_places) if self.on_gpu else {}
        return found

    # -- counting ---------------------------------------------------------------------------------------------

    def _start_counting(self) -> None:
        """Count waits of the host for the device: PyTorch's own warnings, and waits that are asked for by name."""
        self._sync_places: Counter[str] = Counter()
        catcher = warnings.catch_warnings()
        catcher.__enter__()
        warnings.simplefilter("always")

        def show(message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
            if "synchroniz" in str(message):
                self._count("implicit_syncs")
                if self.rounds and self.rounds[-1].is_decode:
                    self._sync_places[f"{_short(filename)}:{lineno}"] += 1

        warnings.showwarning = show
        torch.cuda.set_sync_debug_mode("warn")
        self._undo += [lambda: catcher.__exit__(None, None, None), lambda: torch.cuda.set_sync_debug_mode("default")]
        for owner in (torch.cuda.Event, torch.cuda.Stream):
            self._count_calls(owner, "synchronize")
        self._count_calls(torch.cuda, "synchronize")
        self._count_calls(HostCopy, "wait")  # for routes, and for the sizes of trees

    def _count_calls(self, owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self._count("explicit_waits")
            return inner(*args, **kwargs)

        setattr(owner, name, call)
        self._undo.append(lambda: setattr(owner, name, inner))


def _describe(this: Round, end: tuple[str, float, Any, int | None]) -> dict[str, Any]:
    """Requests, tokens, milliseconds by stage on the host and on a GPU, and what was counted, by name and stage."""
    marks = [*this.marks, end]
    host = dict.fromkeys(STAGES, 0.0)
    device = dict.fromkeys(STAGES, 0.0)
    counts: Counter[tuple[str, str]] = Counter(this.counts)
    for (stage, clock, event, allocations), (_, next_clock, next_event, next_allocations) in pairwise(marks):
        host[stage] += (next_clock - clock) * 1e3
        if event is not None:
            device[stage] += event.elapsed_time(next_event)
        if allocations is not None:
            counts["allocations", stage] += next_allocations - allocations
    return {
        "num_requests": this.num_requests,
        "num_tokens": this.num_tokens,
        "host_ms": host,
        "device_ms": device if end[2] is not None else None,
        "counts": {f"{what}/{stage}": number for (what, stage), number in counts.items()},
    }


def _allocations(device: torch.device) -> int:
    return torch.cuda.memory_stats_as_nested_dict(device)["allocation"]["all"]["allocated"]


def _short(filename: str) -> str:
    return filename.rsplit("site-packages/", 1)[-1]


_probe: Probe | None = None


def install(worker: Any) -> dict[str, Any]:
    """Wrap the worker's model runner once; what it runs on."""
    global _probe
    if _probe is None:
        _probe = Probe(worker.model_runner)
    return describe(worker)


def uninstall(worker: Any) -> None:
    """Make way for the next engine of this process."""
    global _probe
    assert _probe is not None
    _probe.unwrap()
    _probe = None


def begin(worker: Any, mode: str, num_rounds: int) -> None:
    assert _probe is not None
    _probe.begin(mode, num_rounds)


def end(worker: Any) -> dict[str, Any]:
    assert _probe is not None
    return _probe.end()


def describe(worker: Any) -> dict[str, Any]:
    """Device, captured graphs by their manager, and memory in GiB."""
    runner = worker.model_runner
    on_gpu = runner.device.type == "cuda"
    owners = {"target": runner, "draft": runner.speculator}
    owners |= {f"draft {name}": p for name, p in getattr(runner.speculator, "proposers", {}).items()}
    graphs = {
        f"{owner} {name.removesuffix('cudagraph_manager').rstrip('_')}".strip(): len(manager.graphs)
        for owner, thing in owners.items()
        if thing is not None
        for name, manager in vars(thing).items()
        if isinstance(manager, CudaGraphManager)
    }
    backlogs = getattr(runner.speculator, "backlogs", None)
    queues = {} if backlogs is None else backlogs.queues
    graphs |= {f"draft {name} catch-up": len(queue.graphs) for name, queue in queues.items() if queue.graphs}
    one = torch.ones(1, device=runner.device)
    return {
        "device": torch.cuda.get_device_name(runner.device) if on_gpu else "cpu",
        # A rehearsal's GPU takes every call and computes nothing.
        "simulated": on_gpu and one.item() != 1.0,
        "graphs_captured": graphs,
        "gib_allocated": torch.cuda.memory_allocated() / 2**30 if on_gpu else None,
    }
