"""The small tuples of tensors that modules exchange.

Shape legend: R requests of the batch, S request slots of the engine, T target tokens of the step, H hidden size,
K draft tokens of a request.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

TREE, CHAIN, NO_DRAFTS = 0, 1, 2
"""The kind of drafts that a request allows."""
DEFAULT_DRAFT_TOKENS = 5
"""K if neither the user nor the drafter's checkpoint sets one."""
FLOAT8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""Types of quantised KV caches that draft trees support, by vLLM's names; one scale per layer or KV head."""


class StepInputs(NamedTuple):
    """The result of a target's step: everything a proposer needs to draft the next tokens.

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
        num_scheduled: draft tokens per request that the scheduler wants from this round; None: the usual number.
        num_drafts: draft tokens per request that this drafter should draft; None: its usual number.
        is_dummy: whether the requests are made up, for memory profiles, CUDA graphs or kernels.
        skips_attention: whether a dummy round skips attention, because there is no KV cache yet.
        is_profile: whether vLLM measures memory with this round.
        dp_sync: vLLM's agreement of the data-parallel ranks for this step; None without data parallelism.
        mm_inputs: vLLM's embeddings of images and other media; None without any.
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
    num_scheduled: int | None = None
    num_drafts: int | None = None
    is_dummy: bool = False
    skips_attention: bool = False
    is_profile: bool = False
    dp_sync: Any = None
    mm_inputs: Any = None


class TreeArguments(NamedTuple):
    """A :class:`TokenTree` as kernels take it."""

    tokens: torch.Tensor  # int64 [R, width]
    tokens_stride: int
    parents: torch.Tensor  # int32 [R, width]
    parents_stride: int
    log_probs: torch.Tensor  # float32 [R, width]
    log_probs_stride: int
    sizes: torch.Tensor  # int32 [R]


class TokenTree(NamedTuple):
    """Draft trees of a batch: node i is row i + 1 of its request's verification; row 0 is the last sampled token.

    Nodes are ordered by falling path probability, so every prefix of the list is a tree. N draft nodes.

    Attributes:
        tokens: int64 [R, N], token ids of the target's vocabulary; 0 past the live nodes.
        parents: int32 [R, N], row of each node's parent, smaller than the node's own row.
        log_probs: float32 [R, N], falling: the drafter's log-probability of the path from the root, or the builder's
            score (``continuity``).
        sizes: int32 [R], live nodes.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    log_probs: torch.Tensor
    sizes: torch.Tensor

    @property
    def arguments(self) -> TreeArguments:
        """The trees as kernel arguments."""
        return TreeArguments._make([x for tensor in self[:3] for x in (tensor, tensor.stride(0))] + [self.sizes])


class AcceptedPaths(NamedTuple):
    """The accepted rows of each request in a verified step; row 0 is the last sampled token.

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
    """The sizes that a drafter chose for the trees of a batch (``adaptive``).

    Attributes:
        phi: float32 [R] on the device: the uncertainty that sized each tree, nats; NaN for a tree cut short.
        depths: int32 [R] on the device: levels of each tree.
        bins: int64 [R] on the host: each tree's bin; bin 0 is the most certain.
        widths: int32 [R] on the host: most nodes of each tree.
        extensions: int64 [R] on the host: levels of each tree beyond an ordinary one's.
    """

    phi: torch.Tensor
    depths: torch.Tensor
    bins: npt.NDArray[np.int64]
    widths: npt.NDArray[np.int32]
    extensions: npt.NDArray[np.int64]


class Candidates(NamedTuple):
    """A drafter's drafts of a round: a chain per request (int64 [R, K] target token ids), or trees.

    ``sizing`` belongs to trees that differ in size.
    """

    tokens: torch.Tensor | None = None
    tree: TokenTree | None = None
    sizing: Sizing | None = None


class TargetFacts(NamedTuple):
    """Facts of the target that a drafter's checkpoint must fit; the name is for messages."""

    name: str
    hidden_size: int
    vocab_size: int
    num_layers: int


class DrafterFacts(NamedTuple):
    """Facts of a drafter's checkpoint, in any public format.

    Attributes:
        target_hidden_size: width of the target states that it reads; None if it taps no layer.
        vocab_size: of the token ids that it embeds.
        draft_vocab_size: of its own output.
        target_layers: tapped target layers, ascending, in vLLM's numbering (0: the embedding's output, i: layer i's).
        max_draft_tokens: most tokens of one draft; None without a bound.
        default_draft_tokens: K if the user sets none.
        mask_token_id: the id of a token to be drafted; None for an autoregressive drafter.
        overrides: values that vLLM gets instead of those in config.json, by name.
    """

    target_hidden_size: int | None
    vocab_size: int
    draft_vocab_size: int
    target_layers: tuple[int, ...]
    max_draft_tokens: int | None = None
    default_draft_tokens: int = DEFAULT_DRAFT_TOKENS
    mask_token_id: int | None = None
    overrides: Mapping[str, int] = MappingProxyType({})


class Futures(NamedTuple):
    """The target's future state of every slot, for ConFu's drafter (Qin et al. 2026, section 3.1).

    Attributes:
        states: [S, H].
        present: int32 [S] 1 if the slot has one.
    """

    states: torch.Tensor
    present: torch.Tensor
