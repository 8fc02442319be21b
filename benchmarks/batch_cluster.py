"""`crossspec batch` on a Ray cluster of two nodes on this machine, one of its replicas killed (SIGKILL) in the middle.

The rows of the output are held against those of one engine, and against plain generation's: all rows, each once, the
same texts. Half of the rows are greedy, half are sampled with seeds; all have other words.

    python benchmarks/batch_cluster.py --rows 2000

Prints one JSON document as its last line.
"""

import argparse
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import vllm_crossspec
from vllm_crossspec.cli.app import app

POCKET = Path(vllm_crossspec.__file__).parent / "pocket"
WHIFLASH = {
    "method": "whiflash",
    "num_speculative_tokens": 7,
    "drafters": {"eagle3": {"model": str(POCKET / "eagle3")}, "dflash": {"model": str(POCKET / "dflash")}},
    "router": {"policy": "entropy", "threshold": 1.5},
}
WORDINGS = ("{}", "In short: {}", "{} Be brief.", "My neighbour asks: {}", "{} Say why.", "Once more: {}")
POLL_SECONDS = 0.05


def make_rows(count: int) -> list[dict[str, Any]]:
    """Rows of `crossspec batch`: the demo's prompts in several wordings, numbered; every second one is sampled."""
    prompts = [json.loads(line)["prompt"] for line in (POCKET / "prompts.jsonl").read_text().splitlines()]
    rows: list[dict[str, Any]] = []
    for i in range(count):
        words = WORDINGS[i // len(prompts) % len(WORDINGS)].format(prompts[i % len(prompts)])
        sampling = {"temperature": 0.8, "top_p": 0.95} if i % 2 else {}
        rows.append({"id": f"row-{i}", "prompt": f"{words} ({i})", **sampling})
    return rows


class Cluster:
    """A Ray cluster of two nodes of one CPU each on this machine, joined by this process.

    Attributes:
        raylets: process ids of the nodes.
    """

    def __enter__(self) -> "Cluster":
        import ray
        from ray.cluster_utils import Cluster as Local

        # A busy machine starts nodes and workers slowly.
        os.environ.setdefault("RAY_raylet_start_wait_time_s", "300")
        os.environ.setdefault("RAY_worker_register_timeout_seconds", "300")
        node = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 100 << 20}
        self._cluster = Local(initialize_head=True, head_node_args=node)
        self._cluster.add_node(num_cpus=1, object_store_memory=100 << 20)
        ray.init(address=self._cluster.address, log_to_driver=False)
        processes = [node.all_processes["raylet"] for node in self._cluster.list_all_nodes()]
        self.raylets = [one.process.pid for started in processes for one in started]
        return self

    def __exit__(self, *problem: object) -> None:
        import ray

        ray.shutdown()
        self._cluster.shutdown()

    def replicas(self) -> list[int]:
        """Process ids of the replicas, those of one node after those of the other."""
        return [pid for raylet in self.raylets for pid in children(raylet) if b"Replica" in command_line(pid)]


def children(pid: int) -> list[int]:
    """Of a process, by ``/proc``; none where it is gone."""
    try:
        return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in _words(task / "children")]
    except OSError:
        return []


def _words(file: Path) -> list[str]:
    return file.read_text().split()


def command_line(pid: int) -> bytes:
    """Of a process; empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def family(pid: int) -> list[int]:
    """A process and all that it started."""
    return [pid, *(other for child in children(pid) for other in family(child))]


class Killer(threading.Thread):
    """Kills one replica once so many shards are done and two replicas are at work.

    Attributes:
        killed: process ids of the replica and what it had started; none yet, or none at all.
        at: shards that were done then.
    """

    def __init__(self, cluster: Cluster, parts: Path, after: int) -> None:
        super().__init__(daemon=True)
        self._cluster, self._parts, self._after = cluster, parts, after
        self.killed: list[int] = []
        self.at = 0
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(POLL_SECONDS):
            done, replicas = len(list(self._parts.glob("rows-*.jsonl"))), self._cluster.replicas()
            if done >= self._after and len(replicas) == 2:
                # The one that has a shard in hand in any case: both have, until the last ones.
                self.killed, self.at = family(replicas[-1]), done
                os.kill(replicas[-1], signal.SIGKILL)
                return


def batch(rows: Path, out: Path, *words: object) -> dict[str, Any]:
    """Run `crossspec batch` in this process; its summary."""
    summary = out.with_suffix(".json")
    given = ["batch", rows, out, "--json", summary, "--dtype", "float32", "--model", POCKET / "target", *words]
    app([str(word) for word in given], standalone_mode=False)
    found: dict[str, Any] = json.loads(summary.read_text())
    return found


def texts(file: Path) -> list[tuple[str, str, str | None]]:
    """Id, text and error of every row of an output."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [(row["id"], row["text"], row["error"]) for row in rows]


def differing(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Rows that are not the same in both."""
    return sum(x != y for x, y in zip(a, b, strict=True))


def gone(pids: Sequence[int], seconds: float = 30.0) -> bool:
    """Whether these processes have ended, after so many seconds at the latest."""
    end = time.monotonic() + seconds
    while (alive := [pid for pid in pids if command_line(pid)]) and time.monotonic() < end:
        time.sleep(POLL_SECONDS)
    return not alive


def run(folder: Path, count: int, max_tokens: int, shard_rows: int, after: int, batch_size: int) -> dict[str, Any]:
    """The job three times: plain, by one engine, and by two replicas of which one is killed; what came out."""
    rows, spec = folder / "rows.jsonl", folder / "whiflash.json"
    rows.write_text("".join(json.dumps(row) + "\n" for row in make_rows(count)))
    spec.write_text(json.dumps(WHIFLASH))
    words = ["--max-tokens", max_tokens, "--shard-rows", shard_rows, "--batch-size", batch_size]
    words += ["--max-model-len", 512]
    one = batch(rows, folder / "one.jsonl", *words, "--spec", spec)
    with Cluster() as cluster:
        killer = Killer(cluster, folder / "two.jsonl.parts", after)
        killer.start()
        two = batch(rows, folder / "two.jsonl", *words, "--spec", spec, "--replicas", 2)
        killer.over.set()
        killer.join()
        ended = gone(killer.killed)
    plain = batch(rows, folder / "plain.jsonl", *words)
    found = {name: texts(folder / f"{name}.jsonl") for name in ("plain", "one", "two")}
    return {
        "rows": count,
        "rows_in_output": len(found["two"]),
        "different_ids": len({row[0] for row in found["two"]}),
        "errors": two["errors"],
        "processes_killed": len(killer.killed),
        "shards_done_before": killer.at,
        "shards": -(-count // shard_rows),
        "engines_died": two["engines_died"],
        "killed_processes_are_gone": ended,
        "texts_unlike_one_engines": differing(found["two"], found["one"]),
        "texts_unlike_plain": differing(found["two"], found["plain"]),
        "seconds": {"plain": plain["seconds"], "one engine": one["seconds"], "two replicas": two["seconds"]},
        "tokens": two["tokens"],
        "row_sums": {name: two[name] for name in ("rounds", "draft_tokens", "accepted_tokens")},
        "drafters": two["drafters"],
        "drafters_of_one_engine": one["drafters"],
    }


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--shard-rows", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--folder", type=Path, help="keep the files there; what is done is not done again")
    parser.add_argument("--kill-after", type=int, default=8, help="shards that are done when a replica is killed")
    return parser.parse_args(argv)


def main() -> None:
    """Run it in a folder of its own."""
    given = arguments()
    # Acceptance is compared, and must not depend on how busy the machine is.
    os.environ.setdefault("CROSSSPEC_FIXED_WIDTHS", "1")
    with tempfile.TemporaryDirectory(prefix="crossspec-cluster-") as folder:
        size = given.max_tokens, given.shard_rows, given.kill_after, given.batch_size
        print(json.dumps(run(given.folder or Path(folder), given.rows, *size)))


if __name__ == "__main__":
    main()
