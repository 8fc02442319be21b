"""State of drafts between the round that proposes them and the step that verifies them."""

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_crossspec.step.step import Step
from vllm_crossspec.trees.builders.store import store_trees
from vllm_crossspec.trees.verify.rows import StepRows, prepare_rows
from vllm_crossspec.types import NO_DRAFTS, TokenTree


class DraftState:
    """Persistent device buffers, written in place, so that CUDA graphs can hold their addresses.

    S request slots (``max_num_reqs``), N draft tokens of a request (``num_nodes``), D deepest level (``max_depth``), W
    mask words of 32 rows each, followed by mask words of soft prompts, if any.

    Args:
        max_num_tokens: most target tokens of a step.
        num_rows: most rows of a request in a step; None: the root and the nodes.
        num_soft: soft prompts that contemplate rows see (``kinds.contemplate_layout``).
        rows_per_node: rows of the step per verified row; 2 adds contemplate rows.
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

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        # [S, N] row of each node's parent; chains until trees are stored
        self.parents = torch.arange(num_nodes, dtype=torch.int32, device=device).repeat(max_num_reqs, 1)
        self.sizes = torch.full((max_num_reqs,), num_nodes, dtype=torch.int32, device=device)  # [S] live nodes
        # [S] on the host, one of TREE, CHAIN, NO_DRAFTS (``types``), and its copy
        self.modes, self.modes_on_device = np.zeros(max_num_reqs, dtype=np.int32), zeros(max_num_reqs)
        self.row_mask = zeros(max_num_tokens, self.num_words)  # which tail rows each row of the step sees
        self.prefix_len, self.num_live = zeros(max_num_reqs), zeros(max_num_reqs)  # of the step's requests
        # [S, D + 1] accepted rows of the step's requests, as many as ``Step.num_sampled`` says
        self.path = zeros(max_num_reqs, max_depth + 1)
        self.has_stopped = False  # whether drafting has stopped for all requests (:meth:`stop`)

    @property
    def num_bytes(self) -> int:
        """Device memory of all buffers."""
        return sum(t.nbytes for t in vars(self).values() if isinstance(t, torch.Tensor))

    def store(self, idx_mapping: torch.Tensor, tree: TokenTree, drafted_by: torch.Tensor, drafter: int) -> None:
        """Keep the trees of a round for the step that verifies them; arguments as in ``store_trees``."""
        store_trees(tree, idx_mapping, self.parents, self.sizes, self.modes_on_device, drafted_by, drafter)

    def take_modes(self, stores_shapes: bool) -> None:
        """Copy the requests' modes to the device; without ``stores_shapes`` all drafts have the same shape."""
        # From a copy of the host's array, which new requests may change before the transfer is done.
        async_tensor_h2d(self.modes.copy(), out=self.modes_on_device)
        if not stores_shapes:
            self.sizes.copy_((self.modes_on_device != NO_DRAFTS) * self.num_nodes)
        else:  # a round stores nothing if the whole batch opted out
            self.sizes.masked_fill_(self.modes_on_device == NO_DRAFTS, 0)

    def stop(self) -> None:
        """Stop drafting for all requests, and drop the current drafts."""
        self.has_stopped = True
        self.modes[:] = NO_DRAFTS
        self.take_modes(stores_shapes=True)

    def lay_out(self, step: Step, prefill_len: torch.Tensor) -> None:
        """Write the positions and ancestor masks of the step's draft rows; ``prefill_len`` is int32 [S]."""
        batch = step.batch
        rows = StepRows(
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
        prepare_rows(rows)
        # Requests that only pad a CUDA graph have no rows.
        self.prefix_len[batch.num_reqs : batch.num_reqs_after_padding].zero_()
