"""Reads only the output embedding of a Hugging Face folder, tied or not."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_crossspec.files import bin_files, load_bin, open_tensors, read_json

_OUTPUT, _INPUT = ("lm_head.weight", "embed_out.weight", "output.weight"), ("embed_tokens.weight", "wte.weight")


def own_output(folder: Path, key: str, may_be_tied: bool = True) -> tuple[Path, str] | None:
    """File and name of the output embedding; None if the folder has none.

    ``may_be_tied``: whether the input embedding can serve. A drafter without an output layer uses the target's.
    """
    if not folder.is_dir() or not (folder / "config.json").is_file():
        raise ValueError(f"{key} {folder} has no config.json; give a Hugging Face model folder")
    config = read_json(folder / "config.json", key)
    places = tensor_files(folder, key)
    if any(name.endswith(("lm_head.bias", "embed_out.bias")) for name in places):
        raise ValueError(f"{key} {folder}: its output layer has a bias, which the head leaves out; use the dense head")
    output = _find(places, _OUTPUT)
    shared = _find(places, _INPUT) if may_be_tied else None
    is_tied = config_value(config, "tie_word_embeddings", output is None)
    name = shared if is_tied and shared is not None else output
    return None if name is None else (places[name], name)


@contextlib.contextmanager
def open_rows(file: Path, name: str, key: str) -> Iterator[Any]:
    """Open a tensor of a file: ``[a:b]`` reads some rows, ``[:]`` all."""
    if file.suffix == ".bin":
        yield load_bin(file, f"{key} {file}")[name]
        return
    with open_tensors(file, f"{key} {file}") as opened:
        yield opened.get_slice(name)


def _find(places: dict[str, Path], endings: tuple[str, ...]) -> str | None:
    """The shortest name with the first ending that occurs; names of a vision tower are longer."""
    for ending in endings:
        names = [name for name in places if name == ending or name.endswith("." + ending)]
        if names:
            return min(names, key=lambda name: (len(name), name))
    return None


def tensor_files(folder: Path, key: str) -> dict[str, Path]:
    """The file of each tensor of a model."""
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


def config_value(config: dict[str, Any], name: str, default: Any) -> Any:
    """A setting of the model or of its ``text_config``."""
    nested = config.get("text_config")
    if name not in config and isinstance(nested, dict):
        return nested.get(name, default)
    return config.get(name, default)
