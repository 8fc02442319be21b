"""Sets of models for `crossspec demo`: a target, drafters for it, methods and prompts. The pocket's is built in."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_crossspec.cli.rows import PLAIN
from vllm_crossspec.names import look_up
from vllm_crossspec.pocket_models import find_pocket

Config = dict[str, Any] | None
"""A method's --speculative-config; None of plain. `{pocket}` or `{models}` in it is the folder of the drafters."""

GROUP = "crossspec.demo"
"""Entry-point group by which other packages add sets: ``NAME = "module:SET"``."""

MODEL_FILES = ("config.json", "router.json", "store.safetensors", "calibration.json")
"""A folder of a model has one of them."""

FOLDER = re.compile(r"{(?:pocket|models)}/([\w.-]+)")


@dataclass(frozen=True, kw_only=True)
class ModelSet:
    """A target and what drafts for it.

    Attributes:
        find: the folder of the drafters, a folder each, and of prompts.jsonl; raises ValueError where there is none.
        target: the target's folder; it may be made first, or raise ValueError.
        table: the JSON file with `headline`, `methods`, and `drafters` that methods share.
        missing: why the target cannot be had, in a sentence with the fix; None where it can.
        batch_size: most requests at a time.
        headline_prompts: of each category, that the headline is shown on.
        is_timed: whether its times mean something. Then one engine runs at a time, trees fit the load, and the table
            has tokens a second.
    """

    name: str
    title: str
    find: Callable[[], Path]
    target: Callable[[], Path]
    table: Path
    missing: Callable[[], str | None] = lambda: None
    batch_size: int = 16
    headline_prompts: int = 2
    is_timed: bool = False
    headline: list[str] = field(init=False)
    methods: dict[str, Config] = field(init=False)

    def __post_init__(self) -> None:
        table = json.loads(self.table.read_text())
        shared = table.get("drafters", {})
        for config in table["methods"].values():
            if config is not None and isinstance(config.get("drafters"), str):
                config["drafters"] = shared[config["drafters"]]
        vars(self).update(headline=table["headline"], methods=table["methods"])

    def lacking(self) -> str | None:
        """Why the headline cannot be shown, in a sentence; None where it can."""
        absent = {name for method in self.headline for name in absent_folders(self.methods[method], self.find())}
        return f"{self.find()} has no {', '.join(sorted(absent))}" if absent else self.missing()


POCKET = ModelSet(
    name="pocket",
    title="the pocket models",
    find=find_pocket,
    target=lambda: find_pocket() / "target",
    table=Path(__file__).with_name("methods.json"),
)

PREFERRED = "smollm2"
INSTALL = "pip install vllm-crossspec-smollm2"


def choose_set(name: str | None) -> ModelSet:
    """The set of this name; of None the public model's, or the pocket's and a line on stderr that says why.

    Raises ValueError: no set is called so.
    """
    entries = {entry.name: entry for entry in metadata.entry_points(group=GROUP)}
    if name == POCKET.name:
        return POCKET
    if name is not None:
        return look_up(name, {POCKET.name: POCKET, **entries}, "--models", "set of models").load()
    why = f"{PREFERRED} is not installed: run `{INSTALL}` (`make venv` in a clone)"
    if PREFERRED in entries:
        found: ModelSet = entries[PREFERRED].load()
        if (lacking := found.lacking()) is None:
            return found
        why = f"{PREFERRED}: {lacking}"
    Console(stderr=True).print(
        f"note: shown with the pocket models. {why}", highlight=False, markup=False, soft_wrap=True
    )
    return POCKET


def config_of(models: ModelSet, method: str) -> str:
    """The JSON that `vllm serve` takes as --speculative-config.

    Raises ValueError: no such method, or a model of it is missing.
    """
    drafting = {name: config for name, config in models.methods.items() if name != PLAIN}
    config, folder = look_up(method, drafting, "METHOD", "method"), models.find()
    for name in absent_folders(config, folder):
        raise ValueError(no_model(folder / name))
    return json.dumps(located(config, folder))


def folders_of(config: Any) -> list[str]:
    """The folders of drafters that a method needs."""
    return sorted(set(FOLDER.findall(json.dumps(config))))


def absent_folders(config: Config, folder: Path) -> list[str]:
    """Those that hold no model."""
    return [name for name in folders_of(config) if not any((folder / name / file).is_file() for file in MODEL_FILES)]


def no_model(folder: Path) -> str:
    return f"{folder} holds no model: check out the repository whole, or train one (`crossspec train`)"


def located(value: Any, folder: Path) -> Any:
    """The same with the folder of the drafters filled in."""
    if isinstance(value, dict):
        return {key: located(inner, folder) for key, inner in value.items()}
    return re.sub("{(pocket|models)}", lambda _: str(folder), value) if isinstance(value, str) else value
