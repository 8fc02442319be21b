"""Reads from the syntax of this project and of vLLM where one uses the other below its public surface.

Nothing is imported. A class of ours that descends from one of vLLM's, or stands before one among somebody's bases, is
looked at with its whole line of ancestors; an object whose class the syntax does not tell is taken for what its name
says (:data:`RECEIVERS`). As a command it writes ``points/generated.py`` for the releases whose wheels or folders are
named, else for the installed one::

    python tests/seam.py [vllm-0.32.0-....whl vllm-0.33.0-....whl]
"""

import ast
import json
import sys
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from vllm_source import Class, Library, Module, Release, bound_names, definer_of, dotted_name, is_name  # noqa: E402

from vllm_crossspec.vllm_api.points import RELEASES  # noqa: E402
from vllm_crossspec.vllm_api.points import written as read_list  # noqa: E402
from vllm_crossspec.vllm_api.points.base import TouchPoint  # noqa: E402
from vllm_crossspec.vllm_api.points.ours import OURS  # noqa: E402

PACKAGE, CPU_LANE = ROOT / "vllm_crossspec", ROOT / "packages" / "cpu_lane" / "crossspec_cpu_lane"
GENERATED = PACKAGE / "vllm_api" / "points" / "generated.py"
HEAD = '''"""What this project uses of each vLLM below its public surface; written by `python tests/seam.py`.

By module and name: the parameters of what is called, as this project relies on them, and behind a semicolon our classes
that override it; else None. Where releases differ, by release.
"""
# ruff: noqa: E501
# fmt: off

RELEASES = ({releases})
POINTS: dict[str, dict[str, str | dict[str, str | None] | None]] = {{
'''

WITHOUT_VLLM = [[room] for room in ("cli", "config", "kinds", "metrics", "ngram_store")]
"""Rooms in which no object of vLLM's comes by, where a file imports nothing of it."""

PUBLIC = {
    # What vLLM documents for users and for authors of plugins, and keeps from one minor version to the next.
    "vllm",
    "vllm.config",
    "vllm.envs",
    "vllm.logger",
    "vllm.platforms",
    "vllm.sampling_params",
    "vllm.version",
}

_GPU = "vllm.v1.worker.gpu"
_OF = {
    # The names under which objects of vLLM's classes are held in the engine room, where no annotation says it.
    f"{_GPU}.input_batch.InputBatch": "batch input_batch",
    f"{_GPU}.input_batch.InputBuffers": "buffers input_buffers",
    f"{_GPU}.block_table.BlockTables": "tables block_tables",
    f"{_GPU}.states.RequestState": "req_states",
    f"{_GPU}.model_runner.GPUModelRunner": "runner",
    f"{_GPU}.sample.sampler.Sampler": "sampler",
    f"{_GPU}.sample.penalties.PenaltiesState": "chain",
    f"{_GPU}.cudagraph_utils.CudaGraphManager": "manager prefill_cudagraph_manager",
    f"{_GPU}.spec_decode.target_dependent_ar.cudagraph_utils.SpeculatorCudaGraphManager": "decode_cudagraph_manager",
    f"{_GPU}.cudagraph_utils.BatchExecutionDescriptor": "desc",
    "vllm.v1.core.sched.output.SchedulerOutput": "scheduler_output",
    "vllm.v1.core.sched.output.GrammarOutput": "grammar_output",
    "vllm.v1.worker.utils.AttentionGroup": "group",
    "vllm.model_executor.layers.attention.attention.Attention": "layer",
    "vllm.v1.attention.backend.CommonAttentionMetadata": "common",
    "vllm.v1.attention.backends.registry.AttentionBackendEnum": "member",
    "vllm.config.speculative.SpeculativeConfig": "speculative speculative_config",
    "vllm.engine.arg_utils.EngineArgs": "engine_args",
    "vllm.model_executor.layers.logits_processor.LogitsProcessor": "processor",
    "vllm.config.compilation.CompilationConfig": "compilation",
    "vllm.v1.engine.core.EngineCore": "core",
    "vllm.v1.core.kv_cache_manager.KVCacheManager": "cache_manager",
    "vllm.v1.core.kv_cache_coordinator.KVCacheCoordinator": "coordinator",
    "vllm.v1.core.single_type_kv_cache_manager.SingleTypeKVCacheManager": "single_type",
    "vllm.v1.core.block_pool.BlockPool": "pool",
    "vllm.config.parallel.ParallelConfig": "parallel_config",
    "vllm.config.scheduler.SchedulerConfig": "scheduler_config",
}
RECEIVERS = {name: dotted for dotted, names in _OF.items() for name in names.split()}

ANCESTORS = {
    # Classes of ours that take the place of one of vLLM's, or stand before one, without naming it among their bases.
    "OptOutScheduler": (
        "vllm.v1.core.sched.scheduler.Scheduler",
        "vllm.v1.core.sched.async_scheduler.AsyncScheduler",
    ),
    "MatchVerifier": (f"{_GPU}.spec_decode.rejection_sampler.RejectionSampler",),
    "StepClock": (f"{_GPU}.async_utils.StepTimingCollector",),
    "TreeCpuImpl": ("vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl",),
}

FOREIGN = {
    # Attributes that are set on objects of neither vLLM nor ours.
    "max_position_embeddings": "transformers' config of a checkpoint",
    "cpu_linear": "a layer, by whom takes the place of dispatch_cpu_unquantized_gemm, which has its row",
}
OF_NAMED_TUPLES = {"_replace", "_asdict", "_fields", "_make"}
OWN_PREFIX = "crossspec"  # what is added to a class of vLLM under a name of ours is none of vLLM's


class Use(NamedTuple):
    """One use of something of vLLM's.

    Attributes:
        where: file and line.
        module: of vLLM; empty where only the last name is known.
        name: dotted path in the module, or the last name alone.
        how: what is done with it.
    """

    where: str
    module: str
    name: str
    how: str

    def __str__(self) -> str:
        return f"{self.where}: {self.how} {'.'.join(filter(None, (self.module, self.name)))}"


def _is_super(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and is_name(node.func, "super")


def _last(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def is_public(library: Library, module: str, name: str) -> bool:
    """Whether a name is part of vLLM's public surface, wherever it is imported from."""
    if _is_private(name):
        return False
    config = library.module("vllm.config") if module.startswith("vllm.config.") else None
    return module in PUBLIC or (config is not None and name in config.imports)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


class Scan:
    """All uses in a package.

    Args:
        package: folder of the package.
        vllm: folder of vLLM.
        others: further folders, as top-level packages of their own, of which imports are looked at.

    Attributes:
        overriders: our classes that override a function, by its module and name.
        receivers, foreign: what told something so far of the tables of the same name.
    """

    def __init__(self, package: Path, vllm: Path, others: tuple[Path, ...] = ()):
        self.folders = (package, *others)
        self.library = Library({"vllm": vllm, **{folder.name: folder for folder in self.folders}})
        self.modules = list(self._modules())
        self.classes = [
            found
            for module in self.modules
            for name in module.classes
            if (found := self.library.find_class(f"{module.name}.{name}")) is not None
        ]
        self.lines: dict[Class, list[list[Class]]] = {}
        for leaf in self.classes:
            for ancestor in leaf.line:
                if not ancestor.is_vllms:
                    self.lines.setdefault(ancestor, []).append(leaf.line)
            for base in ANCESTORS.get(leaf.name, ()):
                mixed = self.library.find_class(base)
                assert mixed is not None, base
                before = [c for c in leaf.line if c not in mixed.line]
                self.lines[leaf].append([*before, *mixed.line])
        self.own = self._own_names()
        self.overriders: dict[tuple[str, str], set[str]] = {}
        self.receivers: set[str] = set()
        self.foreign: set[str] = set()

    def _modules(self) -> Iterator[Module]:
        for folder in self.folders:
            for file in sorted(folder.rglob("*.py")):
                parts = (folder.name, *file.relative_to(folder).with_suffix("").parts)
                name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                module = self.library.module(name)
                assert module is not None, name
                yield module

    def _own_names(self) -> set[str]:
        """Names that are ours and not, by way of a common ancestor, vLLM's."""
        found = {name for module in self.modules for name in module.own_names}
        for own in self.classes:
            found |= {name for name in own.members if not any(self.inherited(own, name))}
        return found

    def inherited(self, own: Class, name: str) -> Iterator[Class]:
        """vLLM's classes whose ``name`` comes next after a class of ours, one for each line in which it stands."""
        for line in self.lines.get(own, []):
            definer = definer_of(line[line.index(own) + 1 :], name)
            if definer is not None and definer.is_vllms:
                yield definer

    def overriding(self) -> Iterator[tuple[Use, ast.FunctionDef]]:
        """Methods of ours before a method of vLLM's of the same name, each as the use that it is."""
        for own, lines in self.lines.items():
            file = own.module.file
            for node in own.node.body:
                if not isinstance(node, ast.FunctionDef) or (node.name.startswith("__") and node.name != "__call__"):
                    continue
                for line in lines:
                    later = line[line.index(own) + 1 :]
                    definer = next((c for c in later if c.is_vllms and node.name in c.methods), None)
                    if definer is not None:
                        use = Use(f"{file.name}:{node.lineno}", definer.module.name, f"{definer.name}.{node.name}", "")
                        yield use, node

    @cached_property
    def uses(self) -> list[Use]:
        """All of them, each once a line."""
        found: dict[Use, None] = {}
        for module in self.modules:
            touches = any(name.split(".")[0] == "vllm" for name in module.imports.values())
            folder, *room = module.name.split(".")[:2]
            if touches or (folder == self.folders[0].name and room not in WITHOUT_VLLM):
                found.update(dict.fromkeys(_Reader(self, module).uses()))
        return list(found)


class _Reader(ast.NodeVisitor):
    """The uses in one file."""

    def __init__(self, scan: Scan, module: Module):
        self.scan, self.module, self.library = scan, module, scan.library
        self.found: list[Use] = []
        self.owners: list[Class] = []
        self.scopes: list[dict[str, str]] = [{}]

    def uses(self) -> list[Use]:
        self.visit(self.module.tree)
        return self.found

    def add(self, node: ast.AST, module: str, name: str, how: str) -> None:
        parts = Path(*self.module.file.parts[self.module.file.parts.index(self.module.name.split(".")[0]) :])
        self.found.append(Use(f"{parts}:{node.lineno}", module, name, how))  # type: ignore[attr-defined]

    def meaning(self, name: str) -> str | None:
        """What a plain name stands for: something imported, or a class of vLLM's by annotation."""
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return self.module.imports.get(name)

    # -- what opens a scope -----------------------------------------------------------------------------------

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        own = self.library.find_class(f"{self.module.name}.{node.name}")
        assert own is not None
        for name in sorted(own.members):
            if name.startswith("__") and name != "__call__":
                continue
            for definer in set(self.scan.inherited(own, name)):
                how = "overrides" if name in own.methods else "sets"
                if how == "overrides":
                    point = definer.module.name, f"{definer.name}.{name}"
                    self.scan.overriders.setdefault(point, set()).add(own.name)
                self.add(_place(node, name), definer.module.name, f"{definer.name}.{name}", how)
        self.owners.append(own)
        self.generic_visit(node)
        self.owners.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        scope = {}
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            if argument.annotation is not None:
                scope.update(self._annotated(argument.arg, argument.annotation))
        for inner in ast.walk(node):
            if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                scope.update(self._annotated(inner.target.id, inner.annotation))
            if not isinstance(inner, ast.Assign):
                continue
            target, meaning = inner.targets[0], self._imported(inner.value)
            if isinstance(target, ast.Name) and meaning is not None:
                scope[target.id] = meaning
        self.scopes.append(scope)
        self.generic_visit(node)
        self.scopes.pop()

    def _annotated(self, name: str, annotation: ast.expr) -> dict[str, str]:
        """The meaning of a name that an annotation says to be of one of vLLM's classes."""
        known = self.library.class_of(self.module, annotation)
        return {name: f"{known.module.name}.{known.name}:instance"} if known is not None and known.is_vllms else {}

    def _imported(self, value: ast.expr) -> str | None:
        """What an assigned expression stands for, if it begins with an imported name or asks for a loaded module."""
        if isinstance(value, ast.Call) and dotted_name(value.func) in ("sys.modules.get", "importlib.import_module"):
            first = value.args[0]
            return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else None
        dotted = dotted_name(value)
        first, _, rest = (dotted or "").partition(".")
        meaning = self.meaning(first)
        if meaning is None or meaning.endswith(":instance"):
            return None
        return ".".join(filter(None, (meaning, rest)))

    # -- what is used -----------------------------------------------------------------------------------------

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        source = self.module.source_of(node)
        if source.split(".")[0] != "vllm":
            return
        for alias in node.names:
            if (
                not is_public(self.library, source, alias.name)
                and self.library.module(f"{source}.{alias.name}") is None
            ):
                self.add(node, source, alias.name, "imports")

    def visit_Call(self, node: ast.Call) -> None:
        if dotted_name(node.func) in ("getattr", "setattr", "hasattr") and len(node.args) > 1:
            name = node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                stores = dotted_name(node.func) == "setattr"
                self.attribute(node, node.args[0], name.value, stores)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "__init__" and _is_super(node.func.value):
            only_hands_on = all(isinstance(x, ast.Starred) for x in node.args) and not any(k.arg for k in node.keywords)
            if not only_hands_on and self.owners:
                self.of_self(node, self.owners[-1], "__init__", is_super=True)
        made = self.meaning(node.func.id) if isinstance(node.func, ast.Name) else None
        if made is not None and not made.endswith(":instance"):
            self.of_import(node, made, stores=False, how="makes")
        own = self.library.class_of(self.module, node.func)
        maker = None if own is None or own.is_vllms else next((c for c in own.line if "__init__" in c.methods), None)
        if own is not None and maker is not None and maker.is_vllms:  # a class of ours, by vLLM's own initialiser
            made_as = next(c for c in own.line if c.is_vllms)
            self.add(node, made_as.module.name, made_as.name, "makes")
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.attribute(node, node.value, node.attr, isinstance(node.ctx, ast.Store))
        self.generic_visit(node)

    def attribute(self, node: ast.AST, value: ast.expr, name: str, stores: bool) -> None:
        """One ``value.name``, read or set."""
        if name.startswith("__"):
            return
        own = self.owners[-1] if self.owners else None
        if own is not None and (_is_super(value) or dotted_name(value) in ("self", "cls")):
            self.of_self(node, own, name, is_super=_is_super(value))
            return
        dotted = dotted_name(value)
        first, _, rest = (dotted or "").partition(".")
        meaning = self.meaning(first)
        if meaning is not None and not meaning.endswith(":instance"):
            self.of_import(node, ".".join(filter(None, (meaning, rest, name))), stores)
            return
        known = self.known(value, meaning if not rest else None)
        definer = known.definer(name) if known is not None else None
        if definer is not None and definer.is_vllms:
            self.scan.receivers |= {_last(value)} & RECEIVERS.keys()
            is_config = definer.module.name.startswith("vllm.config.")
            if stores or not is_config or name in definer.methods:
                how = "sets" if stores else "uses"
                self.add(node, definer.module.name, f"{definer.name}.{name}", how)
        elif (_is_private(name) or stores) and name not in self.scan.own | OF_NAMED_TUPLES:
            if name in FOREIGN:
                self.scan.foreign.add(name)
            else:
                self.add(node, "", name, "sets" if stores else "uses")

    def known(self, value: ast.expr, meaning: str | None) -> Class | None:
        """The class of an object, by its annotation or by its name."""
        if meaning is not None:
            return self.library.find_class(meaning.removesuffix(":instance"))
        dotted = RECEIVERS.get(_last(value))
        return None if dotted is None else self.library.find_class(dotted)

    def of_self(self, node: ast.AST, own: Class, name: str, is_super: bool) -> None:
        """A member of the object itself, or of what stands after its class."""
        lines = self.scan.lines[own]
        if is_super or any(name in c.members for line in lines for c in line[: line.index(own) + 1] if not c.is_vllms):
            definers = set(self.scan.inherited(own, name)) if is_super else set()
        else:
            firsts = (definer_of(line, name) for line in lines)
            definers = {c for c in firsts if c is not None and c.is_vllms}
        for definer in definers:
            self.add(node, definer.module.name, f"{definer.name}.{name}", "calls" if is_super else "uses")
        is_known = definers or any(name in c.members for line in lines for c in line)
        if not is_known and _is_private(name):
            self.add(node, "", name, "uses")

    def of_import(self, node: ast.AST, dotted: str, stores: bool, how: str = "uses") -> None:
        """A member of an imported module or class."""
        if dotted.split(".")[0] != "vllm":
            return
        module, member = self.library.split(dotted)
        first, *rest = member.split(".")
        last = rest[-1] if rest else first
        owner = self.library.find_class(f"{module}.{first}") if rest else None
        if not member or len(rest) > 1 or (rest and owner is None):  # what lies deeper is reported with its owner
            return
        if is_public(self.library, module, first) and not stores and not _is_private(last):
            return
        if last.startswith(OWN_PREFIX):  # added to vLLM's class, which itself is what is used
            member = member.rpartition(".")[0]
        self.add(node, module, member, "replaces" if stores else how)


def lacks(function: ast.FunctionDef, names: list[str]) -> list[str]:
    """Which of these parameters a function cannot be given by name, nor has in their place under another name."""
    own = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    known = {*own, *(argument.arg for argument in function.args.kwonlyargs)}
    return [] if function.args.kwarg is not None else [name for name in names[len(own) :] if name not in known]


Points = dict[tuple[str, str], str | None]
"""Parameters of what is called, and our classes that override it, else None; by module and name."""


def points_of(scan: Scan, release: Release) -> Points:
    """The touch points of a release: all that is used or ours, and is there, with its parameters.

    What is used and not there is of another release; :func:`missing` says so if it is of none. A class has parameters
    where it is made, and no point of its own where something inside it has one. What is ours in the place of functions
    that differ by platform has none.
    """
    made = {(use.module, use.name) for use in scan.uses if use.how in ("makes", "replaces")} | OURS.keys()
    ours = OURS.keys() | scan.overriders.keys()
    found: Points = {}
    for module, name in sorted({(use.module, use.name) for use in scan.uses if use.module} | ours):
        places = release.places(TouchPoint(module, name, None, ""))
        if not places:
            continue
        names = [None if p.parameters is None else " ".join(x.name for x in p.parameters) for p in places]
        is_unused_class = isinstance(places[0].node, ast.ClassDef) and (module, name) not in made
        is_platforms = (module, name) in ours and len(set(names)) > 1
        known = None if is_unused_class or is_platforms else names[0]
        classes = sorted(scan.overriders.get((module, name), ()))
        found[module, name] = f"{known}; {' '.join(classes)}" if known is not None and classes else known
    owners = {(module, name.rpartition(".")[0]) for module, name in found}
    imported = {use[1:3] for use in scan.uses} - {use[1:3] for use in scan.uses if use.how != "imports"}
    return {point: names for point, names in found.items() if point not in owners & imported}


def missing(uses: list[Use], points: Iterable[tuple[str, str]]) -> list[Use]:
    """Uses that no point covers: what is imported, any inside it; a use without a known place, none."""
    known = set(points)
    owners = {(module, name.rpartition(".")[0]) for module, name in known}
    return [use for use in uses if use[1:3] not in (known | owners if use.how == "imports" else known)]


def unexplained(uses: list[Use]) -> list[Use]:
    """What is replaced without a row by hand that says why."""
    return [use for use in uses if use.how == "replaces" and use[1:3] not in OURS]


def renewed(known: dict[str, Points], found: dict[str, Points]) -> dict[str, Points]:
    """The lists of all releases, those of some found anew.

    The others follow the first of these: what is used no more is gone from them, too, and what is new is taken to be
    there with the same parameters, until they are looked at themselves.
    """
    release, points = next(iter(found.items()))
    before = known.get(release, {})
    followed = {
        other: {
            **{p: names for p, names in listed.items() if p in points or p not in before},
            **{p: names for p, names in points.items() if p not in listed and p not in before},
        }
        for other, listed in known.items()
    }
    return {**followed, **found}


def written(known: dict[str, Points]) -> str:
    """The text of ``generated.py``: what all releases have alike stands once."""
    releases = sorted(known)
    modules: dict[str, dict[str, Any]] = {}
    for module, name in sorted({point for points in known.values() for point in points}):
        each = {release: known[release][module, name] for release in releases if (module, name) in known[release]}
        is_alike = len(each) == len(releases) and len(set(each.values())) == 1
        modules.setdefault(module, {})[name] = each[releases[0]] if is_alike else each
    rows = (f"    {json.dumps(module)}: {json.dumps(names)}," for module, names in modules.items())
    text = "".join(f"{row}\n" for row in rows).replace(": null", ": None")
    return HEAD.format(releases=json.dumps(releases)[1:-1]) + text + "}\n"


def lists() -> dict[str, Points]:
    """What is written now, by release."""
    return {release: read_list(release) for release in RELEASES}


def write(folders: list[Path]) -> None:
    """Look at these releases of vLLM, and write what was found."""
    found = {}
    for release in map(Release, folders):
        major, minor, _ = release.version.split(".", 2)
        found[f"{major}.{minor}.0"] = points_of(Scan(PACKAGE, release.folder, (CPU_LANE,)), release)
    GENERATED.write_text(written(renewed(lists(), found)))


def _place(node: ast.ClassDef, name: str) -> ast.AST:
    """Where a class defines a name."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef) and inner.name == name and inner in node.body:
            return inner
        is_set = isinstance(inner, ast.Attribute) and inner.attr == name and isinstance(inner.ctx, ast.Store)
        if is_set and is_name(inner.value, "self"):
            return inner
    return next((inner for inner in node.body if name in bound_names(inner)), node)


if __name__ == "__main__":
    from importlib.util import find_spec

    spec = find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations is not None
    write([Path(word) for word in sys.argv[1:]] or [Path(spec.submodule_search_locations[0])])
