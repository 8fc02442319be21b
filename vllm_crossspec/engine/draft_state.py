"""What the engine remembers of drafts between the round that proposes them and the step that verifies them."""

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_crossspec.engine.step import Step
from vllm_crossspec.tree.store import store_trees
from vllm_crossspec.types import NO_DRAFTS, TokenTree
from vllm_crossspec.verify.rows import prepare_rows


class DraftState:
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
        rows_per_node: rows of the step for every row that is verified; with 2 the second ones contemplate.

    Attributes:
        parents: int32 [S, N] row of each node's parent; chains until trees are stored.
        sizes: int32 [S] live nodes.
        modes: int32 [S] on the host, one of TREE, CHAIN, NO_DRAFTS (``types``); ``modes_on_device`` is its copy.
        row_mask: int32 [tokens, W] which tail rows each row of the step sees.
        prefix_len, num_live: int32 [S] of the step's requests.
        path: int32 [S, D + 1] accepted rows of the step's requests.
        num_sampled: int32 [S] their number.
        has_stopped: whether nothing is drafted any more, for nobody (:meth:`stop`).
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
        rows_per_node: int = 1,
    ):
        self.num_nodes, self.max_depth, self.num_soft = num_nodes, max_depth, num_soft
        self.contemplates = rows_per_node > 1
        self.num_rows = num_rows or num_nodes + 1
        self.num_words = -(-self.num_rows // 32) + -(-num_soft // 32)

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.parents = torch.arange(num_nodes, dtype=torch.int32, device=device).repeat(max_num_reqs, 1)
        self.sizes = torch.full((max_num_reqs,), num_nodes, dtype=torch.int32, device=device)
        self.modes = np.zeros(max_num_reqs, dtype=np.int32)
        self.modes_on_device = zeros(max_num_reqs)
        self.row_mask = zeros(max_num_tokens, self.num_words)
        self.prefix_len, self.num_live = zeros(max_num_reqs), zeros(max_num_reqs)
        self.path = zeros(max_num_reqs, max_depth + 1)
        self.num_sampled = zeros(max_num_reqs)
        self.has_stopped = False

    @property
    def num_bytes(self) -> int:
        """Device memory of all buffers."""
        return sum(t.nbytes for t in vars(self).values() if isinstance(t, torch.Tensor))

    def store(self, idx_mapping: torch.Tensor, tree: TokenTree, drafted_by: torch.Tensor, drafter: int) -> None:
        """Keep the trees of a round for the step that verifies them; requests that opted out get no live nodes.

        Args:
            idx_mapping: int [R] slot of each row; negative entries are padding.
            tree: of the round; its N may be smaller than this state's.
            drafted_by: int32 [S], written: ``drafter`` for the requests that did not opt out.
            drafter: number of the one that drafted.
        """
        store_trees(
            tree=tree,
            idx_mapping=idx_mapping,
            parents=self.parents,
            sizes=self.sizes,
            modes=self.modes_on_device,
            drafted_by=drafted_by,
            drafter=drafter,
            nothing=NO_DRAFTS,
        )

    def take_modes(self, stores_shapes: bool) -> None:
        """What requests let their drafter draft, of requests that are new: to the device.

        Args:
            stores_shapes: whether drafts are stored round by round; if not, all of them are alike.
        """
        # A copy of the host's array, for the next batch of new requests may change it before this one is through.
        async_tensor_h2d(self.modes.copy(), out=self.modes_on_device)
        if not stores_shapes:
            self.sizes.copy_((self.modes_on_device != NO_DRAFTS) * self.num_nodes)
        else:  # nothing may be drafted, and so stored, while all of a batch opted out
            self.sizes.masked_fill_(self.modes_on_device == NO_DRAFTS, 0)

    def stop(self) -> None:
        """From here on nothing is drafted, whatever requests let their drafter draft; what was drafted is forgotten."""
        self.has_stopped = True
        self.modes[:] = NO_DRAFTS
        self.take_modes(stores_shapes=True)

    def lay_out(self, step: Step, prefill_len: torch.Tensor) -> None:
        """Give the rows of the step's drafts the positions of their depths and the masks of their ancestors.

        Args:
            step: with drafts.
            prefill_len: int32 [S] of the runner's request states.
        """
        batch = step.batch
        prepare_rows(
            idx_mapping=batch.idx_mapping,
            query_start_loc=batch.query_start_loc,
            cu_rows=step.cu_rows,
            seq_lens=batch.seq_lens,
            prefill_len=prefill_len,
            parents=self.parents,
            sizes=self.sizes,
            positions=batch.positions,
            row_mask=self.row_mask,
            prefix_len=self.prefix_len,
            num_live=self.num_live,
            max_depth=self.max_depth,
            contemplates=self.contemplates,
            num_soft=self.num_soft,
        )
        # Requests that only pad a CUDA graph have no rows.
        self.prefix_len[batch.num_reqs : batch.num_reqs_after_padding].zero_()
