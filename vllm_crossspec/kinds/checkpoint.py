"""Reading a drafter's folder: its config.json, and whether its weight files are whole. No tensor is loaded.

What is wrong is a ValueError of one sentence that begins with ``key``, the setting that named the folder.
"""

import zipfile
from importlib import import_module
from pathlib import Path
from typing import Any

from vllm_crossspec.files import bin_files, indexed_files, load_bin, open_tensors, read_json
from vllm_crossspec.kinds.drafter import DrafterKind, drafter_kind, drafter_kinds
from vllm_crossspec.kinds.tensors import Shapes
from vllm_crossspec.model_names import config_file, hub_problem
from vllm_crossspec.types import DEFAULT_DRAFT_TOKENS, DrafterFacts, TargetFacts


def check_drafter(
    kind: str, model: str, key: str, target: TargetFacts, revision: str | None = None, has_weights: bool = True
) -> DrafterFacts:
    """Read what the checkpoint of a kind of drafter, a folder or hub id, says of itself, and see that it fits.

    Without ``has_weights``, where dummy weights are to be made up, no weight files need be there.
    """
    found = drafter_kind(kind, key)
    config = read_config(model, key, revision) if found.has_model else {}
    return facts_of(found, config, model, key, target, has_weights)


def facts_of(
    kind: DrafterKind, config: dict[str, Any], model: str, key: str, target: TargetFacts, has_weights: bool
) -> DrafterFacts:
    """As :func:`check_drafter`, of a checkpoint whose ``config`` has been read."""
    reader, folder = import_module(kind.checkpoint), Path(model).expanduser()
    try:
        facts: DrafterFacts = reader.read_facts(config, key, target)
        if not kind.has_model:
            return facts
        _check_fits(facts, key, target)
        shapes = check_weight_files(folder, key) if has_weights and folder.is_dir() else None
        if hasattr(reader, "check_tensors"):
            facts = reader.check_tensors(shapes, config, facts, key)
    except (AttributeError, IndexError, KeyError, TypeError) as problem:
        raise ValueError(
            f"{key}: config.json of {model} has a field of another kind than a drafter's ({problem}); copy it again"
        ) from problem
    return facts


def kind_of(folder: Path) -> DrafterKind | None:
    """The kind of drafter that a folder's config.json names; None for a language model of its own."""
    config = read_json(folder / "config.json", "MODEL:")
    named = " ".join([*(config.get("architectures") or []), str(config.get("speculators_model_type", ""))]).lower()
    kinds = (drafter_kind(name, "MODEL") for name in drafter_kinds())
    return next((kind for kind in kinds if any(mark in named for mark in kind.marks)), None)


def read_config(model: str, key: str, revision: str | None = None) -> dict[str, Any]:
    """The raw config.json of a local folder or of a hub repository."""
    if file := config_file(model, key):
        return read_json(file, f"{key}:")
    problem = hub_problem(model, revision)
    if problem is None:
        from transformers import PretrainedConfig  # takes seconds to import

        try:
            config: dict[str, Any]
            config, _ = PretrainedConfig.get_config_dict(model, revision=revision)
            return config
        except OSError:
            problem = "the hub has none; give a local folder"
    raise ValueError(f"{key}: no config.json for {model!r}; {problem}")


def check_weight_files(folder: Path, key: str) -> Shapes | None:
    """See that every weight file of ``folder`` is there and whole, by its header alone, and holds tensors alone.

    Returns the shapes of the tensors that a loader reads, by name; None where an old pickle does not tell them unread.
    """
    files, loaded = sorted(folder.glob("*.safetensors")), loaded_files(folder, key)
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with open_tensors(file, f"{key}: {file}") as tensors:
            names = tensors.keys() if file in loaded else ()
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in names}
    bins = bin_files(folder) if not files else []
    if not files and not bins:
        raise ValueError(f"{key}: {folder} holds no .safetensors or .bin weights")
    of_bins = [_shapes_of_bin(file, key) for file in bins]
    for found in of_bins:
        shapes |= found or {}
    return None if None in of_bins else shapes


def loaded_files(folder: Path, key: str) -> list[Path]:
    """The files of safetensors that a loader reads: those that an index names, which must be there, else all."""
    files = sorted(folder.glob("*.safetensors"))
    indexed: set[Path] = set()
    for index in folder.glob("*.safetensors.index.json"):
        named = {folder / name for name in indexed_files(index, f"{key}:")}
        if missing := sorted(named - set(files)):
            raise ValueError(f"{key}: {missing[0]} is named by {index.name} but not there; copy the checkpoint again")
        indexed |= named
    return sorted(indexed) or files


def _shapes_of_bin(file: Path, key: str) -> Shapes | None:
    # torch has written zip archives since 1.6; an older pickle shows no such mark and is left to torch.
    with file.open("rb") as opened:
        starts_as_zip = opened.read(2) in (b"PK", b"")
    if not starts_as_zip:
        return None
    if not zipfile.is_zipfile(file):
        raise ValueError(f"{key}: {file} is damaged or cut short; copy it again")
    return {name: tuple(tensor.shape) for name, tensor in load_bin(file, f"{key}: {file}").items()}


def _check_fits(facts: DrafterFacts, key: str, target: TargetFacts) -> None:
    reads_states = facts.target_hidden_size is not None
    if reads_states and facts.target_hidden_size != target.hidden_size:
        raise ValueError(
            f"{key}: this drafter reads states of width {facts.target_hidden_size}, but {target.name} has hidden "
            f"size {target.hidden_size}; it was trained for another target"
        )
    if facts.vocab_size != target.vocab_size:
        raise ValueError(
            f"{key}: this drafter has a vocabulary of {facts.vocab_size} tokens, but {target.name} has "
            f"{target.vocab_size}; it was trained for another target"
        )
    if facts.draft_vocab_size > facts.vocab_size:
        raise ValueError(
            f"{key}: draft_vocab_size {facts.draft_vocab_size} is larger than the vocabulary ({facts.vocab_size})"
        )
    inside = all(0 <= layer <= target.num_layers for layer in facts.target_layers)
    if not inside or (reads_states and not facts.target_layers):
        raise ValueError(
            f"{key}: this drafter taps target layers {list(facts.target_layers)}, but {target.name} has "
            f"{target.num_layers}; it was trained for another target"
        )
    if facts.mask_token_id is not None and not 0 <= facts.mask_token_id < target.vocab_size:
        raise ValueError(f"{key}: mask_token_id {facts.mask_token_id} is outside the vocabulary of {target.name}")


def architectures(config: dict[str, Any], key: str, usual: str) -> tuple[str, ...]:
    """The names of the model in a config.json; a sentence that names the ``usual`` one where it has none."""
    named = config.get("architectures")
    if not named or not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise ValueError(f'{key}: set "architectures" in config.json to ["{usual}"] (it is {named!r})')
    return tuple(named)


def layer_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config that describes the drafter's layers: nested in speculators' format, else all of it."""
    nested = config.get("transformer_layer_config")
    return nested if isinstance(nested, dict) else config


def require(config: dict[str, Any], name: str, key: str) -> Any:
    """``config[name]``, or a sentence that it is missing."""
    value = config.get(name)
    if value is None:
        raise ValueError(f"{key}: config.json has no {name!r}; it is not a checkpoint of this drafter")
    return value


def proposal_tokens(config: dict[str, Any]) -> int:
    """Draft tokens that a speculators checkpoint recommends, or the usual number."""
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    tokens = methods[0].get("speculative_tokens")
    return int(tokens) if tokens else DEFAULT_DRAFT_TOKENS
