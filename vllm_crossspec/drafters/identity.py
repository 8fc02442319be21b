"""Which model a file is about, whatever its folder is called."""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

from vllm_crossspec.files import indexed_files

_VOLATILE_KEYS = ("_name_or_path", "transformers_version")
"""Of a config.json: they change when a checkpoint is copied or saved again, and the model does not."""

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf")


_SAMPLES, _SAMPLE_BYTES = 64, 4096


class Identity(NamedTuple):
    """Which model a file is about, whatever its folder is called.

    Attributes:
        name: of its folder or repository, for messages only.
        config: SHA-256 of what its config.json says.
        weights: SHA-256 of the size and of samples of its weight files; None where they are not in a local folder.
    """

    name: str
    config: str
    weights: str | None

    def is_same(self, other: "Identity") -> bool:
        """Whether both are the same model, as far as both know their weights."""
        if self.config != other.config:
            return False
        return self.weights is None or other.weights is None or self.weights == other.weights


def identify(model: str, key: str, revision: str | None = None) -> Identity:
    """What a model is known by.

    Args:
        model: local folder or hub id.
        key: of the setting that named it, for messages.
        revision: of a hub repository.

    Returns:
        Hashes that stay when a folder is renamed, moved or linked, and change with the model: of the config.json, and
        of the weights' sizes and 64 samples of 4 KiB of each file, where the files are at hand.

    Raises:
        ValueError: there is no such model, or its config.json cannot be read.
    """
    from vllm_crossspec.drafters.checkpoint import read_config  # transformers takes seconds to import

    config = read_config(model, key, revision)
    folder = local_folder(model, revision) or Path(model)
    kept = {name: value for name, value in config.items() if name not in _VOLATILE_KEYS}
    canonical = json.dumps(kept, sort_keys=True, separators=(",", ":"))
    return Identity(_short_name(model), hashlib.sha256(canonical.encode()).hexdigest(), _weights_hash(folder))


def known_model(model: str, revision: str | None = None) -> Identity | None:
    """As :func:`identify`; None where there is no config.json (a single weights file, an object store)."""
    try:
        return identify(model, "", revision)
    except ValueError:
        return None


def local_folder(model: str, revision: str | None = None) -> Path | None:
    """The folder that a user names, or where the hub's client keeps the files of a repository, if it has them."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json", revision=revision)
    return Path(found).parent if isinstance(found, str) else None


def _short_name(model: str) -> str:
    """The hub id, or the folder's name: nobody else has the rest of its path."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return model
    for part in folder.resolve().parts:
        if part.startswith("models--"):  # the hub client's cache: models--ORG--NAME/snapshots/COMMIT
            return part.removeprefix("models--").replace("--", "/")
    return folder.resolve().name


def _weights_hash(folder: Path) -> str | None:
    """None where the folder has no weights."""
    if not folder.is_dir():
        return None
    indices = sorted(folder.glob("*.safetensors.index.json"))
    if indices:
        named = {name for index in indices for name in indexed_files(index, "the checkpoint")}
        files = [folder / name for name in named]
    else:
        files = next((found for suffix in _WEIGHT_SUFFIXES if (found := sorted(folder.glob(f"*{suffix}")))), [])
    if not files or not all(file.is_file() for file in files):
        return None
    return hashlib.sha256("".join(sorted(map(_file_hash, files))).encode()).hexdigest()


def _file_hash(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for i in range(_SAMPLES + 1):
            file.seek(i * max(size - _SAMPLE_BYTES, 0) // _SAMPLES)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
