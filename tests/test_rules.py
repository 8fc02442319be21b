"""Rules of the house that a linter cannot hold alone."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import vllm_crossspec
from vllm_crossspec import api
from vllm_crossspec.kinds.drafter import drafter_kind, drafter_kinds
from vllm_crossspec.kinds.registry import load

PACKAGE = Path(vllm_crossspec.__file__).parent


def imports_of(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


WITHOUT_VLLM = ("cli", "config", "kinds", "metrics", "ngram_store", "catch_up/kernels.py", "catch_up/naive.py")
"""Rooms that commands and settings are made of. Every file at the top of the package is one of them, too."""


def test_settings_and_commands_do_without_vllm():
    offenders = [
        str(file.relative_to(PACKAGE))
        for file in PACKAGE.rglob("*.py")
        if file.relative_to(PACKAGE).as_posix().startswith(WITHOUT_VLLM)
        or (file.parent == PACKAGE and file.name != "platform.py")  # whose methods are of engines
        if any(name.split(".")[0] == "vllm" for name in imports_of(file))
    ]
    assert offenders == []


def test_every_kind_of_drafter_can_be_looked_up():
    for name in drafter_kinds():
        kind = drafter_kind(name, "method")
        assert callable(import_module(kind.checkpoint).read_facts)
        assert load(kind.proposer).__name__.endswith("Proposer")


def test_other_packages_find_every_name():
    assert api.__all__ == sorted(api._MODULES, key=lambda name: (name.islower(), name))
    assert all(getattr(api, name).__name__ == name for name in api.__all__)
    with pytest.raises(AttributeError, match="'vllm_crossspec.api' has no attribute 'Drafterkind'"):
        api.Drafterkind  # noqa: B018


def test_reading_configurations_needs_no_vllm():
    """Mistakes are found before vLLM, which takes seconds to import, is loaded."""
    modules = ("api", "cli.app", "config.schema")
    code = f"import sys, {', '.join(f'vllm_crossspec.{name}' for name in modules)}; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_registering_twice_is_registering_once():
    from vllm.engine.arg_utils import EngineArgs

    from vllm_crossspec.plugin import register

    register()
    hooked = EngineArgs.create_speculative_config
    register()
    assert EngineArgs.create_speculative_config is hooked
    assert not hasattr(hooked.__wrapped__, "__wrapped__")


HOST_ONLY = {
    "ray_relay.py": "reads prometheus_client's numbers",
}
"""Threads beside the one that decodes which touch no device."""


def test_threads_beside_decoding_leave_graph_captures_alone():
    """One that allocates on a GPU, copies or waits would end the capture of a second engine's graphs."""
    makers = {
        file.name: file.read_text()
        for file in PACKAGE.rglob("*.py")
        if "threading.Thread(" in file.read_text() and PACKAGE / "cli" not in file.parents
    }
    assert {name for name, text in makers.items() if "thread_stream(" not in text} == set(HOST_ONLY)
    assert not any("torch.cuda.Stream(" in text for text in makers.values())


def test_a_threads_stream_comes_with_relaxed_captures(monkeypatch):
    import torch

    from vllm_crossspec import devices

    called = []
    monkeypatch.setattr(devices, "leave_captures_alone", lambda: called.append("captures"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: called.append(device) or "stream")
    assert devices.thread_stream(torch.device("cpu")) is None and not called
    assert devices.thread_stream(torch.device("cuda", 1)) == "stream"
    assert called == ["captures", torch.device("cuda", 1)]


class Case:
    """A collected test, as far as the tiers look at it."""

    def __init__(self, function, *marks):
        self.function, self.marks = function, [mark.mark for mark in marks]

    def get_closest_marker(self, name):
        return next(self.iter_markers(name), None)

    def iter_markers(self, name):
        return (mark for mark in self.marks if mark.name == name)


def test_what_is_left_to_the_night():
    import conftest

    night = pytest.mark.nightly
    matrix = [Case("matrix", night(keep=3)) for _ in range(8)]
    some = [Case("some", night) if i % 2 else Case("some") for i in range(4)]
    alone, always = Case("alone", night), Case("always")
    left = conftest._of_the_night([*matrix, *some, alone, always])
    assert left == {alone, some[1], some[3], *matrix} - {matrix[0], matrix[2], matrix[5]}
