"""Commit in plain PyTorch: the truth that the kernels are tested against. Arguments are the kernels'."""

from collections.abc import Sequence

import torch


def _moves(
    query_start_loc: torch.Tensor, cu_num_logits: torch.Tensor, num_sampled: torch.Tensor, path: torch.Tensor
) -> list[tuple[int, int]]:
    """Token rows (from, to) of all requests, in an order in which they may be done one by one."""
    moves = []
    for request in range(cu_num_logits.shape[0] - 1):
        num_logits = int(cu_num_logits[request + 1] - cu_num_logits[request])
        first = int(query_start_loc[request + 1]) - num_logits
        for k in range(1, int(num_sampled[request])):
            source = int(path[request, k])
            if source != k:
                moves.append((first + source, first + k))
    return moves


def compact_kv(
    caches: Sequence[tuple[torch.Tensor, int]],
    *,
    query_start_loc: torch.Tensor,
    cu_num_logits: torch.Tensor,
    num_sampled: torch.Tensor,
    path: torch.Tensor,
    slot_mappings: torch.Tensor,
) -> None:
    """See :func:`vllm_crossspec.kv_compaction.kernels.compact_kv`; takes what ``make_kv_layers`` takes."""
    moves = _moves(query_start_loc, cu_num_logits, num_sampled, path)
    for cache, group in {cache.data_ptr(): (cache, group) for cache, group in caches}.values():
        block_size = cache.shape[2]
        for source, target in moves:
            read, write = int(slot_mappings[group, source]), int(slot_mappings[group, target])
            if read >= 0 and write >= 0:
                content = cache[read // block_size, :, read % block_size]
                cache[write // block_size, :, write % block_size] = content


def compact_rows(
    tensors: Sequence[torch.Tensor],
    *,
    query_start_loc: torch.Tensor,
    cu_num_logits: torch.Tensor,
    num_sampled: torch.Tensor,
    path: torch.Tensor,
) -> None:
    """See :func:`vllm_crossspec.kv_compaction.kernels.compact_rows`."""
    for source, target in _moves(query_start_loc, cu_num_logits, num_sampled, path):
        for tensor in tensors:
            tensor[target] = tensor[source]


def restore_rows(
    *,
    query_start_loc: torch.Tensor,
    cu_num_logits: torch.Tensor,
    num_sampled: torch.Tensor,
    path: torch.Tensor,
    positions: torch.Tensor,
    input_ids: torch.Tensor,
    seq_lens: torch.Tensor,
) -> None:
    """See :func:`vllm_crossspec.kv_compaction.kernels.restore_rows`."""
    for source, target in _moves(query_start_loc, cu_num_logits, num_sampled, path):
        input_ids[target] = input_ids[source]
    for request in range(cu_num_logits.shape[0] - 1):
        num_logits = int(cu_num_logits[request + 1] - cu_num_logits[request])
        if num_logits > 1:
            end = int(query_start_loc[request + 1])
            seq_len = int(seq_lens[request])
            positions[end - num_logits : end] = torch.arange(seq_len - num_logits, seq_len, device=positions.device)
