"""Reading a drafter's folder: its config.json, and whether its weight files are whole. No tensor is loaded."""

import os
import zipfile
from importlib import import_module
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from vllm_crossspec.drafters.base import DrafterKind, drafter_kind, drafter_kinds
from vllm_crossspec.files import bin_files, indexed_files, load_bin, open_tensors, read_json
from vllm_crossspec.types import DEFAULT_DRAFT_TOKENS, DrafterFacts, TargetFacts


def check_drafter(
    kind: str, model: str, key: str, target: TargetFacts, revision: str | None = None, has_weights: bool = True
) -> DrafterFacts:
    """Read what the checkpoint says of itself and see that it fits ``target``.

    Args:
        kind: of the drafter, a registry entry.
        model: local folder or hub id; unread for a kind without weights.
        key: of the speculative config that named it, for messages.
        target: what it must fit.
        revision: of a hub repository.
        has_weights: False where dummy weights are to be made up, so that none need be there.

    Raises:
        ValueError: one sentence naming ``key`` and what is wrong: no such folder, not a drafter of this kind, another
            target's, or damaged weight files.
    """
    found = drafter_kind(kind, key)
    config = read_config(model, key, revision) if found.has_model else {}
    try:
        facts: DrafterFacts = import_module(found.checkpoint).read_facts(config, key, target)
        if not found.has_model:
            return facts
        _check_fits(facts, key, target)
    except (AttributeError, IndexError, KeyError, TypeError) as problem:
        raise ValueError(
            f"{key}: config.json of {model} has a field of another kind than a drafter's ({problem}); copy it again"
        ) from problem
    if has_weights and Path(model).expanduser().is_dir():
        check_weight_files(Path(model).expanduser(), key)
    return facts


def kind_of(folder: Path) -> DrafterKind | None:
    """The kind of drafter that a folder's config.json names; None for a language model of its own."""
    config = read_json(folder / "config.json", "MODEL:")
    named = " ".join([*(config.get("architectures") or []), str(config.get("speculators_model_type", ""))]).lower()
    kinds = (drafter_kind(name, "MODEL") for name in drafter_kinds())
    return next((kind for kind in kinds if any(mark in named for mark in kind.marks)), None)


def read_config(model: str, key: str, revision: str | None = None) -> dict[str, Any]:
    """The raw config.json of a local folder or of a hub repository."""
    folder = Path(model).expanduser()
    looks_local = model.startswith(("/", "./", "../", "~")) or model.count("/") > 1 or "/" not in model
    if looks_local and not folder.is_dir():
        raise ValueError(f"{key}: there is no folder {model!r}; give the drafter's folder or a hub id like ORG/NAME")
    if folder.is_dir():
        file = folder / "config.json"
        if not file.is_file():
            raise ValueError(f"{key}: {model} has no config.json; it is not a checkpoint folder")
        return read_json(file, f"{key}:")
    try:
        config: dict[str, Any]
        config, _ = PretrainedConfig.get_config_dict(model, revision=revision)
    except OSError:
        offline = os.environ.get("HF_HUB_OFFLINE") == "1"
        why = "it is not in the local cache and HF_HUB_OFFLINE=1 forbids the hub" if offline else "the hub has none"
        raise ValueError(f"{key}: no config.json for {model!r}; {why}; give a local folder") from None
    return config


def check_weight_files(folder: Path, key: str) -> None:
    """See that every weight file of ``folder`` is there and whole, by its header alone, and holds tensors alone."""
    files = sorted(folder.glob("*.safetensors"))
    for index in folder.glob("*.safetensors.index.json"):
        named = {folder / name for name in indexed_files(index, f"{key}:")}
        missing = sorted(named - set(files))
        if missing:
            raise ValueError(f"{key}: {missing[0]} is named by {index.name} but not there; copy the checkpoint again")
    for file in files:
        with open_tensors(file, f"{key}: {file}") as tensors:
            tensors.keys()
    bins = bin_files(folder) if not files else []
    for file in bins:
        # torch has written zip archives since 1.6; an older pickle shows no such mark and is left to torch.
        with file.open("rb") as opened:
            starts_as_zip = opened.read(2) in (b"PK", b"")
        if starts_as_zip and not zipfile.is_zipfile(file):
            raise ValueError(f"{key}: {file} is damaged or cut short; copy it again")
        if starts_as_zip:
            load_bin(file, f"{key}: {file}")
    if not files and not bins:
        raise ValueError(f"{key}: {folder} holds no .safetensors or .bin weights")


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
    bad = [layer for layer in facts.target_layers if not 0 <= layer <= target.num_layers]
    if bad or (reads_states and not facts.target_layers):
        raise ValueError(
            f"{key}: this drafter taps target layers {list(facts.target_layers)}, but {target.name} has "
            f"{target.num_layers}; it was trained for another target"
        )
    if facts.mask_token_id is not None and not 0 <= facts.mask_token_id < target.vocab_size:
        raise ValueError(f"{key}: mask_token_id {facts.mask_token_id} is outside the vocabulary of {target.name}")


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
