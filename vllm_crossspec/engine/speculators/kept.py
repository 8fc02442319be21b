"""What is kept of a round's drafts for the step that verifies them."""

from typing import Any

import torch

from vllm_crossspec.config import CrossSpecConfig
from vllm_crossspec.engine.draft_state import DraftState
from vllm_crossspec.engine.proposers.base import empty_tree, first_rows
from vllm_crossspec.metrics.counters import AcceptanceCounters
from vllm_crossspec.tree.chain import chain
from vllm_crossspec.tree.to_chain import to_chain
from vllm_crossspec.types import CHAIN, Candidates


class KeptDrafts:
    """Draft tokens as vLLM's scheduler plans them, and the drafts' shapes where they may differ.

    Several drafters, or trees, change a slot's shape from round to round; one drafter of chains never does.

    Args:
        settings: of the engine, resolved.
        max_num_reqs: most requests of a batch.
        device: of the drafts.
        counters: which are told who drafted for whom.

    Attributes:
        stores_shapes: whether shapes are stored round by round.
        state: where they are stored; None where vLLM's own verification runs, which knows chains alone.
    """

    def __init__(
        self, settings: CrossSpecConfig, max_num_reqs: int, device: torch.device, counters: AcceptanceCounters
    ):
        assert settings.num_speculative_tokens is not None
        self.num_nodes, self.counters = settings.num_speculative_tokens, counters
        self.stores_shapes = settings.verification == "match" and (settings.has_trees or len(settings.drafters) > 1)
        self.state: DraftState | None = None
        self.padded = torch.zeros(max_num_reqs, self.num_nodes, dtype=torch.int64, device=device)
        self.planned = torch.zeros(max_num_reqs, settings.planned(self.num_nodes), dtype=torch.int64, device=device)
        self._no_drafts = torch.zeros_like(self.planned)
        if self.stores_shapes:
            self._chains = empty_tree(max_num_reqs, self.num_nodes, device)

    def keep(self, drafted: Candidates, batch: Any, drafter: int | None) -> torch.Tensor:
        """Keep the drafts of a batch, and who made them.

        Args:
            drafted: of its requests, in its order.
            batch: vLLM's.
            drafter: number of the one that drafted; None where the requests are made up: nothing is stored then, but
                every kernel that changes the drafts has run.

        Returns:
            int64 [R, N] draft tokens.
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
        # A dummy run compiles the kernel, which the first request for a chain would otherwise wait for.
        if drafter is None or (state.modes[batch.idx_mapping_np] == CHAIN).any():
            to_chain(
                tokens=tree.tokens,
                parents=tree.parents,
                log_probs=tree.log_probs,
                sizes=tree.sizes,
                chain_only=state.modes_on_device,
                max_depth=state.max_depth,
                idx_mapping=batch.idx_mapping,
            )
        if drafter is not None:
            state.store(batch.idx_mapping, tree, self.counters.drafted_by, drafter)
        return tree.tokens

    def plan(self, tokens: torch.Tensor) -> torch.Tensor:
        """The draft tokens [R, N] as the scheduler plans them: rows that are no drafts follow, whatever their ids."""
        if self.planned.shape[1] == tokens.shape[1]:
            return tokens
        num_reqs, num_tokens = tokens.shape
        # The others are written in every round, for vLLM puts -1 where it plans fewer.
        parts = (tokens, self._no_drafts[:num_reqs, num_tokens:])
        return torch.cat(parts, dim=1, out=self.planned[:num_reqs])

    def nothing(self, num_reqs: int, num_scheduled: int | None) -> torch.Tensor:
        """The plan of a round in which nobody drafts.

        The scheduler may have planned rows all the same (``engine.scheduler``), whose tokens must be valid.
        """
        return self.planned[:num_reqs].fill_(-1 if num_scheduled == 0 else 0)

    def _pad(self, tokens: torch.Tensor) -> torch.Tensor:
        """Bring [R, k] to [R, N] with each row's last token: padding goes through the embedding and must be valid."""
        num_reqs, width = tokens.shape
        if width == self.num_nodes:
            return tokens
        padded = self.padded[:num_reqs]
        padded[:, :width] = tokens
        padded[:, width:] = tokens[:, -1:]
        return padded
