"""From a folder with a target and its drafters to one of the same, larger: what is there, how it grows, what it takes.

A folder beside the target's is known by what is in it: a drafter or draft model (config.json of a model), clusters of
FlashHead, a router, a calibration of HeteroSpec, an n-gram store.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from crossspec_inflate import assets
from crossspec_inflate.drafters import KINDS
from crossspec_inflate.growth import Growth, Shape, grow, place_layers, shape_of
from crossspec_inflate.matrices import Maker, Recipe
from crossspec_inflate.models import Recipes, Source, language_model, language_model_config
from crossspec_inflate.write import Report, num_bytes, write_checkpoint
from crossspec_tools.train.blocks import replacing
from vllm_crossspec.drafters.eagle3.checkpoint import default_target_layers
from vllm_crossspec.drafting.flashhead.assets import FOLDER_KEY
from vllm_crossspec.files import read_json
from vllm_crossspec.heterospec.calibration import read_calibration, write_calibration
from vllm_crossspec.kinds.checkpoint import check_drafter, kind_of
from vllm_crossspec.kinds.drafter import drafter_kind
from vllm_crossspec.kinds.identity import identify
from vllm_crossspec.routing.checkpoint import FACTS_FILE as ROUTER_FILE
from vllm_crossspec.types import TargetFacts

FACTS_FILE = "inflated.json"
"""By which a folder is known as one that was inflated."""
CALIBRATION_FILE, STORE_FILE = "calibration.json", "store.safetensors"
TARGET = "target"


class Part(NamedTuple):
    """One folder that is to be made: its size in bytes, its weights (0: no model), and what writes it.

    ``write`` takes the folder of all parts, where those before it are.
    """

    name: str
    size: int
    num_weights: int
    write: Callable[[Path, Report], None]


class Plan(NamedTuple):
    """All that is to be made, the target first; ``left_out`` has sentences on folders that cannot grow with it."""

    growth: Growth
    parts: list[Part]
    left_out: list[str]
    facts: dict[str, Any]

    @property
    def size(self) -> int:
        """Bytes of all parts."""
        return sum(part.size for part in self.parts)


class Wish(NamedTuple):
    """What the user asks for.

    Attributes:
        model: folder of the target.
        names: folders beside it; None for all that can grow with it.
        sizes: of the target, those that are not its own.
        draft: shape of draft models that read no states; None: their own.
        dtype: of the weights; None: the target's own.
        device: where they are made.
    """

    model: Path
    names: Sequence[str] | None
    sizes: Mapping[str, int]
    draft: Shape | None
    dtype: torch.dtype | None
    device: torch.device


def make_plan(wish: Wish) -> Plan:
    """What is to be made; only headers are read, and output embeddings that clusters belong to.

    Raises ValueError, one sentence: no such folder, a shape without room, a folder that cannot grow.
    """
    source = Source(wish.model, "--model")
    growth = _target_growth(source, wish)
    maker = Maker(wish.dtype or source.dtype, wish.device)
    target = _language_model(source, growth)
    parts = [_model_part(TARGET, source, target, maker, lambda root: language_model_config(source, growth))]
    made, left_out = _Beside(wish, source, growth, maker), []
    for name in sorted(folder.name for folder in wish.model.resolve().parent.iterdir()) if wish.names is None else ():
        try:
            made.add(name)
        except ValueError as problem:
            left_out.append(str(problem))
    for name in wish.names or ():
        made.add(name, is_wanted=True)
    parts += made.parts()
    left_out += made.left_out
    facts = {
        "source": wish.model.resolve().parent.name,
        "shape": growth.new._asdict(),
        "layers_of_the_source": list(growth.places),
        "dtype": str(maker.dtype).removeprefix("torch."),
        "num_weights": {part.name: part.num_weights for part in parts if part.num_weights},
    }
    return Plan(growth, parts, left_out, facts)


def write_plan(plan: Plan, out: Path, report: Callable[[str], Report]) -> None:
    """Write all parts, and then let the folder appear whole; ``report`` gives a part's listener by its name."""
    with replacing(out) as fresh:
        try:
            for part in plan.parts:
                part.write(fresh, report(part.name))
            (fresh / FACTS_FILE).write_text(json.dumps(plan.facts, indent=2) + "\n")
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise


def check_out(out: Path, is_overwritten: bool) -> None:
    """Raises ValueError where the folder must not be written."""
    if out.is_file():
        raise ValueError(f"--out {out} is a file; name a folder")
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not (out / FACTS_FILE).is_file():
        raise ValueError(f"--out {out} holds something that `crossspec inflate` did not write; name a new folder")
    if not is_overwritten:
        raise ValueError(f"--out {out} is there already; name a new folder, or give --overwrite")


def check_space(out: Path, size: int) -> None:
    """Raises ValueError where the disk has less room than ``size`` bytes."""
    place = next(folder for folder in (out.resolve(), *out.resolve().parents) if folder.is_dir())
    free = shutil.disk_usage(place).free
    if free < size:
        raise ValueError(
            f"--out {out} will take {size / 1e9:.1f} GB and its disk has {free / 1e9:.1f} GB left; name a folder of "
            "another disk, or choose a smaller shape, fewer drafters or --dtype bfloat16"
        )


def _target_growth(source: Source, wish: Wish) -> Growth:
    """The target's growth. Layers are placed by EAGLE-3's taps, which DART and most checkpoints share."""
    old, head_dim = shape_of(source.config, source.key)
    new = old._replace(**wish.sizes)
    if new.layers < old.layers:
        raise ValueError(f"--layers {new.layers}: {source.key} has {old.layers}; give that or more")
    taps = list(zip(default_target_layers(old.layers), default_target_layers(new.layers), strict=True))
    # A target too shallow for three taps has no drafter that reads them.
    places = place_layers(old.layers, new.layers, taps if sorted(taps) == taps else [], source.key)
    return grow(old, new, head_dim, places, source.key)._replace(draft=wish.draft)


def _language_model(source: Source, growth: Growth) -> Recipes:
    recipes = language_model(source, growth)
    source.check_all_used()
    return recipes


def _model_part(
    name: str, source: Source, recipes: Recipes, maker: Maker, config: Callable[[Path], dict[str, Any]]
) -> Part:
    def write(root: Path, report: Report) -> None:
        write_checkpoint(root / name, config(root), recipes, maker, report)
        for file in source.folder.iterdir():
            if file.is_file() and file.name != "config.json" and not _holds_weights(file):
                shutil.copyfile(file, root / name / file.name)

    size = sum(num_bytes(recipe, maker.dtype) for recipe in recipes.values())
    return Part(name, size, sum(map(_num_weights, recipes.values())), write)


def _num_weights(recipe: Recipe) -> int:
    return torch.Size(recipe.shape).numel() if recipe.dtype is None else 0


def _holds_weights(file: Path) -> bool:
    return file.suffix in (".safetensors", ".bin", ".pt") or file.name.endswith(".index.json")


class _Beside:
    """The folders beside the target, sorted by what they hold."""

    def __init__(self, wish: Wish, target: Source, growth: Growth, maker: Maker):
        self._folder, self._model = wish.model.resolve().parent, wish.model.resolve()
        self._growth, self._maker = growth, maker
        vocab_size = int(target.config["vocab_size"])
        self._facts = TargetFacts(str(wish.model), growth.old.hidden, vocab_size, growth.old.layers)
        self._drafters: dict[str, Part] = {}
        self._others: dict[str, Callable[[str], Part]] = {}
        self._wanted: set[str] = set()
        self.left_out: list[str] = []

    def add(self, name: str, is_wanted: bool = False) -> None:
        """Plan for the folder of that name, if it holds something that is known; it must if it ``is_wanted``."""
        folder = self._folder / name
        if is_wanted:
            self._wanted.add(name)
        config = folder / "config.json"
        if folder.resolve() == self._model:
            if is_wanted:
                raise ValueError(f"--drafters {name}: that is --model itself; name folders beside it")
        elif config.is_file() and FOLDER_KEY not in read_json(config, f"--drafters {name}:"):
            self._drafters[name] = self._drafter(name, folder)
        elif other := next((make for make in self._makers() if (folder / make[0]).is_file()), None):
            self._others[name] = other[1]
        elif is_wanted:
            known = ", ".join(sorted(path.name for path in self._folder.iterdir() if path.is_dir()))
            raise ValueError(f"--drafters {name}: {folder} holds no drafter, clusters or router; choose from {known}")

    def parts(self) -> list[Part]:
        """All of them, those that others depend on first."""
        made = list(self._drafters.values())
        for name, make in self._others.items():
            try:
                made.append(make(name))
            except ValueError as problem:
                if name in self._wanted:
                    raise
                self.left_out.append(str(problem))
        return made

    def _makers(self) -> Iterator[tuple[str, Callable[[str], Part]]]:
        """The file that a folder is known by, and what makes its part."""
        yield "config.json", self._clusters
        yield ROUTER_FILE, self._router
        yield CALIBRATION_FILE, self._calibration
        yield STORE_FILE, self._copy

    def _drafter(self, name: str, folder: Path) -> Part:
        key = f"--drafters {name}"
        kind = kind_of(folder) or drafter_kind("draft_model", key)
        check_drafter(kind.name, str(folder), key, self._facts)
        if kind.name not in KINDS:
            raise ValueError(f"{key}: no {kind.name} drafter can be inflated; leave it out")
        source, made = Source(folder, key), KINDS[kind.name]
        recipes = made.recipes(source, self._growth)
        source.check_all_used()
        made.config(source, self._growth, self._model)  # what is wrong with it is said before anything is written
        config = lambda root: made.config(source, self._growth, root / TARGET)  # noqa: E731
        return _model_part(name, source, recipes, self._maker, config)

    def _clusters(self, name: str) -> Part:
        folder, key = self._folder / name, f"--drafters {name}"
        owner = assets.owner_of_clusters(folder, {drafter: self._folder / drafter for drafter in self._drafters}, key)
        if owner is None:
            raise ValueError(f"{key}: its clusters are of none of the drafters that are inflated; name theirs, too")
        growth = self._growth.new.hidden // self._growth.old.hidden
        return self._part(name, growth, lambda root: assets.inflate_clusters(folder, root / owner, root / name, key))

    def _router(self, name: str) -> Part:
        folder, width = self._folder / name, self._growth.width
        key = f"--drafters {name}"
        growth = (width.new // width.old) ** 2
        return self._part(name, growth, lambda root: assets.inflate_router(folder, width, root / name, key))

    def _calibration(self, name: str) -> Part:
        """HeteroSpec's table, unchanged except for the models that it names."""
        folder, key = self._folder / name, f"--drafters {name}"
        read = read_calibration(folder / CALIBRATION_FILE, key)
        known = {drafter: identify(str(self._folder / drafter), key) for drafter in self._drafters}
        owner = next((drafter for drafter, identity in known.items() if identity.is_same(read.drafter)), None)
        if owner is None or not identify(str(self._model), key).is_same(read.target):
            raise ValueError(f"{key}: it is for {read.drafter.name}, which is not inflated; name that drafter, too")

        def write(root: Path) -> None:
            (root / name).mkdir()
            target, drafter = (identify(str(root / model), key) for model in (TARGET, owner))
            write_calibration(root / name / CALIBRATION_FILE, replace(read, target=target, drafter=drafter))

        return self._part(name, 1, write)

    def _copy(self, name: str) -> Part:
        return self._part(name, 1, lambda root: shutil.copytree(self._folder / name, root / name))

    def _part(self, name: str, growth: int, make: Callable[[Path], Any]) -> Part:
        """A folder without weights, so many times as large as its source."""
        size = growth * sum(file.stat().st_size for file in (self._folder / name).rglob("*") if file.is_file())

        def write(root: Path, report: Report) -> None:
            make(root)
            report(size)

        return Part(name, size, 0, write)
