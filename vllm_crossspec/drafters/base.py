"""The registry of drafters: a kind of drafter is one folder, ours or another package's, and one entry that names it."""

import functools
from collections.abc import Mapping
from importlib import import_module, metadata
from types import MappingProxyType
from typing import Any, NamedTuple

from vllm_crossspec.names import look_up
from vllm_crossspec.tree.base import Supply

GROUP = "crossspec.drafters"
"""Entry-point group by which other packages add kinds: ``NAME = "module:KIND"``, NAME being what users write."""


class DrafterKind(NamedTuple):
    """One kind of drafter: all that is true of it alone, and of no other. Whatever imports is named as a string.

    Attributes:
        name: as users write it.
        vllm_method: vLLM's own method whose configuration describes this drafter to the engine.
        checkpoint: module with ``read_facts(config: dict, key: str, target: TargetFacts) -> DrafterFacts``.
        proposer: ``module:class`` of the proposer that drafts chains.
        tree_proposer: of the one that drafts trees; empty where none does.
        reads_target_slots: its first pass reads the target's slot mappings, which a later drafter may overwrite;
            such drafters run first.
        reads_next_token: its cache's entry of a token depends on the token behind it, too, so that the last entry of a
            prefix that was found in the cache may be of another text.
        tree: the builder of trees (``tree.base``) that this drafter's candidates are for.
        supplies: what it can yield beside first choices (``tree.base``); other builders that need no more suit it, too.
        drafts_trees: whether its drafts are trees where the user says nothing of their shape.
        is_autoregressive: whether each of its tokens sees the ones before it; routers number such drafters first.
        head: the output layer (``head.type``) that it has where the user says nothing; None for its checkpoint's own.
        has_head: whether it has an output layer at all, which another can stand in for.
        ties_head: whether its input embedding may be its output layer, too; a drafter without either has the target's.
        can_share: whether it can draft beside others in one engine. What keeps a cache and reads no target states
            cannot, for it has nothing to catch up from.
        can_sample: whether it can sample its drafts and keep what they were sampled from (``probabilistic``).
        contemplates: whether the target runs contemplate rows for it (``contemplate.layout``).
        models: vLLM's registry gets these: architecture as in config.json, ``module:class``.
        speculators_reader: ``module:function(config_dict=..., pre_trained_config=...)`` by which vLLM reads a
            config.json of ``speculators_model_type`` ``name``; empty where vLLM knows how.
        check_target: ``module:function(config, key, target_model, revision)`` that refuses a checkpoint of another
            target, by its config.json and the target's files; empty for the checks that all drafters get.
        check_engine: ``module:function(speculative_config, target_model_config, target_parallel_config, path)`` that
            refuses what vLLM made of the drafter; ``path`` begins its keys.
        marks: a folder is of this kind if one of these words is in its architectures or speculators type; for tools
            that are given a folder and no kind.
        head_states: module with ``check_drafter_format(folder)`` and ``drafted_states(folder, target_folder, prompts,
            *, new_tokens, device, progress)``, the states that its output layer sees; empty where they cannot be had.
        trainer: ``module:name`` of the ``cli.train_drafters.Trainer`` behind its command in `crossspec train`; empty
            where there is none. Of this project's kinds only.
        preloads: modules of vLLM that an engine imports for it, for the server of forks (``engine.jobs.preload``).
        lookup: what its ``lookup`` settings are where the user says nothing (``config.LookupConfig``), for one that has
            no weights and drafts from text at hand; empty for the others. With ``share`` in it, it can keep earlier
            outputs.
        may_bring_code: whether its checkpoint may bring Python code of its own (``auto_map``), which vLLM runs where
            the user says `--trust-remote-code`; of all others none is run, whatever the target's may.
        has_model: whether there is a checkpoint; where not, ``read_facts`` gets an empty config.
        inflate: module with ``recipes(source, target)`` and ``config(source, target, folder)``, by which checkpoints
            grow with their target (``crossspec inflate``); empty where they cannot.
    """

    name: str
    vllm_method: str
    checkpoint: str
    proposer: str
    tree_proposer: str = ""
    reads_target_slots: bool = False
    reads_next_token: bool = False
    tree: str = "chain"
    supplies: Supply = "tokens"
    drafts_trees: bool = False
    is_autoregressive: bool = True
    head: str | None = None
    has_head: bool = True
    ties_head: bool = False
    can_share: bool = True
    can_sample: bool = True
    contemplates: bool = False
    models: Mapping[str, str] = MappingProxyType({})
    speculators_reader: str = ""
    check_target: str = ""
    check_engine: str = ""
    marks: tuple[str, ...] = ()
    head_states: str = ""
    trainer: str = ""
    preloads: tuple[str, ...] = ()
    lookup: Mapping[str, int | bool] = MappingProxyType({})
    may_bring_code: bool = False
    has_model: bool = True
    inflate: str = ""

    def load_proposer(self, is_tree: bool = False) -> Any:
        """The proposer's class, of chains or of trees; imports vLLM."""
        return load(self.tree_proposer if is_tree else self.proposer)


_NAMES = ("eagle3", "dflash", "dart", "confu", "draft_model", "flashhead", "ngram", "suffix", "nothing")
_OWN = {name: f"vllm_crossspec.drafters.{name}:KIND" for name in _NAMES}


def load(path: str) -> Any:
    """What ``module:name`` names."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def own_kinds() -> tuple[DrafterKind, ...]:
    """The kinds of this project, whatever other packages claim: no engine that uses none of them may fail for it."""
    return tuple(load(path) for path in _OWN.values())


def drafter_kinds() -> tuple[str, ...]:
    """Names of all kinds of drafter, those of other packages last; none of them is imported."""
    return (*_OWN, *(name for name in _others() if name not in _OWN))


def drafter_kind(name: str, key: str) -> DrafterKind:
    """The kind called ``name``.

    Raises:
        ValueError: one sentence: there is none (it names ``key`` and the nearest kind), several packages have one of
            this name, or the package that has it gives none.
    """
    # Asked in every step: what is loaded is one look-up away.
    return _loaded.get(name) or _load(name, key)


_loaded: dict[str, DrafterKind] = {}


@functools.cache
def _others() -> dict[str, list[metadata.EntryPoint]]:
    """What other packages offer, by name."""
    found: dict[str, list[metadata.EntryPoint]] = {}
    for entry in metadata.entry_points(group=GROUP):
        found.setdefault(entry.name, []).append(entry)
    return found


def _load(name: str, key: str) -> DrafterKind:
    others = _others().get(name, [])
    if len(others) + (name in _OWN) > 1:
        packages = [*(["vllm-crossspec"] if name in _OWN else []), *map(_package, others)]
        raise ValueError(
            f"{key or GROUP}: {name!r} is a drafter of {' and of '.join(packages)} alike; uninstall one of them, or "
            "have its author rename the entry point"
        )
    if others:
        kind = _load_other(others[0], key)
    else:
        kind = load(look_up(name, dict.fromkeys(drafter_kinds(), "") | _OWN, key, "drafter"))
    return _loaded.setdefault(name, kind)


def _load_other(entry: metadata.EntryPoint, key: str) -> DrafterKind:
    start = f"{key or GROUP}: the drafter {entry.name!r} of package {_package(entry)}"
    try:
        kind = entry.load()
    except Exception as error:
        why = " ".join(str(error).split())
        raise ValueError(
            f"{start} cannot be loaded ({type(error).__name__}: {why}); update or uninstall that package"
        ) from error
    if not isinstance(kind, DrafterKind) or kind.name != entry.name:
        found = f"the kind {kind.name!r}" if isinstance(kind, DrafterKind) else f"a {type(kind).__name__}"
        raise ValueError(
            f"{start} is {found}; entry point {entry.value!r} must name a DrafterKind called {entry.name!r}"
        )
    return kind


def _package(entry: metadata.EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value
