"""Drafts of a round, kept for the step that verifies them."""

from typing import Any

import torch

from vllm_crossspec.config.schema import CrossSpecConfig
from vllm_crossspec.drafting.proposer import empty_tree, first_rows
from vllm_crossspec.metrics.counters import AcceptanceCounters
from vllm_crossspec.trees.builders.chain import chain, to_chain
from vllm_crossspec.trees.draft_state import DraftState
from vllm_crossspec.types import CHAIN, Candidates


class KeptDrafts:
    """Draft tokens as vLLM's scheduler plans them, and the drafts' shapes if they can differ.

    Several drafters, or trees, change a slot's shape from round to round; a single drafter of chains does not.

    Attributes:
        stores_shapes: whether shapes are stored in every round.
        state: the store of shapes; None with vLLM's own verification, which takes chains only.
    """

    def __init__(
        self, settings: CrossSpecConfig, max_num_reqs: int, device: torch.device, counters: AcceptanceCounters
    ):
        self.num_nodes, self.counters = settings.num_nodes, counters
        self.stores_shapes = settings.verification == "match" and (settings.has_trees or len(settings.drafters) > 1)
        self.state: DraftState | None = None
        self.padded = torch.zeros(max_num_reqs, self.num_nodes, dtype=torch.int64, device=device)
        self.planned = torch.zeros(max_num_reqs, settings.planned(self.num_nodes), dtype=torch.int64, device=device)
        self._no_drafts = torch.zeros_like(self.planned)
        if self.stores_shapes:
            self._chains = empty_tree(max_num_reqs, self.num_nodes, device)

    def keep(self, drafted: Candidates, batch: Any, drafter: int | None) -> torch.Tensor:
        """Keep the drafts of a batch and the drafter's number; return int64 [R, N] draft tokens.

        ``drafter`` None means a dummy batch: nothing is stored, but every kernel that changes drafts runs.
        """
        tree, state = drafted.tree, self.state
        if drafter is not None and (not self.stores_shapes or state is None):
            self.counters.mark_drafted(batch.idx_mapping, drafter)
        if not self.stores_shapes:
            assert drafted.tokens is not None
            return self._pad(drafted.tokens)
        if tree is None:
            chain(tokens=drafted.tokens, out=self._chains)
            tree = first_rows(self._chains, batch.num_reqs)
        if state is None:
            return tree.tokens
        # A dummy run compiles the kernel, so that the first request for a chain need not wait.
        if drafter is None or (state.modes[batch.idx_mapping_np] == CHAIN).any():
            to_chain(tree, state.modes_on_device, state.max_depth, batch.idx_mapping)
        if drafter is not None:
            state.store(batch.idx_mapping, tree, self.counters.drafted_by, drafter)
        return tree.tokens

    def plan(self, tokens: torch.Tensor) -> torch.Tensor:
        """The draft tokens [R, N] as the scheduler plans them, followed by rows that are not drafts."""
        if self.planned.shape[1] == tokens.shape[1]:
            return tokens
        num_reqs, num_tokens = tokens.shape
        # The other columns are written in every round, because vLLM puts -1 there when it plans fewer.
        parts = (tokens, self._no_drafts[:num_reqs, num_tokens:])
        return torch.cat(parts, dim=1, out=self.planned[:num_reqs])

    def nothing(self, num_reqs: int, num_scheduled: int | None) -> torch.Tensor:
        """The plan of a round without drafts; the scheduler may have planned rows, whose tokens must be valid."""
        return self.planned[:num_reqs].fill_(-1 if num_scheduled == 0 else 0)

    def _pad(self, tokens: torch.Tensor) -> torch.Tensor:
        """Pad [R, k] to [R, N] with each row's last token: the embedding reads padding, so it must be valid."""
        num_reqs, width = tokens.shape
        if width == self.num_nodes:
            return tokens
        padded = self.padded[:num_reqs]
        padded[:, :width] = tokens
        padded[:, width:] = tokens[:, -1:]
        return padded
