"""What passes between the rooms: small tuples of tensors.

Shape legend: R requests of the batch, S request slots of the engine, T target tokens of the step, H hidden size,
K draft tokens of a request.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

TREE, CHAIN, NO_DRAFTS = 0, 1, 2
"""What a request lets its drafter draft."""
DEFAULT_DRAFT_TOKENS = 5
"""K where neither the user nor the drafter's checkpoint names one."""
FLOAT8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""Quantised KV caches that draft trees are verified over, by vLLM's names; one scale a layer or a KV head."""


class StepInputs(NamedTuple):
    """What the target's step left behind; all a proposer needs to draft the next tokens.

    Attributes:
        batch: vLLM's ``InputBatch`` of the step (positions, query boundaries, slots).
        attn_metadata, slot_mappings: the target's, by layer name; a drafter's first pass may use them.
        last_hidden_states: [T, H] final states of the target.
        tapped_hidden_states: the [T, H] states of this drafter's own target layers, ascending; None in profiling.
        num_sampled: int32 [R] tokens accepted in this step, the bonus token included; 0 inside a prompt.
        num_rejected: int32 [R] draft tokens of this step that were rejected.
        last_sampled: int64 [S] last sampled token of every slot.
        next_prefill_tokens: [1, S] next prompt token of every slot that is still inside its prompt.
        temperature, seeds: [S] sampling parameters of every slot.
        options: flags that only vLLM sets (dummy runs, data-parallel state); handed through unread.
        num_scheduled: draft tokens of a request that the scheduler wants of this round; None: as many as ever.
    """

    batch: Any
    attn_metadata: dict[str, Any] | None
    slot_mappings: dict[str, torch.Tensor] | None
    last_hidden_states: torch.Tensor
    tapped_hidden_states: list[torch.Tensor] | None
    num_sampled: torch.Tensor
    num_rejected: torch.Tensor
    last_sampled: torch.Tensor
    next_prefill_tokens: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor
    options: dict[str, Any]
    num_scheduled: int | None = None

    @property
    def is_dummy(self) -> bool:
        """Whether the requests are made up: for memory profiles, CUDA graphs or kernels."""
        return bool(self.options.get("dummy_run"))


class TokenTree(NamedTuple):
    """Draft trees of a batch: node i is row i + 1 of its request's verification, row 0 being the last sampled token.

    Nodes are ordered by falling path probability, so that every prefix of the list is a tree. N draft nodes.

    Attributes:
        tokens: int64 [R, N], token ids of the target's vocabulary; 0 past the live nodes.
        parents: int32 [R, N], row of each node's parent, smaller than the node's own row.
        log_probs: float32 [R, N], falling: the drafter's log-probability of the path from the root, or the score that
            the builder orders by in its place (``continuity``).
        sizes: int32 [R], live nodes.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    log_probs: torch.Tensor
    sizes: torch.Tensor

    @property
    def arguments(self) -> tuple[torch.Tensor | int, ...]:
        """What kernels take of the trees: the sizes, and before them each other tensor and the stride of its rows."""
        strided = (x for tensor in self[:3] for x in (tensor, tensor.stride(0)))
        return (*strided, self.sizes)


class AcceptedPaths(NamedTuple):
    """What a verified step accepted: of each request, rows of its own. Row 0 is the last sampled token.

    Attributes:
        query_start_loc: int32 [at least R + 1] first token row of each request.
        cu_rows: int32 [R + 1]; a request's verification rows are its last ones.
        num_sampled: int32 [at least R] length of each path, row 0 included; 0 inside a prompt.
        path: int32 [at least R, depth + 1] rows of the accepted path.
    """

    query_start_loc: torch.Tensor
    cu_rows: torch.Tensor
    num_sampled: torch.Tensor
    path: torch.Tensor


class Sizing(NamedTuple):
    """What a drafter whose trees differ in size gave each request of a batch (``adaptive``).

    Attributes:
        phi: float32 [R] on the device: what the trees were sized by, in nats; NaN for a tree cut short.
        depths: int32 [R] on the device: levels of each tree.
        bins: int64 [R] on the host: which bin each tree is in, the surest first.
        widths: int32 [R] on the host: the most nodes of each tree.
        extensions: int64 [R] on the host: levels of each tree beyond those of an ordinary one.
    """

    phi: torch.Tensor
    depths: torch.Tensor
    bins: npt.NDArray[np.int64]
    widths: npt.NDArray[np.int32]
    extensions: npt.NDArray[np.int64]


class Candidates(NamedTuple):
    """A drafter's answer for a round: a chain of every request, or a tree.

    Attributes:
        tokens: int64 [R, K] the chain, token ids of the target's vocabulary; None where there is a tree.
        tree: None where there is a chain.
        sizing: of the trees, where they differ in size; None where they do not.
    """

    tokens: torch.Tensor | None = None
    tree: TokenTree | None = None
    sizing: Sizing | None = None


class TargetFacts(NamedTuple):
    """What a drafter's checkpoint must agree with.

    Attributes:
        name: of the target, for messages.
        hidden_size: width of its states.
        vocab_size: of its output.
        num_layers: its decoder layers.
    """

    name: str
    hidden_size: int
    vocab_size: int
    num_layers: int


class DrafterFacts(NamedTuple):
    """What a drafter's checkpoint says of itself, whichever public format it is in.

    Attributes:
        target_hidden_size: width of the target states that it reads; None where it reads none, and taps no layer.
        vocab_size: of the token ids that it embeds.
        draft_vocab_size: of its own output.
        target_layers: target layers that it taps in vLLM's numbering (0 is the embedding's output, i the output of
            layer i), ascending.
        max_draft_tokens: most tokens that one draft may have; None where the drafter sets no bound.
        default_draft_tokens: K where the user names none.
        mask_token_id: the id that stands for "to be drafted"; None for an autoregressive drafter.
    """

    target_hidden_size: int | None
    vocab_size: int
    draft_vocab_size: int
    target_layers: tuple[int, ...]
    max_draft_tokens: int | None = None
    default_draft_tokens: int = DEFAULT_DRAFT_TOKENS
    mask_token_id: int | None = None


class Futures(NamedTuple):
    """What the target foresees of every request for its drafter (ConFu, section 3.1).

    Attributes:
        states: [S, H] by request slot.
        present: int32 [S] 1 where there is one.
    """

    states: torch.Tensor
    present: torch.Tensor
