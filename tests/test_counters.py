"""The acceptance counters: the kernel against its naive twin, and what must not be counted."""

import errno
import multiprocessing
import os
import sys
from typing import ClassVar

import pytest
import torch

from vllm_crossspec.config.schema import CrossSpecConfig
from vllm_crossspec.metrics import kernel, naive
from vllm_crossspec.metrics.counters import AcceptanceCounters
from vllm_crossspec.types import NO_DRAFTS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random_step(seed, slots, rows, positions, drafters):
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    mapping = torch.randperm(slots, generator=generator)[:rows].to(torch.int32)
    mapping[draw(0, 8, rows) == 0] = -1
    drafted = draw(0, positions + 1, rows)
    accepted = torch.minimum(draw(0, positions + 1, rows), drafted)
    in_chunk = draw(0, 6, rows) == 0
    sampled = torch.where(in_chunk, 0, accepted + 1).to(torch.int32)
    rejected = torch.where(in_chunk, 0, drafted - accepted).to(torch.int32)
    state = draw(-1, drafters, slots)
    return mapping, sampled, rejected, draw(0, 60, slots), draw(0, 30, slots), state


@pytest.mark.parametrize(("slots", "rows", "positions", "drafters"), [(1, 1, 1, 1), (7, 5, 3, 2), (64, 33, 15, 3)])
@pytest.mark.parametrize("seed", range(5))
def test_kernel_equals_naive(seed, slots, rows, positions, drafters):
    mapping, sampled, rejected, computed, prefill, state = random_step(seed, slots, rows, positions, drafters)
    results = []
    for implementation, contemplates in ((naive, seed % 2 == 0), (kernel, seed % 2 == 0)):
        counts = torch.full((drafters, 3 + positions), 5, dtype=torch.int64, device=DEVICE)
        drafted_by = state.clone().to(DEVICE)
        arguments = [t.to(DEVICE) for t in (mapping, sampled, rejected, computed, prefill)]
        implementation.record_acceptance(counts, drafted_by, *arguments, contemplates)
        modes = (torch.arange(slots, dtype=torch.int32) % 3).to(DEVICE)  # trees, chains, nothing
        implementation.mark_drafted(drafted_by, modes, arguments[0][::2].contiguous(), drafters - 1)
        results.append((counts.cpu(), drafted_by.cpu()))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_contemplate_rows_are_no_drafts():
    """15 drafts of the scheduler's are 7 nodes, and 8 contemplate rows that are always rejected."""
    counters = AcceptanceCounters({"a": 7}, 4, device=torch.device(DEVICE), rows_per_node=2)
    slots = torch.tensor([2], dtype=torch.int32, device=DEVICE)
    counters.mark_drafted(slots, 0)
    one = [torch.tensor([v], dtype=torch.int32, device=DEVICE) for v in (2, 3, 13)]
    counters.count_verified(*one, *(torch.full((4,), v, dtype=torch.int32, device=DEVICE) for v in (20, 10)))
    counted = counters.snapshot()["a"]
    assert counted == {
        "drafts": 1,
        "draft_tokens": 7,
        "accepted_tokens": 2,
        "accepted_per_position": [1, 1, 0, 0, 0, 0, 0],
    }


def test_what_counts_and_what_does_not():
    counters = AcceptanceCounters({"a": 2, "b": 3}, max_num_reqs=4, device=torch.device(DEVICE))

    def verdict(slot, sampled, rejected, computed, prompt):
        one = [torch.tensor([v], dtype=torch.int32, device=DEVICE) for v in (slot, sampled, rejected)]
        per_slot = [torch.full((4,), v, dtype=torch.int32, device=DEVICE) for v in (computed, prompt)]
        counters.count_verified(*one, *per_slot)

    slots = torch.tensor([2], dtype=torch.int32, device=DEVICE)
    counters.mark_drafted(slots, 1)
    verdict(2, sampled=3, rejected=1, computed=13, prompt=10)  # 3 drafted, 2 accepted
    verdict(2, sampled=3, rejected=1, computed=16, prompt=10)  # nobody drafted since: not counted
    counters.mark_drafted(slots, 1)
    verdict(2, sampled=1, rejected=3, computed=8, prompt=10)  # placeholders inside a prompt: not counted
    counters.mark_drafted(slots, 0)
    verdict(2, sampled=1, rejected=0, computed=11, prompt=10)  # nothing was drafted in this step
    counters.modes[2] = NO_DRAFTS
    counters.mark_drafted(slots, 0)
    verdict(2, sampled=1, rejected=3, computed=12, prompt=10)  # the request opted out: not counted
    stats = counters.snapshot()
    assert stats["b"] == {
        "drafts": 1,
        "draft_tokens": 3,
        "accepted_tokens": 2,
        "accepted_per_position": [1, 1, 0],
    }
    assert stats["a"]["drafts"] == 0 and stats["a"]["accepted_per_position"] == [0, 0], "as many as it has levels"


def test_positions_are_those_that_a_drafter_can_reach():
    """A chain's tokens, a tree's levels and those that adaptive trees may grow; not every node of the widest tree."""
    tree = {"type": "dynamic", "depth": 5, "top_k": 8, "num_nodes": 60}
    drafters = {
        "tree": {"kind": "eagle3", "model": "a", "num_speculative_tokens": 5, "tree": tree},
        "grows": {"kind": "eagle3", "model": "a", "num_speculative_tokens": 5, "tree": tree,
                  "adaptive": {"model": "b"}, "policy": ((1.0,), (3, 0), (60, 60))},
        "small": {"kind": "dflash", "model": "a", "num_speculative_tokens": 7,
                  "tree": {"type": "best_first", "num_nodes": 4}},
        "chain": {"kind": "dflash", "model": "a", "num_speculative_tokens": 7},
        "nothing": {"kind": "nothing", "model": "", "num_speculative_tokens": 1},
    }  # fmt: skip
    settings = CrossSpecConfig(method="whiflash", drafters=drafters, num_speculative_tokens=60)
    depths = {name: settings.depth_of(name) for name in drafters}
    assert depths == {"tree": 5, "grows": 8, "small": 4, "chain": 7, "nothing": 0}
    counters = AcceptanceCounters(depths, 2, device=torch.device(DEVICE))
    found = {name: len(counted["accepted_per_position"]) for name, counted in counters.snapshot().items()}
    assert found == depths and AcceptanceCounters({"nothing": 0}, 2, torch.device(DEVICE)).snapshot()


def test_backlogs_are_a_histogram_as_prometheus_knows_it():
    """Each bucket counts those below it, `+Inf` counts all, and what is published twice is not counted twice."""
    import numpy as np
    from prometheus_client import REGISTRY

    from vllm_crossspec.metrics.export import Publisher, _make_counters
    from vllm_crossspec.metrics.routing import BACKLOG_EDGES, RoutingCounters

    counters, publisher = RoutingCounters(("left", "right"), num_slots=4), Publisher(_make_counters(), engine=1)
    missed = [0, 3, 3, 200, 5000]

    def sample(suffix, **labels):
        name = f"crossspec:router_backlogs{suffix}"
        return REGISTRY.get_sample_value(name, {"engine": "1", "drafter": "right", **labels})

    for repetition in (1, 2):
        for tokens in missed:
            counters.count_decisions(np.array([1]), np.array([0]))
            counters.count_missed(1, np.array([1]), np.array([tokens]))
        publisher.add_routing(counters.snapshot()["drafters"], {})
        publisher.add_routing(counters.snapshot()["drafters"], {})
        for edge in (*BACKLOG_EDGES, float("inf")):
            label = "+Inf" if edge == float("inf") else f"{edge:.1f}"
            assert sample("_bucket", le=label) == repetition * sum(tokens <= edge for tokens in missed), edge
        assert sample("_count") == repetition * len(missed)
        assert sample("_sum") == repetition * sum(missed)


def _folder_of_metrics(paths):
    from vllm_crossspec.metrics.export import FOLDER_VARIABLE, prepare_frontend

    prepare_frontend()
    path = os.environ[FOLDER_VARIABLE].partition(":")[2]
    paths.put((path, os.path.isdir(path)))


def test_a_forked_engine_leaves_no_folder_behind(monkeypatch):
    """Engines on a CPU are forks of a server, and end as multiprocessing ends them."""
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    context = multiprocessing.get_context("forkserver")
    paths = context.SimpleQueue()
    process = context.Process(target=_folder_of_metrics, args=(paths,))
    process.start()
    path, was_there = paths.get()
    process.join()
    assert was_there and not os.path.isdir(path)


def test_files_of_a_full_disk_are_not_mapped(monkeypatch, tmp_path):
    """A write into a hole of one would end the process (SIGBUS)."""
    from vllm_crossspec.metrics import export

    counters = AcceptanceCounters({"a": 3}, 4, device=torch.device(DEVICE))
    monkeypatch.setattr(export, "_make_counters", lambda: pytest.fail("the files are mapped"))
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "gone"))
    with pytest.raises(FileNotFoundError):
        export.start_worker_export(counters, 0)

    def is_full(descriptor, start, length):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", is_full)
        with pytest.raises(OSError, match="No space left"):
            export.start_worker_export(counters, 0)
    export._reserve_files()
    files = {file.name: file.stat() for file in tmp_path.iterdir()}
    assert set(files) == {f"{kind}_{os.getpid()}.db" for kind in ("counter", "histogram")}
    assert all(file.st_blocks * 512 >= file.st_size == export.FILE_BYTES for file in files.values())


class RaysCounter:
    """Stands for `ray.util.metrics.Counter`, by Ray's rules: tags are those of the counter, names are plain."""

    values: ClassVar[dict[tuple[str, str], float]] = {}

    def __init__(self, name, description, tag_keys):
        assert name.isidentifier() and description
        self.name, self.tag_keys = name, tag_keys

    def inc(self, value, tags):
        assert value > 0 and set(tags) == set(self.tag_keys)
        key = self.name, ",".join(tags.values())
        self.values[key] = self.values.get(key, 0) + value


@pytest.fixture
def rays_metrics(monkeypatch):
    from types import SimpleNamespace

    from vllm_crossspec.metrics import ray_relay

    monkeypatch.setattr(RaysCounter, "values", {})
    monkeypatch.setattr(ray_relay, "_relays", [])
    ray = SimpleNamespace(is_initialized=lambda: True)
    for name in ("ray", "ray.util"):
        monkeypatch.setitem(sys.modules, name, ray)
    monkeypatch.setitem(sys.modules, "ray.util.metrics", SimpleNamespace(Counter=RaysCounter))
    return RaysCounter.values


def test_ray_is_told_what_counters_grow_by(rays_metrics):
    from prometheus_client import CollectorRegistry, Counter, Histogram

    from vllm_crossspec.metrics.ray_relay import Relay

    registry = CollectorRegistry()
    drafts = Counter("crossspec:drafts", "-", ["drafter"], registry=registry)
    backlogs = Histogram("crossspec:router_backlogs", "-", ["drafter"], registry=registry, buckets=(1, 4))
    Counter("vllm:prompts", "-", registry=registry).inc(9)
    relay = Relay(registry)
    for number in (3, 0, 4):
        drafts.labels("eagle3").inc(number)
        drafts.labels("dflash").inc(2 * number)
        relay.push()
    backlogs.labels("eagle3").observe(2)
    relay.push()
    relay.push()
    assert rays_metrics["crossspec_drafts", "eagle3"] == 7 and rays_metrics["crossspec_drafts", "dflash"] == 14
    assert rays_metrics["crossspec_router_backlogs_bucket", "eagle3,4.0"] == 1
    assert rays_metrics["crossspec_router_backlogs_sum", "eagle3"] == 2
    assert all(name.startswith("crossspec_") for name, _ in rays_metrics)


def test_ray_worker_on_another_machine_writes_no_files(rays_metrics, monkeypatch, tmp_path):
    from vllm_crossspec.metrics import export, ray_relay

    started = []
    monkeypatch.setattr(export, "start_relay", lambda: started.append(True))
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    monkeypatch.setenv(export.FOLDER_VARIABLE, f"1:{tmp_path / 'elsewhere'}")
    export._use_shared_files()
    assert started == [True] and "PROMETHEUS_MULTIPROC_DIR" not in os.environ
    monkeypatch.setattr(sys.modules["ray"], "is_initialized", lambda: False)
    export._use_shared_files()
    assert started == [True] and not ray_relay.is_under_ray()


def test_ray_workers_of_vllm_are_told_the_folder(monkeypatch):
    from prometheus_client import multiprocess
    from vllm.ray.ray_env import get_env_vars_to_copy

    from vllm_crossspec.metrics import export

    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    monkeypatch.setattr(export, "_folder", None)
    monkeypatch.setattr(multiprocess, "MultiProcessCollector", lambda registry, path: None)
    monkeypatch.setenv(export.FOLDER_VARIABLE, "")
    monkeypatch.setenv(export.RAY_COPIES, "MINE")
    assert export.FOLDER_VARIABLE not in get_env_vars_to_copy()
    export.prepare_frontend()
    assert {export.FOLDER_VARIABLE, "MINE"} <= get_env_vars_to_copy()
