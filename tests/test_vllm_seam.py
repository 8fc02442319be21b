"""The seam between this project and vLLM: all that depends on vLLM's version is in the inventory, and nothing else.

``seam`` reads the uses from the syntax, and writes them into ``vllm_api/points/generated.py``; what is ours is
beside it with its reasons, by hand. The installed vLLM is looked at, and every other whose wheel, or the folder of an
unpacked one, is named::

    CROSSSPEC_VLLM=vllm-0.32.0-....whl:vllm-0.33.0-....whl python -m pytest -p no:xdist tests/test_vllm_seam.py
"""

import ast
import inspect
import os
import zipfile
from functools import cache
from pathlib import Path

import pytest
import seam
import vllm
import vllm.utils
from vllm_source import Release

from vllm_crossspec.platform import CUDA_NAMES
from vllm_crossspec.vllm_api.check import has_attribute, problem
from vllm_crossspec.vllm_api.points import inventory_of
from vllm_crossspec.vllm_api.points.base import TouchPoint, fits, reads
from vllm_crossspec.vllm_api.points.ours import OURS

VLLM = Path(vllm.__file__).parent
INVENTORY = inventory_of(vllm.__version__)
TOUCH_POINTS, STAND_INS = INVENTORY.touch_points, INVENTORY.stand_ins
LISTS = seam.lists()
HOWS = {"replaced": "replaces", "stood in for on the instance": "sets", "relied on": ""}
EVERY_NAME = {name for names in LISTS.values() for name in names}
"""Of all versions: what is there in one alone is used where it is there, and found in the syntax with any of them."""


@cache
def scan(folder=VLLM):
    return seam.Scan(seam.PACKAGE, folder, (seam.CPU_LANE,))


@pytest.fixture(scope="session", params=["installed", *filter(None, os.environ.get("CROSSSPEC_VLLM", "").split(":"))])
def folder(request, tmp_path_factory):
    """vLLM's package, of the installed version or of one that is named."""
    path = Path(request.param)
    if request.param == "installed":
        return VLLM
    if path.is_dir():
        return path if path.name == "vllm" else path / "vllm"
    unpacked = tmp_path_factory.mktemp("vllm")
    with zipfile.ZipFile(path) as wheel:
        wheel.extractall(unpacked, [name for name in wheel.namelist() if name.endswith(".py")])
    return unpacked / "vllm"


@pytest.fixture(scope="session")
def release(folder):
    """The same, with what its touch points are."""
    return Release(folder)


# ---- the inventory is whole


def test_the_list_is_what_the_syntax_says(folder, release):
    """If not: run ``python tests/seam.py``, with the wheels of all releases if they are at hand, and read the diff."""
    listed = inventory_of(release.version).release
    assert seam.points_of(scan(folder), release) == LISTS[listed]
    assert [str(use) for use in seam.missing(scan(folder).uses, EVERY_NAME)] == []
    assert seam.GENERATED.read_text() == seam.written(LISTS)


def test_what_is_replaced_has_a_row_by_hand(folder):
    assert [str(use) for use in seam.unexplained(scan(folder).uses)] == []


@pytest.mark.parametrize("name", OURS, ids=".".join)
def test_no_row_by_hand_can_be_taken_out(name):
    """Nor is there one of what is not so: nothing in the package does it, or it is relied on without being named."""
    assert name in EVERY_NAME, "no release has it"
    hows = {use.how for use in scan().uses if use[1:3] == name}
    how = next(start for start in HOWS if OURS[name].startswith(start))
    assert hows <= {"imports"} if how == "relied on" else HOWS[how] in hows, "take it out, or say what is ours"


def test_lists_of_other_releases_follow_the_one_that_is_looked_at():
    used, gone, new = ("m", "used"), ("m", "gone"), ("m", "new")
    known = {"1.0": {used: "a", gone: "a"}, "2.0": {used: "a b", gone: "a", ("m", "only"): None}}
    found = seam.renewed(known, {"1.0": {used: "a", new: "c"}})
    assert found == {"1.0": {used: "a", new: "c"}, "2.0": {used: "a b", new: "c", ("m", "only"): None}}
    # A point that the first has lost stays lost for the second, though it is new there no more.
    assert seam.renewed({"1.0": {used: "a"}, "2.0": {}}, {"1.0": {used: "a"}})["2.0"] == {}
    text = seam.written(found)
    names: dict = {}
    exec(text, names)
    assert names["RELEASES"] == ("1.0", "2.0")
    assert names["POINTS"] == {"m": {"new": "c", "only": {"2.0": None}, "used": {"1.0": "a", "2.0": "a b"}}}


def test_a_release_is_as_its_inventory_says(release):
    inventory = inventory_of(release.version)
    assert [sentence for point in inventory.touch_points if (sentence := release.problem(point))] == []
    assert [sentence for stand_in in inventory.stand_ins for sentence in release.unknown_reads(stand_in)] == []


def test_methods_of_ours_take_what_vllm_passes(folder, release):
    """Whatever a version hands to a method that we override, by place or by name."""
    points = {(point.module, point.name): point for point in inventory_of(release.version).touch_points}
    found = {}
    for use, function in scan(folder).overriding():
        point = points.get((use.module, use.name))
        # A first pass of our own is captured as SpeculatorCudaGraphManager's, from which it does not descend.
        if point is not None and point.parameters is not None and point.name != "DFlashCudaGraphManager.capture":
            found[f"{use.where} {use.name}"] = seam.lacks(function, point.parameters.split())
    assert len(found) > 50
    assert {where: names for where, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("source", "lacking"),
    [
        ("self, a, b, c=0", []),
        ("self, a, *_, **__", []),
        ("self, *arguments, **options", []),
        ("self, a, b, **others", []),
        ("self, a, b", ["c"]),
        ("self, a, *_", ["b", "c"]),
        ("self, a, *, c, **others", []),
        ("self, a, x, c", []),
    ],
)
def test_what_a_method_does_not_take_is_seen(source, lacking):
    (function,) = ast.parse(f"def method({source}): pass").body
    assert seam.lacks(function, ["self", "a", "b", "c"]) == lacking


def test_all_that_is_replaced_is_replaced_in_few_places():
    """For a whole process: by the hooks, by what mends vLLM on a CPU, and for a moment by the worker of a CPU and
    while a model, or a drafter with a dtype of its own, is loaded there, and while a drafter is made whole."""
    where = {Path(use.where).name.partition(":")[0] for use in scan().uses if use.how == "replaces"}
    assert where == {"install.py", "products.py", "patches.py", "worker.py", "weights.py"}


def test_what_the_scan_is_told_is_needed():
    """An entry of the scan's own tables that tells nothing any more is out of date."""
    uses = scan().uses
    assert scan().receivers == seam.RECEIVERS.keys()
    assert scan().foreign == seam.FOREIGN.keys()
    for own, others in seam.ANCESTORS.items():
        assert [c.name for c in scan().classes].count(own) == 1, own
        for module, _, name in (other.rpartition(".") for other in others):
            assert any(use.module == module and use.name.startswith(f"{name}.") for use in uses), f"{own}: {name}"


# ---- planted uses


WORKER = "from vllm.v1.worker.gpu_worker import Worker\n"
PLANTED = [
    ("from vllm.v1.worker.gpu.states import RequestState", "1: imports vllm.v1.worker.gpu.states.RequestState"),
    ("from vllm.platforms import _secret", "1: imports vllm.platforms._secret"),
    ("import vllm.v1.worker.gpu.shutdown as module\nmodule.x = 1", "2: replaces vllm.v1.worker.gpu.shutdown.x"),
    ("from vllm.config import VllmConfig\nVllmConfig._x = None", "2: replaces vllm.config.VllmConfig._x"),
    ("from vllm import LLM\nsetattr(LLM, 'generate', None)", "2: replaces vllm.LLM.generate"),
    (
        "import sys\ndef go():\n    module = sys.modules.get('vllm.v1.worker.gpu.model_runner')\n    module.logger = 1",
        "4: replaces vllm.v1.worker.gpu.model_runner.logger",
    ),
    (
        f"{WORKER}class Mine(Worker):\n    def sleep(self):\n        pass",
        "3: overrides vllm.v1.worker.gpu_worker.Worker.sleep",
    ),
    (
        f"{WORKER}class Mixin:\n    def go(self):\n        super().init_device()\nclass Mine(Mixin, Worker):\n    pass",
        "4: calls vllm.v1.worker.gpu_worker.Worker.init_device",
    ),
    (
        f"{WORKER}class Mine(Worker):\n    def go(self):\n        self.sleep()",
        "4: uses vllm.v1.worker.gpu_worker.Worker.sleep",
    ),
    (
        f"{WORKER}class Mine(Worker):\n    def go(self):\n        self.local_rank = 0",
        "4: sets vllm.v1.worker.worker_base.WorkerBase.local_rank",
    ),
    (f"{WORKER}class Mine(Worker):\n    def go(self):\n        self._do_not()", "4: uses _do_not"),
    ("def go(worker):\n    worker._do_not()", "2: uses _do_not"),
    ("def go(worker):\n    return getattr(worker, '_do_not', None)", "2: uses _do_not"),
    ("def go(worker):\n    worker.is_tired = True", "2: sets is_tired"),
    (
        "def go(runner):\n    runner._dummy_sampler_run()",
        "2: uses vllm.v1.worker.gpu.model_runner.GPUModelRunner._dummy_sampler_run",
    ),
    (
        "def go(batch):\n    return batch.is_prefilling_np",
        "2: uses vllm.v1.worker.gpu.input_batch.InputBatch.is_prefilling_np",
    ),
    ("from vllm import LLM\nfrom vllm.config import VllmConfig\nLLM.generate\nVllmConfig.compute_hash", None),
    ("def go(worker):\n    return worker.public, worker._replace(x=1)", None),
]


def planted(folder, source):
    room = folder / "vllm_crossspec" / "runner"
    room.mkdir(parents=True)
    (room / "planted.py").write_text(source + "\n")
    return seam.Scan(folder / "vllm_crossspec", VLLM)


@pytest.mark.parametrize(("source", "expected"), PLANTED)
def test_a_planted_use_is_named(tmp_path, source, expected):
    found = [str(use).removeprefix("vllm_crossspec/runner/planted.py:") for use in planted(tmp_path, source).uses]
    assert (expected in found) if expected is not None else (found == [])


def test_a_use_without_a_row_is_what_fails(tmp_path):
    uses = planted(tmp_path, "from vllm.v1.worker.gpu.buffer_utils import UvaBufferPool").uses
    assert [str(use) for use in seam.missing(uses, EVERY_NAME)] == [
        "vllm_crossspec/runner/planted.py:1: imports vllm.v1.worker.gpu.buffer_utils.UvaBufferPool"
    ]


# ---- what is accepted of another vLLM


def _signature(source):
    return list(inspect.signature(eval(f"lambda {source}: None")).parameters.values())


@pytest.mark.parametrize("source", ["a, b", "a, b=1", "a, b, c=None, d=1", "a, b, *, c=1", "a, *, b, c=1"])
def test_new_trailing_parameters_with_defaults_are_accepted(source):
    assert fits(_signature(source), ["a", "b"])


@pytest.mark.parametrize("source", ["a", "b, a", "a, c, b", "a, b, c", "a, c=1, b=1", "a, b, *, c", "a, b, **c", ""])
def test_everything_else_is_not(source):
    assert not fits(_signature(source), ["a", "b"])


def test_a_keyword_may_be_new_before_the_rest_of_them():
    assert fits(_signature("a, *, new=1, **rest"), ["a", "rest"])


@pytest.mark.parametrize(("reason", "is_accepted"), [("called: once", True), ("overridden: by a feature", False)])
def test_what_vllm_may_pass_to_a_function_of_ours_is_refused(monkeypatch, reason, is_accepted):
    """A default does not help there: it is vLLM's function that has it, and ours that is called."""
    monkeypatch.setattr(vllm.utils, "grown", lambda batch, width=None: None, raising=False)
    sentence = problem(TouchPoint("vllm.utils", "grown", "batch", reason), "0.32.0")
    assert (sentence is None) == is_accepted
    if sentence is not None:
        assert sentence.startswith("vllm.utils.grown takes (batch width) in this vLLM, not (batch) as in 0.32.0")


def test_attributes_of_instances_are_found():
    class Base:
        noted: int

        @property
        def known(self):
            self.cached = 1
            return self.read

    class Derived(Base):
        def __init__(self):
            self.set_here = self.only_read

    found = {name for name in ("noted", "cached", "set_here", "only_read", "read") if has_attribute(Derived, name)}
    assert found == {"noted", "cached", "set_here"}


def test_what_is_there_on_a_gpu_alone_is_compared_by_its_syntax():
    """The check leaves it out on a CPU, where vLLM imports no FlashAttention."""
    (point,) = (point for point in TOUCH_POINTS if point.name in CUDA_NAMES)
    tree = ast.parse((VLLM / "vllm_flash_attn" / "flash_attn_interface.py").read_text())
    (function,) = (node for node in tree.body if getattr(node, "name", None) == point.name)
    assert point.parameters == " ".join(argument.arg for argument in function.args.args)


# ---- stand-ins


def _reads_by_syntax(file, name):
    """What a file reads or sets of objects under a name, by the syntax."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute):
            value, attribute = node.value, node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            value, attribute = node.args[0], getattr(node.args[1], "value", None)
        else:
            continue
        if name in (getattr(value, "id", None), getattr(value, "attr", None)):
            found.add(attribute)
    return found


def _file(folder, module):
    return folder.joinpath(*module.split(".")[1:]).with_suffix(".py")


@pytest.fixture(params=[stand_in.name for stand_in in STAND_INS])
def stand_in(request, release):
    """One object of ours in the place of vLLM's, as the release's inventory has it."""
    return next(s for s in inventory_of(release.version).stand_ins if s.name == request.param)


def test_what_vllm_reads_of_a_stand_in_is_listed(folder, stand_in):
    files = [_file(folder, module) for module in stand_in.readers.split()]
    found = set().union(*(_reads_by_syntax(file, stand_in.name) for file in files))
    assert found == {*stand_in.attributes.split(), *stand_in.others.split()}
    assert found == set().union(*(reads(file.read_text(), stand_in.name) for file in files)), "the check at start-up"


def test_nothing_else_of_vllm_reads_it(folder, stand_in):
    if stand_in.name == "processor":  # a word that vLLM has for much else
        return
    listed = {_file(folder, module) for module in stand_in.readers.split()}
    for file in folder.rglob("*.py"):
        # vLLM's own speculators, and its own parts of the rejection sampler, read what they themselves hold; its
        # benchmarks read what the runner does.
        if file in listed or {"spec_decode", "models", "benchmarks"} & {*file.relative_to(folder).parts}:
            continue
        text = file.read_text()
        if f"{stand_in.name}." in text or f"{stand_in.name}," in text:
            found = _reads_by_syntax(file, stand_in.name)
            assert not found, f"{file} reads {sorted(found)} of {stand_in.name}: name it among the readers"


def test_a_stand_in_has_all_that_vllm_reads(folder, stand_in):
    """Its own, and what vLLM's methods that it inherits read of it in turn."""
    own = scan(folder).library.find_class(stand_in.ours)
    assert own is not None
    assert _lacks(own, stand_in.attributes.split()) == []


def test_what_a_stand_in_lacks_is_seen(tmp_path):
    source = (
        "from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator\n"
        "class Host(DraftModelSpeculator):\n"
        "    def __init__(self):\n"
        "        self.model = None\n"
        "class Derived(Host):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
    )
    own = planted(tmp_path, source).library.find_class("vllm_crossspec.runner.planted.Derived")
    wanted = ["model", "num_query_per_req", "draft_logits", "prepare_watermarking"]
    assert _lacks(own, wanted) == ["draft_logits", "draft_watermarker"]


def _lacks(own, attributes):
    """What a class of ours does not have of these attributes, and of those that vLLM's methods among them read."""
    runs_vllms_initialiser = _runs_vllms_initialiser(own)
    wanted, seen, lacking = set(attributes), set(), []
    while wanted:
        name = wanted.pop()
        seen.add(name)
        holders = [c for c in own.line if name in c.members]
        # What vLLM's initialiser would have set is there only if that has run.
        if not [c for c in holders if not c.is_vllms or runs_vllms_initialiser or name in c.class_names]:
            lacking.append(name)
        elif holders[0].is_vllms and name in holders[0].methods:
            wanted |= _reads_of_self(holders[0], name) - seen
    return sorted(lacking)


def _runs_vllms_initialiser(own):
    """Whether the initialisers of our classes hand on to vLLM's."""
    for ancestor in own.line:
        if "__init__" not in ancestor.methods:
            continue
        if ancestor.is_vllms:
            return True
        function = next(node for node in ancestor.node.body if getattr(node, "name", None) == "__init__")
        if not any(isinstance(node, ast.Attribute) and node.attr == "__init__" for node in ast.walk(function)):
            return False
    return False


def _reads_of_self(holder, method):
    function = next(node for node in holder.node.body if getattr(node, "name", None) == method)
    nodes = [node for node in ast.walk(function) if isinstance(node, ast.Attribute)]
    return {node.attr for node in nodes if getattr(node.value, "id", None) == "self" and isinstance(node.ctx, ast.Load)}


def test_a_stand_in_that_lacks_something_is_named_at_start_up(monkeypatch):
    from vllm_crossspec.vllm_api import check

    host = STAND_INS[0]
    poorer = host._replace(attributes=host.attributes.replace(" propose", ""))
    monkeypatch.setattr(check, "inventory_of", lambda version: INVENTORY._replace(touch_points=(), stand_ins=(poorer,)))
    assert check.check() == [
        f"vllm.v1.worker.gpu.model_runner reads speculator.propose in this vLLM, which {host.ours} was not written to "
        f"have; vllm_crossspec was written for {INVENTORY.release}"
    ]
