"""Moves the accepted path to where an accepted chain would be: KV of every layer, states, token ids.

Row ``path[k]`` of a request moves to row ``k``. Rows of a path ascend, so ``path[k] >= k``. Rows move in ascending
order, and each block of rows is read before any is written. So no row is overwritten before it is read.
"""

# mypy: disable-error-code="no-untyped-def"
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_crossspec.step.request_rows import request_rows
from vllm_crossspec.types import AcceptedPaths

PATH_ROWS = 16  # rows of a path that one program reads before it writes
MAX_TENSORS = 8


class KVLayers(NamedTuple):
    """Addresses and strides of all layers' KV caches for one kernel. Units are words."""

    pointers: torch.Tensor  # uint64 [layers], addresses of the caches
    group: torch.Tensor  # int32 [layers], KV cache group of each layer: its row of the slot mappings
    block_stride: torch.Tensor  # int64 [layers]
    head_stride: torch.Tensor  # int64 [layers]
    token_stride: torch.Tensor  # int64 [layers]
    column_stride: torch.Tensor  # int64 [layers]
    num_heads: int  # KV heads of every layer
    block_size: int  # tokens of a block
    content: int  # words of one token and head
    word: tl.dtype  # their type; int32 if the words of a token and head are contiguous in every layer
    is_strided: bool  # whether they are not contiguous in some layer
    alignment: int  # every row's address is a multiple of this many words; 4 allows copies of 16 bytes


def make_kv_layers(caches: Sequence[tuple[torch.Tensor, int]]) -> KVLayers:
    """Collect the layers' caches. Layers of one group that share a cache count once.

    Args:
        caches: (cache [blocks, heads, block_size, content], KV cache group) of every layer; ``content`` is K and V
            contiguous, or one of the two if they are separate. Groups may share memory.

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
    dtypes = (torch.uint64, torch.int32, *[torch.int64] * 4)
    columns = (
        torch.tensor(column, dtype=dtype, device=caches[0][0].device)
        for column, dtype in zip(zip(*rows, strict=True), dtypes, strict=True)
    )
    heads, block_size = caches[0][0].shape[1:3]
    word = {1: tl.int8, 2: tl.int16, 4: tl.int32}[size]
    return KVLayers._make((*columns, heads, block_size, words[3], word, is_strided, alignment))


@triton.jit
def _compact_kv_kernel(
    paths,  # AcceptedPaths
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
    length = tl.load(paths.num_sampled + request)
    if length > 1:
        first, _, _ = request_rows(paths.query_start_loc, paths.cu_rows, request)
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
            source = tl.load(paths.path + request * path_stride + k, mask=k < length, other=0)
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
    """Move K and V of row ``path[k]`` to row ``k`` in every layer; one launch.

    Rows with negative slots (``slot_mappings``: int64 [groups, T]) stay unchanged.
    """
    num_reqs = paths.cu_rows.shape[0] - 1
    _compact_kv_kernel[(num_reqs, layers.pointers.shape[0], layers.num_heads)](
        paths,
        paths.path.stride(0),
        slot_mappings,
        slot_mappings.stride(0),
        *layers[:6],
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
    paths,  # AcceptedPaths
    tensors,  # tuple of pointers to [T, width]
    strides,  # tuple of their row strides
    width,
    path_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    length = tl.load(paths.num_sampled + request)
    if length > 1:
        first, _, _ = request_rows(paths.query_start_loc, paths.cu_rows, request)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        for start in range(1, length, ROWS):
            k = start + tl.arange(0, ROWS)
            source = tl.load(paths.path + request * path_stride + k, mask=k < length, other=0)
            mask = ((k < length) & (source != k))[:, None] & (column < width)[None, :]
            for i in tl.static_range(len(tensors)):
                if tl.program_id(2) == i:
                    read = tensors[i] + (first + source)[:, None] * strides[i] + column[None, :]
                    write = tensors[i] + (first + k)[:, None] * strides[i] + column[None, :]
                    values = tl.load(read, mask=mask)
                    tl.debug_barrier()  # no row is written before all of these rows are read
                    tl.store(write, values, mask=mask)


def _lie_apart(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether no two tensors share an element: each follows another in memory, or they are columns of one buffer."""
    width = tensors[0].shape[1] * tensors[0].element_size()
    places = sorted((t.data_ptr(), t.shape[0], t.stride(0) * t.element_size()) for t in tensors)
    return all(
        second - first >= (rows - 1) * stride + width
        or (stride == other_stride and width <= (second - first) % stride <= stride - width)
        for (first, rows, stride), (second, _, other_stride) in itertools.combinations(places, 2)
    )


def compact_rows(tensors: Sequence[torch.Tensor], paths: AcceptedPaths) -> None:
    """Move row ``path[k]`` of each request to row ``k`` in up to eight of the target's states; one launch.

    Each is [at least T, width], of one dtype and width, rows contiguous. They must not overlap, because programs run in
    any order.
    """
    width = tensors[0].shape[1]
    assert 0 < len(tensors) <= MAX_TENSORS
    assert all(t.shape[1] == width and t.stride(1) == 1 and t.dtype == tensors[0].dtype for t in tensors)
    assert _lie_apart(tensors), "two of the states that are moved share memory"
    columns = min(256, triton.next_power_of_2(width))
    grid = (paths.cu_rows.shape[0] - 1, triton.cdiv(width, columns), len(tensors))
    _compact_rows_kernel[grid](
        paths,
        tuple(tensors),
        tuple(t.stride(0) for t in tensors),
        width,
        paths.path.stride(0),
        ROWS=PATH_ROWS,
        COLUMNS=columns,
    )


@triton.jit
def _restore_rows_kernel(
    paths,  # AcceptedPaths
    path_stride,
    positions_ptr,  # int64 [T]
    input_ids_ptr,  # int32 [T]
    seq_lens_ptr,  # int32 [R]
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    first, num_rows, _ = request_rows(paths.query_start_loc, paths.cu_rows, request)
    if num_rows > 1:
        root = tl.load(seq_lens_ptr + request) - num_rows
        for start in range(0, num_rows, ROWS):
            row = start + tl.arange(0, ROWS)
            tl.store(positions_ptr + first + row, (root + row).to(tl.int64), mask=row < num_rows)
        k = tl.arange(0, STEPS)
        mask = (k > 0) & (k < tl.load(paths.num_sampled + request))
        source = tl.load(paths.path + request * path_stride + k, mask=mask, other=0)
        tokens = tl.load(input_ids_ptr + first + source, mask=mask)
        tl.debug_barrier()  # no token is overwritten before all of the path are read
        tl.store(input_ids_ptr + first + k, tokens, mask=mask)


def restore_rows(
    paths: AcceptedPaths, *, positions: torch.Tensor, input_ids: torch.Tensor, seq_lens: torch.Tensor
) -> None:
    """Make the rows of requests with drafts look like a chain's; one launch.

    Args:
        paths: of the step.
        positions: int64 [T], written: linear again.
        input_ids: int32 [T], written in the first rows: the ids of the path.
        seq_lens: int32 [at least R] tokens of each request, including all rows of this step.
    """
    _restore_rows_kernel[(paths.cu_rows.shape[0] - 1,)](
        paths,
        paths.path.stride(0),
        positions,
        input_ids,
        seq_lens,
        STEPS=triton.next_power_of_2(paths.path.shape[1]),
        ROWS=128,
        num_warps=1,
    )
