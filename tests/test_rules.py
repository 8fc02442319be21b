"""Rules of the house that a linter cannot hold alone."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import vllm_crossspec
from vllm_crossspec.drafters.base import drafter_kind, drafter_kinds

PACKAGE = Path(vllm_crossspec.__file__).parent


def imports_of(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def test_only_the_engine_room_talks_to_vllm():
    offenders = [
        str(file.relative_to(PACKAGE))
        for file in PACKAGE.rglob("*.py")
        if PACKAGE / "engine" not in file.parents and file.name != "model.py"
        if any(name.split(".")[0] == "vllm" for name in imports_of(file))
    ]
    assert offenders == []


def test_every_kind_of_drafter_can_be_looked_up():
    for name in drafter_kinds():
        kind = drafter_kind(name, "method")
        assert callable(import_module(kind.checkpoint).read_facts)
        assert kind.load_proposer().__name__.endswith("Proposer")


def test_reading_configurations_needs_no_vllm():
    """Mistakes are found before vLLM, which takes seconds to import, is loaded."""
    code = "import sys, vllm_crossspec.config, vllm_crossspec.cli.app; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_registering_twice_is_registering_once():
    from vllm.engine.arg_utils import EngineArgs

    from vllm_crossspec.plugin import register

    register()
    hooked = EngineArgs.create_speculative_config
    register()
    assert EngineArgs.create_speculative_config is hooked
    assert not hasattr(hooked.__wrapped__, "__wrapped__")
