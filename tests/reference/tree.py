"""EAGLE-3's trees: as SafeAILab's ``topK_genrate`` builds them, and as ours grow from the very same drafter.

How the two count:

===============================  =======================================================================
SafeAILab                        ours
===============================  =======================================================================
``depth`` (argument, attribute)  passes of the drafter after its first; its trees have ``depth + 1`` levels,
                                 which is our ``depth``
``total_tokens`` (argument)      nodes with the root; our ``num_nodes`` is ``total_tokens - 1``
``total_tokens`` (attribute)     the argument less one already: our ``num_nodes``
``top_k``                        the same: children of a node, and nodes of a level that get children
order of its nodes               level by level; ours by falling log-probability of the path, which is the order in
                                 which its last ``topk`` ranks them
tree mask                        [1 + nodes, 1 + nodes], each row sees its ancestors and itself; our ``parents``
===============================  =======================================================================
"""

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch

from reference.compare import TIE
from vllm_crossspec.trees.builders.dynamic import DynamicTree
from vllm_crossspec.types import TokenTree

Cache = Any


class Settings(NamedTuple):
    """Sizes of a tree in SafeAILab's counting, as ``EaModel`` takes them."""

    total_tokens: int
    depth: int
    top_k: int

    def ours(self) -> dict[str, int]:
        """The same sizes in our counting."""
        return {"num_nodes": self.total_tokens - 1, "depth": self.depth + 1, "top_k": self.top_k}


class Node(NamedTuple):
    """A node of a draft tree: the tokens from the root's child to it, and the log-probability of that path."""

    path: tuple[int, ...]
    log_prob: float


def configure(model: Any, settings: Settings) -> None:
    """Give the reference's drafter other tree sizes, as its constructor would."""
    model.total_tokens, model.depth, model.top_k = settings.total_tokens - 1, settings.depth, settings.top_k
    model.init_tree()


def theirs(model: Any, states: torch.Tensor, tokens: list[int]) -> list[Node]:
    """The tree that the reference drafts after ``tokens``, by falling log-probability.

    Args:
        model: from ``safeailab.load``; its cache moves on.
        states: [1, T, 3H] of the target that the drafter has not seen, up to the last but one token.
        tokens: all that is known.
    """
    ranked: list[tuple[torch.Tensor, torch.Tensor]] = []
    topk = torch.topk

    def spy(scores: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        ranked.append((scores, topk(scores, *args, **kwargs).indices))
        return topk(scores, *args, **kwargs)

    with mock.patch.object(torch, "topk", spy):
        drafted, _, mask, depths = model.topK_genrate(states, torch.tensor([tokens]), None, None)
    # The last ranking is the one over all candidates; the nodes come in the order of the candidates.
    scores, kept = ranked[-1]
    nodes = []
    for i, candidate in enumerate(kept.sort().values.tolist(), start=1):
        ancestors = mask[0, 0, i].nonzero().flatten().tolist()
        path = tuple(drafted[0, ancestors].tolist())
        assert path[0] == tokens[-1] and len(path) - 1 == int(depths[i])
        nodes.append(Node(path[1:], float(scores[candidate])))
    return sorted(nodes, key=lambda node: -node.log_prob)


def passes_as_told(rows: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Leaves the drafter's mask and positions as they are."""
    return rows, positions


@torch.no_grad()
def ours(
    model: Any,
    builder: DynamicTree,
    states: torch.Tensor,
    tokens: list[int],
    cache: Cache,
    spoil: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] = passes_as_told,
) -> TokenTree:
    """The tree that our builder makes of the same drafter's logits; no state of ``model`` is kept.

    Args:
        model, states, tokens: as in :func:`theirs`.
        builder: for one request.
        cache: the model's cache before the round.
        spoil: may change the mask and the positions of every pass, to see that the comparison notices.
    """
    kept, top_k = model.stable_kv, builder.top_k
    known = torch.tensor([tokens[1:]])
    model.reset()
    seen = 0 if cache is None else cache[0][0].shape[2]
    hidden, cache = model(states, input_ids=known[:, seen:], past_key_values=cache, use_cache=True)
    beam = builder.start(*_choices(model, hidden[:, -1], top_k))
    hidden = hidden[:, -1:].expand(-1, top_k, -1)
    for level in range(2, builder.depth + 1):
        positions = torch.full((top_k,), known.shape[1] + level - 2)
        model.tree_mask, positions = spoil(_rows(beam.masks, (level - 1) * top_k), positions)
        hidden, cache = model(
            hidden, input_ids=beam.tokens, past_key_values=cache, position_ids=positions, use_cache=True
        )
        beam = builder.expand(level, *_choices(model, hidden, top_k))
        hidden = hidden[:, beam.parents[0].long()]
    out = TokenTree(
        torch.full((1, builder.num_nodes), -7777),
        torch.full((1, builder.num_nodes), -7777, dtype=torch.int32),
        torch.full((1, builder.num_nodes), float("nan")),
        torch.full((1,), -7777, dtype=torch.int32),
    )
    builder.finish(out)
    model.stable_kv = kept
    return out


def _choices(model: Any, hidden: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and target ids of the ``top_k`` likeliest children of each row."""
    log_probs, ids = model.lm_head(model.norm(hidden)).log_softmax(dim=-1).topk(top_k, dim=-1)
    return log_probs, ids + model.d2t[ids] if hasattr(model, "d2t") else ids


def _rows(masks: torch.Tensor, num_rows: int) -> torch.Tensor:
    """[1, 1, k, rows] of ones and zeros, from the words of a beam."""
    row = torch.arange(num_rows)
    return (masks[0][:, row // 32] >> (row % 32) & 1).float()[None, None]


def nodes_of(tree: TokenTree) -> list[Node]:
    """The live nodes of a batch of one, in order."""
    paths: list[tuple[int, ...]] = [()]
    for i in range(int(tree.sizes[0])):
        paths.append((*paths[int(tree.parents[0, i])], int(tree.tokens[0, i])))
    return [Node(path, float(p)) for path, p in zip(paths[1:], tree.log_probs[0].tolist(), strict=False)]


class Agreement(NamedTuple):
    """Outcome of a comparison, summed over rounds.

    Attributes:
        rounds: that were compared.
        equal: rounds whose trees have the same nodes with the same parents in the same order, and log-probabilities
            within ``TIE``.
        ties: rounds that differ first where the reference itself ranks two nodes within ``TIE``.
        nodes: of all trees of the reference.
        depth: of its deepest.
        largest_error: of the log-probabilities of equal nodes.
    """

    rounds: int = 0
    equal: int = 0
    ties: int = 0
    nodes: int = 0
    depth: int = 0
    largest_error: float = 0.0

    def __add__(self, other: "Agreement") -> "Agreement":  # type: ignore[override]
        sums = [a + b for a, b in zip(self[:4], other[:4], strict=True)]
        return Agreement(*sums, max(self.depth, other.depth), max(self.largest_error, other.largest_error))


def compare(mine: list[Node], reference: list[Node]) -> Agreement:
    """One round; what follows a tie is not compared."""
    base = Agreement(rounds=1, nodes=len(reference), depth=max(len(node.path) for node in reference))
    errors = [abs(a.log_prob - b.log_prob) for a, b in zip(mine, reference, strict=False) if a.path == b.path]
    base = base._replace(largest_error=max(errors, default=0.0))
    if [node.path for node in mine] == [node.path for node in reference]:
        return base._replace(equal=int(base.largest_error < TIE))
    for a, b in zip(mine, reference, strict=False):
        if a.path != b.path:
            where = {node.path: node.log_prob for node in reference}
            # A node that the reference left out can only tie with its last one.
            rival = where.get(a.path, reference[-1].log_prob)
            is_tie = abs(a.log_prob - b.log_prob) < TIE and abs(rival - b.log_prob) < TIE
            return base._replace(ties=int(is_tie and len(mine) == len(reference)))
    return base
