"""Other packages that bring drafters, for as long as a test needs them."""

import contextlib
import sys

from vllm_crossspec.drafters import base


@contextlib.contextmanager
def package(folder, module="", **entries):
    """A package that is installed into ``folder``: a module's text, and drafters by entry point."""
    name = folder.name
    info = folder / f"{name}-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    lines = (f"{drafter} = {value}" for drafter, value in entries.items())
    (info / "entry_points.txt").write_text("\n".join([f"[{base.GROUP}]", *lines, ""]))
    if module:
        (folder / f"{name}.py").write_text(module)
    with installed(folder):
        try:
            yield
        finally:
            sys.modules.pop(name, None)


@contextlib.contextmanager
def installed(folder):
    """A folder of packages is looked into."""
    sys.path.insert(0, str(folder))
    base._others.cache_clear()
    loaded = dict(base._loaded)
    base._loaded.clear()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        base._others.cache_clear()
        base._loaded.clear()
        base._loaded.update(loaded)
