"""What a training says while it runs, at a signal and at its end."""

import json
import os
import signal
import subprocess
import sys
import time
from itertools import cycle
from types import SimpleNamespace

import pytest
import torch
from test_config import NATIVE_KEYS
from tiny_training import TRAINERS, random_rows
from typer.testing import CliRunner

from crossspec_tools.train import cli_drafters as train_drafters
from crossspec_tools.train import progress
from crossspec_tools.train.acceptance import report
from crossspec_tools.train.cli import app as train_app
from crossspec_tools.train.generations import write_shard
from crossspec_tools.train.loop import Trainer
from crossspec_tools.train.recipes import ConfuConfig, DartConfig, Eagle3Config, LoopConfig
from crossspec_tools.train.stopping import Stopped, stoppable
from vllm_crossspec.config.parse import parse

LOOP = LoopConfig(steps=6, save_every=100, eval_every=2, warmup=2)


def _trainer(out, loss=None, evaluate=None) -> Trainer:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    batches = cycle(torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(1)))

    def usual(model, batch, generator):
        return model(batch).square().mean(), {"tokens": 20}

    return Trainer(model, batches, loss or usual, out, LOOP, evaluate)


def _send(signum: int) -> None:
    signal.raise_signal(signum)  # to this thread, at once: one sent to the process may reach it some steps later


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_the_step_under_way_and_the_run_resumes_bit_equal(tmp_path, signum, capsys):
    (whole := _trainer(tmp_path / "whole")).run("small")
    handlers = [signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)]

    def signalled(model, batch, generator):
        if trainer.step == 2:
            _send(signum)
        return model(batch).square().mean(), {}

    trainer = _trainer(tmp_path / "stopped", signalled)
    with pytest.raises(Stopped) as end:
        trainer.run("small")
    assert (end.value.signum, end.value.place) == (signum, "after step 3 of 6")
    assert torch.load(tmp_path / "stopped" / "state.pt", weights_only=True)["step"] == 3
    assert [signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)] == handlers
    assert "a second signal ends at once" in capsys.readouterr().err
    again = _trainer(tmp_path / "stopped")
    again.run("small")
    assert "small: resumed at step 3 of 6" in capsys.readouterr().out
    assert torch.equal(again.model.weight, whole.model.weight)
    assert len((tmp_path / "stopped" / "log.jsonl").read_text().splitlines()) == 6
    _trainer(tmp_path / "stopped").run("small")
    assert "has made its steps: give more --steps" in capsys.readouterr().out


def test_a_signal_ends_an_evaluation_which_the_resumed_run_repeats(tmp_path):
    calls = []

    def evaluate():
        calls.append(1)
        if len(calls) == 1:
            _send(signal.SIGTERM)
            time.sleep(60)
        return {"dev_accept": 1.5}

    begun = time.monotonic()
    with pytest.raises(Stopped, match="after step 2 of 6"):
        _trainer(tmp_path, evaluate=evaluate).run("small")
    assert time.monotonic() - begun < 30
    assert torch.load(tmp_path / "state.pt", weights_only=True)["step"] == 2
    _trainer(tmp_path, evaluate=evaluate).run("small")
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log if "dev_accept" in line] == [2, 4, 6] and len(calls) == 4


LONG_STEP = """
import sys, time
from pathlib import Path
from test_training_progress import _trainer

def loss(model, batch, generator):
    print("begun", flush=True)
    time.sleep(100)  # no handler raises, so that this goes on after a signal

_trainer(Path(sys.argv[1]), loss).run("small")
"""


def test_a_second_signal_ends_a_long_step_at_once(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", LONG_STEP, str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    try:
        while "begun" not in (line := process.stdout.readline()):
            assert line, process.stderr.read()
        process.terminate()
        assert "a second signal ends at once" in process.stderr.readline()
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 128 + signal.SIGINT
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    "has_state, resume, how",
    [
        (True, True, "the same command to resume"),
        (True, False, "the same command without --restart to resume"),
        (False, False, "the same command to begin anew"),
    ],
)
def test_a_signal_between_the_steps_is_a_sentence_too(tmp_path, has_state, resume, how, capsys):
    if has_state:
        (tmp_path / "state.pt").touch()
    with pytest.raises(SystemExit) as end, stoppable(tmp_path / "state.pt", resume):
        _send(signal.SIGINT)
    assert end.value.code == 130
    assert capsys.readouterr().err == f"crossspec: stopped by SIGINT; run {how}\n"


SIZES = {
    "eagle3": ("--anchors", 2, "--draft-vocab", 96),
    "dflash": ("--anchors", 2, "--block-size", 4),
    "dart": ("--anchors", 2, "--draft-vocab", 96, "--num-drafts", 4),
    "draft-model": ("--layers", 1, "--intermediate-size", 16),
}


@pytest.mark.parametrize("kind", TRAINERS)
def test_a_command_stops_resumes_and_says_how_to_serve(tmp_path, kind, target_folder, monkeypatch):
    (tmp_path / "data").mkdir()
    for split in ("train", "dev"):
        write_shard(tmp_path / "data" / f"{split}-00000.jsonl.gz", random_rows(12))
    words = [kind, "--data", tmp_path / "data", "--target", target_folder, "--out", tmp_path, "--float32"]
    words = [str(word) for word in (*words, "--rows-per-step", 4, "--threads", 1, "--steps", 4, *SIZES[kind])]
    monkeypatch.setattr(progress, "SLOW_STEP", 0.0)
    monkeypatch.setattr(progress, "_usable_cores", lambda: 8)
    step = Trainer._train_step

    def signalled(self):
        if self.step == 1:
            _send(signal.SIGTERM)
        return step(self)

    monkeypatch.setattr(Trainer, "_train_step", signalled)
    result = CliRunner().invoke(train_app, words)
    assert result.exit_code == 143
    assert result.stderr.splitlines()[-1] == (
        "crossspec: stopped by SIGTERM after step 2 of 4; run the same command to resume"
    )
    monkeypatch.setattr(Trainer, "_train_step", step)
    result = CliRunner().invoke(train_app, words)
    assert result.exit_code == 0, result.output
    assert f"{kind.replace('-', ' ')}: resumed at step 2 of 4" in result.stdout.replace("-", " ")
    assert "give --threads 8 (now 1), or with --restart a smaller --rows-per-step (now 4)" in result.stdout
    assert ("--anchors (now 2)" in result.stdout) == (kind != "draft-model")
    assert "tokens/s  ETA 0:00:0" in result.stdout
    given = json.loads(result.stdout.splitlines()[-1].removeprefix("serve it with "))
    (drafter,) = parse(given, NATIVE_KEYS).drafters.values()
    assert drafter.model == str(tmp_path / "model") and (drafter.kind == kind.replace("-", "_"))


def test_the_config_to_serve_with_is_one_for_every_setting():
    for method, trainer, config in (
        ("confu", train_drafters.CONFU, ConfuConfig()),
        ("eagle3", train_drafters.EAGLE3, Eagle3Config(num_steps=99)),
        ("confu", train_drafters.CONFU, ConfuConfig(num_steps=99)),
    ):
        parse({"method": method, "model": "m", **trainer.served(config)}, NATIVE_KEYS)
    assert train_drafters.DART.served(DartConfig(is_shifted=False)) is None  # no engine decodes with it


@pytest.mark.parametrize("seconds", [0.5, 145.0])
def test_the_pace_is_there_from_the_second_step_on(seconds, monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    with progress.StepProgress("eagle3", 0, 100) as shown:
        for step in (1, 2):
            now[0] += seconds
            shown.show(step, {"loss": 3.0, "tokens": 1000})
            said = capsys.readouterr().out
            assert ("ETA" in said) == (step == 2 and seconds > 30), said  # not a terminal: lines, and not many
    rate, left = ("2,000", "0:00:49") if seconds < 1 else ("7", "3:56:50")
    assert f"{rate} tokens/s  ETA {left}" in (said + capsys.readouterr().out).replace("\n", " ")


def test_a_hint_names_only_what_helps(monkeypatch):
    model = torch.nn.Linear(2, 2)
    monkeypatch.setattr(progress, "_usable_cores", torch.get_num_threads)
    assert progress.slow_hint(60.0, model, {"--rows-per-step": 1}) == ""
    assert progress.slow_hint(1.0, model, {"--rows-per-step": 16}) == ""
    said = progress.slow_hint(60.0, model, {"--rows-per-step": 16, "--anchors": 0})
    assert said.endswith("give with --restart a smaller --rows-per-step (now 16) or --anchors (now all)")


def test_no_accepted_draft_is_said(tmp_path, capsys):
    for accept, words in ((1.0, "all 1.00 (nothing is accepted yet), chat"), (1.002, "(almost nothing"), (1.5, "")):
        report("eagle3", {"dev_accept": accept, "dev_accept_chat": accept}, tmp_path / "a.json")
        said = capsys.readouterr().out
        assert words in said and ("accepted yet" in said) == bool(words)
