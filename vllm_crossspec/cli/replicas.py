"""Engines on the machines of a Ray cluster that share shards: each takes the next one when it is through with its last.

A replica is a Ray actor with one engine, in a process of its own (:mod:`vllm_crossspec.cli.processes`). What a replica
leaves behind when it dies, the next free one takes, and its place is taken by a new one. Models must be found under the
same names on all machines; shards come back as bytes and are written by whoever asked for them.
"""

import json
import os
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

from vllm_crossspec.cli import processes
from vllm_crossspec.cli.processes import BOUND_CORES, EngineError

CONTENT = "content"
"""Key of a shard's bytes in the event that it is done."""

TRIES = 3
"""How often a shard is begun, and how often in a row a replica is started that then does no shard."""

STOP_SECONDS = 30.0

Event = dict[str, Any]
Shard = dict[str, Any]


class Replica:
    """What runs on a machine of the cluster: an engine that answers the shards that it is handed, one by one.

    Args:
        name: of the job, for messages.
        module: that the engine's process runs.
        job: without its shards; ``cwd`` is the folder that relative names of models are meant from.
    """

    def __init__(self, name: str, module: str, job: dict[str, Any]) -> None:
        with suppress(FileNotFoundError):  # a machine that does not have it has no relative names, either
            os.chdir(job["cwd"])
        # vLLM would have all engines of a machine keep to the same cores of a CPU.
        os.environ.setdefault(BOUND_CORES, "nobind")
        self._name, self._folder = name, tempfile.TemporaryDirectory(prefix="crossspec-replica-")
        self._out, pipe = Path(self._folder.name), Path(self._folder.name, "shards")
        os.mkfifo(pipe)
        # Open at both ends, or it would wait here for the engine to open the other. It closes with this process,
        # however that ends, and the engine's process ends with it.
        self._shards = open(os.open(pipe, os.O_RDWR), "w")  # noqa: SIM115 - open as long as this lives
        job = {**job, "out": str(self._out), "shards_file": str(pipe)}
        self._events = processes.engine_events(name, job, module)

    def start(self) -> Iterator[Event]:
        """Events until the engine is up."""
        yield from self._until("ready")

    def answer(self, shard: Shard) -> Iterator[Event]:
        """Events until the shard is done; the last one has its bytes."""
        self._shards.write(json.dumps(shard) + "\n")
        self._shards.flush()
        for event in self._until("shard"):
            if event["event"] == "shard":
                path = self._out / shard["file"]
                event[CONTENT] = path.read_bytes()
                path.unlink()
            yield event

    def stop(self) -> None:
        """End the engine's process and what it started."""
        self._shards.close()
        self._events.close()
        self._folder.cleanup()

    def _until(self, last: str) -> Iterator[Event]:
        for event in self._events:
            yield event
            if event["event"] == last:
                return
        raise EngineError(f"{self._name}: the engine's process ended before it was through")


class Queue:
    """Shards that wait for a replica. Several threads take from it; a shard that was not done comes back.

    Attributes:
        given_up: those that were begun :data:`TRIES` times.
        is_stopped: whether no more are handed out, done or not.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.given_up: list[Shard] = []
        self._waiting, self._running, self.is_stopped = deque(shards), 0, False
        self._begun: Counter[int] = Counter()
        self._changed = threading.Condition()

    def take(self) -> Shard | None:
        """The next shard; None once there will be none. Waits while another replica has one that may come back."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or not self._running or self.is_stopped)
            if not self._waiting or self.is_stopped:
                return None
            self._running += 1
            shard = self._waiting.popleft()
            self._begun[shard["number"]] += 1
            return shard

    def finish(self, shard: Shard, *, done: bool) -> None:
        """What became of a shard that was taken."""
        with self._changed:
            self._running -= 1
            if not done and self._begun[shard["number"]] < TRIES:
                self._waiting.appendleft(shard)
            elif not done:
                self.given_up.append(shard)
            self._changed.notify_all()

    def stop(self) -> None:
        """Hand out no more."""
        with self._changed:
            self.is_stopped = True
            self._changed.notify_all()

    @property
    def is_over(self) -> bool:
        """Whether nothing waits and nothing runs, or it was stopped."""
        with self._changed:
            return self.is_stopped or not (self._waiting or self._running)

    @property
    def num_left(self) -> int:
        """Shards that were not done, once all threads are through."""
        with self._changed:
            return len(self._waiting) + len(self.given_up)


class _Seat:
    """The place of one replica, with a thread that follows whoever has it.

    Args:
        make: starts a replica; its handle.
        queue: where shards come from.
        deliver: takes a shard and the event that it is done.
        listen: takes every other event of a shard (None: of none).

    Attributes:
        is_starting: whether the replica's engine is not up yet.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        queue: Queue,
        deliver: Callable[[Shard, Event], None],
        listen: Callable[[Shard | None, Event], None],
    ) -> None:
        self._make, self._queue, self._deliver, self._listen = make, queue, deliver, listen
        self._replica: Any = None
        self.is_starting = True

    def follow(self) -> str:
        """Have replicas answer shards until there are none; the last reason why one died, if it is given up.

        Raises:
            ValueError, EngineError: the engine refuses its arguments, or does not come up.
        """
        failures, reason = 0, ""
        try:
            while failures < TRIES and not self._queue.is_over:
                failures += 1
                self.is_starting = True
                self._replica = self._make()
                reason = self._begin()
                self.is_starting = False
                while not reason:
                    shard = self._queue.take()
                    if shard is None:
                        self._end()
                        return ""
                    reason = self._answer(shard)
                    failures = failures if reason else 0
                self.kill()
        except BaseException:
            self._queue.stop()
            raise
        return reason

    def kill(self) -> None:
        """End the replica, whatever it does."""
        import ray

        if self._replica is not None:
            with suppress(ray.exceptions.RayError):
                ray.kill(self._replica)

    def _begin(self) -> str:
        for event, reason in self._follow("start"):
            if isinstance(reason, EngineError):
                raise reason
            if reason is not None:
                return self._mourn(None, reason)
            self._listen(None, event)
        return ""

    def _answer(self, shard: Shard) -> str:
        for event, reason in self._follow("answer", shard):
            if reason is not None:
                self._queue.finish(shard, done=False)
                return self._mourn(shard, reason)
            if event["event"] == "shard":
                self._deliver(shard, event)
                self._queue.finish(shard, done=True)
            else:
                self._listen(shard, event)
        return ""

    def _mourn(self, shard: Shard | None, problem: BaseException) -> str:
        """The first line of what a replica died of; Ray goes on with lines of its own state."""
        reason = str(problem).strip().partition("\n")[0]
        if not self._queue.is_over:
            self._listen(shard, {"event": "died", "reason": reason})
        return reason

    def _follow(self, method: str, *arguments: Any) -> Iterator[tuple[Event, BaseException | None]]:
        """Events of a call, and at the end why there are no more, where the replica or its engine died."""
        import ray

        try:
            call = getattr(self._replica, method).options(num_returns="streaming")
            for reference in call.remote(*arguments):
                yield ray.get(reference), None
        except ray.exceptions.RayTaskError as problem:
            if isinstance(problem.cause, ValueError):
                raise problem.cause from None
            if not isinstance(problem.cause, EngineError):
                raise
            yield {}, problem.cause
        except ray.exceptions.RayError as problem:
            yield {}, problem

    def _end(self) -> None:
        import ray

        with suppress(ray.exceptions.RayError):
            ray.get(self._replica.stop.remote(), timeout=STOP_SECONDS)
        self.kill()


def run(
    name: str,
    module: str,
    job: dict[str, Any],
    shards: Sequence[Shard],
    count: int,
    deliver: Callable[[Shard, Event], None],
    listen: Callable[[Shard | None, Event], None],
) -> None:
    """Share the shards among ``count`` engines.

    Args:
        name: of the job, for messages.
        module: that every engine's process runs.
        job: without its shards.
        shards: to be done.
        count: of the engines; no more are started than there are shards.
        deliver: takes a shard and the event that it is done, with its :data:`CONTENT`; from several threads.
        listen: takes every other event of a shard (None: of none), ``died`` among them, with its ``reason``.

    Raises:
        ValueError: Ray is not installed, or an engine refuses its arguments.
        EngineError: an engine does not come up, or shards are left that killed every engine that began them.
    """
    try:
        import ray
    except ModuleNotFoundError:
        problem = f'{name}: {count} engines need Ray: run `pip install "vllm-crossspec[ray]"`, or ask for one engine'
        raise ValueError(problem) from None

    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    num_gpus = (job["engine"]["tensor_parallel_size"] or 1) if ray.cluster_resources().get("GPU") else 0
    # Restarts are ours: a replica's shard goes to whoever is free first.
    actor = ray.remote(num_cpus=1, num_gpus=num_gpus, max_restarts=0, scheduling_strategy="SPREAD")(Replica)
    job, queue = {**job, "cwd": os.getcwd()}, Queue(shards)
    count = min(count, len(shards))
    seats = [_Seat(lambda: actor.remote(name, module, job), queue, deliver, listen) for _ in range(count)]
    with ThreadPoolExecutor(count) as pool:
        followers = [pool.submit(seat.follow) for seat in seats]
        try:
            while not queue.is_over and not all(follower.done() for follower in followers):
                wait(followers, timeout=0.2)
            _, busy = wait(followers, timeout=1.0)
            while busy and queue.is_over:
                for seat, follower in zip(seats, followers, strict=True):
                    # A replica that still starts would come too late; the others end by themselves.
                    if follower in busy and (seat.is_starting or queue.is_stopped):
                        seat.kill()
                _, busy = wait(followers, timeout=1.0)
        except BaseException:
            queue.stop()
            for seat in seats:
                seat.kill()
            raise
    reasons = [follower.result() for follower in followers]
    if queue.num_left:
        reason = next((reason for reason in reasons if reason), "its engine died")
        raise EngineError(
            f"{name}: {queue.num_left} of {len(shards)} shards are missing, for which {TRIES} tries were not enough "
            f"({reason}); what is done is kept: run it again to go on"
        )
