"""Starting `vllm serve` as a user would, for the tests."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import engines

START_SECONDS = 600
METRIC_SECONDS = 30
SETTINGS = ["--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "8", "--enforce-eager"]


def command(spec: dict[str, Any] | None, *extra: str) -> list[str]:
    """The command line of a server of the pocket target."""
    vllm = Path(sys.executable).parent / "vllm"
    speculative = ["--speculative-config", json.dumps(spec)] if spec else []
    return [
        str(vllm),
        "serve",
        str(engines.TARGET),
        "--served-model-name",
        "pocket",
        *SETTINGS,
        *speculative,
        *extra,
    ]


class Server(NamedTuple):
    """A running server."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            return answer.read().decode()

    def post(self, path: str, body: Any) -> tuple[int, str]:
        """Status and text of the answer to a JSON value, or to bytes as they are."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", content, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as refused:
            return refused.code, refused.read().decode()

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples that carry these labels."""
        total = 0.0
        for line in self.get("/metrics").splitlines():
            if line.startswith(name) and all(f'{k}="{v}"' in line for k, v in labels.items()):
                total += float(line.rsplit(" ", 1)[1])
        return total

    def wait_for_metric(self, name: str, above: float, **labels: str) -> float:
        """The metric's sum once it is larger than ``above``; our counters are published once a second."""
        deadline = time.monotonic() + METRIC_SECONDS
        while (value := self.metric(name, **labels)) <= above:
            if time.monotonic() > deadline:
                raise AssertionError(f"{name} is still {value}")
            time.sleep(0.2)
        return value

    def client(self) -> Any:
        from openai import OpenAI

        return OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=900)

    def kill(self) -> None:
        """End the whole process group at once, as the kernel would for lack of memory."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def serving(spec: dict[str, Any] | None, *extra: str) -> contextlib.AbstractContextManager[Server]:
    """A server of the pocket target."""
    return started(command(spec, *extra))


@contextlib.contextmanager
def serving_with_faults(spec: dict[str, Any] | None, *extra: str) -> Iterator[Server]:
    """The same, whose worker takes the calls of ``faults_in_worker``."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    with (
        mock.patch.dict(os.environ, {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": path}),
        serving(spec, *extra, "--worker-extension-cls", "faults_in_worker.Faults") as server,
    ):
        yield server


@contextlib.contextmanager
def started(words: list[str], folder: Path | None = None) -> Iterator[Server]:
    """Start a server in this folder on a free port, wait until it is healthy, stop it at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = Path(tempfile.mkstemp(suffix=".log")[1])
    arguments = [*words, "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as stream:
        process = subprocess.Popen(
            arguments, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True, cwd=folder
        )
    server = Server(process, port, log)
    try:
        _wait_until_healthy(server)
        yield server
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=30)
    except BaseException:
        print(f"the server's last words:\n{log.read_text()[-6000:]}")
        raise
    finally:
        server.kill()
        log.unlink()


def _wait_until_healthy(server: Server) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise AssertionError(f"the server ended:\n{server.log.read_text()[-3000:]}")
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            server.get("/health")
            return
        time.sleep(0.2)
    raise AssertionError(f"the server is not healthy after {START_SECONDS} s:\n{server.log.read_text()[-3000:]}")
