"""Triton's cache of compiled kernels, where its folder may be read-only or full, and its files may be damaged.

Triton writes every file of an entry beside its place and renames it, the list of the entry's files last: two processes
that compile one kernel at once leave one whole entry, and one that is killed leaves none. What it does not do is go on
where nothing can be written. Here a process that cannot write keeps its kernels in a folder of its own, which goes when
it ends, and says so in one line. An entry is kept with the sizes of its files: one of which a part is missing (a disk
that was full, a copy that was cut off) is compiled anew, for a library that is cut off ends the process that loads it.
"""

import json
import os
import shutil
import tempfile
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from triton import knobs
from triton.runtime.cache import FileCacheManager

from crossspec_cpu_lane.notice import warn


class LaneCacheManager(FileCacheManager):
    """Triton's own manager of an entry, on the private folder once the usual one refuses."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        try:
            super().__init__(key, override=override, dump=dump)
        except OSError as problem:
            self._move(key, problem)

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        """Write a file of the entry; see Triton's manager."""
        try:
            return super().put(data, filename, binary)
        except OSError as problem:
            self._drop_leftovers()
            self._move(self.key, problem)
        try:
            return super().put(data, filename, binary)
        except OSError as problem:
            raise RuntimeError(
                f"compiled kernels can be kept nowhere, not even in {self.cache_dir} ({problem.strerror}): "
                "make room, or set TRITON_CACHE_DIR to a folder with room"
            ) from problem

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        """Close an entry: the paths of its files, and their sizes."""
        sizes = {name: os.path.getsize(path) for name, path in group.items()}
        return self.put(json.dumps({"child_paths": group, "sizes": sizes}), f"__grp__{filename}", binary=False)

    def get_group(self, filename: str) -> dict[str, str] | None:
        """The paths of an entry's files; None where it is not there, or not whole."""
        try:
            group = json.loads(Path(self._make_path(f"__grp__{filename}")).read_text())
            paths: dict[str, str] = group["child_paths"]
            if any(os.path.getsize(paths[name]) != size for name, size in group["sizes"].items()):
                return None
            json.loads(Path(paths[filename]).read_text())["hash"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # what reading of anything may raise
            return None
        return paths

    def _make_path(self, filename: str) -> str:
        """Where the file is: in the usual folder, or in the private one if it could be written there only."""
        usual = super()._make_path(filename)
        kept = Path(_private.path, self.key, filename) if _private.path else None
        return str(kept) if kept and kept.exists() and not Path(usual).exists() else usual

    def _move(self, key: str, problem: OSError) -> None:
        self.key = key
        folder = Path(_private.make(knobs.cache.dir, problem.strerror or str(problem)), key)
        folder.mkdir(parents=True, exist_ok=True)
        self.cache_dir, self.lock_path = str(folder), str(folder / "lock")

    def _drop_leftovers(self) -> None:
        """What a write of this process that failed has left of itself."""
        for folder in Path(self.cache_dir).glob(f"tmp.pid_{os.getpid()}_*"):
            shutil.rmtree(folder, ignore_errors=True)


class _PrivateFolder:
    """A temporary folder that goes with the process that made it."""

    def __init__(self) -> None:
        self.path = ""

    def make(self, usual: str, reason: str) -> str:
        if not self.path:
            warn(
                f"{usual} cannot keep compiled kernels ({reason}), so this process compiles its own: "
                "set TRITON_CACHE_DIR to a folder that can be written"
            )
            self.path = tempfile.mkdtemp(prefix="cpu-lane-cache-")
            # Not `atexit`, which a process that was forked by `multiprocessing` does not run. Others' forks let it be.
            Finalize(None, shutil.rmtree, (self.path,), {"ignore_errors": True}, exitpriority=0)
        return self.path


_private = _PrivateFolder()
