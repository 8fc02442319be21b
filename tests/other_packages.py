"""Other packages that bring drafters, for as long as a test needs them."""

import contextlib
import sys

from vllm_crossspec.kinds import drafter, policy, tree


@contextlib.contextmanager
def package(folder, module="", registry=drafter.REGISTRY, **entries):
    """A package that is installed into ``folder``: a module's text, and kinds of a registry by entry point."""
    name = folder.name
    info = folder / f"{name}-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    lines = (f"{name} = {value}" for name, value in entries.items())
    (info / "entry_points.txt").write_text("\n".join([f"[{registry.group}]", *lines, ""]))
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
    _forget()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        _forget()


def _forget():
    for registry in (drafter.REGISTRY, tree.REGISTRY, policy.REGISTRY):
        registry.__dict__.pop("_others", None)
        registry._loaded.clear()
