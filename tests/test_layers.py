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
    "plugin",
    "api",
    "hooks",
    "jobs",
    "runner",
    "cli",
    "frontend",
    "routing",
    "drafters",
    "speculator",
    "drafting",
    "heterospec",
    "budget",
    "trees",
    "graphs",
    "vllm_api",
    "load",
    "metrics",
    "step",
    "config",
    "kinds",
    "catch_up",
    "ngram_store",
    "pocket_models",
    "platform",
    "kernel_args",
    "host_copy",
    "devices",
    "differences",
    "ranks",
    "model_names",
    "files",
    "types",
    "arrays",
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
    return module.split(".")[0]


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


def bands():
    """Rooms of the drawing in docs/develop/architecture.md, and in which of its bands (from the top) each stands."""
    drawing = (PACKAGE.parent / "docs" / "figures" / "rooms.svg").read_text()
    edges = [int(y) for y in re.findall(r'<rect x="10" y="(\d+)"', drawing)]
    words = re.findall(r'<text x="[\d.]+" y="([\d.]+)"[^>]*>([^<]*)<', drawing)
    places = (
        (room, float(y)) for y, text in words if float(y) < 560 for room in re.findall(r"\b(\w+)(?:/|\.py)", text)
    )
    return {room: sum(y > edge for edge in edges) for room, y in places if room in ROOMS}


def test_the_drawing_has_every_room_and_no_import_leads_up_in_it():
    found, modules = bands(), modules_in(PACKAGE)
    assert {room for room in ROOMS if (PACKAGE / room).is_dir()} - {""} <= set(found)
    pairs = {(room_of(module), room_of(target)) for module, _, target in imports_in(PACKAGE) if target in modules}
    assert {pair for pair in pairs if set(pair) <= set(found) and found[pair[0]] > found[pair[1]]} == set()
    assert found["hooks"] < found["speculator"] < found["drafters"] < found["trees"] < found["config"]


ELSEWHERE = ("crossspec_tools", "crossspec_inflate")
"""Packages of this project that serve no request."""


def test_serving_imports_nothing_that_serves_no_request():
    nodes = [(file, node) for file in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(file.read_text()))]
    found = [(file.name, node.module) for file, node in nodes if isinstance(node, ast.ImportFrom)]
    found += [(file.name, x.name) for file, node in nodes if isinstance(node, ast.Import) for x in node.names]
    assert [(file, module) for file, module in found if module.split(".")[0] in ELSEWHERE] == []


def test_no_import_goes_in_a_circle():
    assert circles(PACKAGE) == []


def lane_imports(package):
    """(file, line) of every import of the CPU lane, which the plugin finds by its entry point alone."""
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else names
            if any(name.split(".")[0] == "crossspec_cpu_lane" for name in names):
                yield file.name, node.lineno


def test_the_plugin_does_not_import_the_lane(tmp_path):
    assert list(lane_imports(PACKAGE)) == []
    (tmp_path / "x.py").write_text("import os\nfrom crossspec_cpu_lane.vllm import forks\nimport crossspec_cpu_lane\n")
    assert list(lane_imports(tmp_path)) == [("x.py", 2), ("x.py", 3)]


@pytest.mark.parametrize(
    "file", ["drafting/heads.py", "routing/speculator.py", "runner/runner.py", "hooks/scheduler.py"]
)
def test_what_all_platforms_run_asks_for_none(file):
    assert not re.search(r"is_cpu|[\"']cpu[\"']", (PACKAGE / file).read_text())


@pytest.mark.parametrize("line", ["from vllm_crossspec.runner.runner import X", "import vllm_crossspec.runner.runner"])
def test_an_import_that_points_up_is_named(tmp_path, line):
    (tmp_path / "trees").mkdir()
    (tmp_path / "runner").mkdir()
    (tmp_path / "runner" / "runner.py").write_text("from vllm_crossspec.trees.chain import chain\n")
    (tmp_path / "trees" / "chain.py").write_text(f"def lazily():\n    {line}\n")
    assert upward(tmp_path) == ["trees/chain.py:2: trees imports runner.runner, but stands below it"]
    assert circles(tmp_path) == ["runner.runner", "trees.chain"]


NAMELESS = ("runner/runner.py", "speculator/base.py", "step/step.py")
WORDS = r"trees?|continuity|contemplat\w*|adapt\w*|rout\w+|record\w*|heterospec|confu|whiflash|mrope|budget"


@pytest.mark.parametrize("file", NAMELESS)
def test_runner_and_speculator_know_no_feature_by_name(file):
    lines = (PACKAGE / file).read_text().splitlines()
    lines = [line for line in lines if line != "from vllm_crossspec.trees.draft_state import DraftState"]
    named = [f"{file}:{number}: {line.strip()}" for number, line in enumerate(lines, 1) if names_a_feature(line)]
    assert named == []


def names_a_feature(line):
    return re.search(rf"(?<![a-z])({WORDS})(?![a-z])", line, re.IGNORECASE)


def test_every_features_name_is_looked_for():
    from vllm_crossspec.runner.features import FEATURES

    found = {feature.name for feature in FEATURES}
    assert {name for name in found if not names_a_feature(f"self.{name}_state = None")} == {"rounds"}
    assert [feature.name for feature in FEATURES][-1] == "trees", "the trees move what the others read"


NAMED_KINDS = {
    # Modules outside drafters/ that may say a kind's name: none decides by it, and why each has it.
    # The registry of those that this project brings.
    "kinds/drafter.py": (
        *("eagle3", "dflash", "jetspec", "dart", "confu", "draft_model", "flashhead", "ngram", "suffix", "nothing"),
    ),
    "config/parse.py": ("ngram",),  # the key of n-gram stores
    "config/schema.py": ("flashhead",),  # the head of this name
    "vllm_api/speculative.py": ("dflash", "eagle3", "draft_model"),  # methods of vLLM's, the most room first
    "drafting/weights.py": ("draft_model",),  # a tag of vLLM's compile cache
}


def named_kinds(package):
    """By module outside drafters/, the names of kinds that stand in it as whole strings."""
    from vllm_crossspec.kinds.drafter import own_kinds

    kinds = {kind.name for kind in own_kinds()}
    found = {}
    for file in package.rglob("*.py"):
        nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)]
        names = {node.value for node in nodes if isinstance(node.value, str)} & kinds
        if names and file.relative_to(package).parts[0] != "drafters":
            found[file.relative_to(package).as_posix()] = names
    return found


def test_no_kind_of_drafter_is_named_outside_its_folder():
    """What is true of one kind alone its entry says; a new exception needs a reason, and a stale one fails, too."""
    assert named_kinds(PACKAGE) == {file: set(names) for file, names in NAMED_KINDS.items()}


@pytest.mark.parametrize(
    "line",
    [
        'if kind.name == "confu": pass',
        'rows = 2 if kind in ("dart", "confu") else 1',
        'x = {"confu": 2}.get(kind, 1)',
        'match kind:\n    case "confu": pass',
    ],
)
def test_a_module_that_decides_by_a_kinds_name_is_named(tmp_path, line):
    for room in ("runner", "drafters"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "planted.py").write_text(f"kind = None\n{line}\n")
    assert {file: "confu" in names for file, names in named_kinds(tmp_path).items()} == {"runner/planted.py": True}
