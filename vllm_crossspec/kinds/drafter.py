"""The registry of drafters: a kind of drafter is one folder, ours or another package's, and one entry that names it."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from vllm_crossspec.kinds.registry import Registry, load
from vllm_crossspec.kinds.tree import Supply

GROUP = "crossspec.drafters"
"""Entry-point group by which other packages add kinds: ``NAME = "module:KIND"``, NAME being what users write."""


class DrafterKind(NamedTuple):
    """One kind of drafter: all that is true of it alone, and of no other. Whatever imports is named as a string.

    Attributes:
        name: as users write it.
        vllm_method: vLLM's own method whose configuration describes this drafter to the engine.
        checkpoint: module with ``read_facts(config: dict, key: str, target: TargetFacts) -> DrafterFacts``. It may have
            ``check_tensors(shapes, config, facts, key) -> DrafterFacts``, which compares the tensors of the files
            (``kinds.tensors``; None where they cannot be read).
        proposer, tree_proposer: ``module:class`` of what drafts chains, and trees; empty where none does.
        reads_target_slots: its first pass reads the target's slot mappings, so that it must run before other drafters.
        reads_next_token: its KV entry for token t also depends on token t + 1, so the last entry of a cached prefix may
            be wrong.
        tree: the builder of trees (``kinds.tree``) that this drafter's candidates are for.
        tree_defaults: settings of that tree whose values stand where the user gives none, in the place of the tree's.
        supplies: what it can yield beside first choices; other builders that need no more suit it, too.
        drafts_trees: whether its drafts are trees where the user says nothing of their shape.
        is_autoregressive: whether each of its tokens sees the ones before it; routers number such drafters first.
        head: the output layer (``head.type``) that it has where the user says nothing; None for its checkpoint's own.
        has_head: whether it has an output layer at all, which another can stand in for.
        ties_head: whether its input embedding may be its output layer, too; a drafter without either has the target's.
        can_share: whether it can draft beside others. A drafter with a cache that reads no target states cannot catch
            up with them.
        can_sample: whether it can sample its drafts and keep what they were sampled from (``probabilistic``).
        contemplates: whether the target runs contemplate rows for it (``kinds.contemplate_layout``).
        models: vLLM's registry gets these: architecture as in config.json, ``module:class``.
        speculators_reader: ``module:function(config_dict=..., pre_trained_config=...)`` by which vLLM reads a
            config.json of ``speculators_model_type`` ``name``; empty where vLLM knows how.
        check_target: ``module:function(config, key, target)`` that refuses a checkpoint of another target
            (``kinds.identity.Target``); empty for the checks that all drafters get.
        check_engine: ``module:function(speculative_config, target_model_config, target_parallel_config, path)`` that
            refuses what vLLM made of the drafter; ``path`` begins its keys.
        marks: words of which one is in the architectures or the speculators type of such a folder.
        lookup: its ``lookup`` settings where the user says nothing, for one that drafts from text at hand; empty for
            the others. With ``share`` in it, it can keep earlier outputs.
        may_bring_code: whether vLLM runs Python code of its checkpoint (``auto_map``) under `--trust-remote-code`.
        has_model: whether there is a checkpoint; where not, ``read_facts`` gets an empty config.
        vllm_needs: package without which vLLM cannot run its own method of this name; without it the name alone stands
            for this drafter. Empty for a name that vLLM has not, or runs without any.
    """

    name: str
    vllm_method: str
    checkpoint: str
    proposer: str
    tree_proposer: str = ""
    reads_target_slots: bool = False
    reads_next_token: bool = False
    tree: str = "chain"
    tree_defaults: Mapping[str, int] = MappingProxyType({})
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
    lookup: Mapping[str, int | bool] = MappingProxyType({})
    may_bring_code: bool = False
    has_model: bool = True
    vllm_needs: str = ""


_NAMES = ("eagle3", "dflash", "jetspec", "dart", "confu", "draft_model", "flashhead", "ngram", "suffix", "nothing")
_OWN = {name: f"vllm_crossspec.drafters.{name}:KIND" for name in _NAMES}
REGISTRY = Registry(GROUP, "drafter", DrafterKind, _OWN)
drafter_kind, drafter_kinds = REGISTRY.find, REGISTRY.names


def own_kinds() -> tuple[DrafterKind, ...]:
    """The kinds of this project, whatever other packages claim: no engine that uses none of them may fail for it."""
    return tuple(load(path) for path in _OWN.values())
