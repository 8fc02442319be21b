"""Imports point down, from one room of the package to a lower one, and never in a circle."""

import ast
import re
from pathlib import Path

import pytest

import vllm_crossspec

PACKAGE = Path(vllm_crossspec.__file__).parent
NAME = "vllm_crossspec"

ROOMS = [
    # The top first. A room imports itself and rooms that stand below it.
    "cli",
    "plugin",
    "engine.jobs",
    "engine.hooks",
    "engine.cpu_patches",
    "engine.worker",
    "engine.runner",
    "engine.features",
    "engine.startup",
    "engine.speculators",
    "engine.verification",
    "engine.proposers",
    "engine.models",
    "engine.attention",
    "engine.heads",
    "engine.noise",
    "engine.weights",
    "engine.graphs",
    "engine.scheduler",
    "engine.frontend",
    "engine.vllm_api",
    "engine.draft_state",
    "engine.step",
    "engine.step_records",
    "engine.draft_settings",
    "engine.requests",
    "engine.names",
    "engine",
    "inflate",
    "training",
    "metrics",
    "heads",
    "adaptive",
    "config_parsing",
    "config",
    "drafters",
    "contemplate",
    "catchup",
    "kv_compaction",
    "verify",
    "tree",
    "ngram",
    "router",
    "shapes",
    "shards",
    "types",
    "arrays",
    "twins",
    "host_copy",
    "devices",
    "names",
    "",
]


def modules_in(package):
    """Dotted names below the package, and their files."""
    found = {}
    for file in package.rglob("*.py"):
        parts = file.relative_to(package).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports_in(package):
    """(module, line, imported module) for every import of the package's own modules, lazy ones included."""
    modules = modules_in(package)
    for name, file in modules.items():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert not node.level, f"{file}:{node.lineno}: imports are absolute"
                targets = [(node.module, f"{node.module}.{alias.name}") for alias in node.names]
            elif isinstance(node, ast.Import):
                targets = [(alias.name, alias.name) for alias in node.names]
            else:
                continue
            for module, member in targets:
                if module.split(".")[0] == NAME:
                    own = [x.removeprefix(NAME).removeprefix(".") for x in (member, module)]
                    yield name, node.lineno, own[0] if own[0] in modules else own[1]


def room_of(module):
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "engine" else parts[0]


def upward(package):
    """One sentence for every import that does not point down."""
    return [
        f"{module.replace('.', '/')}.py:{line}: {room_of(module)} imports {target}, but stands below it"
        for module, line, target in imports_in(package)
        if ROOMS.index(room_of(target)) < ROOMS.index(room_of(module))
    ]


def circles(package):
    """Modules that import themselves by way of others."""
    below = {name: set() for name in modules_in(package)}
    for module, _, target in imports_in(package):
        if target != module:
            below[module].add(target)
    while leaves := {name for name, targets in below.items() if not targets & below.keys()}:
        below = {name: targets for name, targets in below.items() if name not in leaves}
    return sorted(below)


def test_every_room_has_its_place():
    assert {room_of(module) for module in modules_in(PACKAGE)} == set(ROOMS)


def test_imports_point_down():
    assert upward(PACKAGE) == []


def test_no_import_goes_in_a_circle():
    assert circles(PACKAGE) == []


@pytest.mark.parametrize("line", ["from vllm_crossspec.engine.runner import X", "import vllm_crossspec.engine.runner"])
def test_an_import_that_points_up_is_named(tmp_path, line):
    (tmp_path / "tree").mkdir()
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "runner.py").write_text("from vllm_crossspec.tree.chain import chain\n")
    (tmp_path / "tree" / "chain.py").write_text(f"def lazily():\n    {line}\n")
    assert upward(tmp_path) == ["tree/chain.py:2: tree imports engine.runner, but stands below it"]
    assert circles(tmp_path) == ["engine.runner", "tree.chain"]


NAMELESS = ("engine/runner.py", "engine/speculators/base.py", "engine/step.py")
WORDS = r"trees?|continuity|contemplat\w*|adapt\w*|rout\w+|record\w*|heterospec|confu|whiflash"


@pytest.mark.parametrize("file", NAMELESS)
def test_runner_and_speculator_know_no_feature_by_name(file):
    lines = (PACKAGE / file).read_text().splitlines()
    named = [f"{file}:{number}: {line.strip()}" for number, line in enumerate(lines, 1) if names_a_feature(line)]
    assert named == []


def names_a_feature(line):
    return re.search(rf"(?<![a-z])({WORDS})(?![a-z])", line, re.IGNORECASE)


def test_every_features_name_is_looked_for():
    from vllm_crossspec.engine.features.registry import FEATURES

    found = {feature.name for feature in FEATURES}
    assert {name for name in found if not names_a_feature(f"self.{name}_state = None")} == {"rounds"}
    assert [feature.name for feature in FEATURES][-1] == "trees", "the trees move what the others read"
