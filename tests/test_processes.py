"""Processes of engines that are forked: their session, log, environment, cores and end; and when none is forked."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from importlib import metadata
from multiprocessing import forkserver
from pathlib import Path

import pytest
from crossspec_cpu_lane.vllm import forks

from vllm_crossspec.cli import processes, runner
from vllm_crossspec.platform import Platform, platform
from vllm_crossspec.pocket_models import find_pocket

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or not platform().on_cores,
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
    "asked": os.environ.get("CROSSSPEC_ASKED"), "folder": os.getcwd(),
}) + "\\n")
exec(job["then"])
"""


@pytest.fixture
def forked(monkeypatch, tmp_path):
    """Fork a played engine from a server that has imported next to nothing; returns how."""
    (tmp_path / "played_fork.py").write_text(PLAYED)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(forks, "PRELOADED", "json")
    job_file, log_file = tmp_path / "job.json", tmp_path / "log.txt"

    def fork(then, cores=()):
        job_file.write_text(json.dumps({"then": then}))
        return processes.engine_process(job_file, log_file, "played_fork", cores)

    monkeypatch.setattr(forks, "_server_environment", [])
    forkserver._forkserver._stop()
    yield fork
    forkserver._forkserver._stop()
    assert "into the log" in log_file.read_text()


def test_a_fork_is_a_process_of_its_own(forked, monkeypatch, tmp_path):
    monkeypatch.setenv("CROSSSPEC_ASKED", "yes")
    core = min(os.sched_getaffinity(0))
    with forked("sys.exit()"):  # the server is there, and this process goes elsewhere
        pass
    monkeypatch.chdir(tmp_path)
    with forked("sys.exit(3)", [core]) as (process, events):
        assert isinstance(process, forks.Forked)
        (event,) = events
        assert process.wait() == 3
    assert event["name"] == "__main__" and event["session"] == event["pid"] == process.pid != os.getpid()
    assert event["cores"] == [core] and event["bound"] == str(core) and event["asked"] == "yes"
    assert event["folder"] == str(tmp_path)


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
    monkeypatch.setattr(forks, "_server_environment", [])
    assert forks.can_fork(os.environ) and forks.can_fork(os.environ)
    monkeypatch.setenv("CROSSSPEC_SOMETHING", "1")
    assert forks.can_fork(os.environ)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not forks.can_fork(os.environ)


def test_a_second_engine_is_forked_while_the_server_starts(forked, monkeypatch):
    start, found = forkserver.ensure_running, []

    def slowly():
        other = threading.Thread(
            target=lambda: found.append(forks.can_fork(processes.CHILD_DEFAULTS | dict(os.environ)))
        )
        other.start()
        other.join(0.2)
        found.append(other.is_alive())
        start()

    monkeypatch.setattr(forkserver, "ensure_running", slowly)
    for name in processes.CHILD_DEFAULTS:
        monkeypatch.delenv(name, raising=False)
    with forked("pass") as (process, events):
        assert isinstance(process, forks.Forked) and len(list(events)) == 1
    while len(found) < 2:
        time.sleep(0.01)
    assert found == [True, True]
    assert not set(processes.CHILD_DEFAULTS) & set(os.environ)


def test_a_fork_does_not_run_the_program_that_asked_for_it(tmp_path):
    (tmp_path / "played_fork.py").write_text(PLAYED)
    (tmp_path / "job.json").write_text(json.dumps({"then": "pass"}))
    script = tmp_path / "script.py"
    script.write_text(
        "from pathlib import Path\nfrom crossspec_cpu_lane.vllm import forks\n"
        "from vllm_crossspec.cli import processes\nforks.PRELOADED = 'json'\n"
        "print('once')\nhere = Path(__file__).parent\n"
        "with processes.engine_process(here / 'job.json', here / 'log.txt', 'played_fork') as (process, events):\n"
        "    print(type(process).__name__, len(list(events)))\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment)
    assert (done.stdout.split(), done.stderr) == (["once", "Forked", "1"], "")


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("CC", "no-such-cc", "CC is no-such-cc, and no-such-cc is not found; install gcc or clang"),
        ("TRITON_INTERPRET", "1", "TRITON_INTERPRET: engines run compiled kernels only; unset it"),
    ],
)
def test_what_keeps_engines_from_running_is_one_sentence(monkeypatch, tmp_path, name, value, sentence):
    from vllm.engine.arg_utils import EngineArgs

    from vllm_crossspec.frontend.build import check_first

    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=sentence), processes.engine_process(tmp_path / "job", tmp_path / "log"):
        pass
    with pytest.raises(ValueError, match=sentence):
        check_first(EngineArgs(str(find_pocket() / "target"), speculative_config={"method": "suffix", "tree": {}}))


def test_a_cpu_without_a_platform_is_told_to_install_the_lane(monkeypatch):
    assert "run `pip install --no-deps ./packages/cpu_lane`" in Platform().problem()
    monkeypatch.setattr(metadata, "version", lambda name: "0.32.0")
    assert Platform().problem() is None and Platform().tools() == []


def test_where_the_server_ends_an_engine_is_started(forked, monkeypatch, tmp_path):
    def gone():
        raise EOFError("unexpected EOF")

    monkeypatch.setattr(forkserver, "ensure_running", gone)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with forked("pass") as (process, events):
        assert isinstance(process, subprocess.Popen) and len(list(events)) == 1


@pytest.mark.nightly
def test_what_cannot_be_imported_does_not_end_the_server(tmp_path):
    (tmp_path / "needs_a_library.py").write_text("raise OSError('libfoo.so: cannot open shared object file')")
    source = Path(forks.__file__).with_name("preload.py")
    code = source.read_text().replace('"vllm', '"needs_a_library", "vllm_has_no_such.')
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0


def test_engines_side_by_side_share_the_cores(monkeypatch):
    monkeypatch.setenv(processes.BOUND_CORES, "3")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert runner.cores_of(2) == [[]], "what the user has set stands"
    monkeypatch.delenv(processes.BOUND_CORES)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 4})
    assert runner.cores_of(1) == [[]]
    assert runner.cores_of(2) == [[0, 2, 4], [1, 3]]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {7})
    assert runner.cores_of(4) == [[]]
    monkeypatch.setattr(platform(), "on_cores", False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert runner.cores_of(4) == [[]]
