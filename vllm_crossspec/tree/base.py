"""The registry of tree builders: a kind of tree is one entry here and one module beside it."""

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from vllm_crossspec.names import look_up

Supply = Literal["tokens", "levels", "marginals", "matches", "none"]
"""What a drafter can yield.

tokens: its first choice at every position. levels: candidates of any beam of nodes, one level after another (an
autoregressive drafter that can be asked about several branches). marginals: the likeliest tokens of every position
with their log-probabilities, all at once (a parallel drafter). matches: whole continuations (a drafter that looks for
the last tokens in text at hand). none: no draft at all.
"""


class TreeKind(NamedTuple):
    """One kind of draft tree.

    Attributes:
        name: as users write it.
        builder: ``module:name`` of the function or class that builds it.
        needs: what a drafter must yield for it.
        defaults: settings that it takes, with the values that stand where the user gives none.
        ngram_builder: of what builds it by n-grams; empty where that is the same, or there is none.
    """

    name: str
    builder: str
    needs: Supply
    defaults: Mapping[str, int | float]
    ngram_builder: str = ""

    def load_builder(self, has_ngrams: bool = False) -> Any:
        """The builder as this machine runs it (``twins``); imports Triton."""
        from vllm_crossspec.tree import torch_ops
        from vllm_crossspec.twins import runs_kernels

        module, _, name = ((self.ngram_builder if has_ngrams else "") or self.builder).partition(":")
        builder = getattr(import_module(module), name)
        return builder if runs_kernels() else getattr(torch_ops, name, builder)


KINDS = {
    kind.name: kind
    for kind in (
        TreeKind("chain", "vllm_crossspec.tree.chain:chain", needs="tokens", defaults=MappingProxyType({})),
        TreeKind(
            name="dynamic",
            builder="vllm_crossspec.tree.dynamic:DynamicTree",
            needs="levels",
            defaults=MappingProxyType({"depth": 8, "top_k": 10, "num_nodes": 60, "sharpness": 1.5}),
        ),
        TreeKind(
            name="best_first",
            builder="vllm_crossspec.tree.best_first:best_first",
            needs="marginals",
            defaults=MappingProxyType({"num_nodes": 60, "ngram_weight": 0.5, "sharpness": 1.3}),
            ngram_builder="vllm_crossspec.tree.continuity:ContinuityTree",
        ),
        TreeKind(
            name="matches",
            builder="vllm_crossspec.lookup.trees:match_tree",
            needs="matches",
            defaults=MappingProxyType({"num_nodes": 60}),
        ),
        TreeKind(
            name="continuity",
            builder="vllm_crossspec.tree.continuity:ContinuityTree",
            needs="marginals",
            # The paper's, appendix D.
            defaults=MappingProxyType(
                {
                    "num_nodes": 60,
                    "top_k": 25,
                    "beam_width": 20,
                    "ngram_weight": 0.5,
                    "logit_decay": 0.9,
                    "level_decay": 0.7,
                }
            ),
        ),
    )
}


def tree_kind(name: str, key: str) -> TreeKind:
    """The kind called ``name``.

    Raises:
        ValueError: there is none; the sentence names ``key`` and the nearest kind.
    """
    return look_up(name, KINDS, key, "tree")
