"""Attention in float32 on a GPU, where FlashAttention has none: for comparing texts token for token, not for speed.

vLLM's own choice for float32, its Triton attention, multiplies in TF32 unless ``TRITON_F32_DEFAULT`` says ``ieee``.
"""

import torch

from vllm_crossspec.verify.tail_attention import Softmax


def exact_attention(
    *,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    query_start_loc: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    max_query_len: int,
    max_length: int,
    softmax: Softmax,
    causal: bool,
) -> torch.Tensor:
    """Attend to a paged cache as FlashAttention's function of ragged batches does; a CUDA graph can hold it.

    Shapes: R requests, Hq and Hkv query and KV heads, Dh head size.

    Args:
        query: [rows, Hq, Dh].
        keys: [blocks, block_size, Hkv, Dh].
        values: likewise.
        out: [rows, Hq, Dh], written; 0 where a row sees nothing.
        query_start_loc: int32 [R + 1] first row of each request; rows after the last one's are the last request's.
        lengths: int32 [R] keys of each request.
        block_table: int32 [R, max_blocks]; what is out of range is not trusted with an address.
        max_query_len: most rows of a request.
        max_length: most keys of a request.
        softmax: of the layer; of a window without a causal mask a row sees as much behind itself as before.
        causal: whether a request's last row sees all its keys, the row before it all but one, and so on.

    Returns:
        float32 [Hq, rows] log-sum-exp; -inf where a row sees nothing.
    """
    num_rows, num_heads, head_size = query.shape
    block_size, kv_heads = keys.shape[1], keys.shape[2]
    num_reqs, device = lengths.shape[0], query.device
    first, last = query_start_loc[:-1], query_start_loc[1:]
    place = torch.arange(max_query_len, device=device)
    rows = (first[:, None] + place).clamp(max=num_rows - 1)
    blocks = block_table[:, : -(-max_length // block_size)].clamp(0, keys.shape[0] - 1)
    grouped = (num_reqs, max_query_len, kv_heads, num_heads // kv_heads, head_size)
    q = query[rows].view(grouped).permute(0, 2, 3, 1, 4)  # [R, Hkv, group, rows of a request, Dh]
    k, v = (x[blocks].flatten(1, 2).transpose(1, 2)[:, :, None] for x in (keys, values))  # [R, Hkv, 1, keys, Dh]

    key = torch.arange(k.shape[3], device=device)
    seen = (key < lengths[:, None])[:, None, :]
    position = (lengths[:, None] - (last - first)[:, None] + place)[:, :, None]  # of a row, among the keys
    if causal:
        seen = seen & (key <= position)
    if softmax.window:
        seen = seen & (key > position - softmax.window) & (key < position + softmax.window)
    # What no row sees may be anything, NaN included.
    v = v.where(seen.any(1)[:, None, None, :, None], 0.0)
    scores = q @ k.transpose(3, 4) * softmax.scale
    if softmax.soft_cap:
        scores = softmax.soft_cap * torch.tanh(scores / softmax.soft_cap)
    scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    lse = scores.logsumexp(-1)  # [R, Hkv, group, rows of a request]
    if softmax.sinks is not None:
        lse = torch.logaddexp(lse, softmax.sinks.to(lse.dtype).view(kv_heads, -1, 1))
    weights = (scores - lse.where(lse.isfinite(), 0.0)[..., None]).exp()

    row = torch.arange(num_rows, device=device, dtype=torch.int32)
    request = torch.searchsorted(last, row, right=True).clamp(max=num_reqs - 1)
    within = (row - first[request]).clamp(max=max_query_len - 1)
    out.copy_((weights @ v).permute(0, 3, 1, 2, 4)[request, within].view_as(out))
    return lse.permute(0, 3, 1, 2)[request, within].reshape(num_rows, num_heads).T
