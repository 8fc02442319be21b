"""What is wrong with a speculative config, said before anything heavy is imported: its keys, and folders that miss.

vLLM's own names are read off its source, for importing it takes ten seconds. What can only be told with the
checkpoints' contents or with vLLM itself is told by the engine (``frontend``). What is wrong is a ValueError of one
sentence, which names the key and the fix.
"""

import ast
import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vllm_crossspec.config import parse as config_parsing
from vllm_crossspec.config.native_keys import INTERNAL_KEYS
from vllm_crossspec.config.schema import CrossSpecConfig
from vllm_crossspec.model_names import config_file, require_target

_JSON = (str, int, float, list, dict, type(None))


class NativeNames(NamedTuple):
    """Names of the methods, and of the keys, that vLLM's own speculative config takes."""

    methods: set[str]
    keys: set[str]


@functools.cache
def native_names() -> NativeNames | None:
    """As the installed vLLM's source has them; None without vLLM, or if the source is written in another way."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    try:
        body = ast.parse(Path(spec.submodule_search_locations[0], "config", "speculative.py").read_text()).body
    except (OSError, SyntaxError):
        return None
    literals = {ast.unparse(node.targets[0]): node.value for node in body if isinstance(node, ast.Assign)}
    config = next(
        (node.body for node in body if isinstance(node, ast.ClassDef) and node.name == "SpeculativeConfig"), []
    )
    fields = {ast.unparse(node.target) for node in config if isinstance(node, ast.AnnAssign)}
    methods = _strings("SpeculativeMethod", literals)
    return NativeNames(methods, fields - INTERNAL_KEYS) if methods and fields else None


def _strings(name: str, literals: Mapping[str, ast.expr]) -> set[str]:
    """The strings of a ``Literal``, and of those that it names."""
    found: set[str] = set()
    for node in ast.walk(literals[name]) if name in literals else ():
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
        elif isinstance(node, ast.Name) and node.id != "Literal":
            found |= _strings(node.id, literals)
    return found


def as_written(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a config with underscores, each once, without the objects that vLLM itself puts there."""
    found: dict[str, Any] = {}
    for written, value in raw.items():
        key = str(written).replace("-", "_")
        if key in found:
            raise ValueError(f"speculative_config.{key} is written twice, as {key} and as {written}; leave out one")
        if key not in INTERNAL_KEYS or isinstance(value, _JSON):
            found[key] = value
    return found


def parse(raw: Mapping[str, Any]) -> CrossSpecConfig | None:
    """Settings of what was written after ``--speculative-config``, by its keys alone.

    None where the config is vLLM's own, or vLLM's names are not known.
    """
    names = native_names()
    raw = as_written(raw)
    if names is None or not config_parsing.is_ours(raw, *names):
        return None
    return config_parsing.parse(raw, names.keys).without_idle()


def check_folders(settings: CrossSpecConfig, target: str | None = None, revision: str | None = None) -> None:
    """See that the drafters' folders are there, and the target's where it is named; no hub is asked."""
    for name, drafter in settings.drafters.items():
        if drafter.traits.has_model:
            config_file(drafter.model, f"{settings.path_of(name)}model")
    if target is not None:
        require_target(target, "model", revision, ask_hub=False)
