"""Reads from the syntax of this project and of vLLM where one uses the other below its public surface.

Nothing is imported. A class of ours that descends from one of vLLM's, or stands before one among somebody's bases, is
looked at with its whole line of ancestors; an object whose class the syntax does not tell is taken for what its name
says (:data:`RECEIVERS`).
"""

import ast
from collections.abc import Iterable, Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

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
    ("vllm_crossspec/engine/features/contemplate.py", f"{_GPU}.structured_outputs", "_build_grammar_mapping"),
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


class Module:
    """One file's syntax, and what its names mean."""

    def __init__(self, name: str, file: Path):
        self.name, self.file, self.is_package = name, file, file.name == "__init__.py"
        self.tree = ast.parse(file.read_text())

    @cached_property
    def imports(self) -> dict[str, str]:
        """Dotted meaning of every imported name, wherever in the file it is imported."""
        found = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    found[alias.asname or alias.name.split(".")[0]] = (
                        alias.name if alias.asname else alias.name.split(".")[0]
                    )
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    found[alias.asname or alias.name] = f"{self.source_of(node)}.{alias.name}"
        return found

    def source_of(self, node: ast.ImportFrom) -> str:
        """The absolute module of a ``from ... import``."""
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        parts = parts[: len(parts) - node.level + self.is_package]
        return ".".join([*parts, *([node.module] if node.module else [])])

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        """All classes, those inside functions too."""
        return {node.name: node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)}

    @cached_property
    def own_names(self) -> set[str]:
        """Functions, classes and values of the module itself."""
        return {name for node in self.tree.body for name in bound_names(node)}


class Class:
    """One class, of vLLM or of ours."""

    def __init__(self, library: "Library", module: Module, node: ast.ClassDef):
        self.library, self.module, self.node, self.name = library, module, node, node.name

    @property
    def is_vllms(self) -> bool:
        """Whether vLLM defines it."""
        return self.module.name.split(".")[0] == "vllm"

    @cached_property
    def methods(self) -> set[str]:
        """Functions of the class, properties included."""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        return {node.name for node in ast.walk(self.node) if isinstance(node, kinds) and node in self.node.body}

    @property
    def class_names(self) -> set[str]:
        """What the class itself has, without its instances."""
        return {name for node in self.node.body for name in bound_names(node)}

    @cached_property
    def fields(self) -> set[str]:
        """Values of the class, and what its methods set on ``self``."""
        found = self.class_names - self.methods
        for node in ast.walk(self.node):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_name(node.value, "self"):
                found.add(node.attr)
        return found - self.methods

    @cached_property
    def members(self) -> set[str]:
        """All of its own names."""
        return self.methods | self.fields

    @cached_property
    def line(self) -> list["Class"]:
        """The class and its ancestors in Python's order, as far as their source is here."""
        bases = [found for base in self.node.bases if (found := self.library.class_of(self.module, base)) is not None]
        lines = [list(base.line) for base in bases] + [bases]
        merged: list[Class] = [self]
        while lines := [line for line in lines if line]:
            heads = (line[0] for line in lines if not any(line[0] in other[1:] for other in lines))
            head = next(heads, lines[0][0])
            merged.append(head)
            lines = [[c for c in line if c is not head] for line in lines]
        return merged

    def definer(self, name: str) -> "Class | None":
        """The class in line that defines the name."""
        return definer_of(self.line, name)


def definer_of(line: list[Class], name: str) -> Class | None:
    """The first of some ancestors that has the name; of vLLM's that set the same attribute, the last."""
    first = next((c for c in line if name in c.members), None)
    if first is None or not first.is_vllms or name in first.methods:
        return first
    return [c for c in line if c.is_vllms and name in c.members][-1]


class Library:
    """Source files by dotted name.

    Args:
        roots: folder of each top-level package.
    """

    def __init__(self, roots: dict[str, Path]):
        self.roots = roots
        self.find_class = cache(self._find_class)
        self.module = cache(self._module)

    def _module(self, name: str) -> Module | None:
        first, *rest = name.split(".")
        if first not in self.roots:
            return None
        path = self.roots[first].joinpath(*rest)
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.is_file():
                return Module(name, file)
        return None

    def split(self, dotted: str) -> tuple[str, str]:
        """The longest part that is a module, and the rest."""
        parts = dotted.split(".")
        for end in range(len(parts), 0, -1):
            if self.module(".".join(parts[:end])) is not None:
                return ".".join(parts[:end]), ".".join(parts[end:])
        return "", dotted

    def is_public(self, module: str, name: str) -> bool:
        """Whether a name is part of vLLM's public surface, wherever it is imported from."""
        if _is_private(name):
            return False
        config = self.module("vllm.config") if module.startswith("vllm.config.") else None
        return module in PUBLIC or (config is not None and name in config.imports)

    def _find_class(self, dotted: str) -> Class | None:
        """A class by the name under which it can be imported."""
        name, member = self.split(dotted)
        module = self.module(name) if name else None
        if module is None or not member or "." in member:
            return None
        if member in module.classes:
            return Class(self, module, module.classes[member])
        target = module.imports.get(member)
        return self.find_class(target) if target is not None and target != dotted else None

    def class_of(self, module: Module, base: ast.expr) -> Class | None:
        """The class that an expression among the bases, or an annotation, names."""
        if isinstance(base, ast.Subscript):
            base = base.value
        if isinstance(base, ast.BinOp):  # X | None
            base = base.left
        dotted = _dotted(base)
        if dotted is None:
            return None
        first, _, rest = dotted.partition(".")
        if first in module.classes and not rest:
            return self.find_class(f"{module.name}.{first}")
        meaning = module.imports.get(first)
        return None if meaning is None else self.find_class(".".join(filter(None, (meaning, rest))))


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _is_super(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and _is_name(node.func, "super")


def _dotted(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (value := _dotted(node.value)) is not None:
        return f"{value}.{node.attr}"
    return None


def _last(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def bound_names(node: ast.AST) -> Iterator[str]:
    """What a statement of a module's or a class's body defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            yield from (leaf.id for leaf in ast.walk(target) if isinstance(leaf, ast.Name))


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
        if isinstance(value, ast.Call) and _dotted(value.func) in ("sys.modules.get", "importlib.import_module"):
            first = value.args[0]
            return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else None
        dotted = _dotted(value)
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
            if not self.library.is_public(source, alias.name) and self.library.module(f"{source}.{alias.name}") is None:
                self.add(node, source, alias.name, "imports")

    def visit_Call(self, node: ast.Call) -> None:
        if _dotted(node.func) in ("getattr", "setattr", "hasattr") and len(node.args) > 1:
            name = node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                stores = _dotted(node.func) == "setattr"
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
        if own is not None and (_is_super(value) or _dotted(value) in ("self", "cls")):
            self.of_self(node, own, name, is_super=_is_super(value))
            return
        dotted = _dotted(value)
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
        if self.library.is_public(module, first) and not stores and not _is_private(last):
            return
        if last.startswith(OWN_PREFIX):  # added to vLLM's class, which itself is what is used
            member = member.rpartition(".")[0]
        self.add(node, module, member, "replaces" if stores else "uses")


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
        if is_set and _is_name(inner.value, "self"):
            return inner
    return next((inner for inner in node.body if name in bound_names(inner)), node)
