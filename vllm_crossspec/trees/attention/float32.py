"""Attention in float32 on a GPU, for comparing texts token for token, not for speed.

FlashAttention has no float32. vLLM's choice, its Triton attention, multiplies in TF32 unless ``TRITON_F32_DEFAULT`` is
``ieee``.
"""

from typing import Any

import torch

from vllm_crossspec.trees.verify.tail_attention import Softmax


def exact_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    out: torch.Tensor,
    metadata: Any,
    lengths: torch.Tensor,
    max_query_len: int,
    softmax: Softmax,
    causal: bool,
) -> torch.Tensor:
    """Attend to a paged cache as FlashAttention's varlen function does; a CUDA graph can hold it.

    Shapes: R requests, Hq and Hkv query and KV heads, Dh head size.

    Args:
        query: [rows, Hq, Dh].
        kv_cache: [blocks, Hkv, block_size, 2 * Dh].
        out: [rows, Hq, Dh], written; 0 if a row sees nothing.
        metadata: of the batch. Rows after the last request count as that request's, and ``block_table`` is clamped.
        lengths: int32 [R] keys of each request.
        max_query_len: most rows of a request.
        softmax: of the layer; without a causal mask a window reaches equally far to both sides.
        causal: whether a request's last row sees all keys, the row before it all except one, and so on.

    Returns:
        float32 [Hq, rows] log-sum-exp; -inf if a row sees nothing.
    """
    num_rows, num_heads, head_size = query.shape
    num_blocks, kv_heads, block_size, _ = kv_cache.shape
    num_reqs, device = lengths.shape[0], query.device
    first, last = metadata.query_start_loc[:num_reqs], metadata.query_start_loc[1 : num_reqs + 1]
    place = torch.arange(max_query_len, device=device)
    rows = (first[:, None] + place).clamp(max=num_rows - 1)
    blocks = metadata.block_table[:num_reqs, : -(-metadata.max_seq_len // block_size)].clamp(0, num_blocks - 1)
    grouped = (num_reqs, max_query_len, kv_heads, num_heads // kv_heads, head_size)
    q = query[rows].view(grouped).permute(0, 2, 3, 1, 4)  # [R, Hkv, group, rows of a request, Dh]
    halves = kv_cache.transpose(1, 2).split(head_size, dim=-1)
    k, v = (x[blocks].flatten(1, 2).transpose(1, 2)[:, :, None] for x in halves)  # [R, Hkv, 1, keys, Dh]

    key = torch.arange(k.shape[3], device=device)
    seen = (key < lengths[:, None])[:, None, :]
    position = (lengths[:, None] - (last - first)[:, None] + place)[:, :, None]  # of a row, among the keys
    if causal:
        seen = seen & (key <= position)
    if softmax.window:
        seen = seen & (key > position - softmax.window) & (key < position + softmax.window)
    # 0 times NaN is NaN. So values lose their NaNs, and the scores of rows that see such a value get them instead.
    flaws = (v * 0.0).sum(-1)
    v = v.where(v.isfinite(), 0.0)
    scores = q @ k.transpose(3, 4) * softmax.scale
    if softmax.soft_cap:
        scores = softmax.soft_cap * torch.tanh(scores / softmax.soft_cap)
    scores = (scores + flaws[..., None, :]).masked_fill(~seen[:, None, None], float("-inf"))
    lse = scores.logsumexp(-1)  # [R, Hkv, group, rows of a request]
    if softmax.sinks is not None:
        lse = torch.logaddexp(lse, softmax.sinks.to(lse.dtype).view(kv_heads, -1, 1))
    weights = (scores - lse.where(lse.isfinite(), 0.0)[..., None]).exp()

    row = torch.arange(num_rows, device=device, dtype=torch.int32)
    request = torch.searchsorted(last, row, right=True).clamp(max=num_reqs - 1)
    within = (row - first[request]).clamp(max=max_query_len - 1)
    out.copy_((weights @ v).permute(0, 3, 1, 2, 4)[request, within].view_as(out))
    return lse.permute(0, 3, 1, 2)[request, within].reshape(num_rows, num_heads).T
