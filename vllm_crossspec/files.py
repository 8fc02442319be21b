"""Atomic writes, and reads that answer damaged files with an error of one sentence."""

import contextlib
import json
import pickle
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from safetensors import SafetensorError, safe_open

if TYPE_CHECKING:
    import torch

Parsed = TypeVar("Parsed")

_OF_TRAINING = ("training_args.bin", "optimizer.bin")
"""Pickles of their own objects that trainers leave beside weights; vLLM does not read them either."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to; it is renamed to ``path`` when the block ends without an error."""
    partial = path.with_name(path.name + ".partial")
    yield partial
    partial.replace(path)


def write_json(path: Path, content: Any, indent: int = 2) -> None:
    """Write indented JSON atomically."""
    with replacing(path) as partial:
        partial.write_text(json.dumps(content, indent=indent) + "\n")


def write_tensors(path: Path, tensors: "Mapping[str, torch.Tensor]", metadata: dict[str, str] | None = None) -> None:
    """Write contiguous tensors in safetensors' format; OSError if they cannot be written."""
    from safetensors.torch import save_file  # it imports torch, which commands that write no tensors do without

    try:
        save_file(dict(tensors), path, metadata)
    except SafetensorError as problem:
        raise OSError(f"{path}: {problem}") from None


def read_json(file: Path, where: str) -> dict[str, Any]:
    """Read a JSON object; a damaged one raises a ValueError whose message begins with ``where``."""
    try:
        content = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} {file} is not valid JSON ({error}); copy it again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{where} {file} holds no JSON object; copy it again")
    return content


def indexed_files(index: Path, where: str) -> set[str]:
    """Names of a sharded checkpoint's files, from its index; ``where`` as in :func:`read_json`."""
    parts = read_json(index, where).get("weight_map")
    names = set(map(str, parts.values())) if isinstance(parts, dict) else set()
    if not names or any(Path(name).name != name for name in names):
        raise ValueError(f"{where} {index} names no weight files beside it; copy the checkpoint again")
    return names


@contextlib.contextmanager
def open_tensors(path: Path, where: str) -> Iterator[Any]:
    """Open a safetensors file; ``where`` as in :func:`read_json`."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{where} is damaged or cut short ({error}); copy it again") from None


def bin_files(folder: Path) -> list[Path]:
    """Weight files in torch's format."""
    return sorted(file for file in folder.glob("*.bin") if file.name not in _OF_TRAINING)


def load_bin(path: Path, where: str) -> "dict[str, torch.Tensor]":
    """The tensors of a torch file, memory-mapped; torch's reader runs no code of the pickle."""
    import torch  # takes a second, which readers of JSON need not wait for

    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError:
        raise ValueError(
            f"{where} holds more than tensors, which could run as code when it is read; save its tensors alone, "
            "best as .safetensors"
        ) from None
    except (RuntimeError, OSError, EOFError) as error:
        why = str(error).splitlines()[0]
        raise ValueError(f"{where} is damaged or cut short ({why}); copy it again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{where} holds no tensors by name; copy it again")
    return {name: tensor for name, tensor in content.items() if isinstance(tensor, torch.Tensor)}


def read_versioned(
    path: Path,
    version: int,
    *,
    where: str,
    remedy: str,
    parse: Callable[[dict[str, Any]], Parsed],
    disagreement: Callable[[Parsed], str | None],
) -> Parsed:
    """Parse a JSON file of ours; ``disagreement`` returns what is inconsistent in the result, if anything.

    Errors begin with ``where`` and name ``remedy``, the command that writes such files.
    """
    try:
        content = json.loads(path.read_text())
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"{where}: {path} is not valid JSON ({problem}); {remedy} again") from None
    found = content.get("format_version") if isinstance(content, dict) else None
    if found != version:
        raise ValueError(f"{where}: {path} has format_version {found}, this version reads {version}; {remedy} again")
    try:
        parsed = parse(content)
    except KeyError as problem:
        raise ValueError(f"{where}: {path} has no {problem}; {remedy} again") from None
    except (TypeError, ValueError) as problem:
        what = f"{path} holds something of another kind than expected ({problem})"
        raise ValueError(f"{where}: {what}; {remedy} again") from None
    wrong = disagreement(parsed)
    if wrong:
        raise ValueError(f"{where}: {wrong} in {path}; {remedy} again")
    return parsed
