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
from bisect import bisect_right
from collections import Counter
from itertools import pairwise
from typing import Any

import torch
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

from vllm_crossspec.host_copy import HostCopy

STAGES = ("prepare", "target", "between", "sample", "draft")
MARKS_PER_ROUND = 8
RANGE_PREFIX = "round:"
# What the CUDA runtime and driver call the things that we count, by the beginning of the name.
API_CALLS = {
    "kernel_launches": ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchCooperativeKernel"),
    "graph_launches": ("cudaGraphLaunch", "cuGraphLaunch"),
    "copies_and_fills": ("cudaMemcpy", "cuMemcpy", "cudaMemset", "cuMemset"),
    "waits": ("cudaStreamSynchronize", "cuStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
    "device_mallocs": ("cudaMalloc", "cuMemAlloc", "cudaHostAlloc", "cudaFree"),
}


class Round:
    """One step of the engine.

    Attributes:
        num_requests, num_tokens: of the step.
        is_decode: every request is past its prompt.
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
        self._range: Any = None
        self._profiler: Any = None
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
        if self.mode == "profile":
            self._close_range()
            label = f"{RANGE_PREFIX}{stage}" if self.rounds[-1].is_decode else f"{RANGE_PREFIX}other"
            self._range = torch.profiler.record_function(label)
            self._range.__enter__()
        self.rounds[-1].marks.append((stage, time.perf_counter(), event, allocations))

    def _close_range(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def _count(self, what: str) -> None:
        if self.rounds and self.rounds[-1].marks:
            self.rounds[-1].counts[what, self.rounds[-1].marks[-1][0]] += 1

    # -- a run ------------------------------------------------------------------------------------------------

    def begin(self, mode: str, num_rounds: int) -> None:
        """Start recording; ``mode`` is ``time``, ``count`` or ``profile``, each blind to the others' figures."""
        self.mode, self.rounds = mode, []
        if self.on_gpu and mode == "time":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(num_rounds * MARKS_PER_ROUND)]
            for event in self._events:
                event.record()  # an event comes to be at its first record, which must not be the timed one
            torch.cuda.synchronize()
        if self.on_gpu and mode == "count":
            self._start_counting()
        if mode == "profile":
            activities = [torch.profiler.ProfilerActivity.CPU]
            activities += [torch.profiler.ProfilerActivity.CUDA] if self.on_gpu else []
            self._profiler = torch.profiler.profile(activities=activities)
            self._profiler.__enter__()

    def end(self) -> dict[str, Any]:
        """Stop recording.

        Returns:
            ``rounds``: for every decode round that another round follows, its requests and tokens, milliseconds by
            stage on the host and (on a GPU) on the device, and what was counted, by name and stage. ``sync_places``:
            where the host waited for the device, by file and line. ``calls``: see :meth:`_read_profile`.
        """
        rounds, self.rounds = self.rounds or [], None
        if self.on_gpu:
            torch.cuda.synchronize()
        for undo in reversed(self._undo):
            undo()
        self._undo = []
        found: dict[str, Any] = {"rounds": [], "sync_places": {}, "calls": None}
        for this, following in pairwise(rounds):
            if this.is_decode and any(stage == "target" for stage, *_ in this.marks):
                found["rounds"].append(_describe(this, following.marks[0]))
        if self.mode == "count":
            found["sync_places"] = dict(self._sync_places) if self.on_gpu else {}
        if self.mode == "profile":
            self._close_range()
            self._profiler.__exit__(None, None, None)
            found["calls"] = self._read_profile(sum(r.is_decode for r in rounds))
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

    def _read_profile(self, num_rounds: int) -> dict[str, dict[str, float]]:
        """Calls of the CUDA runtime and driver per decode round, by kind and stage."""
        ranges, calls = [], []
        for event in self._profiler.events():
            if event.device_type == torch.autograd.DeviceType.CPU:
                kind = next((k for k, names in API_CALLS.items() if event.name.startswith(names)), None)
                if event.name.startswith(RANGE_PREFIX):
                    ranges.append((event.time_range.start, event.name.removeprefix(RANGE_PREFIX)))
                elif kind is not None:
                    calls.append((event.time_range.start, kind))
        ranges.sort()
        starts = [start for start, _ in ranges]
        counted: dict[str, Counter[str]] = {kind: Counter() for kind in API_CALLS}
        for start, kind in calls:
            index = bisect_right(starts, start) - 1
            if index >= 0 and ranges[index][1] in STAGES:
                counted[kind][ranges[index][1]] += 1
        return {k: {s: c[s] / max(num_rounds, 1) for s in STAGES} for k, c in counted.items()}


def _describe(this: Round, end: tuple[str, float, Any, int | None]) -> dict[str, Any]:
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


def begin(worker: Any, mode: str, num_rounds: int) -> None:
    """See :meth:`Probe.begin`."""
    assert _probe is not None
    _probe.begin(mode, num_rounds)


def end(worker: Any) -> dict[str, Any]:
    """See :meth:`Probe.end`."""
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
    catch_ups = getattr(runner.speculator, "context_graphs", {})
    graphs |= {f"draft {name} catch-up": len(captured) for name, captured in catch_ups.items()}
    one = torch.ones(1, device=runner.device)
    return {
        "device": torch.cuda.get_device_name(runner.device) if on_gpu else "cpu",
        # A rehearsal's GPU takes every call and computes nothing.
        "simulated": on_gpu and one.item() != 1.0,
        "graphs_captured": graphs,
        "gib_allocated": torch.cuda.memory_allocated() / 2**30 if on_gpu else None,
    }
