"""Sets of models for `crossspec demo`: a target, drafters for it, methods and prompts. The pocket's is built in."""

import json
import re
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from vllm_crossspec.cli.rows import PLAIN
from vllm_crossspec.names import look_up
from vllm_crossspec.pocket_models import find_pocket

Config = dict[str, Any] | None
"""A method's --speculative-config, its folders as :func:`located` takes them; None of plain."""
GROUP = "crossspec.demo"
"""Entry-point group by which other packages add sets: ``NAME = "module:SET"``."""
PREFERRED, INSTALL = "smollm2", "pip install vllm-crossspec-smollm2"
MODEL_FILES = ("config.json", "router.json", "store.safetensors", "calibration.json")
"""A folder of a model has one of them."""


class ModelSet(NamedTuple):
    """A target and what drafts for it.

    Attributes:
        find: the folder of the drafters and of prompts.jsonl; raises ValueError where there is none.
        target: the target's folder, which may be made first; raises ValueError, too.
        missing: why the target cannot be had, in a sentence with the fix; None where it can.
        headline_prompts: of each category.
        is_timed: whether times mean something. Then engines run one by one, and trees fit the load.
    """

    name: str
    headline: list[str]
    methods: dict[str, Config]
    find: Callable[[], Path]
    target: Callable[[], Path]
    missing: Callable[[], str | None] = lambda: None
    batch_size: int = 16
    headline_prompts: int = 2
    is_timed: bool = False


def read_table(file: Path) -> dict[str, Any]:
    """`headline` and `methods` of a JSON file, whose methods may share `drafters` by name."""
    table = json.loads(file.read_text())
    for config in table["methods"].values():
        if config is not None and "drafters" in config:
            config["drafters"] = table["drafters"][config["drafters"]]
    return {"headline": table["headline"], "methods": table["methods"]}


_TABLE = read_table(Path(__file__).with_name("methods.json"))
POCKET = ModelSet(name="pocket", **_TABLE, find=find_pocket, target=lambda: find_pocket() / "target")


def choose_set(name: str | None) -> ModelSet:
    """The set of this name; of None the public model's, or the pocket's and a line on stderr that says why.

    Raises ValueError: no set is called so.
    """
    sets = {entry.name: entry.load for entry in metadata.entry_points(group=GROUP)}
    if name is not None:
        return look_up(name, {POCKET.name: lambda: POCKET, **sets}, "--models", "set of models")()
    why: str | None = f"not installed: run `{INSTALL}` (`make venv` in a clone)"
    if PREFERRED in sets:
        found: ModelSet = sets[PREFERRED]()
        configs = {method: found.methods[method] for method in found.headline}
        absent = absent_folders(configs, found.find())
        if (why := f"{found.find()} has no {', '.join(absent)}" if absent else found.missing()) is None:
            return found
    note = f"note: shown with the pocket models. {PREFERRED}: {why}"
    Console(stderr=True).print(note, highlight=False, markup=False, soft_wrap=True)
    return POCKET


def config_of(models: ModelSet, method: str) -> str:
    """What `vllm serve` takes as --speculative-config. Raises ValueError: no such method, or a model is missing."""
    drafting = {name: config for name, config in models.methods.items() if name != PLAIN}
    config, folder = look_up(method, drafting, "METHOD", "method"), models.find()
    for name in folders_of(config):
        require_model(folder / name)
    return json.dumps(located(config, folder, models.target))


def folders_of(config: Any) -> list[str]:
    """The folders of drafters that a method needs."""
    return sorted(set(re.findall(r"{(?:pocket|models|target)}/([\w.-]+)", json.dumps(config))))


def absent_folders(config: Any, folder: Path) -> list[str]:
    """Those that hold no model."""
    return [name for name in folders_of(config) if not holds_model(folder / name)]


def holds_model(folder: Path) -> bool:
    return any((folder / file).is_file() for file in MODEL_FILES)


def require_model(folder: Path) -> None:
    if not holds_model(folder):
        raise ValueError(f"{folder} holds no model: check out the repository whole, or train one (`crossspec train`)")


def located(value: Any, folder: Path, target: Callable[[], Path] | None = None) -> Any:
    """The same with `{pocket}` and `{models}` filled in, the drafters' ``folder``, and `{target}`, by default in it."""
    if not isinstance(value, str):
        return {k: located(v, folder, target) for k, v in value.items()} if isinstance(value, dict) else value
    place = target or (lambda: folder / "target")
    return re.sub("{(pocket|models|target)}", lambda at: str(place() if at[1] == "target" else folder), value)
