"""Sliding windows, sinks and capped logits in attention over trees: both backends and their kernels, by definition."""

import random
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import test_tree_attention_flash as played
import torch
from attention_batches import (
    BLOCK_SIZE,
    Batch,
    Request,
    Shape,
    as_on_a_cpu,
    expected,
    make_batch,
    masked_softmax,
    verification,
)
from hopper import compile_in_subprocess
from steps import DEVICE
from test_tree_attention import TARGET, attend, config, implementation, mixed
from test_tree_attention import Layer as BuiltLayer
from test_tree_attention_flash import flash  # noqa: F401
from two_passes import in_two_passes
from vllm.v1.attention.backends import flash_attn

from vllm_crossspec.engine.attention import base, cpu
from vllm_crossspec.engine.attention import flash as flash_module
from vllm_crossspec.engine.attention.base import DraftTail
from vllm_crossspec.engine.attention.cpu import TreeCpuImpl
from vllm_crossspec.engine.attention.exact import exact_attention
from vllm_crossspec.engine.attention.flash import TreeFlashImpl
from vllm_crossspec.verify import naive
from vllm_crossspec.verify.naive import pack_bits
from vllm_crossspec.verify.tail_attention import PagedTail, Softmax, tail_attention
from vllm_crossspec.verify.window_attention import window_attention

SHAPE = Shape(6, 2, 32, torch.float32)
SCALE = 0.21
SINKS = torch.tensor([1.5, -2.0, 0.0, 4.0, -0.5, 2.5])
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2 / 64, torch.float16: 1 / 128}
FORMS = [
    Softmax(SCALE, window=1),
    Softmax(SCALE, window=3),
    Softmax(SCALE, window=24),
    Softmax(SCALE, window=BLOCK_SIZE + 1, sinks=SINKS),
    Softmax(SCALE, window=500, soft_cap=1.5),
    Softmax(SCALE, sinks=SINKS),
    Softmax(SCALE, soft_cap=0.7),
    Softmax(SCALE, window=40, soft_cap=2.0, sinks=SINKS),
]


def name(form):
    parts = (f"window{form.window}" * bool(form.window), f"cap{form.soft_cap}" * bool(form.soft_cap))
    return "-".join(part for part in (*parts, "sinks" * (form.sinks is not None)) if part)


def options(form):
    """What an implementation of vLLM's is built with."""
    return {"sliding_window": form.window or None, "logits_soft_cap": form.soft_cap or None, "sinks": form.sinks}


def others(form):
    """The same but for one thing: what an implementation that gets it wrong would do."""
    if form.window:
        yield form._replace(window=form.window + 1)
        if form.window > 1:
            yield form._replace(window=form.window - 1)
    if form.sinks is not None:
        yield form._replace(sinks=None)
        yield form._replace(sinks=form.sinks + torch.log(torch.tensor(2.0)))  # as if they were counted twice
    if form.soft_cap:
        yield form._replace(soft_cap=0.0)


# -- a CPU, in one pass and as on a GPU -------------------------------------------------------------------------------


@pytest.fixture(params=["lane", "torch", "two-passes"])
def way(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(cpu, "lane_ops", lambda: None)
    if request.param == "two-passes":
        monkeypatch.setattr(TreeCpuImpl, "forward", in_two_passes(TreeCpuImpl.forward))
    return request.param


@pytest.mark.parametrize("form", FORMS, ids=name)
def test_sliding_rows_see_what_is_near_on_their_line(form, way):
    """Trees, a request without drafts, a chain and prompts; each wrong form is told from the right one."""
    batch = make_batch(SHAPE, mixed(seed=1), seed=2)
    out = attend(batch, impl=implementation(SHAPE, **options(form)))
    torch.testing.assert_close(out.double(), expected(batch, form), atol=2e-6, rtol=0)
    for wrong in others(form):
        if wrong.window in (0, form.window) or wrong.window < int(batch.seq_lens.max()):
            assert (out - expected(batch, wrong)).abs().max() > 1e-3, name(wrong)


def test_sliding_layers_of_one_metadata_do_not_share_their_rows(way):
    """Layers with and without a window, in one KV cache group, as without vLLM's hybrid manager."""
    batch = make_batch(SHAPE, mixed(seed=3), seed=4)
    metadata = cpu.TreeCpuMetadataBuilder(None, [], config({}), torch.device("cpu")).build(0, batch.common())
    metadata.target_tail = batch.tail
    for form in (Softmax(SCALE), Softmax(SCALE, window=5), Softmax(SCALE, window=19), Softmax(SCALE)):
        out = torch.full_like(batch.query, torch.nan)
        impl = implementation(SHAPE, **options(form))
        impl.forward(TARGET, batch.query, None, None, as_on_a_cpu(batch.cache), metadata, out)
        torch.testing.assert_close(out.double(), expected(batch, form), atol=2e-6, rtol=0)


@pytest.mark.parametrize("form", FORMS, ids=name)
@pytest.mark.parametrize("has_shared", [False, True], ids=["own", "shared"])
def test_sliding_levels_of_a_draft_tree(form, has_shared, way):
    """A drafter's level, by definition: its cached tokens, then the line of each row, the last ``window`` of both.

    A shared entry counts as a token of every line.
    """
    width, depth, extra = 3, 3, int(has_shared)
    rng, queries = random.Random(5), width + extra
    batch = make_batch(SHAPE, [Request(prefix, 1, None) for prefix in (40, 7, 95)], seed=6)
    num_reqs, capacity = 3, depth * width + extra
    parents = [[-1] * width + [rng.randrange(width) for _ in range(width)] for _ in range(num_reqs)]
    for tree in parents:
        tree += [width + rng.randrange(width) for _ in range(width)]
    generator = torch.Generator().manual_seed(7)
    scratch = torch.randn(num_reqs, capacity, 2, SHAPE.kv_heads, SHAPE.head_size, generator=generator)
    content = scratch.clone()
    query = torch.randn(num_reqs * queries, SHAPE.heads, SHAPE.head_size, generator=generator)
    seen = torch.zeros(num_reqs, queries, 32, dtype=torch.bool)
    seen[..., :extra] = True
    for request, tree in enumerate(parents):
        for beam in range(width):
            node = 2 * width + beam
            while node >= 0:
                seen[request, beam, extra + node] = True
                node = tree[node]
    places = [*range(extra + 2 * width, capacity), *range(extra)]  # of the level's rows in the scratch
    keys, values = content[:, places].flatten(0, 1).unbind(1)
    scratch[:, places] = torch.nan
    tail = DraftTail(
        scratch, pack_bits(seen.flatten(0, 1)), torch.tensor([capacity]).int(), num_reqs, queries, has_shared
    )
    bounds = torch.arange(0, num_reqs * queries + 1, queries, dtype=torch.int32)
    out = torch.full_like(query, torch.nan)
    metadata = cpu.TreeCpuMetadata(
        num_actual_tokens=len(query), num_reqs=num_reqs, max_query_len=queries, max_seq_len=int(batch.seq_lens.max()),
        query_start_loc=bounds, seq_lens=batch.seq_lens, block_table=batch.block_table,
        slot_mapping=torch.empty(0), causal=False, draft_tail=tail,
    )  # fmt: skip
    impl = implementation(SHAPE, **options(form))
    drafter = SimpleNamespace(is_draft_layer=True)
    impl.forward(drafter, query, keys, values, as_on_a_cpu(batch.cache), metadata, out)
    for request in range(num_reqs):
        cached = batch.dense[request]
        line = torch.cat([torch.ones(queries, len(cached), dtype=torch.bool), seen[request, :, :capacity]], dim=1)
        if form.window:
            line &= line.sum(1, keepdim=True) - line.cumsum(1) < form.window
        mine = slice(request * queries, (request + 1) * queries)
        whole = masked_softmax(query[mine], torch.cat([cached, content[request]]), line, form)
        torch.testing.assert_close(out[mine].double(), whole, atol=2e-6, rtol=0)


# -- kernels ----------------------------------------------------------------------------------------------------------


class Paged(NamedTuple):
    """A batch's cache as on a GPU; where no row looks are NaN, and blocks before every window lead anywhere."""

    batch: Batch
    prefix: PagedTail

    def arguments(self, form):
        return {
            "query": self.batch.query,
            "query_start_loc": self.batch.query_start_loc,
            "row_mask": self.batch.tail.row_mask,
            "softmax": form,
            "num_reqs": self.batch.tail.num_reqs,
            "max_query_len": self.batch.tail.max_query_len,
        }


def paged(shape, requests, form, seed):
    """A batch of verification rows alone."""
    batch = make_batch(shape, requests, seed)
    cache, table = batch.cache.clone(), batch.block_table.clone()
    for index, request in enumerate(requests):
        begin = max(request.prefix - form.window + bool(request.parents), 0) if form.window else 0
        for token in range(begin):
            cache[table[index, token // BLOCK_SIZE].long(), :, token % BLOCK_SIZE] = torch.nan
        table[index, : begin // BLOCK_SIZE] = 2**31 - 1  # freed
    on_device = batch._replace(
        query=batch.query.to(DEVICE),
        query_start_loc=batch.query_start_loc.to(DEVICE),
        tail=batch.tail._replace(row_mask=batch.tail.row_mask.to(DEVICE)),
    )
    tensors = (cache, table, batch.tail.prefix_len, batch.seq_lens)
    return Paged(on_device, PagedTail(*(x.to(DEVICE) for x in tensors)))


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
def test_sliding_kernels_complete_the_softmax(heads, kv_heads, head_size, dtype, window):
    """The prefix pass against its twin; with the tail's kernel, and its twin, against one softmax by definition."""
    rng = random.Random(window)
    shape = Shape(heads, kv_heads, head_size, dtype)
    requests = [verification(rng, prefix, nodes) for prefix, nodes in ((70, 13), (300, 40), (0, 6), (1, 33))]
    requests.insert(2, Request(45, 1, []))
    form = Softmax(SCALE, window, 3.0 if window > 32 else 0.0, SINKS[:heads].repeat(2)[:heads] if window % 2 else None)
    if form.sinks is not None:
        form = form._replace(sinks=form.sinks.to(DEVICE, dtype))
    case = paged(shape, requests, form, seed=8)
    outs = []
    for dense, rest in ((window_attention, tail_attention), (naive.window_attention, naive.tail_attention)):
        out = torch.full_like(case.batch.query, torch.nan)
        lse = torch.full((heads, len(out)), torch.nan, device=DEVICE)
        dense(out=out, lse=lse, prefix=case.prefix, **case.arguments(form))
        before = out.clone()
        rest(out=out, lse=lse, tail=case.prefix, **case.arguments(form))
        outs.append((before, lse, out))
    tolerance = TOLERANCE[dtype]
    for mine, twin in zip(*outs, strict=True):
        assert not mine.isnan().any()
        torch.testing.assert_close(mine, twin, atol=max(tolerance, 1e-5), rtol=1e-5)
    whole = expected(make_batch(shape, requests, seed=8), form)
    torch.testing.assert_close(outs[0][2].cpu().double(), whole, atol=max(tolerance, 1e-5), rtol=0)


def test_sliding_tail_with_sinks_after_a_dense_prefix():
    """A layer without a window but with sinks: a request that has no tail gets them, too, and every request once."""
    rng = random.Random(9)
    requests = [verification(rng, 40, 20), Request(45, 1, []), verification(rng, 0, 5)]
    form = Softmax(SCALE, sinks=SINKS.to(DEVICE))
    case = paged(SHAPE, requests, form, seed=10)
    far = form._replace(window=10**6)  # as good as none: makes the dense pass
    for rest in (tail_attention, naive.tail_attention):
        out, lse = torch.empty_like(case.batch.query), torch.empty(SHAPE.heads, len(case.batch.query), device=DEVICE)
        naive.window_attention(out=out, lse=lse, prefix=case.prefix, **case.arguments(far))
        rest(out=out, lse=lse, tail=case.prefix, **case.arguments(form))
        whole = expected(make_batch(SHAPE, requests, seed=10), form._replace(sinks=SINKS))
        torch.testing.assert_close(out.cpu().double(), whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("seed", range(3))
def test_sliding_kernel_reads_nothing_out_of_bounds_in_stale_replays(seed):
    form = Softmax(SCALE, window=40)
    rng = random.Random(seed)
    case = paged(SHAPE, [verification(rng, 70, 13), verification(rng, 9, 13)], form, seed)
    generator = torch.Generator().manual_seed(seed)

    def stale(low, high, tensor):
        return torch.randint(low, high, tensor.shape, generator=generator, dtype=torch.int32).to(DEVICE)

    cache, table, prefix_len, seq_lens = case.prefix
    fenced = torch.full((cache.shape[0] + 2, *cache.shape[1:]), torch.nan, device=DEVICE)
    fenced[1:-1] = 1.0
    prefix = PagedTail(
        fenced[1:-1],
        stale(-(2**31), 2**31 - 1, table),
        stale(-50, 5000, prefix_len),
        stale(0, 5000, seq_lens),
    )
    mask = stale(-(2**31), 2**31 - 1, case.batch.tail.row_mask)
    out = torch.full_like(case.batch.query, torch.nan)
    lse = torch.zeros(SHAPE.heads, len(out), device=DEVICE)
    window_attention(out=out, lse=lse, prefix=prefix, **case.arguments(form) | {"row_mask": mask})
    assert out.isfinite().all() and not lse.isnan().any()


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "non-causal"])
@pytest.mark.parametrize("form", FORMS[1:], ids=name)
def test_sliding_attention_in_float32_for_gpus(form, causal):
    """What takes FlashAttention's place for prompts and plain rows."""
    requests = [Request(60, 8, None), Request(33, 1, None), Request(0, 20, None)]
    batch = make_batch(SHAPE, requests, seed=11)
    keys, values = batch.cache.transpose(1, 2).split(SHAPE.head_size, dim=-1)
    out = torch.full_like(batch.query, torch.nan)
    lse = exact_attention(
        query=batch.query, keys=keys, values=values, out=out, query_start_loc=batch.query_start_loc,
        lengths=batch.seq_lens, block_table=batch.block_table, max_query_len=20, max_length=100,
        softmax=form, causal=causal,
    )  # fmt: skip
    assert lse.isfinite().all()
    for index, request in enumerate(requests):
        rows = slice(*batch.query_start_loc[index : index + 2].tolist())
        place = torch.arange(request.prefix + request.rows)
        away = place[request.prefix :, None] - place
        mask = (away >= 0) if causal else torch.ones_like(away, dtype=torch.bool)
        if form.window:
            mask &= away.abs() < form.window
        whole = masked_softmax(batch.query[rows], batch.dense[index], mask, form)
        torch.testing.assert_close(out[rows].double(), whole, atol=2e-6, rtol=0)


COMPILE_FOR_HOPPER = """
import hopper
compiled = hopper.compile_only()
import test_sliding_attention as cases

for heads, kv_heads, head_size, dtype, window in cases.WINDOW_CASES[2:5]:
    requests = [cases.verification(cases.random.Random(0), 70, 40)]
    form = cases.Softmax(0.2, window, 3.0, cases.SINKS[:heads].to(dtype))
    case = cases.paged(cases.Shape(heads, kv_heads, head_size, dtype), requests, form, seed=0)
    lse = cases.torch.zeros(heads, 41)
    cases.window_attention(out=case.batch.query, lse=lse, prefix=case.prefix, **case.arguments(form))
    cases.tail_attention(out=case.batch.query, lse=lse, tail=case.prefix, **case.arguments(form))
for kernel in ("_window_attention_kernel", "_tail_attention_kernel"):
    variants = compiled.pop(kernel)
    assert any("wgmma" in code["ptx"] for code in variants.values())
assert not compiled
"""


def test_sliding_kernels_compile_for_hopper(tmp_path):
    compile_in_subprocess(COMPILE_FOR_HOPPER, tmp_path)


# -- the backend for GPUs, FlashAttention played ----------------------------------------------------------------------


def flash_forward(batch, metadata, form, layer=played.TARGET):
    shape = batch.shape
    cache = batch.cache.transpose(1, 2).contiguous().transpose(1, 2)
    impl = TreeFlashImpl(shape.heads, shape.head_size, SCALE, shape.kv_heads, None, form.window or None, "auto",
                         form.soft_cap or None, sinks=form.sinks)  # fmt: skip
    out, poison = torch.full_like(batch.query, torch.nan), torch.full_like(batch.query[:, : shape.kv_heads], torch.nan)
    impl.forward(layer, batch.query, poison, poison, cache, metadata, out)
    return out


FLASH_FORMS = [form._replace(sinks=None if form.sinks is None else SINKS[:4]) for form in FORMS]


@pytest.mark.parametrize("is_exact", [False, True], ids=["flash", "float32"])
@pytest.mark.parametrize("with_prompts", [True, False])
@pytest.mark.parametrize("form", FLASH_FORMS, ids=name)
def test_sliding_trees_by_flash_attention(flash, form, with_prompts, is_exact, monkeypatch):  # noqa: F811
    """Which pass is FlashAttention's, with what; and all rows as by definition."""
    monkeypatch.setattr(flash_attn, "flash_attn_supports_sinks", lambda: True, raising=False)
    monkeypatch.setattr(flash_module, "is_exact", lambda dtype: is_exact)
    batch = make_batch(played.SHAPE, played.mixed(with_prompts), seed=12)
    base.set_tree_source(lambda common, capturing: batch.tail)
    impl = TreeFlashImpl(4, 32, SCALE, 2, None, form.window or None, "auto")
    monkeypatch.setattr(flash_attn, "_get_sliding_window_configs", lambda config: {impl.sliding_window})
    metadata = played.make_builder({"target": played.TARGET}).build(0, batch.common())
    out = flash_forward(batch, metadata, form)
    torch.testing.assert_close(out.double(), expected(batch, form), atol=1e-5, rtol=0)
    if not is_exact:
        kinds = [(call["causal"], call["window_size"], call.get("s_aux") is not None) for call in flash.calls]
        prefix = [] if form.window else [(False, [-1, -1], False)]
        behind = [form.window - 1, 0] if form.window else [-1, -1]
        assert kinds == prefix + [(True, behind, form.sinks is not None)] * with_prompts
    for wrong in others(form):
        if wrong.window in (0, form.window) or wrong.window < int(batch.seq_lens.max()):
            assert (out - expected(batch, wrong)).abs().max() > 1e-3, name(wrong)


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_sliding_layers_are_taken_and_those_that_could_only_be_wrong_refused():
    for form in FORMS:
        base.check_backends(config({"layers.0": BuiltLayer(implementation(SHAPE, **options(form)))}))
    chunked = BuiltLayer(implementation(SHAPE))
    chunked.attention_chunk_size = 64
    with pytest.raises(ValueError, match=r"layers\.0: it attends within chunks of the context; use a target without"):
        base.check_backends(config({"layers.0": chunked}))
    softened = BuiltLayer(implementation(SHAPE, sliding_window=9))
    softened.soft_prompts = torch.zeros(2, 2, 3, 32)
    with pytest.raises(ValueError, match="it has soft prompts and a sliding window, which ends before them"):
        base.check_backends(config({"layers.0": softened}))
