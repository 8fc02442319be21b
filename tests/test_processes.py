"""Processes of engines that are forked: their session, log, environment, cores and end; and when none is forked."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from vllm_crossspec.cli import compare, processes

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or not processes.is_cpu_lane(),
    reason="engines are forked in the CPU lane only",
)

PLAYED = """
import json, os, sys
events = os.fdopen(int(sys.argv[2]), "w", buffering=1)
job = json.load(open(sys.argv[1]))
print("into the log", flush=True)
events.write(json.dumps({
    "event": "ready", "name": __name__, "session": os.getsid(0), "pid": os.getpid(),
    "cores": sorted(os.sched_getaffinity(0)), "bound": os.environ.get("VLLM_CPU_OMP_THREADS_BIND"),
    "asked": os.environ.get("CROSSSPEC_ASKED"),
}) + "\\n")
exec(job["then"])
"""


@pytest.fixture
def forked(monkeypatch, tmp_path):
    """Fork a played engine from a server that has imported next to nothing; returns how."""
    (tmp_path / "played_fork.py").write_text(PLAYED)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(processes, "PRELOADED", "json")
    job_file, log_file = tmp_path / "job.json", tmp_path / "log.txt"

    def fork(then, cores=()):
        job_file.write_text(json.dumps({"then": then}))
        return processes.engine_process(job_file, log_file, "played_fork", cores)

    monkeypatch.setattr(processes, "_server_environment", [])
    yield fork
    assert "into the log" in log_file.read_text()


def test_a_fork_is_a_process_of_its_own(forked, monkeypatch):
    monkeypatch.setenv("CROSSSPEC_ASKED", "yes")
    core = min(os.sched_getaffinity(0))
    with forked("sys.exit(3)", [core]) as (process, events):
        assert isinstance(process, processes._Forked)
        (event,) = events
        assert process.wait() == 3
    assert event["name"] == "__main__" and event["session"] == event["pid"] == process.pid != os.getpid()
    assert event["cores"] == [core] and event["bound"] == str(core) and event["asked"] == "yes"


def test_a_fork_that_is_killed_says_by_what(forked):
    with forked("import signal; os.kill(os.getpid(), signal.SIGKILL)") as (process, events):
        assert [event["event"] for event in events] == ["ready"]
        assert process.wait() == -signal.SIGKILL


def test_leaving_ends_the_fork_and_what_it_started(forked):
    then = (
        "import subprocess, time; child = subprocess.Popen(['sleep', '100']);"
        "events.write(json.dumps({'event': 'child', 'pid': child.pid}) + '\\n'); time.sleep(100)"
    )
    with forked(then) as (process, events):
        next(events)
        child = next(events)["pid"]
        assert process.poll() is None
    assert process.poll() == -signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
    deadline = time.monotonic() + 30
    while is_running(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid):
    """Nobody may wait for it here: then it stays as a name without a process."""
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_another_environment_than_the_servers_gets_a_process_from_the_start(monkeypatch):
    monkeypatch.setattr(processes, "_server_environment", [])
    assert processes._can_fork() and processes._can_fork()
    monkeypatch.setenv("CROSSSPEC_SOMETHING", "1")
    assert processes._can_fork()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not processes._can_fork()


def test_engines_side_by_side_share_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 4})
    assert compare.cores_of(1) == [[]]
    assert compare.cores_of(2) == [[0, 2, 4], [1, 3]]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {7})
    assert compare.cores_of(4) == [[]]
    monkeypatch.setattr(compare, "is_cpu_lane", lambda: False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert compare.cores_of(4) == [[]]
