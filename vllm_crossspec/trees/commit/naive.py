"""Commit in plain PyTorch, against which the kernels are tested."""

from collections.abc import Sequence

import torch

from vllm_crossspec.types import AcceptedPaths


def _moves(paths: AcceptedPaths) -> list[tuple[int, int]]:
    """Token rows (from, to) of all requests, in an order in which they can be moved one by one."""
    moves = []
    for request, num_rows in enumerate(paths.cu_rows.diff().tolist()):
        first = int(paths.query_start_loc[request + 1]) - num_rows
        for k in range(1, int(paths.num_sampled[request])):
            source = int(paths.path[request, k])
            if source != k:
                moves.append((first + source, first + k))
    return moves


def compact_kv(caches: Sequence[tuple[torch.Tensor, int]], paths: AcceptedPaths, slot_mappings: torch.Tensor) -> None:
    """As ``compact_kv``; takes what ``make_kv_layers`` takes."""
    moves = _moves(paths)
    for cache, group in {cache.data_ptr(): (cache, group) for cache, group in caches}.values():
        block_size = cache.shape[2]
        for source, target in moves:
            read, write = int(slot_mappings[group, source]), int(slot_mappings[group, target])
            if read >= 0 and write >= 0:
                content = cache[read // block_size, :, read % block_size]
                cache[write // block_size, :, write % block_size] = content


def compact_rows(tensors: Sequence[torch.Tensor], paths: AcceptedPaths) -> None:
    """As ``compact_rows``."""
    for source, target in _moves(paths):
        for tensor in tensors:
            tensor[target] = tensor[source]


def restore_rows(
    paths: AcceptedPaths, *, positions: torch.Tensor, input_ids: torch.Tensor, seq_lens: torch.Tensor
) -> None:
    """As ``restore_rows``."""
    for source, target in _moves(paths):
        input_ids[target] = input_ids[source]
    for request, num_rows in enumerate(paths.cu_rows.diff().tolist()):
        if num_rows > 1:
            end, seq_len = int(paths.query_start_loc[request + 1]), int(seq_lens[request])
            positions[end - num_rows : end] = torch.arange(seq_len - num_rows, seq_len, device=positions.device)
