"""The registry of tree builders: a kind of tree is one entry here and one module beside it."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from vllm_crossspec.names import look_up

Supply = Literal["tokens", "levels", "marginals"]
"""What a drafter can yield.

tokens: its first choice at every position. levels: candidates of any beam of nodes, one level after another (an
autoregressive drafter that can be asked about several branches). marginals: the likeliest tokens of every position
with their log-probabilities, all at once (a parallel drafter).
"""


class TreeKind(NamedTuple):
    """One kind of draft tree.

    Attributes:
        name: as users write it.
        needs: what a drafter must yield for it.
        defaults: settings that it takes, with the values that stand where the user gives none.
    """

    name: str
    needs: Supply
    defaults: Mapping[str, int | float]


KINDS = {
    kind.name: kind
    for kind in (
        TreeKind(name="chain", needs="tokens", defaults=MappingProxyType({})),
        TreeKind(name="dynamic", needs="levels", defaults=MappingProxyType({"depth": 8, "top_k": 10, "num_nodes": 60})),
        TreeKind(
            name="best_first",
            needs="marginals",
            defaults=MappingProxyType({"num_nodes": 60, "ngram_weight": 0.5}),
        ),
        TreeKind(
            name="continuity",
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
