"""What the engine remembers of drafts between the round that proposes them and the step that verifies them."""

from typing import Any

import numpy as np
import torch

from vllm_crossspec.tree.store import store_trees
from vllm_crossspec.types import Sizing, TokenTree

TREE, CHAIN, NOTHING = 0, 1, 2
"""What a request lets its drafter draft."""


class TreeState:
    """Persistent device buffers, allocated once and written in place, so that CUDA graphs may hold their addresses.

    S request slots, N draft tokens of a request, D deepest level, W mask words of 32 rows each; behind them mask words
    of soft prompts, where there are any.

    Args:
        max_num_reqs: S.
        max_num_tokens: most target tokens of a step.
        num_nodes: N.
        max_depth: D.
        device: where they live.
        num_rows: most rows of a request in a step; None: the root and the nodes.
        num_soft: soft prompts that contemplate rows see (``contemplate.layout``).

    Attributes:
        parents: int32 [S, N] row of each node's parent; chains until trees are stored.
        sizes: int32 [S] live nodes.
        log_probs: float32 [S, N] the drafter's log-probability of each node's path; 0 for chains.
        phi: float32 [S] HeteroSpec's Phi of each tree as drafted, in nats; NaN where nobody computed it.
        depths: int32 [S] levels that the tree was grown to; 0 where Phi was not computed.
        widths: int32 [S] on the host, draft nodes of each slot's next verification; more than those are never live.
        modes: int32 [S] on the host, one of TREE, CHAIN, NOTHING; ``modes_on_device`` is its copy.
        row_mask: int32 [tokens, W] which tail rows each row of the step sees.
        prefix_len, num_live: int32 [S] of the step's requests.
        path: int32 [S, D + 1] accepted rows of the step's requests.
        out_tokens: int64 [S, D + 1] sampled tokens along the path.
        num_sampled: int32 [S] their number.
        cu_rows: int32 [R + 1] on the device, first row of each request of the step among all rows that the scheduler
            planned, where these are more than the rows with logits; else None.
    """

    def __init__(
        self,
        max_num_reqs: int,
        max_num_tokens: int,
        num_nodes: int,
        max_depth: int,
        device: torch.device,
        num_rows: int | None = None,
        num_soft: int = 0,
    ):
        self.num_nodes, self.max_depth, self.num_soft = num_nodes, max_depth, num_soft
        self.num_rows = num_rows or num_nodes + 1
        self.num_words = -(-self.num_rows // 32) + -(-num_soft // 32)
        self.cu_rows: torch.Tensor | None = None

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.parents = torch.arange(num_nodes, dtype=torch.int32, device=device).repeat(max_num_reqs, 1)
        self.sizes = torch.full((max_num_reqs,), num_nodes, dtype=torch.int32, device=device)
        self.log_probs = zeros(max_num_reqs, num_nodes, dtype=torch.float32)
        self.phi = torch.full((max_num_reqs,), float("nan"), dtype=torch.float32, device=device)
        self.depths = zeros(max_num_reqs)
        self.widths = np.full(max_num_reqs, num_nodes, dtype=np.int32)
        self.modes = np.zeros(max_num_reqs, dtype=np.int32)
        self.modes_on_device = zeros(max_num_reqs)
        self.row_mask = zeros(max_num_tokens, self.num_words)
        self.prefix_len, self.num_live = zeros(max_num_reqs), zeros(max_num_reqs)
        self.path = zeros(max_num_reqs, max_depth + 1)
        self.out_tokens = zeros(max_num_reqs, max_depth + 1, dtype=torch.int64)
        self.num_sampled = zeros(max_num_reqs)

    @property
    def num_bytes(self) -> int:
        """Device memory of all buffers."""
        return sum(t.nbytes for t in vars(self).values() if isinstance(t, torch.Tensor))

    def store(self, idx_mapping: torch.Tensor, tree: TokenTree) -> None:
        """Keep the trees of a round for the step that verifies them; requests that opted out get no live nodes.

        Args:
            idx_mapping: int [R] slot of each row; negative entries are padding.
            tree: of the round; its N may be smaller than this state's.
        """
        store_trees(
            tree=tree,
            idx_mapping=idx_mapping,
            parents=self.parents,
            sizes=self.sizes,
            log_probs=self.log_probs,
            modes=self.modes_on_device,
            nothing=NOTHING,
        )

    def note_sizing(self, batch: Any, sizing: Sizing | None, keeps_phi: bool) -> None:
        """Keep what the trees just stored were sized by; None for trees that all have the same size.

        Args:
            batch: vLLM's ``InputBatch`` of the round.
            sizing: of its trees.
            keeps_phi: whether anybody will read ``phi`` and ``depths``.
        """
        self.widths[batch.idx_mapping_np] = self.num_nodes if sizing is None else sizing.widths
        if sizing is not None and keeps_phi:
            self.phi[batch.idx_mapping] = sizing.phi
            self.depths[batch.idx_mapping] = sizing.depths
