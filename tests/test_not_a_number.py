"""Draft rows whose keys or values are no finite numbers: rows that do not see them must come out as without them.

A weight of 0 times NaN is NaN. In one product over all rows of a request, a single row that has overflowed, of a draft
that is rejected anyway, would otherwise end every other row of its request.
"""

import random
from types import SimpleNamespace

import attention_batches as made
import pytest
import torch
from attention_batches import BLOCK_SIZE, DRAFTER, FORMS, PLAIN, TARGET, WAYS, Request, Shape
from crossspec_cpu_lane.vllm.attention import TreeCpuImpl
from steps import DEVICE, int32

from vllm_crossspec.trees.attention.float32 import exact_attention
from vllm_crossspec.trees.verify import naive
from vllm_crossspec.trees.verify.tail_attention import DenseTail, QueryRows, Softmax, tail_attention, window_attention

SHAPE = Shape(6, 2, 32, torch.float32)
way = pytest.fixture(params=WAYS)(made.take_way)
NAN, INF = float("nan"), float("inf")
PARTS = [pytest.param(part, bad, id=f"{part} {bad}") for part, bad in (("value", NAN), ("value", -INF), ("key", NAN))]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def half(part, width):
    """The columns of an entry of keys beside values."""
    return slice(0, width // 2) if part == "key" else slice(width // 2, width)


def check(clean, found, sees):
    """Rows that see what is no number are none themselves; the others are the same bits as without it."""
    assert sees.any() and not sees.all() and clean.isfinite().all()
    assert torch.equal(found[~sees], clean[~sees])
    assert not found[sees].isfinite().flatten(1).all(1).any()


@pytest.mark.parametrize("implementation_of", [tail_attention, naive.tail_attention], ids=["kernel", "twin"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("part", "bad"), PARTS)
@pytest.mark.parametrize("num_soft", [0, 40])
def test_a_row_of_a_paged_tail(implementation_of, dtype, part, bad, num_soft):
    case = made.make_attention(4, 40, 64, 4, 16, dtype, kinds=("whole", "small"), num_soft=num_soft)
    _, out, lse = made.whole_and_prefix(case)
    clean = made.run(implementation_of, case, out, lse)
    sees = torch.zeros(len(clean), dtype=torch.bool, device=DEVICE)
    for request, (first, last) in enumerate(
        zip(case.step.query_start_loc, case.step.query_start_loc[1:], strict=False)
    ):
        row = min(int(last - first) - 1, 2)
        position = int(case.prefix_len[request]) + row
        block = case.block_table[request, position // 16]
        case.cache[block, :, position % 16, half(part, case.cache.shape[3])] = bad
        sees[first:last] = naive.unpack_bits(case.row_mask[first:last])[:, row]
    check(clean, made.run(implementation_of, case, out, lse), sees)
    if num_soft:  # and one of the learned entries, which contemplate rows alone see
        case.soft[0 if part == "key" else 1, :, 3] = bad
        ordinary = case.row_mask[: len(clean), -2] == 0
        assert torch.equal(made.run(implementation_of, case, out, lse)[ordinary & ~sees], clean[ordinary & ~sees])


@pytest.mark.parametrize("implementation_of", [tail_attention, naive.tail_attention], ids=["kernel", "twin"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("part", "bad"), PARTS)
def test_a_row_of_a_scratch(implementation_of, dtype, part, bad):
    queries, generator = 10, torch.Generator().manual_seed(1)
    scratch = made.fenced((3, 80, 2, 2, 64), dtype, generator)
    query, out = (torch.randn(3 * queries, 8, 64, generator=generator).to(DEVICE, dtype) for _ in range(2))
    lse = torch.randn(8, 3 * queries, generator=generator).to(DEVICE)
    seen = torch.rand(3 * queries, 96, generator=generator).to(DEVICE) < 0.4
    found = []
    for entry in (None, 70):
        if entry is not None:
            scratch[1, entry, 0 if part == "key" else 1] = bad
        found.append(out.clone())
        rows = QueryRows(query, found[-1], lse, int32([0, 10, 20, 30]), naive.pack_bits(seen), 3, queries)
        implementation_of(rows, DenseTail(scratch, int32([80])), Softmax(0.2))
    check(*found, seen[:, 70] & (torch.arange(3 * queries, device=DEVICE) // queries == 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("part", "bad"), PARTS)
def test_a_key_that_some_windows_still_have(dtype, part, bad):
    """The root sees it, rows below have moved on; and what the prefix pass found is not lost in the tail."""
    form, request = PLAIN._replace(window=30), made.verification(random.Random(3), 70, 13)
    case = made.paged(SHAPE._replace(dtype=dtype), [request], form, seed=5)
    position, found = 70 - 30 + 2, []
    sees = made.visible(request, 30)[:, position].to(DEVICE)
    block = case.prefix.block_table[0, position // BLOCK_SIZE]
    for entry in (None, position % BLOCK_SIZE):
        if entry is not None:
            case.prefix.cache[block, :, entry, half(part, 2 * SHAPE.head_size)] = bad
        out = torch.full_like(case.batch.query, NAN)
        lse = torch.full((SHAPE.heads, len(out)), NAN, device=DEVICE)
        rows = case.rows(out, lse)
        window_attention(rows, case.prefix, form)
        tail_attention(rows, case.prefix, form)
        found.append(out)
    check(*found, sees)


@pytest.mark.parametrize("form", [PLAIN, *FORMS[2:]], ids=made.name)
@pytest.mark.parametrize(("part", "bad"), PARTS)
def test_a_row_of_the_targets_tree_on_a_cpu(form, part, bad, way):
    requests = [made.verification(random.Random(seed), prefix, 20) for seed, prefix in ((1, 70), (2, 33))]
    batch, impl, found = (
        made.make_batch(SHAPE, requests, seed=2),
        made.implementation(SHAPE, **made.options(form)),
        [],
    )
    for row in (None, 20):
        if row is not None:  # a leaf
            block = batch.block_table[0, (70 + row) // BLOCK_SIZE]
            batch.cache[block, :, (70 + row) % BLOCK_SIZE, half(part, 2 * SHAPE.head_size)] = bad
        cache = made.as_on_a_cpu(torch.where(batch.cache.isfinite(), batch.cache, 0.0))
        for view, own in zip(TreeCpuImpl.kv_views(cache), batch.cache.chunk(2, dim=-1), strict=True):
            if row is not None:
                place = (slice(block, block + 1), slice(None), (70 + row) % BLOCK_SIZE)
                view[place] = own[place]
        out = torch.full_like(batch.query, NAN)
        found.append(impl.forward(TARGET, batch.query, None, None, cache, made.metadata_of(batch), out))
    check(*found, torch.arange(len(batch.query)) == 20)


@pytest.mark.parametrize("form", [PLAIN, *FORMS[2:]], ids=made.name)
@pytest.mark.parametrize(("part", "bad"), PARTS)
def test_a_row_of_a_drafters_level_on_a_cpu(form, part, bad, way):
    width, num_reqs = 4, 2
    batch = made.make_batch(SHAPE, [Request(prefix, 1, None) for prefix in (40, 7)], seed=6)
    keys, values, query = (torch.randn(num_reqs * width, heads, SHAPE.head_size) for heads in (2, 2, SHAPE.heads))
    seen = torch.zeros(num_reqs, width, 32, dtype=torch.bool)
    seen[:, torch.arange(width), torch.arange(width)] = True  # each sees itself
    found = []
    for row in (None, 1):
        if row is not None:
            (keys if part == "key" else values)[row] = bad
        scratch = torch.full((num_reqs, 9, 2, SHAPE.kv_heads, SHAPE.head_size), NAN)
        given = {
            "query_start_loc": made.starts_of(num_reqs, width),
            "draft_tail": made.draft_tail(scratch, seen, width),
        }
        metadata = made.metadata_of(batch, causal=False, **given)
        impl, out = made.implementation(SHAPE, **made.options(form)), torch.full_like(query, NAN)
        found.append(impl.forward(DRAFTER, query, keys, values, made.as_on_a_cpu(batch.cache), metadata, out))
    check(*found, torch.arange(len(query)) == 1)


@pytest.mark.parametrize(("part", "bad"), PARTS)
@pytest.mark.parametrize("window", [0, 4])
def test_a_key_of_exact_attention(part, bad, window):
    generator, found = torch.Generator().manual_seed(1), []
    cache = torch.randn(3, 2, 16, 64, generator=generator).to(DEVICE)
    batch = SimpleNamespace(query_start_loc=int32([0, 8]), block_table=int32([[2, 1]]), max_seq_len=24)
    query = torch.randn(8, 4, 32, generator=generator).to(DEVICE)
    for position in (None, 20):
        if position is not None:
            cache[1, :, position - 16, half(part, 64)] = bad
        found.append(torch.empty_like(query))
        exact_attention(query, cache, found[-1], batch, int32([24]), 8, Softmax(0.2, window), True)
    row = 16 + torch.arange(8, device=DEVICE)
    check(*found, (row >= 20) & ((row < 20 + window) | (window == 0)))
