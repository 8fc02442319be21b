"""tests/vllm_diff.py: what two releases of vLLM have differently of the touch points, by their syntax alone.

Of releases that are not here: written in a few lines. ``test_vllm_seam`` reads real ones.
"""

import re
import zipfile
from pathlib import Path

import pytest
import vllm
import vllm_diff
from typer.testing import CliRunner
from vllm_source import Release

from vllm_crossspec.vllm_api.points.base import Inventory, TouchPoint
from vllm_crossspec.vllm_api.points.ours import StandIn

FILES = {
    "_version.py": "__version__ = version = '{version}'\n",
    "__init__.py": "",
    "plans/__init__.py": "from .inner import *\nfrom vllm.plans.inner import draw as paint\n",
    "plans/inner.py": '''
from dataclasses import dataclass, field

class Base:
    noted: int

    def __init__(self, rows, width=1):
        """Words."""
        self.kept = rows  # a remark

    @classmethod
    def made(cls, rows):
        return cls(rows)

    @property
    def size(self):
        return self.kept

class Plan(Base):
    def run(self, batch, *, eager=False):
        return speculator.propose(batch)

@dataclass
class Order:
    number: int
    rows: list = field(default_factory=list)
    cache: dict = field(init=False)

if True:
    def draw(plan, scale): return plan * scale
else:
    def draw(plan): return plan
''',
}
POINTS = (
    TouchPoint("vllm.plans", "draw", "plan scale", "called: found through a star"),
    TouchPoint("vllm.plans", "paint", "plan scale", "called: under another name"),
    TouchPoint("vllm.plans.inner", "Plan", "rows width", "made: by its ancestor's initialiser"),
    TouchPoint("vllm.plans.inner", "Plan.run", "self batch eager", "overridden: by ours"),
    TouchPoint("vllm.plans.inner", "Plan.made", "rows", "called"),
    *(TouchPoint("vllm.plans.inner", f"Plan.{name}", None, "read") for name in ("kept", "noted", "size")),
    TouchPoint("vllm.plans.inner", "Order", "number rows", "made"),
)
STAND_IN = StandIn("ours.Speculator", "speculator", "vllm.plans.inner", "propose")


@pytest.fixture
def inventory(monkeypatch):
    made = Inventory("0.32.0", POINTS, (STAND_IN,))
    monkeypatch.setattr(vllm_diff, "inventory_of", lambda version: made if version.startswith("0.32") else None)
    monkeypatch.setattr(vllm_diff, "INVENTORIES", {(0, 32): made})
    return made


def written(folder, version, *changes):
    """A release with some text of its files exchanged."""
    for name, text in FILES.items():
        for old, new in changes:
            text = text.replace(old, new)
        file = folder / version / "vllm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.replace("{version}", version))
    return folder / version


def run(*arguments):
    import typer

    app = typer.Typer()
    app.command()(vllm_diff.main)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def shown(output):
    """Rows below each title, names alone."""
    found, title = {}, ""
    for line in output.splitlines():
        if match := re.fullmatch(r"([a-z][\w ,]+): (\d+)", line):
            title = match[1]
            found[title] = []
        elif line.startswith("  ") and not line.startswith("   "):
            found[title].append(line.split()[0])
    return found


def test_a_release_that_is_as_listed_has_no_problem(tmp_path, inventory):
    done = run(written(tmp_path, "0.32.5"))
    assert done.exit_code == 0
    assert done.stdout == "vLLM 0.32.5: 9 touch points, 0 not as listed\n"


CHANGES = [
    (("def draw(", "def sketch("), "gone", ["vllm.plans.draw", "vllm.plans.paint"]),
    (("rows, width=1)", "rows, width)"), "other parameters", ["vllm.plans.inner.Plan"]),
    (("*, eager=False", "*, eager=False, depth=0"), "other parameters", ["vllm.plans.inner.Plan.run"]),
    (("number: int", "number: int\n    place: int"), "other parameters", ["vllm.plans.inner.Order"]),
    (("noted: int", "other: int"), "gone", ["vllm.plans.inner.Plan.noted"]),
    (("self.kept = rows", "self.held = rows"), "gone", ["vllm.plans.inner.Plan.kept"]),
    (("return cls(rows)", "return cls(rows + 1)"), "the same name, another body", ["vllm.plans.inner.Plan.made"]),
    (
        ("speculator.propose(batch)", "speculator.propose(batch, speculator.depth)"),
        "read of our objects, and new",
        ["vllm.plans.inner"],
    ),
]


@pytest.mark.parametrize(("change", "title", "names"), CHANGES)
def test_what_changed_between_two_releases_is_named(tmp_path, inventory, change, title, names):
    first, second = written(tmp_path, "0.32.0"), written(tmp_path, "0.34.0", change)
    done = run(first, second)
    found = shown(done.stdout)
    assert found[title] == names
    assert done.exit_code == (title != "the same name, another body")
    same = run(first, written(tmp_path, "0.33.0", ("Words", "Other words"), ("# a remark", "")))
    assert same.exit_code == 0 and not any(shown(same.stdout).values())


def test_bodies_are_shown_where_they_are_asked_for(tmp_path, inventory):
    releases = written(tmp_path, "0.32.0"), written(tmp_path, "0.34.0", ("cls(rows)", "cls(rows + 1)"))
    assert "+    return cls(rows + 1)" in run(*releases, "--bodies").stdout
    assert "rows + 1" not in run(*releases).stdout


def test_a_wheel_is_read_as_its_folder(tmp_path, inventory):
    folder, wheel = written(tmp_path, "0.32.0"), tmp_path / "vllm-0.32.0-cp38-abi3-linux.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        for source in folder.rglob("*.py"):
            file.write(source, source.relative_to(folder))
    found = [
        [release.place(point).body for point in inventory.touch_points] for release in map(Release, (wheel, folder))
    ]
    assert found[0] == found[1]
    assert run(wheel).exit_code == 0


def test_a_new_parameter_of_what_we_override_is_a_problem_and_of_what_we_call_none(tmp_path):
    release = Release(written(tmp_path, "0.34.0", ("def draw(plan, scale)", "def draw(plan, scale, tint=None)")))
    sentence = release.problem(TouchPoint("vllm.plans", "draw", "plan scale", "replaced: by ours"))
    assert sentence == "vllm.plans.draw takes (plan scale tint), not (plan scale) (replaced: by ours)"
    assert release.problem(TouchPoint("vllm.plans", "draw", "plan scale", "called")) is None


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda folder: folder / "none.whl", "none.whl: no vLLM is there; give a wheel, the folder of an unpacked one"),
        (lambda folder: written(folder, "0.34.0"), "there is no list for vLLM 0.34.0 (there are 0.32): compare it"),
    ],
)
def test_what_cannot_be_compared_is_said_in_a_sentence(tmp_path, inventory, make, sentence):
    done = run(make(tmp_path))
    assert done.exit_code == 2 and sentence in done.stderr and done.stderr.count("\n") == 1


def test_the_installed_vllm_is_found():
    assert Release(Path(vllm.__file__).parent).version == vllm.__version__.split("+")[0]
