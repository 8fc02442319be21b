"""The registry of tree builders: a kind of tree is one entry here and one module beside it."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from pydantic import Field, StrictFloat, StrictInt

from vllm_crossspec.kinds.registry import Registry, load
from vllm_crossspec.kinds.scoring import Scoring, product_scoring
from vllm_crossspec.kinds.settings import MAX_DEPTH, MAX_DRAFT_TOKENS, Schedule, Settings

MAX_EXPANSION = 4096
"""Most prefixes that a level of a searched tree may look at."""

Supply = Literal["tokens", "levels", "marginals", "matches", "none"]
"""What a drafter can yield.

tokens: its first choice at every position.
levels: candidates of any beam of nodes, one level after another (an autoregressive drafter that takes branches).
marginals: the likeliest tokens of every position with their log-probabilities, all at once (a parallel drafter).
matches: whole continuations, copied from known text. none: no draft at all.
"""

_DECAYS = {"logit_decay": 0.9, "level_decay": 0.7}  # with the other defaults the paper's, appendix D
_NO_STORE = "{key}.ngram_weight needs n-grams; name a store in {path}ngram"
_AS_DEEP = "{key}.depth: a {type} tree is as deep as num_speculative_tokens; use that key"
_NO_SIZES = "{key}.type 'chain' takes no depth, top_k or num_nodes; use num_speculative_tokens"


class TreeConfig(Settings):
    """How a drafter's candidates become a draft: the settings that several kinds of tree have; None where it has not.

    What each does is in docs/use/configuration.md.
    """

    type: str = "chain"
    depth: StrictInt | None = Field(None, ge=1, le=MAX_DEPTH)
    top_k: StrictInt | None = Field(None, ge=1, le=255)
    num_nodes: StrictInt | None = Field(None, ge=1, le=MAX_DRAFT_TOKENS)
    sharpness: StrictFloat | None = Field(None, gt=0, le=10)
    by_batch_size: Schedule | None = None
    budget: Literal["batch", "request"] | None = None

    @property
    def is_chain(self) -> bool:
        """Whether every node has one child."""
        return self.type == "chain"

    def check(self, key: str, has_ngrams: bool) -> None:
        """Raise ValueError, a sentence that begins with ``key``, the tree's, for what does not go together."""

    def options(self, has_ngrams: bool) -> dict[str, Any]:
        """What a builder that is a class takes of these settings, once resolved, beside the sizes that all have."""
        return {}


class DynamicConfig(TreeConfig):
    """Of trees that are expanded level by level."""

    def check(self, key: str, has_ngrams: bool) -> None:
        """A level's nodes and their children must fit a kernel."""
        if (self.top_k or 0) > 32:
            raise ValueError(f"{key}.top_k is {self.top_k}; a dynamic tree takes at most 32")


class SearchedConfig(TreeConfig):
    """Of trees that are searched in a block's marginals, by n-grams too."""

    beam_width: StrictInt | None = Field(None, ge=1, le=255)
    ngram_weight: StrictFloat | None = Field(None, ge=0, le=10)
    logit_decay: StrictFloat | None = Field(None, gt=0, le=1)
    level_decay: StrictFloat | None = Field(None, ge=0, le=10)

    def check(self, key: str, has_ngrams: bool) -> None:
        """A level's prefixes must fit a kernel, and n-grams come from a store."""
        if (self.top_k or 0) * (self.beam_width or 1) > MAX_EXPANSION:
            raise ValueError(
                f"{key}.top_k * {key}.beam_width is {(self.top_k or 0) * (self.beam_width or 1)} prefixes a level; "
                f"use at most {MAX_EXPANSION}"
            )
        if self.ngram_weight and not has_ngrams:
            raise ValueError(_NO_STORE.format(key=key, path=key.removesuffix("tree")))

    def options(self, has_ngrams: bool) -> dict[str, Any]:
        """The beam, and how scores grow."""
        weight = (self.ngram_weight or 0.0) if has_ngrams else 0.0
        scoring = product_scoring(weight)
        if self.logit_decay is not None and self.level_decay is not None:
            scoring = Scoring(weight, self.logit_decay, self.level_decay)
        return {"beam_width": self.beam_width or self.num_nodes, "scoring": scoring}


class TreeKind(NamedTuple):
    """One kind of draft tree.

    Attributes:
        builder: ``module:name`` of the function or class that builds it.
        needs: what a drafter must yield for it.
        defaults: settings that it takes, with the values that stand where the user gives none.
        ngram_builder: of what builds it by n-grams; empty where that is the same, or there is none.
        settings: the model of its settings.
        optional: settings that it takes beside those in ``defaults``, and leaves unset.
        instead: sentences for settings that it does not take, with ``{key}`` and ``{type}`` for the tree's.
    """

    name: str
    builder: str
    needs: Supply
    defaults: Mapping[str, int | float]
    ngram_builder: str = ""
    settings: type[TreeConfig] = TreeConfig
    optional: tuple[str, ...] = ()
    instead: Mapping[str, str] = MappingProxyType({})

    @property
    def takes(self) -> tuple[str, ...]:
        """The settings that users may write, beside ``type`` and ``by_batch_size``, which all kinds have."""
        return (*self.defaults, *self.optional)

    def refuse(self, setting: str, key: str) -> None:
        """Raise ValueError for a setting that this kind of tree lacks and others have; ``key`` is the tree's."""
        others = " and ".join(takers(setting))
        sentence = self.instead.get(setting, "{key}.{setting} is for {others} trees, not for {type!r}; leave it out")
        raise ValueError(sentence.format(key=key, setting=setting, others=others, type=self.name))

    def load_builder(self, has_ngrams: bool = False) -> Any:
        """The builder; imports Triton."""
        return load((self.ngram_builder if has_ngrams else "") or self.builder)


_OWN = (
    TreeKind(
        name="chain",
        builder="vllm_crossspec.trees.builders.chain:chain",
        needs="tokens",
        defaults={},
        instead=dict.fromkeys(("depth", "top_k", "num_nodes"), _NO_SIZES),
    ),
    TreeKind(
        name="dynamic",
        builder="vllm_crossspec.trees.builders.dynamic:DynamicTree",
        needs="levels",
        defaults={"depth": 8, "top_k": 10, "num_nodes": 60, "sharpness": 1.5},
        settings=DynamicConfig,
    ),
    TreeKind(
        name="best_first",
        builder="vllm_crossspec.trees.builders.best_first:best_first",
        needs="marginals",
        defaults={"num_nodes": 60, "ngram_weight": 0.5, "sharpness": 1.3},
        optional=("top_k",),
        settings=SearchedConfig,
        ngram_builder="vllm_crossspec.trees.builders.continuity:ContinuityTree",
        instead={"depth": _AS_DEEP},
    ),
    TreeKind(
        name="continuity",
        builder="vllm_crossspec.trees.builders.continuity:ContinuityTree",
        needs="marginals",
        defaults={"num_nodes": 60, "top_k": 25, "beam_width": 20, "ngram_weight": 0.5, **_DECAYS},
        optional=("sharpness",),
        settings=SearchedConfig,
        instead={"depth": _AS_DEEP},
    ),
    TreeKind(
        name="matches",
        builder="vllm_crossspec.drafters.lookup.trees:match_tree",
        needs="matches",
        defaults={"num_nodes": 60},
        instead={
            "depth": _AS_DEEP,
            "top_k": "{key}.top_k: a matches tree has as many branches as were found; leave it out",
        },
    ),
)
KINDS = {kind.name: kind for kind in _OWN}
REGISTRY = Registry("crossspec.trees", "tree", TreeKind, KINDS)
tree_kind, tree_kinds = REGISTRY.find, REGISTRY.names


def takers(setting: str) -> list[str]:
    """This project's kinds of tree that take a setting."""
    return [kind.name for kind in KINDS.values() if setting in kind.takes]
