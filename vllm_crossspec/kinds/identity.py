"""Which model a file is about, whatever its folder is called."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from vllm_crossspec.files import indexed_files
from vllm_crossspec.kinds.checkpoint import read_config
from vllm_crossspec.types import TargetFacts

_VOLATILE_KEYS = ("_name_or_path", "transformers_version")
"""Of a config.json: they change when a checkpoint is copied or saved again, and the model does not."""
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf")
_SAMPLES, _SAMPLE_BYTES = 64, 4096


class Identity(NamedTuple):
    """What a model is known by.

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


@dataclass(frozen=True)
class Target:
    """A target, and its tokenizer, as the user names them; its config.json is read once, when something asks."""

    facts: TargetFacts
    model: str
    revision: str | None = None
    tokenizer: str | None = None

    @cached_property
    def config(self) -> dict[str, Any] | None:
        """What its config.json says; None without one (a single weights file, an object store)."""
        try:
            return read_config(self.model, "", self.revision)
        except ValueError:
            return None

    @cached_property
    def identity(self) -> Identity | None:
        """None without a config.json."""
        return None if self.config is None else known_model(self.model, self.revision, self.config)


def identify(model: str, key: str, revision: str | None = None, config: Mapping[str, Any] | None = None) -> Identity:
    """What a model is known by: hashes that stay when its folder is renamed, moved or linked, and change with it.

    They are of the config.json (``config`` if it has been read), and of local weights: their sizes and 64 samples of
    4 KiB of each file. Raises ValueError, which begins with ``key``: there is no such model.
    """
    config = read_config(model, key, revision) if config is None else config
    folder = local_folder(model, revision) or Path(model)
    kept = {name: value for name, value in config.items() if name not in _VOLATILE_KEYS}
    canonical = json.dumps(kept, sort_keys=True, separators=(",", ":"))
    return Identity(_short_name(model), hashlib.sha256(canonical.encode()).hexdigest(), _weights_hash(folder))


def known_model(model: str, revision: str | None, config: Mapping[str, Any]) -> Identity | None:
    """As :func:`identify`; None where the files of its weights cannot be told."""
    try:
        return identify(model, "", revision, config)
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
    """The hub id, or the folder's name: the rest of its path means nothing on other machines."""
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
        files = [folder / name for index in indices for name in indexed_files(index, "the checkpoint")]
    else:
        files = next((found for suffix in _WEIGHT_SUFFIXES if (found := sorted(folder.glob(f"*{suffix}")))), [])
    if not files or not all(file.is_file() for file in files):
        return None
    return hashlib.sha256("".join(sorted(map(_file_hash, set(files)))).encode()).hexdigest()


def _file_hash(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for i in range(_SAMPLES + 1):
            file.seek(i * max(size - _SAMPLE_BYTES, 0) // _SAMPLES)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
