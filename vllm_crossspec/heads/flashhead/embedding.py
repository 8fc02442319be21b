"""The output embedding of a Hugging Face folder, tied or not, and its special tokens; nothing else is loaded."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from vllm_crossspec.files import bin_files, load_bin, open_tensors, read_json

_OUTPUT, _INPUT = ("lm_head.weight", "embed_out.weight", "output.weight"), ("embed_tokens.weight", "wte.weight")
_STOPS = ("bos_token_id", "eos_token_id", "pad_token_id")


def read_output_embedding(folder: Path, key: str = "MODEL") -> torch.Tensor:
    """The matrix [V, D] that turns hidden states into logits, as stored.

    Args:
        folder: of a model or a drafter: config.json, and .safetensors or .bin files.
        key: what the setting is called, for messages.

    Raises:
        ValueError: one sentence: no such folder, no weights, damaged ones, no output embedding, one with a bias.
    """
    place = own_output(folder, key)
    if place is None:
        raise ValueError(
            f"{key} {folder} has no output embedding (lm_head.weight, or a tied embed_tokens.weight); a drafter "
            "without one uses its target's: give the target's folder"
        )
    with open_rows(*place, key) as rows:
        weight: torch.Tensor = rows[:]
    if weight.ndim != 2 or not weight.is_floating_point():
        raise ValueError(
            f"{key} {folder}: {place[1]} is {weight.dtype} {list(weight.shape)}; give an unquantised model"
        )
    return weight


def own_output(folder: Path, key: str, may_be_tied: bool = True) -> tuple[Path, str] | None:
    """File and name of the matrix that turns hidden states into logits; None where the folder has none of its own.

    Args:
        folder: of a model or a drafter.
        key: what the setting is called, for messages.
        may_be_tied: the input embedding may be it. That of a drafter without an output layer is not: the target's is.

    Raises:
        ValueError: one sentence: no such folder, no weights, damaged ones, an output layer with a bias.
    """
    if not folder.is_dir() or not (folder / "config.json").is_file():
        raise ValueError(f"{key} {folder} has no config.json; give a Hugging Face model folder")
    config = read_json(folder / "config.json", key)
    places = tensor_files(folder, key)
    if any(name.endswith(("lm_head.bias", "embed_out.bias")) for name in places):
        raise ValueError(f"{key} {folder}: its output layer has a bias, which the head leaves out; use the dense head")
    output = _find(places, _OUTPUT)
    shared = _find(places, _INPUT) if may_be_tied else None
    is_tied = _read(config, "tie_word_embeddings", output is None)
    name = shared if is_tied and shared is not None else output
    return None if name is None else (places[name], name)


@contextlib.contextmanager
def open_rows(file: Path, name: str, key: str) -> Iterator[Any]:
    """A tensor of a file, of which ``[a:b]`` reads some rows and ``[:]`` all."""
    if file.suffix == ".bin":
        yield load_bin(file, f"{key} {file}")[name]
        return
    with open_tensors(file, f"{key} {file}") as opened:
        yield opened.get_slice(name)


def read_target_ids(folder: Path, key: str = "MODEL") -> torch.Tensor | None:
    """int64 [V] the target's id of each token of a drafter's reduced vocabulary; None where it has the target's own."""
    places = tensor_files(folder, key)
    if "d2t" not in places:
        return None
    with open_rows(places["d2t"], "d2t", key) as rows:
        offsets: torch.Tensor = rows[:].long()
    return offsets + torch.arange(len(offsets))


def read_special_tokens(folder: Path, vocab_size: int, key: str = "MODEL") -> tuple[int, ...]:
    """Ids below ``vocab_size`` that the model's files call special: begin, end, padding, and the tokenizer's own."""
    found: set[int] = set()
    for file in ("config.json", "generation_config.json"):
        if (folder / file).is_file():
            content = read_json(folder / file, key)
            for name in _STOPS:
                ids = _read(content, name, None)
                found |= set(ids if isinstance(ids, list) else [ids])
    if (folder / "tokenizer.json").is_file():
        added = read_json(folder / "tokenizer.json", key).get("added_tokens") or []
        found |= {token["id"] for token in added if token.get("special")}
    return tuple(sorted(token for token in found if isinstance(token, int) and 0 <= token < vocab_size))


def _find(places: dict[str, Path], endings: tuple[str, ...]) -> str | None:
    """The shortest name among the first ending that there is: a vision tower's comes later."""
    for ending in endings:
        names = [name for name in places if name == ending or name.endswith("." + ending)]
        if names:
            return min(names, key=lambda name: (len(name), name))
    return None


def tensor_files(folder: Path, key: str) -> dict[str, Path]:
    """Which file each tensor of a model is in.

    Raises:
        ValueError: one sentence: no weights, or damaged ones.
    """
    places: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with open_tensors(file, f"{key} {file}") as opened:
            places |= dict.fromkeys(opened.keys(), file)
    if not places:
        for file in bin_files(folder):
            places |= dict.fromkeys(load_bin(file, f"{key} {file}"), file)
    if not places:
        raise ValueError(f"{key} {folder} has no weights (*.safetensors or *.bin); give a Hugging Face model folder")
    return places


def _read(config: dict[str, Any], name: str, default: Any) -> Any:
    """A setting of the model, or of its text part."""
    nested = config.get("text_config")
    if name not in config and isinstance(nested, dict):
        return nested.get(name, default)
    return config.get(name, default)
