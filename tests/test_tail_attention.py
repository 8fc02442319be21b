"""Attention over the tail against its naive twin and against one softmax over prefix and tail."""

from typing import NamedTuple

import pytest
import torch
from hopper import compile_in_subprocess
from steps import DEVICE, KINDS, POISON, Step, int32, make_step, prepare

from vllm_crossspec.verify import naive
from vllm_crossspec.verify.tail_attention import DenseTail, PagedTail, Softmax, soft_words, tail_attention


class Attention(NamedTuple):
    """What a step's attention works on: the cache's rows lie inside a larger buffer of NaN."""

    query: torch.Tensor
    cache: torch.Tensor
    block_table: torch.Tensor
    prefix_len: torch.Tensor
    row_mask: torch.Tensor
    step: Step
    scale: float
    soft: torch.Tensor | None


def fenced(shape, dtype, generator):
    """Random numbers with NaN on both sides, so that a read out of bounds is seen."""
    buffer = torch.full((shape[0] + 2, *shape[1:]), float("nan"), dtype=dtype, device=DEVICE)
    buffer[1:-1] = torch.randn(shape, generator=generator).to(DEVICE, dtype)
    return buffer[1:-1]


def make_attention(
    seed, num_nodes, head_size, group, block_size, dtype, prefix=None, kv_heads=2, kinds=tuple(KINDS), num_soft=0
):
    """Contemplate rows are among the rows where there are soft prompts."""
    contemplates = num_soft > 0
    step = make_step(seed, num_nodes, min(num_nodes, 9), kinds, prefix=prefix, contemplates=contemplates)
    generator = torch.Generator().manual_seed(seed)
    prepared = prepare(naive, step, min(num_nodes, 9), contemplates=contemplates, num_soft=num_soft)
    num_reqs, num_rows = step.idx_mapping.shape[0], step.positions.shape[0]
    width = -(-int(step.seq_lens.max()) // block_size) + 1
    blocks = num_reqs * width
    table = torch.randperm(blocks, generator=generator).view(num_reqs, width).to(DEVICE, torch.int32)
    query = torch.randn(num_rows, kv_heads * group, head_size, generator=generator).to(DEVICE, dtype)
    cache = fenced((blocks, kv_heads, block_size, 2 * head_size), dtype, generator)
    if seed % 2:
        cache = fenced((blocks, block_size, kv_heads, 2 * head_size), dtype, generator).transpose(1, 2)
    soft = fenced((2, kv_heads, num_soft, head_size), dtype, generator) if num_soft else None
    return Attention(query, cache, table, prepared["prefix_len"], prepared["row_mask"], step, head_size**-0.5, soft)


def softmax_attention(query, keys, values, seen, scale):
    """Plain masked attention in float64: output [q, Hq, D] and log-sum-exp [Hq, q]."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * scale
    scores = scores.masked_fill(~seen, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values), scores.logsumexp(-1)


def whole_and_prefix(case):
    """Attention over prefix and tail in one softmax; output and log-sum-exp of the prefix alone."""
    step, num_rows = case.step, case.query.shape[0]
    whole = torch.full(case.query.shape, float("nan"), dtype=torch.float64, device=DEVICE)
    prefix, lse = whole.clone(), torch.full((case.query.shape[1], num_rows), float("nan"), device=DEVICE)
    for request in range(step.idx_mapping.shape[0]):
        first, last = step.query_start_loc[request : request + 2].tolist()
        start, end = int(case.prefix_len[request]), int(step.seq_lens[request])
        if first == last:
            continue
        position = torch.arange(end, device=DEVICE)
        blocks = case.block_table[request, position // case.cache.shape[2]].long()
        keys, values = case.cache[blocks, :, position % case.cache.shape[2]].chunk(2, -1)
        num_words = case.row_mask.shape[1] - soft_words(0 if case.soft is None else case.soft.shape[2])
        seen = position[None] <= torch.arange(end - (last - first), end, device=DEVICE)[:, None]
        if start < end:
            seen[:, start:] = naive.unpack_bits(case.row_mask[first:last, :num_words])[:, : end - start]
        query = case.query[first:last]
        everything = (keys, values, seen)
        if case.soft is not None and start < end:
            prompts = naive.unpack_bits(case.row_mask[first:last, num_words:])[:, : case.soft.shape[2]]
            soft_keys, soft_values = case.soft.transpose(1, 2)
            everything = tuple(
                torch.cat(pair, dim)
                for pair, dim in (((keys, soft_keys), 0), ((values, soft_values), 0), ((seen, prompts), 1))
            )
        whole[first:last], _ = softmax_attention(query, *everything, case.scale)
        if start > 0:
            prefix[first:last], lse[:, first:last] = softmax_attention(
                query, keys[:start], values[:start], seen[:, :start], case.scale
            )
        else:
            lse[:, first:last] = float("inf") if request % 2 else float("-inf")
    return whole, prefix.to(case.query.dtype), lse.float()


def attend(implementation, case, out, lse, **changes):
    paged = PagedTail(case.cache, case.block_table, case.prefix_len, case.step.seq_lens)
    arguments = {
        "query": case.query,
        "out": out.clone(),
        "lse": lse,
        "tail": paged,
        "query_start_loc": case.step.query_start_loc,
        "row_mask": case.row_mask,
        "softmax": Softmax(case.scale),
        "num_reqs": case.step.idx_mapping.shape[0],
        "max_query_len": int(case.step.query_start_loc.diff().max()),
        "soft": case.soft,
    }
    arguments |= changes
    implementation(**arguments)
    return arguments["out"]


# float32 is summed in another order, with powers of two of the hardware's precision. With 8 or 11 bits the prefix's
# output is rounded before it is merged, the weights before they meet the values, and the result once more: three
# roundings of values below 4.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 6e-3, torch.bfloat16: 5e-2}

ATTENTION_CASES = [
    # nodes, head size, group, block size, dtype, prefix (None: another for every request)
    (1, 64, 1, 16, torch.float32, None),
    (7, 80, 2, 16, torch.float32, 0),
    (7, 128, 8, 7, torch.bfloat16, 1),
    (60, 128, 4, 16, torch.float32, None),
    (60, 128, 4, 32, torch.bfloat16, None),
    (60, 64, 8, 24, torch.float16, 0),
    (60, 80, 5, 16, torch.bfloat16, None),
    (130, 64, 2, 16, torch.float32, None),
    (130, 80, 1, 3, torch.bfloat16, 17),
    (255, 128, 1, 16, torch.bfloat16, None),
    (255, 64, 4, 128, torch.float16, 0),
]


@pytest.mark.parametrize(("nodes", "head_size", "group", "block_size", "dtype", "prefix"), ATTENTION_CASES)
def test_tail_completes_the_softmax(nodes, head_size, group, block_size, dtype, prefix):
    kinds = tuple(KINDS) if nodes < 100 else ("whole", "truncated", "placeholder", "plain")
    case = make_attention(nodes + group, nodes, head_size, group, block_size, dtype, prefix, kinds=kinds)
    whole, out, lse = whole_and_prefix(case)
    twin, found = (attend(which, case, out, lse) for which in (naive.tail_attention, tail_attention))
    merged = torch.isin(
        torch.arange(found.shape[0], device=DEVICE), rows_of_tails(case.step, case.prefix_len, found.shape[0])
    )
    assert merged.any() and torch.equal(found[~merged].nan_to_num(POISON), out[~merged].nan_to_num(POISON))
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found[merged].double(), whole[merged], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(found[merged], twin[merged], atol=tolerance, rtol=tolerance)


SOFT_CASES = [
    # nodes, head size, group, block size, dtype, prefix, soft prompts
    (1, 64, 1, 16, torch.float32, None, 16),
    (7, 80, 2, 16, torch.float32, 0, 1),
    (20, 128, 4, 16, torch.bfloat16, None, 16),
    (40, 64, 2, 24, torch.float16, 0, 40),
    (60, 64, 1, 16, torch.float32, 17, 70),
    (60, 128, 2, 16, torch.bfloat16, None, 130),
]


@pytest.mark.parametrize(("nodes", "head_size", "group", "block_size", "dtype", "prefix", "num_soft"), SOFT_CASES)
def test_soft_prompts_complete_the_softmax_of_contemplate_rows(
    nodes, head_size, group, block_size, dtype, prefix, num_soft
):
    kinds = tuple(KINDS) if nodes < 30 else ("whole", "truncated", "placeholder", "plain")
    seed = nodes + group
    case = make_attention(seed, nodes, head_size, group, block_size, dtype, prefix, kinds=kinds, num_soft=num_soft)
    whole, out, lse = whole_and_prefix(case)
    twin, found = (attend(which, case, out, lse) for which in (naive.tail_attention, tail_attention))
    merged = torch.isin(
        torch.arange(found.shape[0], device=DEVICE), rows_of_tails(case.step, case.prefix_len, found.shape[0])
    )
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found[merged].double(), whole[merged], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(found[merged], twin[merged], atol=tolerance, rtol=tolerance)
    # Without the soft bits the contemplate rows are others, and only they.
    num_words = case.row_mask.shape[1] - soft_words(num_soft)
    blind = attend(tail_attention, case, out, lse, row_mask=case.row_mask[:, :num_words].contiguous(), soft=None)
    changed = (found != blind).nan_to_num().flatten(1).any(1) & merged
    sees_soft = (case.row_mask[: found.shape[0], num_words:] != 0).any(1) & merged
    assert sees_soft.any() and torch.equal(changed, sees_soft)


@pytest.mark.parametrize(("nodes", "group"), [(1, 4), (7, 1), (30, 4), (60, 1)])
def test_ordinary_rows_are_the_same_bits_with_and_without_contemplate_rows(nodes, group):
    """Float32: another launch without the contemplate rows and without soft prompts; all else is the same."""
    case = make_attention(nodes, nodes, 64, group, 16, torch.float32, kinds=("whole", "small", "plain"), num_soft=16)
    _, out, lse = whole_and_prefix(case)
    step = case.step
    rows = step.query_start_loc.diff()
    counts = torch.where(rows > 1, rows // 2, rows)
    starts = int32([0, *counts.cumsum(0).tolist()])
    kept = torch.cat(
        [
            begin + torch.arange(count, device=DEVICE)
            for begin, count in zip(step.query_start_loc.tolist(), counts.tolist(), strict=False)
        ]
    )
    ordinary = case._replace(
        query=case.query[kept],
        row_mask=case.row_mask[kept, : nodes // 32 + 1].contiguous(),
        step=step._replace(query_start_loc=starts, seq_lens=step.seq_lens - rows + counts),
        soft=None,
    )
    alone = attend(tail_attention, ordinary, out[kept], lse[:, kept].contiguous())
    together = attend(tail_attention, case, out, lse)
    assert torch.equal(together[kept], alone)
    # Let one ordinary row see the soft prompts: it is another, and only it.
    request = int(rows.argmax())
    mask = case.row_mask.clone()
    mask[int(step.query_start_loc[request]) + 1, -1] = 0xFFFF
    found = attend(tail_attention, case, out, lse, row_mask=mask)[kept]
    assert (found != alone).flatten(1).any(1).nonzero().flatten().tolist() == [int(starts[request]) + 1]


def rows_of_tails(step, prefix_len, num_rows):
    """Query rows of the requests that have a tail."""
    split = prefix_len[: step.seq_lens.shape[0]] < step.seq_lens
    request = torch.searchsorted(step.query_start_loc[1:], torch.arange(num_rows, device=DEVICE), right=True)
    return split[request].nonzero().flatten()


def test_a_causal_mask_would_not_do():
    """The comparison can fail: with the mask of a chain the same kernel gives other output."""
    case = make_attention(1, 60, 64, 2, 16, torch.float32, kinds=("whole",))
    whole, out, lse = whole_and_prefix(case)
    chain = naive.pack_bits(torch.ones(61, 64, device=DEVICE).tril().bool())
    found = attend(tail_attention, case, out, lse, row_mask=chain)
    assert (found - whole).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("length", "scratch_rows", "queries", "group"), [(1, 1, 1, 4), (10, 40, 10, 4), (81, 90, 7, 2)]
)
def test_tail_in_a_scratch(dtype, length, scratch_rows, queries, group):
    """Any mask over any number of rows: an autoregressive drafter's beam sees its ancestors of earlier levels."""
    num_reqs, kv_heads, head_size = 3, 2, 64
    generator = torch.Generator().manual_seed(length)
    shape = (num_reqs, scratch_rows, 2, kv_heads, head_size)
    scratch = fenced(shape, dtype, generator)
    scratch[:, length:] = float("nan")
    query = torch.randn(num_reqs * queries, kv_heads * group, head_size, generator=generator).to(DEVICE, dtype)
    words = -(-scratch_rows // 32)
    seen = torch.rand(num_reqs * queries, 32 * words, generator=generator).to(DEVICE) < 0.3
    seen[:, length - 1] = True
    out = torch.randn(query.shape, generator=generator).to(DEVICE, dtype)
    lse = torch.randn(query.shape[1], query.shape[0], generator=generator).to(DEVICE)
    lse[:, :queries] = float("inf")
    out[:queries] = float("nan")
    results = []
    for implementation in (naive.tail_attention, tail_attention):
        merged = out.clone()
        implementation(
            query=query,
            out=merged,
            lse=lse,
            tail=DenseTail(scratch, int32([length])),
            query_start_loc=int32(range(0, (num_reqs + 1) * queries, queries)),
            row_mask=naive.pack_bits(seen),
            softmax=Softmax(0.2),
            num_reqs=num_reqs,
            max_query_len=queries,
        )
        results.append(merged)
    assert results[1].isfinite().all()
    torch.testing.assert_close(*results, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    # No prefix for the first request: the softmax over its scratch alone.
    alone, _ = softmax_attention(
        query[:queries], scratch[0, :length, 0], scratch[0, :length, 1], seen[:queries, :length], 0.2
    )
    torch.testing.assert_close(results[1][:queries].double(), alone, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_no_tail_leaves_the_prefix_alone():
    case = make_attention(0, 7, 64, 2, 16, torch.float32, kinds=("plain", "chunk", "padding"))
    out = torch.full_like(case.query, POISON)
    found = attend(tail_attention, case, out, torch.zeros(4, case.query.shape[0], device=DEVICE))
    assert torch.equal(found, out)
    scratch = torch.zeros(3, 4, 2, 2, 64, device=DEVICE)
    empty = DenseTail(scratch, int32([0]))
    found = attend(tail_attention, case, out, torch.zeros(4, case.query.shape[0], device=DEVICE), tail=empty)
    assert torch.equal(found, out)


@pytest.mark.parametrize("seed", range(4))
def test_replays_with_stale_buffers_read_nothing_out_of_bounds(seed):
    """A captured graph is replayed on whatever the last real step left behind."""
    case = make_attention(seed, 60, 64, 4, 16, torch.float32, kinds=("whole", "small", "truncated", "padding"))
    generator = torch.Generator().manual_seed(seed)

    def stale(low, high, tensor):
        return torch.randint(low, high, tensor.shape, generator=generator, dtype=torch.int32).to(DEVICE)

    tail = PagedTail(
        case.cache,
        stale(-(2**31), 2**31 - 1, case.block_table),
        stale(-50, 5000, case.prefix_len),
        stale(0, 5000, case.step.seq_lens) * stale(0, 2, case.step.seq_lens),
    )
    mask = stale(-(2**31), 2**31 - 1, case.row_mask)
    out = torch.zeros_like(case.query)
    lse = torch.zeros(case.query.shape[1], case.query.shape[0], device=DEVICE)
    found = attend(tail_attention, case, out, lse, tail=tail, row_mask=mask)
    assert found.isfinite().all()
    # Rows that see nothing at all, with no prefix either, come out as numbers too.
    found = attend(tail_attention, case, out, torch.full_like(lse, float("inf")), tail=tail, row_mask=mask * 0)
    assert found.isfinite().all()


COMPILE_FOR_HOPPER = """
import hopper
compiled = hopper.compile_only()
import torch
import test_tail_attention as cases

batches = [*cases.ATTENTION_CASES[2:6], *cases.SOFT_CASES[2::3]]
for nodes, head_size, group, block_size, dtype, prefix, *num_soft in batches:
    case = cases.make_attention(0, nodes, head_size, group, block_size, dtype, prefix, num_soft=sum(num_soft))
    lse = torch.zeros(case.query.shape[1], case.query.shape[0])
    scratch = torch.zeros(case.step.idx_mapping.shape[0], 80, 2, 2, head_size, dtype=dtype)
    for changes in ({}, {"tail": cases.DenseTail(scratch, cases.int32([5]))})[: 1 if num_soft else 2]:
        cases.attend(cases.tail_attention, case, case.query, lse, **changes)
variants = compiled.pop("_tail_attention_kernel")
assert not compiled and any("wgmma" in code["ptx"] for code in variants.values())
"""


def test_kernel_compiles_for_hopper(tmp_path):
    compile_in_subprocess(COMPILE_FOR_HOPPER, tmp_path)
