"""Kernels that read and write the same place: one thread must not read what another one has already overwritten.

The threads of a warp run in step, those of several warps do not. So a program that loads and stores one address runs in
one warp, has a barrier in between, or is listed below with the reason why no thread reads another one's place.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

import vllm_crossspec

PACKAGE = Path(vllm_crossspec.__file__).parent
IN_MEMORY = "(an address from memory)"
STORES = ("store", "atomic_add", "atomic_max", "atomic_min", "atomic_cas", "atomic_xchg")

ITS_OWN = "a thread stores what it made of what it loaded there itself, and no other one uses that"
LEVELS = "reads the beam of the level before, writes that of its own"
ALLOWED = {
    "_add_candidate_noise_kernel": ITS_OWN,
    "_add_cluster_noise_kernel": ITS_OWN,
    "_expand_kernel": LEVELS,
    "_extend_kernel": LEVELS,
    "_tail_attention_kernel": ITS_OWN,
    "_tree_penalties_kernel": ITS_OWN,
}
"""Kernels of several warps and without a barrier that are right all the same."""


class Kernel(NamedTuple):
    """A function of Triton's: by which parameters it loads and stores, which it returns, and if it has a barrier.

    A field of a parameter that is a named tuple is ``parameter.field``. What is returned is told value by value.
    """

    parameters: list[str]
    loads: set[str]
    stores: set[str]
    returned: list[set[str]]
    has_barrier: bool


class Reader:
    """Follows pointers through the statements of one function."""

    def __init__(self, function: ast.FunctionDef, helpers: Mapping[str, Kernel]):
        self.helpers = helpers
        self.parameters = [argument.arg for argument in function.args.args]
        self.roots: dict[str, set[str]] = {name: {name} for name in self.parameters}
        self.loads: set[str] = set()
        self.stores: set[str] = set()
        self.returned: list[set[str]] = []
        self.has_barrier = False
        for _ in range(3):  # a loop's last statements reach its first ones
            for node in ast.walk(function):
                self.visit(node)

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign | ast.AugAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                parts = target.elts if isinstance(target, ast.Tuple) else [target]
                for part, roots in zip(parts, self.values_of(node.value, len(parts)), strict=True):
                    for name in (inner.id for inner in ast.walk(part) if isinstance(inner, ast.Name)):
                        self.roots.setdefault(name, set()).update(roots)
        elif isinstance(node, ast.Return) and node.value is not None:
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            self.returned = [self.roots_of(value) for value in values]
        elif isinstance(node, ast.Call):
            called = name_of(node)
            if called == "load":
                self.loads |= self.roots_of(node.args[0])
            elif called in STORES:
                self.stores |= self.roots_of(node.args[0])
            elif called == "debug_barrier":
                self.has_barrier = True
            elif called in self.helpers:
                helper = self.helpers[called]
                self.has_barrier |= helper.has_barrier
                self.loads |= self.roots_of_arguments(node, helper.parameters, helper.loads)
                self.stores |= self.roots_of_arguments(node, helper.parameters, helper.stores)

    def values_of(self, node: ast.AST, count: int) -> list[set[str]]:
        """The roots of each of so many values."""
        helper = self.helpers.get(name_of(node)) if isinstance(node, ast.Call) else None
        if helper is None or len(helper.returned) != count:
            return [self.roots_of(node)] * count
        return [self.roots_of_arguments(node, helper.parameters, roots) for roots in helper.returned]

    def roots_of(self, node: ast.AST) -> set[str]:
        """The parameters that an address was made from; what is loaded there is no address, but for a cast."""
        if isinstance(node, ast.Call):
            called = name_of(node)
            if called in ("load", "len"):
                return set()
            if called == "cast" and "pointer_type" in ast.unparse(node):
                return {IN_MEMORY}
            if called in self.helpers:
                helper = self.helpers[called]
                return self.roots_of_arguments(node, helper.parameters, set().union(*helper.returned))
        if isinstance(node, ast.Attribute) and node.attr == "dtype":
            return set()
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in self.parameters:
            return {f"{node.value.id}.{node.attr}"}
        if isinstance(node, ast.Name):
            return self.roots.get(node.id, set())
        return set().union(*(self.roots_of(child) for child in ast.iter_child_nodes(node)))

    def roots_of_arguments(self, call: ast.Call, parameters: list[str], wanted: set[str]) -> set[str]:
        """The parameters that those arguments of a call are made from which a helper takes by the ``wanted`` names."""
        found: set[str] = set()
        given = dict(zip(parameters, call.args, strict=False))
        for parameter, dot, field in (name.partition(".") for name in wanted):
            if parameter in given:
                found |= {f"{root}{dot}{field}" for root in self.roots_of(given[parameter])}
        return found


def name_of(call: ast.Call) -> str:
    """What is called, without where it is from."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def is_pointer(name: str) -> bool:
    """Whether a kernel's parameter, or a field of one, is an address, or a tuple of them."""
    if "." in name:
        field = name.rpartition(".")[2]
        return not field.endswith("_stride") and not field.startswith(("num_", "max_"))
    return name == IN_MEMORY or name.endswith("_ptr") or name in ("tensors", "states", "taps")


def jit_functions(trees: Mapping[Path, ast.Module]) -> Iterator[ast.FunctionDef]:
    """All of the package's functions of Triton's."""
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
                yield node


def read_kernels(trees: Mapping[Path, ast.Module]) -> dict[str, Kernel]:
    """All functions of Triton's by name, with what their helpers load and store."""
    kernels: dict[str, Kernel] = {}
    for _ in range(3):  # helpers of helpers
        for function in jit_functions(trees):
            reader = Reader(function, kernels)
            kernels[function.name] = Kernel(
                reader.parameters, reader.loads, reader.stores, reader.returned, reader.has_barrier
            )
    return kernels


def launches(trees: Mapping[Path, ast.Module], kernels: Mapping[str, Kernel]) -> Iterator[tuple[str, ast.Call]]:
    """Every launch, with its kernel's name."""
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                name = ast.unparse(node.func.value).split(".")[-1]
                if name in kernels:
                    yield name, node


def in_place(kernel: Kernel, launch: ast.Call) -> bool:
    """Whether a launch reads and writes one place: by one parameter, or by two that are given the same tensor."""
    if any(is_pointer(name) for name in kernel.loads & kernel.stores):
        return True
    given: dict[str, list[str]] = {}
    for parameter, argument in zip(kernel.parameters, launch.args, strict=False):
        if isinstance(argument, ast.Starred):
            break
        if is_pointer(parameter):
            given.setdefault(ast.unparse(argument), []).append(parameter)
    return any(set(names) & kernel.loads and set(names) & kernel.stores for names in given.values())


def offenders(trees: Mapping[Path, ast.Module]) -> set[str]:
    """Kernels that read and write one place in several warps and without a barrier."""
    kernels = read_kernels(trees)
    found = set()
    for name, launch in launches(trees, kernels):
        options = {option.arg: ast.unparse(option.value) for option in launch.keywords if option.arg}
        if not kernels[name].has_barrier and options.get("num_warps") != "1" and in_place(kernels[name], launch):
            found.add(name)
    return found


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    files = [file for file in PACKAGE.rglob("*.py") if "triton" in file.read_text()]
    return {file: ast.parse(file.read_text()) for file in files}


def test_what_reads_and_writes_one_place_runs_in_one_warp(trees):
    assert offenders(trees) == set(ALLOWED)


SABOTAGED = """
@triton.jit
def _bump(at, value):
    old = tl.load(at)
    {between}
    tl.store(at, old + value)

@triton.jit
def _places(pair, slot):
    return pair.first + slot * pair.first_stride, pair.second + slot

@triton.jit
def _kernel(counts_ptr, slots_ptr, out_ptr, pair, BLOCK: tl.constexpr):
    slot = tl.load(slots_ptr + tl.arange(0, BLOCK))
    place = counts_ptr + slot
    {body}

def bump(counts, slots, out):
    _kernel[(1,)]({given}, BLOCK=16{options})
"""
SEPARATE = "tl.store(out_ptr + slot, tl.load(place))"


@pytest.mark.parametrize(
    ("changes", "is_found"),
    [
        ({"body": "tl.store(place, tl.load(place) + 1)"}, True),
        ({"body": "tl.store(place, tl.load(place) + 1)", "options": ", num_warps=1"}, False),
        ({"body": "tl.store(place, tl.load(place) + 1)", "options": ", num_warps=4"}, True),
        ({"body": "_bump(place, 1)"}, True),
        ({"body": "_bump(place, 1)", "between": "tl.debug_barrier()"}, False),
        ({"body": "tl.atomic_add(counts_ptr + slot, tl.load(counts_ptr))"}, True),
        ({"body": SEPARATE}, False),
        ({"body": "tl.store(pair.first + slot, tl.load(pair.first))"}, True),
        ({"body": "tl.store(pair.first + slot, tl.load(pair.second + slot * pair.first_stride))"}, False),
        ({"body": "one, other = _places(pair, slot); tl.store(one, tl.load(other))"}, False),
        ({"body": "one, other = _places(pair, slot); tl.store(one, tl.load(pair.first))"}, True),
        ({"body": SEPARATE, "given": "counts, slots, counts, pair"}, True),
    ],
)
def test_reading_finds_such_a_kernel(changes, is_found):
    settings = {"between": "pass", "given": "counts, slots, out, pair", "options": "", **changes}
    assert offenders({Path("sabotaged.py"): ast.parse(SABOTAGED.format(**settings))}) == (
        {"_kernel"} if is_found else set()
    )
