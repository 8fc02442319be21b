"""Reads from the syntax of this project and of vLLM where one uses the other below its public surface.

Nothing is imported. A class of ours that descends from one of vLLM's, or stands before one among somebody's bases, is
looked at with its whole line of ancestors; an object whose class the syntax does not tell is taken for what its name
says (:data:`RECEIVERS`).
"""

import ast
import sys
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from vllm_source import Class, Library, Module, bound_names, definer_of, dotted_name, is_name

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
RECEIVERS = {
    # Names that stand for objects of vLLM wherever they occur in the engine room.
    "batch": f"{_GPU}.input_batch.InputBatch",
    "input_batch": f"{_GPU}.input_batch.InputBatch",
    "buffers": f"{_GPU}.input_batch.InputBuffers",
    "input_buffers": f"{_GPU}.input_batch.InputBuffers",
    "tables": f"{_GPU}.block_table.BlockTables",
    "block_tables": f"{_GPU}.block_table.BlockTables",
    "req_states": f"{_GPU}.states.RequestState",
    "runner": f"{_GPU}.model_runner.GPUModelRunner",
    "model_state": f"{_GPU}.model_states.default.DefaultModelState",
    "sampler": f"{_GPU}.sample.sampler.Sampler",
    "chain": f"{_GPU}.sample.penalties.PenaltiesState",
    "manager": f"{_GPU}.cudagraph_utils.CudaGraphManager",
    "prefill_cudagraph_manager": f"{_GPU}.cudagraph_utils.CudaGraphManager",
    "decode_cudagraph_manager": f"{_GPU}.spec_decode.target_dependent_ar.cudagraph_utils.SpeculatorCudaGraphManager",
    "desc": f"{_GPU}.cudagraph_utils.BatchExecutionDescriptor",
    "scheduler_output": "vllm.v1.core.sched.output.SchedulerOutput",
    "grammar_output": "vllm.v1.core.sched.output.GrammarOutput",
    "group": "vllm.v1.worker.utils.AttentionGroup",
    "layer": "vllm.model_executor.layers.attention.attention.Attention",
    "common": "vllm.v1.attention.backend.CommonAttentionMetadata",
    "member": "vllm.v1.attention.backends.registry.AttentionBackendEnum",
    "speculative": "vllm.config.speculative.SpeculativeConfig",
    "speculative_config": "vllm.config.speculative.SpeculativeConfig",
    "engine_args": "vllm.engine.arg_utils.EngineArgs",
    "processor": "vllm.model_executor.layers.logits_processor.LogitsProcessor",
    "compilation": "vllm.config.compilation.CompilationConfig",
    "core": "vllm.v1.engine.core.EngineCore",
    "cache_manager": "vllm.v1.core.kv_cache_manager.KVCacheManager",
    "coordinator": "vllm.v1.core.kv_cache_coordinator.KVCacheCoordinator",
    "single_type": "vllm.v1.core.single_type_kv_cache_manager.SingleTypeKVCacheManager",
    "pool": "vllm.v1.core.block_pool.BlockPool",
}

ANCESTORS = {
    # Classes of ours that take the place of one of vLLM's, or stand before one, without naming it among their bases.
    "vllm_crossspec.engine.scheduler.OptOutScheduler": (
        "vllm.v1.core.sched.scheduler.Scheduler",
        "vllm.v1.core.sched.async_scheduler.AsyncScheduler",
    ),
    "vllm_crossspec.engine.verification.sampler.MatchVerifier": (
        f"{_GPU}.spec_decode.rejection_sampler.RejectionSampler",
    ),
    "vllm_crossspec.engine.startup.clock.StepClock": (f"{_GPU}.async_utils.StepTimingCollector",),
    "vllm_crossspec.engine.attention.cpu.TreeCpuImpl": ("vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl",),
}

UNNAMED = {
    # What is relied on without being named: (file of ours, module of vLLM, name).
    ("vllm_crossspec/engine/heads.py", "vllm.model_executor.layers.logits_processor", "LogitsProcessor.forward"),
    (
        "vllm_crossspec/engine/proposers/dart.py",
        f"{_GPU}.spec_decode.dflash.speculator",
        "DFlashSpeculator._prepare_graph_forward",
    ),
    ("vllm_crossspec/engine/core.py", "vllm.v1.worker.gpu_worker", "Worker.finish_weight_update"),
    ("vllm_crossspec/engine/core.py", "vllm.v1.worker.gpu_worker", "Worker.start_draft_weight_update"),
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
            for base in ANCESTORS.get(f"{leaf.module.name}.{leaf.name}", ()):
                mixed = self.library.find_class(base)
                assert mixed is not None, base
                before = [c for c in leaf.line if c not in mixed.line]
                self.lines[leaf].append([*before, *mixed.line])
        self.own = self._own_names()
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
            if touches or ".engine." in module.name:
                found.update(dict.fromkeys(_Reader(self, module).uses()))
        files = {use.where.rpartition(":")[0] for use in found}
        found.update(
            {Use(f"{file}:1", module, name, "relies on"): None for file, module, name in UNNAMED if file in files}
        )
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
                self.add(_place(node, name), definer.module.name, f"{definer.name}.{name}", how)
        self.owners.append(own)
        self.generic_visit(node)
        self.owners.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        scope = {}
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            known = argument.annotation and self.library.class_of(self.module, argument.annotation)
            if known and known.is_vllms:
                scope[argument.arg] = f"{known.module.name}.{known.name}:instance"
        for inner in ast.walk(node):
            if not isinstance(inner, ast.Assign):
                continue
            target, meaning = inner.targets[0], self._imported(inner.value)
            if isinstance(target, ast.Name) and meaning is not None:
                scope[target.id] = meaning
        self.scopes.append(scope)
        self.generic_visit(node)
        self.scopes.pop()

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
            self.of_import(node, made, stores=False)
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

    def of_import(self, node: ast.AST, dotted: str, stores: bool) -> None:
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
        self.add(node, module, member, "replaces" if stores else "uses")


def lacks(function: ast.FunctionDef, names: list[str]) -> list[str]:
    """Which of these parameters a function cannot be given by name, nor has in their place under another name."""
    own = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    known = {*own, *(argument.arg for argument in function.args.kwonlyargs)}
    return [] if function.args.kwarg is not None else [name for name in names[len(own) :] if name not in known]


class Covered(NamedTuple):
    """What a list of touch points says about some uses.

    Attributes:
        missing: uses that none of them covers.
        needed: the points without which something would be missing.
    """

    missing: list[Use]
    needed: set[tuple[str, str]]


def compare(uses: list[Use], points: Iterable[tuple[str, str]]) -> Covered:
    """Hold uses against the (module, name) of touch points.

    An import of a class is covered by any point inside it; a use of which only the last name is known, by any point of
    that name.
    """
    by_name: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for module, name in points:
        keys = {(module, name), ("", name.rpartition(".")[2]), (f"import {module}", name.split(".")[0])}
        for key in keys:
            by_name.setdefault(key, []).append((module, name))
    missing, needed = [], set()
    for use in uses:
        module = f"import {use.module}" if use.how == "imports" else use.module
        covering = by_name.get((module, use.name), [])
        if not covering:
            missing.append(use)
        elif len(covering) == 1:
            needed.add(covering[0])
    return Covered(missing, needed)


def _place(node: ast.ClassDef, name: str) -> ast.AST:
    """Where a class defines a name."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef) and inner.name == name and inner in node.body:
            return inner
        is_set = isinstance(inner, ast.Attribute) and inner.attr == name and isinstance(inner.ctx, ast.Store)
        if is_set and is_name(inner.value, "self"):
            return inner
    return next((inner for inner in node.body if name in bound_names(inner)), node)
