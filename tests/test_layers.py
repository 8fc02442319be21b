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
    "engine.core",
    "engine.cpu_patches",
    "engine.worker",
    "engine.runner",
    "engine.scheduler",
    "engine.features",
    "engine.startup",
    "engine.speculators",
    "engine.verification",
    "engine.proposers",
    "engine.models",
    "engine.attention",
    "engine.heads",
    "engine.cpu_products",
    "engine.cpu_recurrence",
    "engine.noise",
    "engine.weights",
    "engine.graphs",
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
    "catchup",
    "kv_compaction",
    "verify",
    "contemplate",
    "lookup",
    "tree",
    "ngram",
    "router",
    "shapes",
    "pocket_models",
    "shards",
    "files",
    "types",
    "arrays",
    "twins",
    "host_copy",
    "devices",
    "ranks",
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
WORDS = r"trees?|continuity|contemplat\w*|adapt\w*|rout\w+|record\w*|heterospec|confu|whiflash|mrope"


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


NAMED_KINDS = {
    # Modules outside drafters/ that may say a kind's name: none decides by it, and why each has it.
    # Its methods: data for --methods.
    "cli/demo.py": ("eagle3", "dflash", "dart", "confu", "draft_model", "flashhead", "ngram", "suffix", "nothing"),
    "cli/flashhead.py": ("flashhead",),  # a command, of the head of this name
    "cli/ngram.py": ("ngram", "nothing"),  # the command's name, and an ordinary word
    "config_parsing.py": ("ngram",),  # the key of n-gram stores
    "config.py": ("flashhead",),  # the head of this name
    "engine/models/confu_config.py": ("eagle3",),  # a type of vLLM's, in one kind's own module
    "engine/vllm_api/speculative.py": ("dflash", "eagle3", "draft_model"),  # methods of vLLM's, the most room first
    "inflate/folder.py": ("draft_model",),  # what a folder without any drafter's marks is taken for
    "engine/weights.py": ("draft_model",),  # a tag of vLLM's compile cache
    "training/confu.py": ("confu",),  # the kind that it trains; so the next three
    "training/dart.py": ("dart",),
    "training/dflash.py": ("dflash",),
    "training/eagle3.py": ("eagle3",),
}


def named_kinds(package):
    """By module outside drafters/, the names of kinds that stand in it as whole strings."""
    from vllm_crossspec.drafters.base import own_kinds

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
    for room in ("engine", "drafters"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "planted.py").write_text(f"kind = None\n{line}\n")
    assert {file: "confu" in names for file, names in named_kinds(tmp_path).items()} == {"engine/planted.py": True}


def test_the_demos_methods_are_data():
    """No comparison and no look-up by a name, in the one file that says them all."""
    tree, kinds = ast.parse((PACKAGE / "cli/demo.py").read_text()), NAMED_KINDS["cli/demo.py"]
    deciding = [n for n in ast.walk(tree) if isinstance(n, ast.Compare | ast.Subscript | ast.match_case)]
    assert not [n.lineno for n in deciding for c in ast.walk(n) if isinstance(c, ast.Constant) and c.value in kinds]
