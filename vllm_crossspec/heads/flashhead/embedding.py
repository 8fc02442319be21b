"""The output embedding of a Hugging Face folder, tied or not, and its special tokens; nothing else is loaded."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

_OUTPUT, _INPUT = ("lm_head.weight", "embed_out.weight", "output.weight"), ("embed_tokens.weight", "wte.weight")
_STOPS = ("bos_token_id", "eos_token_id", "pad_token_id")


def read_output_embedding(folder: Path, key: str = "MODEL") -> torch.Tensor:
    """The matrix [V, D] that turns hidden states into logits, as stored.

    Args:
        folder: of a model: config.json and .safetensors files.
        key: what the setting is called, for messages.

    Raises:
        ValueError: one sentence: no such folder, no weights, damaged ones, no output embedding, one with a bias.
    """
    if not folder.is_dir() or not (folder / "config.json").is_file():
        raise ValueError(f"{key} {folder} has no config.json; give a Hugging Face model folder")
    config = _read_json(folder / "config.json", key)
    places = _tensor_files(folder, key)
    if any(name.endswith(("lm_head.bias", "embed_out.bias")) for name in places):
        raise ValueError(f"{key} {folder}: its output layer has a bias, which the head leaves out; use the dense head")
    output = _find(places, _OUTPUT)
    shared = _find(places, _INPUT)
    is_tied = _read(config, "tie_word_embeddings", output is None)
    name = shared if is_tied and shared is not None else output
    if name is None:
        raise ValueError(f"{key} {folder} has no output embedding (lm_head.weight, or a tied embed_tokens.weight)")
    try:
        with safe_open(places[name], framework="pt") as file:
            weight: torch.Tensor = file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{key} {places[name]} is damaged or cut short ({error}); copy it again") from None
    if weight.ndim != 2 or not weight.is_floating_point():
        raise ValueError(f"{key} {folder}: {name} is {weight.dtype} {list(weight.shape)}; give an unquantised model")
    return weight


def read_special_tokens(folder: Path, vocab_size: int, key: str = "MODEL") -> tuple[int, ...]:
    """Ids below ``vocab_size`` that the model's files call special: begin, end, padding, and the tokenizer's own."""
    found: set[int] = set()
    for file in ("config.json", "generation_config.json"):
        if (folder / file).is_file():
            content = _read_json(folder / file, key)
            for name in _STOPS:
                ids = _read(content, name, None)
                found |= set(ids if isinstance(ids, list) else [ids])
    if (folder / "tokenizer.json").is_file():
        added = _read_json(folder / "tokenizer.json", key).get("added_tokens") or []
        found |= {token["id"] for token in added if token.get("special")}
    return tuple(sorted(token for token in found if isinstance(token, int) and 0 <= token < vocab_size))


def _find(places: dict[str, Path], endings: tuple[str, ...]) -> str | None:
    """The shortest name among the first ending that there is: a vision tower's comes later."""
    for ending in endings:
        names = [name for name in places if name == ending or name.endswith("." + ending)]
        if names:
            return min(names, key=lambda name: (len(name), name))
    return None


def _tensor_files(folder: Path, key: str) -> dict[str, Path]:
    """Which file each tensor is in."""
    places: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                places |= dict.fromkeys(opened.keys(), file)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{key} {file} is damaged or cut short ({error}); copy it again") from None
    if not places:
        raise ValueError(f"{key} {folder} has no weights (*.safetensors); give a Hugging Face model folder")
    return places


def _read(config: dict[str, Any], name: str, default: Any) -> Any:
    """A setting of the model, or of its text part."""
    nested = config.get("text_config")
    if name not in config and isinstance(nested, dict):
        return nested.get(name, default)
    return config.get(name, default)


def _read_json(file: Path, key: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{key} {file} is not valid JSON ({error}); copy it again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{key} {file} holds no JSON object; copy it again")
    return content
