"""The tree builders in plain PyTorch: the truth that the kernels are tested against.

Arguments, outputs and ties are those of the kernels. Sums are float32 and in the same order, so trees compare exactly.
"""

import math
from typing import NamedTuple

import torch

from vllm_crossspec.ngram.lookup import EPSILON
from vllm_crossspec.ngram.naive import look_up_level_naive
from vllm_crossspec.ngram.store import NgramStore
from vllm_crossspec.tree.continuity import Scoring
from vllm_crossspec.tree.dynamic import Beam
from vllm_crossspec.types import TokenTree

_NEVER = float("-inf")
_LARGEST = 3.0e38


def _as_log_prob(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > _NEVER, x.float().clamp(max=0.0), _NEVER)


def _clear(out: TokenTree, num_reqs: int) -> None:
    """All nodes of the first rows dead."""
    for tensor, value in zip(out, (0, 0, _NEVER, 0), strict=True):
        tensor[:num_reqs] = value


def chain(*, tokens: torch.Tensor, log_probs: torch.Tensor | None = None, out: TokenTree) -> None:
    """See :func:`vllm_crossspec.tree.chain.chain`."""
    num_reqs, num_drafted = tokens.shape
    _clear(out, num_reqs)
    out.tokens[:num_reqs, :num_drafted] = tokens
    out.parents[:num_reqs, :num_drafted] = torch.arange(num_drafted, dtype=torch.int32)
    own = torch.zeros(num_reqs, num_drafted) if log_probs is None else log_probs.float().clamp(max=0.0)
    out.log_probs[:num_reqs, :num_drafted] = own.cumsum(dim=1)
    out.sizes[:num_reqs] = num_drafted


def best_first(*, log_probs: torch.Tensor, tokens: torch.Tensor, num_nodes: int, out: TokenTree) -> None:
    """See :func:`vllm_crossspec.tree.best_first.best_first`."""
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


class DynamicTree:
    """See :class:`vllm_crossspec.tree.dynamic.DynamicTree`."""

    def __init__(
        self, *, num_nodes: int, depth: int, top_k: int, max_num_reqs: int, device: torch.device, first_row: int = 0
    ):
        self.num_nodes, self.depth, self.top_k, self.device = num_nodes, depth, top_k, device
        self.first_row = first_row
        self.mask_words = -(-(first_row + depth * top_k) // 32)

    def start(self, log_probs: torch.Tensor, tokens: torch.Tensor) -> Beam:
        """See :meth:`vllm_crossspec.tree.dynamic.DynamicTree.start`."""
        num_reqs = log_probs.shape[0]
        # Per request: log-probability, token and parent (a candidate, -1 for the root) of every candidate.
        self.log_probs: list[list[torch.Tensor]] = [[] for _ in range(num_reqs)]
        self.tokens: list[list[int]] = [[] for _ in range(num_reqs)]
        self.parents: list[list[int]] = [[] for _ in range(num_reqs)]
        self.beams: list[list[int]] = [[-1] for _ in range(num_reqs)]
        self.ancestors: list[list[set[int]]] = [[set(range(self.first_row))] for _ in range(num_reqs)]
        return self._take(1, log_probs[:, None], tokens[:, None])

    def expand(self, level: int, log_probs: torch.Tensor, tokens: torch.Tensor) -> Beam:
        """See :meth:`vllm_crossspec.tree.dynamic.DynamicTree.expand`."""
        return self._take(level, log_probs, tokens)

    def finish(self, out: TokenTree) -> None:
        """See :meth:`vllm_crossspec.tree.dynamic.DynamicTree.finish`."""
        _clear(out, len(self.tokens))
        for row, log_probs in enumerate(self.log_probs):
            live = [c for c in range(len(log_probs)) if float(log_probs[c]) > _NEVER]
            order = sorted(live, key=lambda c: (-float(log_probs[c]), c))
            place = {c: i + 1 for i, c in enumerate(order)} | {-1: 0}
            for node, c in enumerate(order[: self.num_nodes]):
                out.tokens[row, node] = self.tokens[row][c]
                out.parents[row, node], out.log_probs[row, node] = place[self.parents[row][c]], log_probs[c]
            out.sizes[row] = min(len(order), self.num_nodes)

    def _take(self, level: int, log_probs: torch.Tensor, tokens: torch.Tensor) -> Beam:
        num_reqs, k = log_probs.shape[0], self.top_k
        beam = Beam(
            torch.zeros(num_reqs, k, dtype=torch.int64),
            torch.zeros(num_reqs, k, dtype=torch.int32),
            torch.full((num_reqs, k), _NEVER),
            torch.zeros(num_reqs, k, self.mask_words, dtype=torch.int32),
        )
        for row in range(num_reqs):
            self._take_row(level, row, _as_log_prob(log_probs[row].cpu()), tokens[row].tolist(), beam)
        return Beam(*(tensor.to(self.device) for tensor in beam))

    def _take_row(self, level: int, row: int, scores: torch.Tensor, tokens: list[list[int]], beam: Beam) -> None:
        k, first = self.top_k, len(self.tokens[row])
        for place, parent in enumerate(self.beams[row]):
            above = torch.tensor(0.0) if parent < 0 else self.log_probs[row][parent]
            for i in range(k):
                self.log_probs[row].append(above + scores[place, i])
                self.tokens[row].append(tokens[place][i])
                self.parents[row].append(parent)
        fresh = range(first, len(self.tokens[row]))
        chosen = sorted(fresh, key=lambda c: (-float(self.log_probs[row][c]), c))[:k]
        before = self.ancestors[row]
        self.beams[row], self.ancestors[row] = chosen, []
        for j, c in enumerate(chosen):
            is_live = float(self.log_probs[row][c]) > _NEVER
            place = (c - first) // k if is_live else 0
            seen = before[place] | {self.first_row + (level - 1) * k + j}
            self.ancestors[row].append(seen)
            beam.tokens[row, j] = self.tokens[row][c] if is_live else 0
            beam.parents[row, j], beam.log_probs[row, j] = place, self.log_probs[row][c]
            for word in range(self.mask_words):
                bits = sum(1 << (i % 32) for i in seen if i // 32 == word)
                beam.masks[row, j, word] = bits - (1 << 32) if bits >= 1 << 31 else bits


def weigh(log_probs: list[float], level: int, scoring: Scoring) -> list[float]:
    """Of one position's candidates: logit_weight * level_weight * ln p, -inf where a candidate must not be drafted."""
    log_probs = [min(x, _LARGEST) if x > _NEVER else _NEVER for x in log_probs]
    live = [x for x in log_probs if x > _NEVER]
    total = math.fsum(math.exp(x - max(live)) for x in live)

    def one(x: float) -> float:
        if x == _NEVER:
            return _NEVER
        log_prob = math.log(math.exp(x - max(live)) / total + EPSILON) if scoring.renormalises else x
        return scoring.logit_weight(level) * min(log_prob, 0.0)

    return [one(x) for x in log_probs]


class _Node(NamedTuple):
    """A candidate of any level: float32 score, where it hangs (a candidate's number, -1 for the root), its path."""

    score: torch.Tensor
    parent: int
    path: tuple[int, ...]


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
    """See :class:`vllm_crossspec.tree.continuity.ContinuityTree`: the truth, one request and node at a time.

    ``scoring`` and what follows are the class's own arguments, the others those of its ``build``.
    """
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
                above = nodes[place] if place >= 0 else _Node(torch.tensor(0.0), -1, ())
                increments = torch.tensor(weighted)
                if level and store is not None:
                    context = torch.tensor((*before, *above.path))[None, None]
                    found, _ = look_up_level_naive(store, context, given[None, None], backoff=backoff)
                    increments = increments + (scoring.continuity_weight(level) * found[0, 0]).clamp(max=0.0)
                nodes += [
                    _Node(score, place, (*above.path, int(token)))
                    for score, token in zip(above.score + increments, given, strict=True)
                ]
            ranked = _live(nodes, range(first, len(nodes)))
            beam = [n for n in ranked if nodes[n].path[-1] not in stop_tokens][:beam_width]
        ranked = _live(nodes, range(len(nodes)))
        rows = {-1: 0} | {n: i + 1 for i, n in enumerate(ranked)}
        for i, n in enumerate(ranked[:num_nodes]):
            out.tokens[row, i], out.log_probs[row, i] = nodes[n].path[-1], nodes[n].score
            out.parents[row, i], out.sizes[row] = rows[nodes[n].parent], i + 1


def _live(nodes: list[_Node], among: range) -> list[int]:
    """Those that may be drafted, by falling score, the earlier first at ties."""
    scores = {n: float(nodes[n].score) for n in among}
    return sorted((n for n in among if scores[n] > _NEVER), key=lambda n: (-scores[n], n))


def to_chain(
    *,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    log_probs: torch.Tensor,
    sizes: torch.Tensor,
    chain_only: torch.Tensor,
    max_depth: int,
    idx_mapping: torch.Tensor | None = None,
) -> None:
    """See :func:`vllm_crossspec.tree.to_chain.to_chain`."""
    slots = range(tokens.shape[0]) if idx_mapping is None else idx_mapping.tolist()
    for row, slot in enumerate(slots):
        if slot < 0 or not chain_only[slot]:
            continue
        paths = [_path(parents[row], node + 1) for node in range(int(sizes[row]))]
        assert all(len(path) <= max_depth for path in paths)
        expected = [float(log_probs[row, path[::-1]].exp().sum()) for path in paths]
        path = paths[max(range(len(paths)), key=expected.__getitem__)] if paths else []
        drafted, scores = tokens[row, path].clone(), log_probs[row, path].clone()
        _clear(TokenTree(tokens[row:], parents[row:], log_probs[row:], sizes[row:]), 1)
        tokens[row, : len(path)], log_probs[row, : len(path)] = drafted, scores
        parents[row, : len(path)] = torch.arange(len(path), dtype=torch.int32)
        sizes[row] = len(path)


def _path(parents: torch.Tensor, row: int) -> list[int]:
    """Node numbers from the root's child down to ``row``'s."""
    path = []
    while row > 0:
        path.append(row - 1)
        row = int(parents[row - 1])
    return path[::-1]
