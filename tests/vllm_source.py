"""vLLM's syntax, read from a wheel, an unpacked one or an installed package: nothing is imported.

:class:`Library` finds modules and classes, with the ancestors of these; :class:`Release` what stands at a touch point.
"""

import ast
import inspect
import re
import zipfile
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

from vllm_crossspec.vllm_api.points.base import TouchPoint, reads
from vllm_crossspec.vllm_api.points.ours import StandIn

Folder = Path | zipfile.Path


class Module:
    """One file's syntax, and what its names mean."""

    def __init__(self, name: str, file: Folder):
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
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_name(node.value, "self"):
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
        roots: folder of each top-level package, on disk or inside a wheel.
    """

    def __init__(self, roots: dict[str, Folder]):
        self.roots = roots
        self.find_class = cache(self._find_class)
        self.module = cache(self._module)

    def _module(self, name: str) -> Module | None:
        first, *rest = name.split(".")
        if first not in self.roots:
            return None
        root = self.roots[first]
        inside = ["__init__.py"] if not rest else [f"{'/'.join(rest)}/__init__.py", f"{'/'.join(rest)}.py"]
        for file in map(root.joinpath, inside):
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
        dotted = dotted_name(base)
        if dotted is None:
            return None
        first, _, rest = dotted.partition(".")
        if first in module.classes and not rest:
            return self.find_class(f"{module.name}.{first}")
        meaning = module.imports.get(first)
        return None if meaning is None else self.find_class(".".join(filter(None, (meaning, rest))))


def is_name(node: ast.AST, name: str) -> bool:
    """Whether an expression is this name."""
    return isinstance(node, ast.Name) and node.id == name


def dotted_name(node: ast.AST) -> str | None:
    """The dotted name that an expression is; None where it is something else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (value := dotted_name(node.value)) is not None:
        return f"{value}.{node.attr}"
    return None


def bound_names(node: ast.AST) -> Iterator[str]:
    """What a statement of a module's or a class's body defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            yield from (leaf.id for leaf in ast.walk(target) if isinstance(leaf, ast.Name))


class Place(NamedTuple):
    """What stands at a touch point.

    Attributes:
        parameters: of what can be called, without the object itself where that is given; None of everything else.
        node: its syntax; None of an attribute that methods set.
    """

    parameters: list[inspect.Parameter] | None
    node: ast.AST | None

    @property
    def body(self) -> str:
        """Its source without comments and documentation, for comparison."""
        if self.node is None:
            return ""
        copy = ast.parse(ast.unparse(self.node))
        for inner in ast.walk(copy):
            body = getattr(inner, "body", None)
            first = body[0] if isinstance(body, list) and body else None
            if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
                body[0] = ast.copy_location(ast.Pass(), first)
        return ast.unparse(copy)


class Release:
    """One release of vLLM.

    Args:
        path: of a wheel, of the folder into which one was unpacked, or of the package inside it.

    Raises:
        ValueError: one sentence; there is no vLLM.
    """

    def __init__(self, path: Path):
        self.folder = _package(path)
        self.library = Library({"vllm": self.folder})
        found = re.search(r"^__version__ = (?:version = )?['\"]([\w.+]+)", self._text("_version"), re.MULTILINE)
        if found is None:
            raise ValueError(f"{path}: vllm/_version.py names no version; give a wheel of a release, or one unpacked")
        self.version = found[1]

    def _text(self, module: str) -> str:
        file = self.folder.joinpath(*module.removeprefix("vllm.").split("."))
        file = file.parent.joinpath(f"{file.name}.py")
        return file.read_text(encoding="utf-8") if file.is_file() else ""

    def place(self, point: TouchPoint) -> Place | None:
        """What stands there; None where nothing does. Of several (a name per platform), one that the point fits."""
        places = self.places(point)
        return next((p for p in places if _takes(p, point)), places[0] if places else None)

    def places(self, point: TouchPoint) -> list[Place]:
        """All that stand there, on one platform or another."""
        return list(self._places(point.module, point.name))

    def problem(self, point: TouchPoint) -> str | None:
        """One sentence if the point is not there, or takes other parameters, else None; as the check at load."""
        place, where = self.place(point), f"{point.module}.{point.name}"
        if place is None:
            return f"{where} is gone ({point.reason})"
        if _takes(place, point):
            return None
        names = "no parameters" if place.parameters is None else f"({' '.join(p.name for p in place.parameters)})"
        return f"{where} takes {names}, not ({point.parameters}) ({point.reason})"

    def unknown_reads(self, stand_in: StandIn) -> list[str]:
        """One sentence for each attribute that this release reads of an object of ours and its list does not have."""
        known = {*stand_in.attributes.split(), *stand_in.others.split()}
        return [
            f"{module} reads {stand_in.name}.{name}, which {stand_in.ours} was not written to have"
            for module in stand_in.readers.split()
            for name in sorted(reads(self._text(module), stand_in.name) - known)
        ]

    def _places(self, module_name: str, name: str) -> Iterator[Place]:
        first, *rest = name.split(".")
        for module, node in self._definitions(module_name, first):
            if not rest:
                yield self._place(module, node)
            elif (own := self._class(module, node)) is not None and len(rest) == 1:
                yield from self._members(own, rest[0])

    def _definitions(self, module_name: str, name: str) -> Iterator[tuple[Module, ast.AST]]:
        """Where a module defines a name, or those from which it imports it, on one platform or another."""
        module = self.library.module(module_name)
        if module is None:
            return
        for node in _top_level(module.tree):
            if name in bound_names(node):
                if not _is_overload(node):
                    yield module, node
            elif isinstance(node, ast.ImportFrom):
                source = module.source_of(node)
                for alias in node.names:
                    if source != module_name and (alias.name == "*" or (alias.asname or alias.name) == name):
                        yield from self._definitions(source, name if alias.name == "*" else alias.name)

    def _members(self, own: Class, name: str) -> Iterator[Place]:
        definer = own.definer(name)
        if definer is None:
            return
        function = next((x for x in definer.node.body if name in bound_names(x)), None)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            yield self._place(definer.module, function)
        else:
            yield Place(None, function)

    def _place(self, module: Module, node: ast.AST) -> Place:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            is_bound = any(is_name(decorator, "classmethod") for decorator in node.decorator_list)
            is_value = any((dotted_name(d) or "").endswith("property") for d in node.decorator_list)
            return Place(None if is_value else _parameters(node.args)[is_bound:], node)
        own = self._class(module, node)
        return Place(None if own is None else self._of_class(own), node)

    def _class(self, module: Module, node: ast.AST) -> Class | None:
        return self.library.find_class(f"{module.name}.{node.name}") if isinstance(node, ast.ClassDef) else None

    def _of_class(self, own: Class) -> list[inspect.Parameter]:
        """What making an instance takes: its initialiser's parameters, or its fields."""
        definer = next((c for c in own.line if "__init__" in c.methods), None)
        if definer is not None:
            function = next(x for x in definer.node.body if "__init__" in bound_names(x))
            assert isinstance(function, ast.FunctionDef)
            return _parameters(function.args)[1:]
        fields: dict[str, inspect.Parameter] = {}
        for ancestor in reversed(own.line):
            for node in ancestor.node.body:
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and _is_field(node):
                    default = inspect.Parameter.empty if node.value is None else None
                    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
                    fields[node.target.id] = inspect.Parameter(node.target.id, kind, default=default)
        return list(fields.values())


def _package(path: Path) -> Folder:
    """The folder of vLLM's package."""
    if path.is_file() and zipfile.is_zipfile(path):
        inside = zipfile.Path(path, "vllm/")
        candidates: tuple[Folder, ...] = (inside,)
    else:
        candidates = (path, path / "vllm")
    for folder in candidates:
        if folder.joinpath("_version.py").is_file():
            return folder
    raise ValueError(f"{path}: no vLLM is there; give a wheel, the folder of an unpacked one, or an installed vllm/")


def _top_level(tree: ast.AST) -> Iterator[ast.AST]:
    """Statements outside of functions and classes, those under conditions too."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.expr):
            yield from _top_level(node)


def _is_overload(node: ast.AST) -> bool:
    """Whether a definition only tells types; the one that runs comes behind it."""
    return isinstance(node, ast.FunctionDef) and any(
        is_name(decorator, "overload") for decorator in node.decorator_list
    )


def _parameters(arguments: ast.arguments) -> list[inspect.Parameter]:
    """As :func:`inspect.signature` gives them; every default is None."""
    kinds, empty = inspect.Parameter, inspect.Parameter.empty
    given = [*arguments.posonlyargs, *arguments.args]
    optional = len(given) - len(arguments.defaults)
    found = [
        kinds(argument.arg, kinds.POSITIONAL_OR_KEYWORD, default=None if index >= optional else empty)
        for index, argument in enumerate(given)
    ]
    if arguments.vararg is not None:
        found.append(kinds(arguments.vararg.arg, kinds.VAR_POSITIONAL))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(kinds(argument.arg, kinds.KEYWORD_ONLY, default=empty if default is None else None))
    if arguments.kwarg is not None:
        found.append(kinds(arguments.kwarg.arg, kinds.VAR_KEYWORD))
    return found


def _is_field(node: ast.AnnAssign) -> bool:
    """Whether an annotation makes a field that is given when an instance is made."""
    if "ClassVar" in ast.unparse(node.annotation):
        return False
    options = node.value.keywords if isinstance(node.value, ast.Call) else []
    return not any(o.arg == "init" and isinstance(o.value, ast.Constant) and o.value.value is False for o in options)


def _takes(place: Place, point: TouchPoint) -> bool:
    """Whether a place can be used as the point says."""
    if point.parameters is None:
        return True
    return place.parameters is not None and point.takes(place.parameters)
