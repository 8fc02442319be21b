"""The accepted path moved to where an accepted chain would be: KV of every layer, states, token ids.

Row ``path[k]`` of a request goes to row ``k``. Rows of a path grow at least by one a step, so ``path[k] >= k``: what a
row overwrites was read before or is read by nobody, if rows are taken in increasing order and each block of them is
read whole before any of it is written.
"""

# mypy: disable-error-code="no-untyped-def"
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_crossspec.contemplate.kernels import request_rows
from vllm_crossspec.types import AcceptedPaths

PATH_ROWS = 16  # rows of a path that one program reads before it writes
MAX_TENSORS = 8


class KVLayers(NamedTuple):
    """Where the KV caches of all layers lie, for a kernel that walks over them. Units are words.

    Attributes:
        pointers: uint64 [layers], addresses of the caches.
        group: int32 [layers], KV cache group of each layer: its row of the slot mappings.
        block_stride, head_stride, token_stride, column_stride: int64 [layers].
        num_heads: KV heads of every layer.
        block_size: tokens of a block.
        content: words of one token and head.
        word: their type, int32 where the words of a token and head lie side by side in every layer.
        is_strided: whether somewhere they do not.
        alignment: words that every address of a row is a multiple of; 4 makes copies of 16 bytes.
    """

    pointers: torch.Tensor
    group: torch.Tensor
    block_stride: torch.Tensor
    head_stride: torch.Tensor
    token_stride: torch.Tensor
    column_stride: torch.Tensor
    num_heads: int
    block_size: int
    content: int
    word: tl.dtype
    is_strided: bool
    alignment: int


def make_kv_layers(caches: Sequence[tuple[torch.Tensor, int]]) -> KVLayers:
    """Note where the layers' caches lie. Layers that share one cache are noted once.

    Args:
        caches: (cache [blocks, heads, block_size, content], KV cache group) of every layer; ``content`` is K beside
            V, contiguous, or the one of two where they lie apart. Groups have blocks of their own, and may have them in
            the same memory; layers of one group that lie there are one.

    Raises:
        ValueError: a cache is not laid out in whole words, or layers differ in heads, block size or content.
    """
    distinct = {(cache.data_ptr(), group): cache for cache, group in caches}
    if not distinct:
        raise ValueError("the target has no attention layer whose KV cache could hold a draft tree")
    shapes = {(*cache.shape[1:], cache.element_size()) for cache in distinct.values()}
    if len(shapes) > 1:
        raise ValueError(
            "draft trees need all layers of the target to have the same KV heads, block size and head size; found "
            f"(heads, block size, content, bytes) {sorted(shapes)}"
        )
    is_strided = any(cache.stride(3) != 1 for cache in distinct.values())
    size = caches[0][0].element_size() if is_strided else 4
    rows, alignment = [], 4
    for (pointer, group), cache in distinct.items():
        numbers = [*cache.stride()[:3], cache.shape[3]]
        if any(n * cache.element_size() % size for n in numbers) or pointer % size:
            raise ValueError(f"a KV cache with strides {cache.stride()} of {cache.dtype} is not made of whole words")
        words = [n * cache.element_size() // size for n in numbers]
        while any(n % alignment for n in [*words, pointer // size]):
            alignment //= 2
        rows.append((pointer, group, *words[:3], cache.stride(3)))
    device = caches[0][0].device
    dtypes = (torch.uint64, torch.int32, *[torch.int64] * 4)
    pointers, of_groups, of_blocks, of_heads, of_tokens, of_columns = (
        torch.tensor(column, dtype=dtype, device=device)
        for column, dtype in zip(zip(*rows, strict=True), dtypes, strict=True)
    )
    heads, block_size = caches[0][0].shape[1:3]
    word = {1: tl.int8, 2: tl.int16, 4: tl.int32}[size]
    strides = (of_blocks, of_heads, of_tokens, of_columns)
    return KVLayers(pointers, of_groups, *strides, heads, block_size, words[3], word, is_strided, alignment)


@triton.jit
def _compact_kv_kernel(
    query_start_loc_ptr,  # int32 [R + 1]
    cu_rows_ptr,  # int32 [R + 1]
    num_sampled_ptr,  # int32 [R]
    path_ptr,  # int32 [R, depth + 1]
    path_stride,
    kv_slots_ptr,  # int64 [groups, T]
    kv_slots_stride,
    pointers_ptr,  # uint64 [layers]
    group_ptr,  # int32 [layers]
    block_stride_ptr,  # int64 [layers]
    head_stride_ptr,  # int64 [layers]
    token_stride_ptr,  # int64 [layers]
    column_stride_ptr,  # int64 [layers]
    BLOCK_SIZE: tl.constexpr,
    CONTENT: tl.constexpr,
    WORD: tl.constexpr,
    IS_STRIDED: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1)
    length = tl.load(num_sampled_ptr + request)
    if length > 1:
        first, _, _ = request_rows(query_start_loc_ptr, cu_rows_ptr, request)
        kv_slots = kv_slots_ptr + tl.load(group_ptr + layer).to(tl.int64) * kv_slots_stride + first
        cache = tl.cast(tl.load(pointers_ptr + layer), tl.pointer_type(WORD))
        cache = tl.multiple_of(cache, (WORD.primitive_bitwidth // 8) * ALIGNMENT)
        block_stride = tl.load(block_stride_ptr + layer)
        token_stride = tl.load(token_stride_ptr + layer)
        head = tl.program_id(2) * tl.load(head_stride_ptr + layer)
        column = tl.arange(0, COLUMNS)
        place = column
        if IS_STRIDED:
            place = column * tl.load(column_stride_ptr + layer)
        for start in range(1, length, ROWS):
            k = start + tl.arange(0, ROWS)
            source = tl.load(path_ptr + request * path_stride + k, mask=k < length, other=0)
            moves = (k < length) & (source != k)
            read = tl.load(kv_slots + source, mask=moves, other=-1)
            write = tl.load(kv_slots + k, mask=moves, other=-1)
            moves = (read >= 0) & (write >= 0)
            read = tl.where(moves, read, 0)
            write = tl.where(moves, write, 0)
            read = (read // BLOCK_SIZE) * block_stride + (read % BLOCK_SIZE) * token_stride + head
            write = (write // BLOCK_SIZE) * block_stride + (write % BLOCK_SIZE) * token_stride + head
            mask = moves[:, None] & (column < CONTENT)[None, :]
            read = tl.multiple_of(read, ALIGNMENT)[:, None] + place[None, :]
            write = tl.multiple_of(write, ALIGNMENT)[:, None] + place[None, :]
            words = tl.load(cache + read, mask=mask)
            tl.debug_barrier()  # no word is written before all of these rows are read
            tl.store(cache + write, words, mask=mask)


def compact_kv(layers: KVLayers, paths: AcceptedPaths, slot_mappings: torch.Tensor) -> None:
    """Move K and V of row ``path[k]`` to row ``k`` in every layer, where they differ; one launch.

    Args:
        layers: of the target, from :func:`make_kv_layers`.
        paths: of the step.
        slot_mappings: int64 [groups, T] KV slot of each token row; rows with negative slots are left alone.
    """
    num_reqs = paths.cu_rows.shape[0] - 1
    _compact_kv_kernel[(num_reqs, layers.pointers.shape[0], layers.num_heads)](
        *paths,
        paths.path.stride(0),
        slot_mappings,
        slot_mappings.stride(0),
        layers.pointers,
        layers.group,
        layers.block_stride,
        layers.head_stride,
        layers.token_stride,
        layers.column_stride,
        BLOCK_SIZE=layers.block_size,
        CONTENT=layers.content,
        WORD=layers.word,
        IS_STRIDED=layers.is_strided,
        ALIGNMENT=layers.alignment,
        ROWS=PATH_ROWS,
        COLUMNS=triton.next_power_of_2(layers.content),
    )


@triton.jit
def _compact_rows_kernel(
    tensors,  # tuple of pointers to [T, width]
    strides,  # tuple of their row strides
    width,
    query_start_loc_ptr,  # int32 [R + 1]
    cu_rows_ptr,  # int32 [R + 1]
    num_sampled_ptr,  # int32 [R]
    path_ptr,  # int32 [R, depth + 1]
    path_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    length = tl.load(num_sampled_ptr + request)
    if length > 1:
        first, _, _ = request_rows(query_start_loc_ptr, cu_rows_ptr, request)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        for start in range(1, length, ROWS):
            k = start + tl.arange(0, ROWS)
            source = tl.load(path_ptr + request * path_stride + k, mask=k < length, other=0)
            mask = ((k < length) & (source != k))[:, None] & (column < width)[None, :]
            for i in tl.static_range(len(tensors)):
                if tl.program_id(2) == i:
                    read = tensors[i] + (first + source)[:, None] * strides[i] + column[None, :]
                    write = tensors[i] + (first + k)[:, None] * strides[i] + column[None, :]
                    values = tl.load(read, mask=mask)
                    tl.debug_barrier()  # no row is written before all of these rows are read
                    tl.store(write, values, mask=mask)


def compact_rows(tensors: Sequence[torch.Tensor], paths: AcceptedPaths) -> None:
    """Move row ``path[k]`` of each request to row ``k`` in up to eight tensors; one launch.

    Args:
        tensors: [at least T, width] each, of one dtype and width, rows contiguous: the target's states.
        paths: of the step.
    """
    width = tensors[0].shape[1]
    assert 0 < len(tensors) <= MAX_TENSORS
    assert all(t.shape[1] == width and t.stride(1) == 1 and t.dtype == tensors[0].dtype for t in tensors)
    columns = min(256, triton.next_power_of_2(width))
    grid = (paths.cu_rows.shape[0] - 1, triton.cdiv(width, columns), len(tensors))
    _compact_rows_kernel[grid](
        tuple(tensors),
        tuple(t.stride(0) for t in tensors),
        width,
        *paths,
        paths.path.stride(0),
        ROWS=PATH_ROWS,
        COLUMNS=columns,
    )


@triton.jit
def _restore_rows_kernel(
    query_start_loc_ptr,  # int32 [R + 1]
    cu_rows_ptr,  # int32 [R + 1]
    num_sampled_ptr,  # int32 [R]
    path_ptr,  # int32 [R, depth + 1]
    path_stride,
    positions_ptr,  # int64 [T]
    input_ids_ptr,  # int32 [T]
    seq_lens_ptr,  # int32 [R]
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    first, num_rows, _ = request_rows(query_start_loc_ptr, cu_rows_ptr, request)
    if num_rows > 1:
        root = tl.load(seq_lens_ptr + request) - num_rows
        for start in range(0, num_rows, ROWS):
            row = start + tl.arange(0, ROWS)
            tl.store(positions_ptr + first + row, (root + row).to(tl.int64), mask=row < num_rows)
        k = tl.arange(0, STEPS)
        mask = (k > 0) & (k < tl.load(num_sampled_ptr + request))
        source = tl.load(path_ptr + request * path_stride + k, mask=mask, other=0)
        tokens = tl.load(input_ids_ptr + first + source, mask=mask)
        tl.debug_barrier()  # no token is overwritten before all of the path are read
        tl.store(input_ids_ptr + first + k, tokens, mask=mask)


def restore_rows(
    paths: AcceptedPaths, *, positions: torch.Tensor, input_ids: torch.Tensor, seq_lens: torch.Tensor
) -> None:
    """Make the rows of requests with drafts look like a chain's: linear positions, ids of the path; one launch.

    Args:
        paths: of the step.
        positions: int64 [T], written.
        input_ids: int32 [T], written for the rows of the path.
        seq_lens: int32 [at least R] tokens of each request, all rows of this step included.
    """
    _restore_rows_kernel[(paths.cu_rows.shape[0] - 1,)](
        *paths,
        paths.path.stride(0),
        positions,
        input_ids,
        seq_lens,
        STEPS=triton.next_power_of_2(paths.path.shape[1]),
        ROWS=128,
        num_warps=1,
    )
