"""The tree builders as PyTorch operations over the whole batch, for machines on which kernels are interpreted.

Triton's interpreter takes tens of milliseconds for the program of every request; these take a few for all of them.
Recording drafts at every token (`crossspec collect`) is possible there through them. Arguments, outputs and ties are
those of the kernels, whose own truth is :mod:`vllm_crossspec.tree.naive`.
"""

import torch

from vllm_crossspec.ngram.lookup import EPSILON, look_up
from vllm_crossspec.tree import continuity
from vllm_crossspec.tree.dynamic import Beam, Grown
from vllm_crossspec.types import TokenTree

_NEVER = float("-inf")
_LARGEST = 3.0e38
_WORD_BITS = 32


def _as_log_prob(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > _NEVER, x.float().clamp(max=0.0), _NEVER)


def _falling(scores: torch.Tensor, count: int) -> torch.Tensor:
    """int64 [R, count] columns of the best scores [R, n]; of equal ones the earlier first."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]


def _write(out: TokenTree, tokens: torch.Tensor, parents: torch.Tensor, log_probs: torch.Tensor) -> None:
    """Nodes [R, n] into the first rows of ``out``; those that cannot be are dead."""
    num_reqs, num_nodes = tokens.shape
    for tensor, value in zip(out, (0, 0, _NEVER, 0), strict=True):
        tensor[:num_reqs] = value
    is_live = log_probs > _NEVER
    out.tokens[:num_reqs, :num_nodes] = tokens.masked_fill(~is_live, 0)
    out.parents[:num_reqs, :num_nodes] = parents.masked_fill(~is_live, 0).to(out.parents.dtype)
    out.log_probs[:num_reqs, :num_nodes] = log_probs
    out.sizes[:num_reqs] = is_live.sum(dim=1, dtype=out.sizes.dtype)


def _keep_best(
    log_probs: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    num_nodes: int,
    out: TokenTree,
    caps: torch.Tensor | None = None,
) -> None:
    """The best of all candidates [R, n], whose parents are candidates (-1 for the root), as trees.

    ``caps``, int32 [R], are the most nodes of each tree.
    """
    order = _falling(log_probs, log_probs.shape[1])
    places = torch.empty_like(order)
    places.scatter_(1, order, torch.arange(order.shape[1], device=order.device).expand_as(order))
    order = order[:, :num_nodes]
    rows = parents.gather(1, order)
    rows = torch.where(rows < 0, 0, places.gather(1, rows.clamp(min=0)) + 1)
    kept = log_probs.gather(1, order)
    if caps is not None:
        kept = kept.masked_fill(torch.arange(kept.shape[1], device=kept.device) >= caps[:, None], _NEVER)
    _write(out, tokens.gather(1, order), rows, kept)


def best_first(*, log_probs: torch.Tensor, tokens: torch.Tensor, num_nodes: int, out: TokenTree) -> None:
    """See :func:`vllm_crossspec.tree.best_first.best_first`."""
    num_reqs, num_positions, num_candidates = log_probs.shape
    scores, rows = _as_log_prob(log_probs), torch.arange(num_reqs, device=log_probs.device)
    # One column and one row more than there are candidates: nothing comes after the last ones.
    scores = torch.nn.functional.pad(scores, (0, 1, 0, 1), value=_NEVER)
    # The frontier: entry 0 is the root's first child, entry n + 1 the first child of node n.
    frontier = scores.new_full((num_reqs, num_nodes + 1), _NEVER)
    frontier[:, 0] = scores[:, 0, 0]
    position, rank = (torch.zeros(num_reqs, num_nodes + 1, dtype=torch.int64, device=rows.device) for _ in range(2))
    above = torch.zeros_like(frontier)
    nodes: list[tuple[torch.Tensor, ...]] = []
    for node in range(num_nodes):
        entry = _falling(frontier, 1)[:, 0]
        score, at, ranked = frontier[rows, entry], position[rows, entry], rank[rows, entry]
        nodes.append((at, ranked, entry, score))
        rank[rows, entry] = (ranked + 1).clamp(max=num_candidates)
        frontier[rows, entry] = torch.where(
            score > _NEVER, above[rows, entry] + scores[rows, at, rank[rows, entry]], _NEVER
        )
        deeper = (at + 1).clamp(max=num_positions)
        frontier[:, node + 1] = score + scores[rows, deeper, 0]
        position[:, node + 1], above[:, node + 1] = deeper, score
    positions, ranks, parents, found = (torch.stack(part, dim=1) for part in zip(*nodes, strict=True))
    last = (positions.clamp(max=num_positions - 1), ranks.clamp(max=num_candidates - 1))
    _write(out, tokens[rows[:, None], *last], parents, found)


class DynamicTree:
    """See :class:`vllm_crossspec.tree.dynamic.DynamicTree`."""

    def __init__(
        self, *, num_nodes: int, depth: int, top_k: int, max_num_reqs: int, device: torch.device, first_row: int = 0
    ):
        self.num_nodes, self.depth, self.top_k, self.first_row = num_nodes, depth, top_k, first_row
        self.mask_words = -(-(first_row + depth * top_k) // _WORD_BITS)
        self.limits = torch.full((max_num_reqs,), depth, dtype=torch.int32, device=device)
        self.caps = torch.full((max_num_reqs,), num_nodes, dtype=torch.int32, device=device)

    def start(self, log_probs: torch.Tensor, tokens: torch.Tensor) -> Beam:
        """See :meth:`vllm_crossspec.tree.dynamic.DynamicTree.start`."""
        num_reqs = log_probs.shape[0]
        # Candidates of all levels so far: log-probability, token, and parent as a candidate (-1 for the root).
        self._log_probs = torch.empty(num_reqs, 0, device=log_probs.device)
        self._tokens = torch.empty(num_reqs, 0, dtype=torch.int64, device=log_probs.device)
        self._parents = torch.empty(num_reqs, 0, dtype=torch.int64, device=log_probs.device)
        self._chosen = torch.full((num_reqs, 1), -1, dtype=torch.int64, device=log_probs.device)
        self._masks = torch.zeros(num_reqs, 1, self.mask_words, dtype=torch.int32, device=log_probs.device)
        self._masks[..., 0] = (1 << self.first_row) - 1
        self._beams: list[Beam] = []
        return self._take(1, log_probs[:, None], tokens[:, None])

    def expand(self, level: int, log_probs: torch.Tensor, tokens: torch.Tensor) -> Beam:
        """See :meth:`vllm_crossspec.tree.dynamic.DynamicTree.expand`."""
        return self._take(level, log_probs, tokens)

    def grown(self) -> Grown:
        """See :meth:`vllm_crossspec.tree.dynamic.DynamicTree.grown`."""
        parents, log_probs = (torch.stack(part) for part in list(zip(*self._beams, strict=True))[1:3])
        return Grown(self._log_probs, parents, log_probs)

    def resume(self, num_reqs: int, levels: int) -> Beam:
        """See :meth:`vllm_crossspec.tree.dynamic.DynamicTree.resume`."""
        assert (num_reqs, levels) == (len(self._tokens), len(self._beams))
        return self._beams[-1]

    def finish(self, out: TokenTree) -> None:
        """See :meth:`vllm_crossspec.tree.dynamic.DynamicTree.finish`."""
        caps = self.caps[: len(self._tokens)]
        _keep_best(self._log_probs, self._tokens, self._parents, self.num_nodes, out, caps)

    def _take(self, level: int, log_probs: torch.Tensor, tokens: torch.Tensor) -> Beam:
        num_reqs, k, first = log_probs.shape[0], self.top_k, self._tokens.shape[1]
        scores = _as_log_prob(log_probs)
        if level > 1:
            scores = self._log_probs.gather(1, self._chosen)[:, :, None] + scores
            scores = scores.masked_fill(self.limits[:num_reqs, None, None] < level, _NEVER)
        scores, tokens = scores.reshape(num_reqs, -1), tokens.reshape(num_reqs, -1)
        self._log_probs = torch.cat([self._log_probs, scores], dim=1)
        self._tokens = torch.cat([self._tokens, tokens], dim=1)
        self._parents = torch.cat([self._parents, self._chosen.repeat_interleave(k, dim=1)], dim=1)
        chosen = _falling(scores, k)
        self._chosen = first + chosen
        best, parents = scores.gather(1, chosen), chosen // k
        is_live = best > _NEVER
        parents = parents.masked_fill(~is_live, 0)
        self._masks = self._masks.gather(1, parents[:, :, None].expand(-1, -1, self.mask_words)).clone()
        own = self.first_row + (level - 1) * k + torch.arange(k, device=chosen.device)
        bits = torch.ones_like(own, dtype=torch.int32) << (own % _WORD_BITS).to(torch.int32)
        self._masks[:, torch.arange(k, device=own.device), own // _WORD_BITS] |= bits
        tokens = tokens.gather(1, chosen).masked_fill(~is_live, 0)
        self._beams.append(Beam(tokens, parents.to(torch.int32), best, self._masks))
        return self._beams[-1]


class ContinuityTree(continuity.ContinuityTree):
    """See :class:`vllm_crossspec.tree.continuity.ContinuityTree`."""

    def _make_buffers(self, max_num_reqs: int, device: torch.device) -> None:
        """Operations make their own."""

    def build(
        self, *, log_probs: torch.Tensor, tokens: torch.Tensor, contexts: torch.Tensor | None, out: TokenTree
    ) -> None:
        """See :meth:`vllm_crossspec.tree.continuity.ContinuityTree.build`."""
        (num_reqs, levels, count), device = log_probs.shape, log_probs.device
        weighted, is_stop = self._weigh(log_probs), torch.isin(tokens, self._stop_tokens)
        longest = self.store.order - 1 if self.store is not None else 0
        paths = contexts[:, None, contexts.shape[1] - longest :].long() if contexts is not None and longest else None
        above, beam = torch.zeros(num_reqs, 1, device=device), torch.full((num_reqs, 1), -1, device=device)
        scores, parents, drafted = [], [], []
        first = 0
        for level in range(levels):
            increments = weighted[:, level, None]
            if level and paths is not None:
                increments = increments + self._continuity(level, paths, tokens[:, level])
            found = (above[:, :, None] + increments).flatten(1)
            scores.append(found)
            parents.append(beam.repeat_interleave(count, dim=1))
            drafted.append(tokens[:, level].repeat(1, beam.shape[1]))
            is_open = ~is_stop[:, level].repeat(1, beam.shape[1])
            found = found.masked_fill(~is_open, _NEVER)
            chosen = _falling(found, self.beam_width)
            above, beam = found.gather(1, chosen), first + chosen
            if paths is not None:
                kept = paths.gather(1, (chosen // count)[:, :, None].expand(-1, -1, longest))
                paths = torch.cat([kept[:, :, 1:], drafted[-1].gather(1, chosen)[:, :, None]], dim=2)
            first += found.shape[1]
        _keep_best(torch.cat(scores, 1), torch.cat(drafted, 1), torch.cat(parents, 1), self.num_nodes, out)

    def _weigh(self, log_probs: torch.Tensor) -> torch.Tensor:
        """float32 [R, K, C]; in float64 on the way, as the kernel."""
        x = log_probs.double().clamp(max=_LARGEST)
        is_live = x > _NEVER
        if self.scoring.renormalises:
            share = x.masked_fill(~is_live, _NEVER).softmax(dim=2)
            x = (share + EPSILON).log()
        x = self._weights[: x.shape[1], None] * x.clamp(max=0.0)
        return torch.where(is_live, x, _NEVER).float()

    def _continuity(self, level: int, paths: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """float32 [R, beams, C], the level's n-gram term after paths [R, beams, L]."""
        assert self.store is not None
        shape = (*paths.shape[:2], tokens.shape[1])
        asked = tokens[:, None].expand(shape).reshape(-1, shape[2])
        found = look_up(self.store, paths.flatten(0, 1), asked, backoff=self.backoff).log_probs
        return (self.scoring.continuity_weight(level) * found).clamp(max=0.0).view(shape)
