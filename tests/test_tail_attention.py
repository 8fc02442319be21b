"""The attention kernels of trees against their naive twins and against one softmax over prefix and tail."""

import random
from typing import NamedTuple

import attention_batches as made
import pytest
import torch
from attention_batches import SCALE, SINKS, Request, Shape
from hopper import compile_in_subprocess
from steps import DEVICE, KINDS, POISON, int32

from vllm_crossspec.trees.verify import naive
from vllm_crossspec.trees.verify.tail_attention import (
    DenseTail,
    PagedTail,
    QueryRows,
    Scales,
    Softmax,
    soft_words,
    tail_attention,
    window_attention,
)
from vllm_crossspec.types import FLOAT8

NAN_BYTE = 0x7F
"""In both types of float8."""

# float32 is summed in another order, with powers of two of the hardware's precision. With 8 or 11 bits the prefix's
# output is rounded before it is merged, the weights before they meet the values, and the result once more: three
# roundings of values below 4.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 6e-3, torch.bfloat16: 5e-2}


def tensor(*numbers):
    return torch.tensor(numbers if len(numbers) > 1 else numbers[0], device=DEVICE)


WHOLE = Scales(None, tensor(0.013), tensor(0.4))
BY_HEAD = Scales(tensor(0.02, 0.03), tensor(0.007, 0.05), tensor(2.0, 0.3))


class Case(NamedTuple):
    """Of a step; a prefix of None is another one for every request."""

    nodes: int
    head_size: int
    group: int
    block_size: int
    dtype: torch.dtype
    prefix: int | None = None
    num_soft: int = 0
    kind: str | None = None  # of a cache in float8
    scales: Scales = Scales()


CASES = [
    Case(1, 64, 1, 16, torch.float32),
    Case(7, 80, 2, 16, torch.float32, 0),
    Case(7, 128, 8, 7, torch.bfloat16, 1),
    Case(60, 128, 4, 16, torch.float32),
    Case(60, 128, 4, 32, torch.bfloat16),
    Case(60, 64, 8, 24, torch.float16, 0),
    Case(60, 80, 5, 16, torch.bfloat16),
    Case(130, 64, 2, 16, torch.float32),
    Case(130, 80, 1, 3, torch.bfloat16, 17),
    Case(255, 128, 1, 16, torch.bfloat16),
    Case(255, 64, 4, 128, torch.float16, 0),
    # Soft prompts.
    Case(1, 64, 1, 16, torch.float32, None, 16),
    Case(7, 80, 2, 16, torch.float32, 0, 1),
    Case(20, 128, 4, 16, torch.bfloat16, None, 16),
    Case(40, 64, 2, 24, torch.float16, 0, 40),
    Case(60, 64, 1, 16, torch.float32, 17, 70),
    Case(60, 128, 2, 16, torch.bfloat16, None, 130),
    # Caches in float8.
    Case(7, 80, 2, 16, torch.float32, 0, 0, "fp8_e5m2", WHOLE),
    Case(20, 64, 4, 16, torch.float32, None, 0, "fp8", WHOLE),
    Case(20, 64, 2, 16, torch.bfloat16, None, 16, "fp8", BY_HEAD),
    Case(40, 128, 4, 32, torch.bfloat16, None, 0, "fp8_e4m3", WHOLE._replace(query=tensor(0.01))),
]
FLOAT8_WINDOWS = [17, 18, 20]
"""Those of the cases that a window is looked at with."""


def to_float8(x, scale, dtype):
    """The numbers of a quantised tensor; its scales are those of the KV heads in dimension 1."""
    most = torch.finfo(dtype).max
    by_head = scale.expand(x.shape[1]).view(1, -1, *[1] * (x.ndim - 2))
    return (x.float() / by_head).clamp(-most, most).to(dtype), by_head


def quantised_queries(query, scale, kv_heads):
    """Queries in float8, and what their numbers are."""
    grouped, by_head = to_float8(query.unflatten(1, (kv_heads, -1)), scale, torch.float8_e4m3fn)
    return grouped.flatten(1, 2), (grouped.float() * by_head).flatten(1, 2)


def quantised(attention, kind, scales):
    """The attention with a cache in float8, and queries too if they have a scale; and what its numbers are."""
    dtype, kv_heads = FLOAT8[kind], attention.cache.shape[1]
    parts = zip(attention.cache.chunk(2, -1), (scales.key, scales.value), strict=True)
    numbers = [to_float8(x, scale, dtype) for x, scale in parts]
    raw = torch.cat([x.view(torch.uint8) for x, _ in numbers], dim=-1)
    fence = torch.full((len(raw) + 2, *raw.shape[1:]), NAN_BYTE, dtype=torch.uint8, device=DEVICE)
    fence[1:-1] = raw
    query, exact_query = attention.query, attention.query.float()
    if scales.query is not None:
        query, exact_query = quantised_queries(query, scales.query, kv_heads)
    exact = attention._replace(query=exact_query, cache=torch.cat([x.float() * by for x, by in numbers], dim=-1))
    if attention.soft is not None:
        exact = exact._replace(soft=attention.soft.float())
    return attention._replace(query=query, cache=fence[1:-1].view(dtype)), exact


def build(case):
    """A case's attention, all of it by definition, what a prefix pass would leave, and which rows have a tail."""
    few = (
        tuple(KINDS) if case.nodes < (30 if case.num_soft else 100) else ("whole", "truncated", "placeholder", "plain")
    )
    sizes = (case.nodes, case.head_size, case.group, case.block_size, case.dtype, case.prefix)
    attention = exact = made.make_attention(case.nodes + case.group, *sizes, kinds=few, num_soft=case.num_soft)
    if case.kind is not None:
        attention, exact = quantised(attention, case.kind, case.scales)
    whole, out, lse = made.whole_and_prefix(exact)
    step = attention.step
    split = attention.prefix_len[: len(step.seq_lens)] < step.seq_lens
    request = torch.searchsorted(step.query_start_loc[1:], torch.arange(len(out), device=DEVICE), right=True)
    return attention, whole, out.to(case.dtype), lse, split[request]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_tail_completes_the_softmax(number):
    """Quantised numbers count times their scales; soft prompts among them have none."""
    case = CASES[number]
    attention, whole, out, lse, merged = build(case)
    both = (naive.tail_attention, tail_attention)
    twin, found = (made.run(which, attention, out, lse, scales=case.scales) for which in both)
    assert merged.any() and torch.equal(found[~merged].nan_to_num(POISON), out[~merged].nan_to_num(POISON))
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(found[merged].double(), whole[merged], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(found[merged], twin[merged], atol=tolerance, rtol=tolerance)
    for wrong in made.wrong_scales(case.scales):
        other = made.run(tail_attention, attention, out, lse, scales=wrong)
        assert (other[merged].double() - whole[merged]).abs().max() > 4 * tolerance
    if case.num_soft:
        # Without the soft bits the contemplate rows are others, and only they.
        num_words = attention.row_mask.shape[1] - soft_words(case.num_soft)
        mask = attention.row_mask[:, :num_words].contiguous()
        blind = made.run(tail_attention, attention, out, lse, row_mask=mask, soft=None, scales=case.scales)
        changed = (found != blind).nan_to_num().flatten(1).any(1) & merged
        sees_soft = (attention.row_mask[: found.shape[0], num_words:] != 0).any(1) & merged
        assert sees_soft.any() and torch.equal(changed, sees_soft)


def run_windowed(dense, rest, attention, out, **form):
    """A prefix pass of our own and the tail behind it: output and log-sum-exp."""
    lse = torch.full((out.shape[1], len(out)), torch.nan, device=DEVICE)
    out = made.run(dense, attention, torch.full_like(out, torch.nan), lse, **form)
    return made.run(rest, attention, out, lse, **form), lse


@pytest.mark.parametrize("number", FLOAT8_WINDOWS)
def test_window_over_float8_completes_the_softmax(number):
    """A window that hides nothing against the definition, a near one against the twins."""
    case = CASES[number]
    attention, whole, out, _, merged = build(case)
    kernels, twins = (window_attention, tail_attention), (naive.window_attention, naive.tail_attention)
    tolerance = TOLERANCE[case.dtype]
    far, _ = run_windowed(*kernels, attention, out, window=10**6, scales=case.scales)
    torch.testing.assert_close(far[merged].double(), whole[merged], atol=tolerance, rtol=tolerance)
    near = [run_windowed(*passes, attention, out, window=9, scales=case.scales) for passes in (kernels, twins)]
    for mine, twin in zip(*near, strict=True):
        torch.testing.assert_close(mine, twin, atol=tolerance, rtol=tolerance, equal_nan=True)
    for wrong in made.wrong_scales(case.scales):
        other, _ = run_windowed(*kernels, attention, out, window=10**6, scales=wrong)
        assert (other[merged].double() - whole[merged]).abs().max() > 4 * tolerance


WINDOW_CASES = [
    # heads, kv heads, head size, dtype, window
    (4, 2, 32, torch.float32, 1),
    (5, 1, 80, torch.float32, 7),
    (6, 2, 32, torch.float32, 70),
    (8, 1, 128, torch.bfloat16, 33),
    (4, 4, 64, torch.float16, 64),
    (4, 2, 64, torch.float32, 1000),
]


@pytest.mark.parametrize(("heads", "kv_heads", "head_size", "dtype", "window"), WINDOW_CASES)
def test_window_and_tail_complete_the_softmax(heads, kv_heads, head_size, dtype, window):
    """The prefix pass against its twin; with the tail's kernel, and its twin, against one softmax by definition."""
    rng = random.Random(window)
    shape = Shape(heads, kv_heads, head_size, dtype)
    requests = [made.verification(rng, prefix, nodes) for prefix, nodes in ((70, 13), (300, 40), (0, 6), (1, 33))]
    requests.insert(2, Request(45, 1, []))
    form = Softmax(SCALE, window, 3.0 if window > 32 else 0.0)
    if window % 2:
        form = form._replace(sinks=SINKS[:heads].repeat(2)[:heads].to(DEVICE, dtype))
    case = made.paged(shape, requests, form, seed=8)
    outs = []
    for dense, rest in ((window_attention, tail_attention), (naive.window_attention, naive.tail_attention)):
        out = torch.full_like(case.batch.query, torch.nan)
        rows = case.rows(out, torch.full((heads, len(out)), torch.nan, device=DEVICE))
        dense(rows, case.prefix, form)
        before = out.clone()
        rest(rows, case.prefix, form)
        outs.append((before, rows.lse, out))
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2 / 64, torch.float16: 1 / 128}[dtype]
    for mine, twin in zip(*outs, strict=True):
        assert not mine.isnan().any()
        torch.testing.assert_close(mine, twin, atol=tolerance, rtol=1e-5)
    whole = made.expected(made.make_batch(shape, requests, seed=8), form)
    torch.testing.assert_close(outs[0][2].cpu().double(), whole, atol=tolerance, rtol=0)


def test_sinks_join_after_a_dense_prefix():
    """A layer without a window but with sinks: a request that has no tail gets them, too, and every request once."""
    rng, shape = random.Random(9), Shape(6, 2, 32, torch.float32)
    requests = [made.verification(rng, 40, 20), Request(45, 1, []), made.verification(rng, 0, 5)]
    form = Softmax(SCALE, sinks=SINKS.to(DEVICE))
    case = made.paged(shape, requests, form, seed=10)
    far = form._replace(window=10**6)  # as good as none: makes the dense pass
    for rest in (tail_attention, naive.tail_attention):
        out = torch.empty_like(case.batch.query)
        rows = case.rows(out, torch.empty(shape.heads, len(out), device=DEVICE))
        naive.window_attention(rows, case.prefix, far)
        rest(rows, case.prefix, form)
        whole = made.expected(made.make_batch(shape, requests, seed=10), form._replace(sinks=SINKS))
        torch.testing.assert_close(out.cpu().double(), whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("nodes", "group"), [(1, 4), (7, 1), (30, 4), (60, 1)])
def test_ordinary_rows_are_the_same_bits_with_and_without_contemplate_rows(nodes, group):
    """Float32: another launch without the contemplate rows and without soft prompts; all else is the same."""
    case = made.make_attention(
        nodes, nodes, 64, group, 16, torch.float32, kinds=("whole", "small", "plain"), num_soft=16
    )
    _, out, lse = made.whole_and_prefix(case)
    step = case.step
    rows = step.query_start_loc.diff()
    counts = torch.where(rows > 1, rows // 2, rows)
    starts = int32([0, *counts.cumsum(0).tolist()])
    firsts = zip(step.query_start_loc.tolist(), counts.tolist(), strict=False)
    kept = torch.cat([begin + torch.arange(count, device=DEVICE) for begin, count in firsts])
    ordinary = case._replace(
        query=case.query[kept],
        row_mask=case.row_mask[kept, : nodes // 32 + 1].contiguous(),
        step=step._replace(query_start_loc=starts, seq_lens=step.seq_lens - rows + counts),
        soft=None,
    )
    alone = made.run(tail_attention, ordinary, out[kept], lse[:, kept].contiguous())
    assert torch.equal(made.run(tail_attention, case, out, lse)[kept], alone)
    # Let one ordinary row see the soft prompts: it is another, and only it.
    request = int(rows.argmax())
    mask = case.row_mask.clone()
    mask[int(step.query_start_loc[request]) + 1, -1] = 0xFFFF
    found = made.run(tail_attention, case, out, lse, row_mask=mask)[kept]
    assert (found != alone).flatten(1).any(1).nonzero().flatten().tolist() == [int(starts[request]) + 1]


def test_a_causal_mask_would_not_do():
    """The comparison can fail: with the mask of a chain the same kernel gives other output."""
    case = made.make_attention(1, 60, 64, 2, 16, torch.float32, kinds=("whole",))
    whole, out, lse = made.whole_and_prefix(case)
    chain = naive.pack_bits(torch.ones(61, 64, device=DEVICE).tril().bool())
    found = made.run(tail_attention, case, out, lse, row_mask=chain)
    assert (found - whole).abs().max() > 0.1


@pytest.mark.parametrize(
    ("dtype", "scales"), [(torch.float32, Scales()), (torch.bfloat16, Scales()), (torch.bfloat16, BY_HEAD)]
)
@pytest.mark.parametrize(
    ("length", "scratch_rows", "queries", "group"), [(1, 1, 1, 4), (10, 40, 10, 4), (81, 90, 7, 2)]
)
def test_tail_in_a_scratch(dtype, scales, length, scratch_rows, queries, group):
    """Any mask over any number of rows: an autoregressive drafter's beam sees its ancestors of earlier levels.

    The scratch is of the model's type and its keys have no scale, where queries are quantised, too.
    """
    num_reqs, kv_heads, head_size = 3, 2, 64
    generator = torch.Generator().manual_seed(length)
    scratch = made.fenced((num_reqs, scratch_rows, 2, kv_heads, head_size), dtype, generator)
    scratch[:, length:] = float("nan")
    query = torch.randn(num_reqs * queries, kv_heads * group, head_size, generator=generator).to(DEVICE, dtype)
    exact = query
    if scales.query is not None:
        query, exact = quantised_queries(query, scales.query, kv_heads)
    words = -(-scratch_rows // 32)
    seen = torch.rand(num_reqs * queries, 32 * words, generator=generator).to(DEVICE) < 0.3
    seen[:, length - 1] = True
    out = torch.randn(query.shape, generator=generator).to(DEVICE, dtype)
    lse = torch.randn(query.shape[1], query.shape[0], generator=generator).to(DEVICE)
    lse[:, :queries] = float("inf")
    out[:queries] = float("nan")
    results = []
    for implementation in (naive.tail_attention, tail_attention):
        starts = int32(range(0, (num_reqs + 1) * queries, queries))
        rows = QueryRows(query, out.clone(), lse, starts, naive.pack_bits(seen), num_reqs, queries)
        implementation(rows, DenseTail(scratch, int32([length])), Softmax(0.2, scales=scales))
        results.append(rows.out)
    assert results[1].isfinite().all()
    torch.testing.assert_close(*results, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    # No prefix for the first request: the softmax over its scratch alone.
    keys, values = scratch[0, :length].unbind(1)
    alone, _ = made.softmax_attention(exact[:queries], keys, values, seen[:queries, :length], 0.2)
    torch.testing.assert_close(results[1][:queries].double(), alone, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_no_tail_leaves_the_prefix_alone():
    case = made.make_attention(0, 7, 64, 2, 16, torch.float32, kinds=("plain", "chunk", "padding"))
    out, lse = torch.full_like(case.query, POISON), torch.zeros(4, case.query.shape[0], device=DEVICE)
    empty = DenseTail(torch.zeros(3, 4, 2, 2, 64, device=DEVICE), int32([0]))
    for tail in (None, empty):
        assert torch.equal(made.run(tail_attention, case, out, lse, tail=tail), out)


@pytest.mark.parametrize("seed", range(4))
def test_replays_with_stale_buffers_read_nothing_out_of_bounds(seed):
    """A captured graph is replayed on whatever the last real step left behind."""
    case = made.make_attention(seed, 60, 64, 4, 16, torch.float32, kinds=("whole", "small", "truncated", "padding"))
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
    assert made.run(tail_attention, case, out, lse, tail=tail, row_mask=mask).isfinite().all()
    # Rows that see nothing at all, with no prefix either, come out as numbers too.
    nowhere = torch.full_like(lse, float("inf"))
    assert made.run(tail_attention, case, out, nowhere, tail=tail, row_mask=mask * 0).isfinite().all()
    found = made.run(window_attention, case, out, lse, tail=tail, row_mask=mask, window=40)
    assert found.isfinite().all() and not lse.isnan().any()


COMPILE_FOR_HOPPER = """
import hopper
compiled = hopper.compile_only()
import random
import torch
from test_tail_attention import *

def check(*words):
    for kernel in ("_window_attention_kernel", "_tail_attention_kernel"):
        variants = compiled.pop(kernel)
        assert any(all(word in code["ptx"] for word in words) for code in variants.values()), kernel
    assert not compiled

for case in (*CASES[2:6], CASES[13], CASES[16]):
    attention, _, out, lse, _ = build(case)
    made.run(tail_attention, attention, out, lse)
    if not case.num_soft:
        scratch = torch.zeros(attention.step.idx_mapping.shape[0], 80, 2, 2, case.head_size, dtype=case.dtype)
        made.run(tail_attention, attention, out, lse, tail=DenseTail(scratch, int32([5])))
for heads, kv_heads, head_size, dtype, window in WINDOW_CASES[2:5]:
    form = Softmax(0.2, window, 3.0, SINKS[:heads].to(dtype))
    requests = [made.verification(random.Random(0), 70, 40)]
    case = made.paged(Shape(heads, kv_heads, head_size, dtype), requests, form, seed=0)
    rows = case.rows(case.batch.query, torch.zeros(heads, 41))
    window_attention(rows, case.prefix, form)
    tail_attention(rows, case.prefix, form)
check("wgmma")
for case in CASES[19:21]:
    attention, _, out, lse, _ = build(case)
    made.run(tail_attention, attention, out, lse, scales=case.scales)
    if not case.num_soft:
        run_windowed(window_attention, tail_attention, attention, out, window=9, scales=case.scales)
check("wgmma", "e4m3x2")
"""


@pytest.mark.nightly
def test_kernels_compile_for_hopper(tmp_path):
    compile_in_subprocess(COMPILE_FOR_HOPPER, tmp_path)
