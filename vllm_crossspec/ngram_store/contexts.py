"""The texts of a batch's requests, and the last tokens of each as lookups want them; one launch for a batch."""

# mypy: disable-error-code="no-untyped-def"
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl


class Texts(NamedTuple):
    """The texts of a batch's requests.

    Attributes:
        idx_mapping: int [R] slot of each request; negative entries are padding.
        num_computed: int32 [S] tokens in the target's cache, this step's accepted ones included; one more is known.
        all_token_ids: int32 [S, L] prompt and accepted tokens.
    """

    idx_mapping: torch.Tensor
    num_computed: torch.Tensor
    all_token_ids: torch.Tensor

    @property
    def arguments(self) -> tuple[torch.Tensor | int, ...]:
        """What kernels take of them: the first arguments of :func:`text_of`."""
        return *self, self.all_token_ids.stride(0), self.all_token_ids.shape[1] - 1


def texts_of(batch: Any, req_states: Any) -> Texts:
    """Those of vLLM's batch."""
    slots = batch.idx_mapping[: batch.num_reqs]
    return Texts(slots, req_states.num_computed_tokens.gpu, req_states.all_token_ids.gpu)


@triton.jit
def text_of(idx_mapping_ptr, num_computed_ptr, all_token_ids_ptr, stride, last_position):
    """A request's text, and the position of its last known token, which is not computed yet; -1 for padding."""
    slot = tl.load(idx_mapping_ptr + tl.program_id(0)).to(tl.int64)
    newest = tl.minimum(tl.load(num_computed_ptr + tl.maximum(slot, 0)), last_position)
    return all_token_ids_ptr + tl.maximum(slot, 0) * stride, tl.where(slot >= 0, newest, -1)


@triton.jit
def _last_tokens_kernel(
    idx_mapping_ptr,
    num_computed_ptr,
    all_token_ids_ptr,
    all_token_ids_stride,
    last_position,
    contexts_ptr,  # int64 [R, W] out
    contexts_stride,
    width,
    BLOCK: tl.constexpr,
):
    text, newest = text_of(idx_mapping_ptr, num_computed_ptr, all_token_ids_ptr, all_token_ids_stride, last_position)
    request = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    position = newest - (width - 1) + place
    token = tl.load(text + position, mask=(place < width) & (position >= 0), other=-1).to(tl.int64)
    tl.store(contexts_ptr + request * contexts_stride + place, token, mask=place < width)


def last_tokens(texts: Texts, contexts: torch.Tensor) -> None:
    """The last known tokens of every request into ``contexts``, int64 [R, W].

    The latest comes last; -1 before the beginning and for padding.
    """
    (num_reqs, width), block = contexts.shape, triton.next_power_of_2(contexts.shape[1])
    _last_tokens_kernel[(num_reqs,)](*texts.arguments, contexts, contexts.stride(0), width, BLOCK=block, num_warps=1)
