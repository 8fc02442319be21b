"""A played engine: a script that speaks its protocol, where no engine is the point; fixtures of every test."""

import json
import signal
import sys

import pytest

from vllm_crossspec.cli import app, check, processes
from vllm_crossspec.platform import platform

ENVIRONMENT = {"versions": {"vllm": "0"}, "device": "cpu"}
PLAYED_ENGINE = """
import json, os, sys
job, events = json.load(open(sys.argv[1])), os.fdopen(int(sys.argv[2]), "w", buffering=1)
def emit(event, **fields):
    events.write(json.dumps({"event": event, **fields}) + "\\n")
for check in job.get("checks", ()):
    emit("checking", method=check["method"])
    if "refused" in (check["engine"].get("speculative_config") or {}):
        emit("error", message="speculative_config.refused: no such key")
        sys.exit(1)
if "checks" in job:
    emit("ready")
    sys.exit()
drafts = job["engine"].get("speculative_config") or {}
"""
GENERATE = f"""
emit("ready", seconds=1.0, **{ENVIRONMENT!r})
for order in map(json.loads, open(job["orders"])):
    for group in job["groups"]:
        tokens = drafts.get("tokens", [5, 6, 7, 8])
        one = dict(token_ids=tokens, text="", num_target_calls=2 if drafts else 4,
                   accepted_histogram=[0, 0, 1] if drafts else [])
        emit("progress", num_tokens=len(tokens))
        emit("group", category=group["category"], seconds=0.5, generations=[one for _ in group["prompts"]])
    emit("shares", shares=None)
    emit("done")
"""


@pytest.fixture
def play(monkeypatch, tmp_path):
    """Replace the engine process by a script; returns how."""

    def replace(script):
        (tmp_path / "played_engine.py").write_text(PLAYED_ENGINE + script)
        monkeypatch.setattr(processes, "CHILD_MODULE", "played_engine")
        monkeypatch.setattr(platform(), "start", lambda *arguments: None)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        # Its models and methods are played, too.
        monkeypatch.setattr(check, "require_target", lambda *where: None)
        monkeypatch.setattr(check, "checked", lambda raw, target: None)

    return replace


@pytest.fixture
def crossspec(monkeypatch, capsys):
    """Run the command in this process: exit code, stdout, stderr."""
    handler = signal.getsignal(signal.SIGTERM)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["crossspec", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            app.main()
        printed = capsys.readouterr()
        return end.value.code or 0, printed.out, printed.err

    yield run
    signal.signal(signal.SIGTERM, handler)


def spec_file(folder, name, **config):
    file = folder / f"{name}.json"
    file.write_text(json.dumps(config))
    return file
