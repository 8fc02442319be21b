"""Registries: kinds by name, this project's and those that other packages add by entry points."""

import functools
from collections.abc import Mapping
from importlib import import_module, metadata
from typing import Any, Generic, TypeVar

from vllm_crossspec.names import look_up

K = TypeVar("K")


def load(path: str) -> Any:
    """What ``module:name`` names."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


class Registry(Generic[K]):
    """Kinds of one sort by name; those that are named by strings are imported when they are asked for.

    Args:
        group: entry-point group of other packages: ``NAME = "module:KIND"``, NAME being what users write.
        what: how messages call one of them.
        kind: their type; each has a ``name``.
        own: this project's, or ``module:name`` of each.
    """

    def __init__(self, group: str, what: str, kind: type[K], own: Mapping[str, str | K]):
        self.group, self.what, self.kind, self.own = group, what, kind, own
        self._loaded: dict[str, K] = {}

    def names(self) -> tuple[str, ...]:
        """All names, those of other packages last; nothing is imported."""
        return (*self.own, *(name for name in self._others if name not in self.own))

    def find(self, name: str, key: str) -> K:
        """The kind called ``name``; ValueError, which names ``key``, for none, several, or one that cannot be had."""
        # Asked in every step: what is loaded is one look-up away.
        return self._loaded.get(name) or self._load(name, key)

    @functools.cached_property
    def _others(self) -> dict[str, list[metadata.EntryPoint]]:
        """What other packages offer, by name."""
        found: dict[str, list[metadata.EntryPoint]] = {}
        for entry in metadata.entry_points(group=self.group):
            found.setdefault(entry.name, []).append(entry)
        return found

    def _load(self, name: str, key: str) -> K:
        others = self._others.get(name, [])
        if len(others) + (name in self.own) > 1:
            packages = [*(["vllm-crossspec"] if name in self.own else []), *map(_package, others)]
            raise ValueError(
                f"{key or self.group}: {name!r} is a {self.what} of {' and of '.join(packages)} alike; uninstall one "
                "of them, or have its author rename the entry point"
            )
        if others:
            kind = self._load_other(others[0], key)
        else:
            found = look_up(name, {**dict.fromkeys(self.names(), ""), **self.own}, key, self.what)
            kind = load(found) if isinstance(found, str) else found
        return self._loaded.setdefault(name, kind)

    def _load_other(self, entry: metadata.EntryPoint, key: str) -> K:
        start = f"{key or self.group}: the {self.what} {entry.name!r} of package {_package(entry)}"
        try:
            kind: Any = entry.load()
        except Exception as error:
            why = " ".join(str(error).split())
            raise ValueError(
                f"{start} cannot be loaded ({type(error).__name__}: {why}); update or uninstall that package"
            ) from error
        is_kind = isinstance(kind, self.kind)
        if not is_kind or kind.name != entry.name:
            found = f"the kind {kind.name!r}" if is_kind else f"a {type(kind).__name__}"
            raise ValueError(
                f"{start} is {found}; entry point {entry.value!r} must name a {self.kind.__name__} called "
                f"{entry.name!r}"
            )
        return kind


def _package(entry: metadata.EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value
