"""The tree builders in plain PyTorch, against which the kernels are tested.

Sums are float32 and in the kernels' order, so trees compare exactly.
"""

import math
from typing import NamedTuple

import torch

from vllm_crossspec.kinds.scoring import Scoring
from vllm_crossspec.ngram_store.naive import look_up_level_naive
from vllm_crossspec.ngram_store.store import EPSILON, NgramStore
from vllm_crossspec.trees.builders.dynamic import Beam
from vllm_crossspec.trees.verify.naive import pack_bits
from vllm_crossspec.types import TokenTree

_NEVER = float("-inf")
_LARGEST = 3.0e38


def _as_log_prob(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > _NEVER, x.float().clamp(max=0.0), _NEVER)


def _clear(out: TokenTree, num_reqs: int) -> None:
    """Mark all nodes of the first rows as dead."""
    for tensor, value in zip(out, (0, 0, _NEVER, 0), strict=True):
        tensor[:num_reqs] = value


def chain(*, tokens: torch.Tensor, log_probs: torch.Tensor | None = None, out: TokenTree) -> None:
    """As ``chain``."""
    num_reqs, num_drafted = tokens.shape
    _clear(out, num_reqs)
    out.tokens[:num_reqs, :num_drafted] = tokens
    out.parents[:num_reqs, :num_drafted] = torch.arange(num_drafted, dtype=torch.int32)
    own = torch.zeros(num_reqs, num_drafted) if log_probs is None else log_probs.float().clamp(max=0.0)
    out.log_probs[:num_reqs, :num_drafted] = own.cumsum(dim=1)
    out.sizes[:num_reqs] = num_drafted


def best_first(*, log_probs: torch.Tensor, tokens: torch.Tensor, num_nodes: int, out: TokenTree) -> None:
    """As ``best_first``."""
    num_reqs, num_positions, num_candidates = log_probs.shape
    scores = _as_log_prob(log_probs)
    _clear(out, num_reqs)
    for row in range(num_reqs):
        # (score, position, rank, parent's row, parent's score); a list whose order is the age of its entries.
        frontier = [(scores[row, 0, 0], 0, 0, 0, torch.tensor(0.0))]
        for node in range(num_nodes):
            best = max(range(len(frontier)), key=lambda i: float(frontier[i][0]))
            score, position, rank, parent, above = frontier[best]
            if float(score) == _NEVER:
                break
            out.tokens[row, node] = tokens[row, position, rank]
            out.parents[row, node], out.log_probs[row, node], out.sizes[row] = parent, score, node + 1
            if rank + 1 < num_candidates:
                frontier[best] = (above + scores[row, position, rank + 1], position, rank + 1, parent, above)
            else:
                frontier[best] = (torch.tensor(_NEVER), position, rank, parent, above)
            if position + 1 < num_positions:
                frontier.append((score + scores[row, position + 1, 0], position + 1, 0, node + 1, score))


class _Node(NamedTuple):
    """A candidate of any level: float32 score, parent (a candidate's number, -1 for the root), and path."""

    score: torch.Tensor
    parent: int
    path: tuple[int, ...]


_ROOT = _Node(torch.tensor(0.0), -1, ())


def _children(above: _Node, place: int, increments: torch.Tensor, tokens: torch.Tensor) -> list[_Node]:
    """The children of the node with the number ``place``."""
    scores = above.score + increments
    return [_Node(score, place, (*above.path, int(token))) for score, token in zip(scores, tokens, strict=True)]


def _ranked(nodes: list[_Node], among: range) -> list[int]:
    """Nodes by falling score, the earlier first at ties."""
    return sorted(among, key=lambda n: (-float(nodes[n].score), n))


def _keep_best(nodes: list[_Node], num_nodes: int, row: int, out: TokenTree) -> None:
    """Write the best nodes that may be drafted as a tree."""
    ranked = [n for n in _ranked(nodes, range(len(nodes))) if float(nodes[n].score) > _NEVER]
    rows = {-1: 0} | {n: i + 1 for i, n in enumerate(ranked)}
    for i, n in enumerate(ranked[:num_nodes]):
        out.tokens[row, i], out.log_probs[row, i] = nodes[n].path[-1], nodes[n].score
        out.parents[row, i], out.sizes[row] = rows[nodes[n].parent], i + 1


class DynamicTree:
    """As ``DynamicTree``."""

    def __init__(
        self, *, num_nodes: int, depth: int, top_k: int, max_num_reqs: int, device: torch.device, first_row: int = 0
    ):
        self.num_nodes, self.top_k, self.device, self.first_row = num_nodes, top_k, device, first_row
        self.mask_words = -(-(first_row + depth * top_k) // 32)

    def start(self, log_probs: torch.Tensor, tokens: torch.Tensor) -> Beam:
        num_reqs = log_probs.shape[0]
        self.nodes: list[list[_Node]] = [[] for _ in range(num_reqs)]
        self.beams: list[list[int]] = [[-1] for _ in range(num_reqs)]
        self.ancestors: list[list[set[int]]] = [[set(range(self.first_row))] for _ in range(num_reqs)]
        return self.expand(1, log_probs[:, None], tokens[:, None])

    def expand(self, level: int, log_probs: torch.Tensor, tokens: torch.Tensor) -> Beam:
        num_reqs, k = log_probs.shape[0], self.top_k
        beam = Beam(
            torch.zeros(num_reqs, k, dtype=torch.int64),
            torch.zeros(num_reqs, k, dtype=torch.int32),
            torch.full((num_reqs, k), _NEVER),
            torch.zeros(num_reqs, k, self.mask_words, dtype=torch.int32),
        )
        for row in range(num_reqs):
            self._expand_row(level, row, _as_log_prob(log_probs[row].cpu()), tokens[row], beam)
        return Beam(*(tensor.to(self.device) for tensor in beam))

    def finish(self, out: TokenTree) -> None:
        _clear(out, len(self.nodes))
        for row, nodes in enumerate(self.nodes):
            _keep_best(nodes, self.num_nodes, row, out)

    def _expand_row(self, level: int, row: int, scores: torch.Tensor, tokens: torch.Tensor, beam: Beam) -> None:
        nodes, k, first, before = self.nodes[row], self.top_k, len(self.nodes[row]), self.ancestors[row]
        for place, parent in enumerate(self.beams[row]):
            nodes += _children(nodes[parent] if parent >= 0 else _ROOT, parent, scores[place], tokens[place])
        chosen = _ranked(nodes, range(first, len(nodes)))[:k]
        self.beams[row], self.ancestors[row] = chosen, []
        for j, c in enumerate(chosen):
            is_live = float(nodes[c].score) > _NEVER
            place = (c - first) // k if is_live else 0
            seen = before[place] | {self.first_row + (level - 1) * k + j}
            self.ancestors[row].append(seen)
            beam.tokens[row, j] = nodes[c].path[-1] if is_live else 0
            beam.parents[row, j], beam.log_probs[row, j] = place, nodes[c].score
            bits = torch.isin(torch.arange(32 * self.mask_words), torch.tensor([*seen]))
            beam.masks[row, j] = pack_bits(bits)


def weigh(log_probs: list[float], level: int, scoring: Scoring) -> list[float]:
    """logit_weight * level_weight * ln p of one position's candidates; -inf if one must not be drafted."""
    log_probs = [min(x, _LARGEST) if x > _NEVER else _NEVER for x in log_probs]
    live = [x for x in log_probs if x > _NEVER]
    total = math.fsum(math.exp(x - max(live)) for x in live)

    def one(x: float) -> float:
        if x == _NEVER:
            return _NEVER
        log_prob = math.log(math.exp(x - max(live)) / total + EPSILON) if scoring.renormalises else x
        return scoring.logit_weight(level) * min(log_prob, 0.0)

    return [one(x) for x in log_probs]


def continuity(
    *,
    log_probs: torch.Tensor,
    tokens: torch.Tensor,
    contexts: torch.Tensor | None,
    num_nodes: int,
    beam_width: int,
    scoring: Scoring,
    store: NgramStore | None,
    out: TokenTree,
    stop_tokens: tuple[int, ...] = (),
    backoff: float | None = None,
) -> None:
    """As ``ContinuityTree``; arguments are those of the class and of its ``build``."""
    _clear(out, log_probs.shape[0])
    store = store if scoring.ngram_weight else None
    for row in range(log_probs.shape[0]):
        before = tuple(contexts[row].tolist()) if contexts is not None else ()
        nodes: list[_Node] = []
        beam = [-1]
        for level, given in enumerate(tokens[row]):
            weighted = weigh(log_probs[row, level].tolist(), level, scoring)
            first = len(nodes)
            for place in beam:
                above = nodes[place] if place >= 0 else _ROOT
                increments = torch.tensor(weighted)
                if level and store is not None:
                    context = torch.tensor((*before, *above.path))[None, None]
                    found, _ = look_up_level_naive(store, context, given[None, None], backoff=backoff)
                    increments = increments + (scoring.continuity_weight(level) * found[0, 0]).clamp(max=0.0)
                nodes += _children(above, place, increments, given)
            ranked = _ranked(nodes, range(first, len(nodes)))
            beam = [n for n in ranked if float(nodes[n].score) > _NEVER and nodes[n].path[-1] not in stop_tokens][
                :beam_width
            ]
        _keep_best(nodes, num_nodes, row, out)


def to_chain(
    trees: TokenTree, chain_only: torch.Tensor, max_depth: int, idx_mapping: torch.Tensor | None = None
) -> None:
    """As ``to_chain``."""
    tokens, parents, log_probs, sizes = trees
    slots = range(tokens.shape[0]) if idx_mapping is None else idx_mapping.tolist()
    for row, slot in enumerate(slots):
        if slot < 0 or not chain_only[slot]:
            continue
        paths = [_path(parents[row], node + 1) for node in range(int(sizes[row]))]
        assert all(len(path) <= max_depth for path in paths)
        expected = [float(log_probs[row, path[::-1]].exp().sum()) for path in paths]
        path = paths[max(range(len(paths)), key=expected.__getitem__)] if paths else []
        drafted, scores = tokens[row, path].clone(), log_probs[row, path].clone()
        _clear(TokenTree(*(tensor[row:] for tensor in trees)), 1)
        tokens[row, : len(path)], log_probs[row, : len(path)] = drafted, scores
        parents[row, : len(path)] = torch.arange(len(path), dtype=torch.int32)
        sizes[row] = len(path)


def _path(parents: torch.Tensor, row: int) -> list[int]:
    """Node numbers of the path from the root's child to ``row``."""
    path = []
    while row > 0:
        path.append(row - 1)
        row = int(parents[row - 1])
    return path[::-1]
