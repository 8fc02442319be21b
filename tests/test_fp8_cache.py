"""KV caches in float8: kernels, backends and engines read the cache's own numbers, by their scales."""

import float8_kernels
import pytest
import test_tree_attention_flash as played
import torch
from attention_batches import Request, expected, make_batch, masked_softmax
from hopper import compile_in_subprocess
from steps import DEVICE
from test_tail_attention import TOLERANCE, attend, make_attention, rows_of_tails, softmax_attention, whole_and_prefix
from test_tree_attention import metadata_of
from two_passes import in_two_passes
from vllm import _custom_ops as ops
from vllm.v1.attention.backends import flash_attn

from vllm_crossspec.engine.attention import base
from vllm_crossspec.engine.attention.base import DraftTail
from vllm_crossspec.engine.attention.cpu import TreeCpuImpl
from vllm_crossspec.engine.attention.flash import TreeFlashImpl
from vllm_crossspec.types import FLOAT8
from vllm_crossspec.verify import naive
from vllm_crossspec.verify.naive import pack_bits
from vllm_crossspec.verify.tail_attention import DenseTail, PagedTail, Scales, Softmax, tail_attention
from vllm_crossspec.verify.window_attention import window_attention

NAN_BYTE = 0x7F
"""In both types of float8."""


def to_float8(x, scale, dtype):
    """The numbers of a quantised tensor; its scales are those of the KV heads in dimension 1."""
    most = torch.finfo(dtype).max
    by_head = scale.expand(x.shape[1]).view(1, -1, *[1] * (x.ndim - 2))
    return (x.float() / by_head).clamp(-most, most).to(dtype), by_head


def quantised(case, kind, scales):
    """The case with a cache in float8, and queries too if they have a scale; and what its numbers are."""
    dtype, kv_heads = FLOAT8[kind], case.cache.shape[1]
    parts = zip(case.cache.chunk(2, -1), (scales.key, scales.value), strict=True)
    numbers = [to_float8(x, scale, dtype) for x, scale in parts]
    raw = torch.cat([x.view(torch.uint8) for x, _ in numbers], dim=-1)
    fence = torch.full((len(raw) + 2, *raw.shape[1:]), NAN_BYTE, dtype=torch.uint8, device=DEVICE)
    fence[1:-1] = raw
    query, exact_query = case.query, case.query.float()
    if scales.query is not None:
        grouped, by_head = to_float8(query.unflatten(1, (kv_heads, -1)), scales.query, torch.float8_e4m3fn)
        query, exact_query = grouped.flatten(1, 2), (grouped.float() * by_head).flatten(1, 2)
    exact = case._replace(query=exact_query, cache=torch.cat([x.float() * by for x, by in numbers], dim=-1))
    if case.soft is not None:
        exact = exact._replace(soft=case.soft.float())
    return case._replace(query=query, cache=fence[1:-1].view(dtype)), exact


def tensor(*numbers):
    return torch.tensor(numbers if len(numbers) > 1 else numbers[0], device=DEVICE)


WHOLE = Scales(None, tensor(0.013), tensor(0.4))
BY_HEAD = Scales(tensor(0.02, 0.03), tensor(0.007, 0.05), tensor(2.0, 0.3))
FP8_CASES = [
    # nodes, head size, group, block size, dtype of the model, prefix, soft prompts, type of the cache, scales
    (7, 80, 2, 16, torch.float32, 0, 0, "fp8_e5m2", WHOLE),
    (20, 64, 4, 16, torch.float32, None, 0, "fp8", WHOLE),
    (20, 64, 2, 16, torch.bfloat16, None, 16, "fp8", BY_HEAD),
    (40, 128, 4, 32, torch.bfloat16, None, 0, "fp8_e4m3", WHOLE._replace(query=tensor(0.01))),
]


def make_case(number):
    """A case, what its numbers are, the whole attention by definition, and what a prefix pass would leave."""
    nodes, head_size, group, block_size, dtype, prefix, num_soft, kind, scales = FP8_CASES[number]
    case = make_attention(nodes, nodes, head_size, group, block_size, dtype, prefix, num_soft=num_soft)
    case, exact = quantised(case, kind, scales)
    whole, out, lse = whole_and_prefix(exact)
    merged = torch.isin(torch.arange(len(out), device=DEVICE), rows_of_tails(case.step, case.prefix_len, len(out)))
    return case, scales, whole, out.to(dtype), lse, merged


def others(scales):
    """The same with one scale wrong."""
    for name, scale in scales._asdict().items():
        if scale is not None:
            yield scales._replace(**{name: 1.5 * scale})


@pytest.mark.parametrize("number", range(len(FP8_CASES)))
def test_fp8_tail_completes_the_softmax(number):
    """Against the numbers of the cache times their scales; soft prompts among them have no scale."""
    case, scales, whole, out, lse, merged = make_case(number)
    twin, found = (attend(which, case, out, lse, scales=scales) for which in (naive.tail_attention, tail_attention))
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(found[merged].double(), whole[merged], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(found[merged], twin[merged], atol=tolerance, rtol=tolerance)
    for wrong in others(scales):
        other = attend(tail_attention, case, out, lse, scales=wrong)
        assert (other[merged].double() - whole[merged]).abs().max() > 4 * tolerance


def attend_windowed(dense, rest, case, scales, out, window):
    """A prefix pass of our own and the tail behind it: output and log-sum-exp."""
    lse = torch.full((out.shape[1], len(out)), torch.nan, device=DEVICE)
    paged = PagedTail(case.cache, case.block_table, case.prefix_len, case.step.seq_lens)
    softmax = Softmax(case.scale, window)
    out = attend(dense, case, torch.full_like(out, torch.nan), lse, scales=scales, softmax=softmax, prefix=paged)
    return attend(rest, case, out, lse, scales=scales, softmax=softmax), lse


@pytest.mark.parametrize("number", [0, 1, 3])
def test_fp8_window_completes_the_softmax(number):
    """A window that hides nothing against the definition, a near one against the twins."""
    case, scales, whole, out, _, merged = make_case(number)
    tolerance = TOLERANCE[out.dtype]
    far, _ = attend_windowed(windowed, tail_attention, case, scales, out, 10**6)
    torch.testing.assert_close(far[merged].double(), whole[merged], atol=tolerance, rtol=tolerance)
    near = [
        attend_windowed(*passes, case, scales, out, 9)
        for passes in ((windowed, tail_attention), (windowed_naive, naive.tail_attention))
    ]
    for mine, twin in zip(*near, strict=True):
        torch.testing.assert_close(mine, twin, atol=tolerance, rtol=tolerance, equal_nan=True)
    for wrong in others(scales):
        other, _ = attend_windowed(windowed, tail_attention, case, wrong, out, 10**6)
        assert (other[merged].double() - whole[merged]).abs().max() > 4 * tolerance


def windowed(*, tail, soft, **arguments):
    window_attention(**arguments)


def windowed_naive(*, tail, soft, **arguments):
    naive.window_attention(**arguments)


def test_fp8_queries_over_a_scratch():
    """A drafter's level: its scratch is of the model's type, its queries may be quantised; keys have no scale."""
    generator = torch.Generator().manual_seed(0)
    num_reqs, rows, queries, length = 3, 40, 5, 33
    scratch = torch.randn(num_reqs, rows, 2, 2, 64, generator=generator).to(DEVICE, torch.bfloat16)
    query = torch.randn(num_reqs * queries, 4, 64, generator=generator).to(DEVICE)
    scales = BY_HEAD
    grouped, by_head = to_float8(query.unflatten(1, (2, 2)), scales.query, torch.float8_e4m3fn)
    exact = (grouped.float() * by_head).flatten(1, 2)
    seen = torch.rand(num_reqs * queries, 64, generator=generator).to(DEVICE) < 0.3
    seen[:, length - 1] = True
    out = torch.full_like(query, torch.nan, dtype=torch.bfloat16)
    tail_attention(
        query=grouped.flatten(1, 2), out=out, lse=torch.full((4, len(query)), torch.inf, device=DEVICE),
        tail=DenseTail(scratch, torch.tensor([length], dtype=torch.int32, device=DEVICE)),
        query_start_loc=torch.arange(0, len(query) + 1, queries, dtype=torch.int32, device=DEVICE),
        row_mask=pack_bits(seen), softmax=Softmax(0.2), num_reqs=num_reqs, max_query_len=queries, scales=scales,
    )  # fmt: skip
    for request in range(num_reqs):
        mine = slice(request * queries, (request + 1) * queries)
        keys, values = scratch[request, :length].unbind(1)
        whole, _ = softmax_attention(exact[mine], keys, values, seen[mine, :length], 0.2)
        torch.testing.assert_close(out[mine].double(), whole, atol=5e-2, rtol=5e-2)


COMPILE_FOR_HOPPER = """
import hopper
compiled = hopper.compile_only()
import torch
import test_fp8_cache as cases

for number in (2, 3):
    case, scales, _, out, lse, _ = cases.make_case(number)
    cases.attend(cases.tail_attention, case, out, lse, scales=scales)
    if number != 2:
        cases.attend_windowed(cases.windowed, cases.tail_attention, case, scales, out, 9)
for kernel in ("_window_attention_kernel", "_tail_attention_kernel"):
    variants = compiled.pop(kernel)
    assert any("wgmma" in code["ptx"] and "e4m3x2" in code["ptx"] for code in variants.values())
assert not compiled
"""


def test_fp8_kernels_compile_for_hopper(tmp_path):
    compile_in_subprocess(COMPILE_FOR_HOPPER, tmp_path)


# -- backends ---------------------------------------------------------------------------------------------------------

SHAPE = played.SHAPE
SCALE = played.SCALE


class Layer(played.Layer):
    """With scales of its own, on the device and on the host."""

    def __init__(self, is_draft_layer, scales):
        super().__init__(is_draft_layer)
        self._q_scale, self._k_scale, self._v_scale = scales
        self._k_scale_float, self._v_scale_float = float(scales.key), float(scales.value)


def layers():
    """The right one, and those of which one scale is wrong."""
    scales = Scales(torch.tensor(0.02), torch.tensor(0.013), torch.tensor(0.4))
    return Layer(False, scales), [Layer(False, wrong) for wrong in others(scales)]


def quantised_batch(kind, layer, requests, query_scale=None):
    """A batch whose cache is in float8, queries too if they have a scale; and the same as the numbers are."""
    batch = make_batch(SHAPE, requests, seed=2)
    size, dtype = SHAPE.head_size, FLOAT8[kind]
    of = torch.cat([layer._k_scale.expand(size), layer._v_scale.expand(size)])
    most = torch.finfo(dtype).max
    cache = (batch.cache / of).clamp(-most, most).to(dtype)
    numbers = [
        ((x / of.view(2, 1, size)).clamp(-most, most).to(dtype).float() * of.view(2, 1, size)) for x in batch.dense
    ]
    exact, query = batch._replace(dense=numbers), batch.query
    if query_scale is not None:
        query = (query / query_scale).to(torch.float8_e4m3fn)
        exact = exact._replace(query=query.float() * query_scale)
    return batch._replace(cache=cache, query=query), exact


@pytest.mark.parametrize("kind", ["fp8", "fp8_e5m2"])
@pytest.mark.parametrize("passes", [1, 2], ids=["one-pass", "two-passes"])
def test_fp8_trees_on_a_cpu(kind, passes, monkeypatch):
    """Trees, prompts and plain rows of one batch: all see the cache's numbers times the layer's scales."""
    if passes == 2:
        monkeypatch.setattr(TreeCpuImpl, "forward", in_two_passes(TreeCpuImpl.forward))
    layer, wrong = layers()
    batch, exact = quantised_batch(kind, layer, played.mixed(with_prompts=True))
    cache = torch.full(batch.cache.shape, 0x55, dtype=torch.uint8)  # where nothing was written are numbers
    written = ~batch.cache.float().isnan().chunk(2, -1)[0]
    for view, part in zip(TreeCpuImpl.kv_views(cache), batch.cache.view(torch.uint8).chunk(2, -1), strict=True):
        view[written] = part[written]

    def forward(layer):
        with float8_kernels.on_any_cpu():
            impl = TreeCpuImpl(SHAPE.heads, SHAPE.head_size, SCALE, SHAPE.kv_heads, kv_cache_dtype=kind)
            return impl.forward(
                layer, batch.query, None, None, cache, metadata_of(batch), torch.empty_like(batch.query)
            )

    whole = expected(exact, SCALE)
    torch.testing.assert_close(forward(layer).double(), whole, atol=1e-5, rtol=0)
    for other in wrong[1:]:  # queries are not quantised
        assert (forward(other) - whole).abs().max() > 0.1


class Flash(played.Flash):
    """FlashAttention 3 over float8: queries, keys and values, each with its scales by request and head."""

    def flash_attn_varlen_func(self, *, q, k, v, q_descale, k_descale, v_descale, **rest):
        scales = q_descale, k_descale, v_descale
        assert {x.dtype for x in (q, k, v)} == {torch.float8_e4m3fn}
        assert {x.shape for x in scales} == {(rest["seqused_k"].shape[0], SHAPE.kv_heads)}
        q, k, v = (x.float() * scale[0, 0] for x, scale in zip((q, k, v), scales, strict=True))
        return super().flash_attn_varlen_func(q=q, k=k, v=v, **rest)


@pytest.fixture
def flash(monkeypatch):
    stand_in = Flash()
    monkeypatch.setattr(flash_attn, "get_flash_attn_version", lambda *_, **__: 3)
    monkeypatch.setattr(flash_attn, "flash_attn_supports_kv_cache_dtype", lambda *_, **__: True)
    for name in ("flash_attn_varlen_func", "get_scheduler_metadata"):
        monkeypatch.setattr(flash_attn, name, getattr(stand_in, name), raising=False)
    yield stand_in
    base.set_tree_source(None)


def flash_forward(batch, layer, metadata, key=None, window=None):
    impl = TreeFlashImpl(SHAPE.heads, SHAPE.head_size, SCALE, SHAPE.kv_heads, None, window, "fp8")
    cache = batch.cache.view(torch.uint8).transpose(1, 2).contiguous().transpose(1, 2)
    out = torch.full(batch.query.shape, torch.nan)
    key = torch.full_like(out[:, : SHAPE.kv_heads], torch.nan) if key is None else key
    impl.forward(layer, batch.query, key, key, cache, metadata, out)
    assert out.isfinite().all()
    return out


@pytest.mark.parametrize("window", [None, 24])
def test_fp8_trees_by_flash_attention(flash, window):
    """Prefix and rest are FlashAttention's, planned for float8; a window's prefix and the tails are ours."""
    layer, wrong = layers()
    batch, exact = quantised_batch("fp8", layer, played.mixed(with_prompts=window is None), layer._q_scale)
    base.set_tree_source(lambda common, capturing: batch.tail)
    metadata = played.make_builder({"target": layer}, dtype=torch.uint8, cache_dtype="fp8").build(0, batch.common())
    whole = expected(exact, Softmax(SCALE, window or 0))
    torch.testing.assert_close(flash_forward(batch, layer, metadata, window=window).double(), whole, atol=1e-5, rtol=0)
    assert {plan["qkv_dtype"] for plan in flash.plans} == {torch.float8_e4m3fn}
    assert [call["causal"] for call in flash.calls] == ([] if window else [False, True])
    for other in wrong:
        assert (flash_forward(batch, other, metadata, window=window) - whole).abs().max() > 0.05


def test_fp8_level_by_flash_attention(flash):
    """A drafter's tree: its cache is in float8, the tree's own rows are not."""
    scales = Scales(torch.tensor(0.02), torch.tensor(0.013), torch.tensor(0.4))
    layer, width, num_reqs = Layer(True, scales), 3, 2
    batch, exact = quantised_batch("fp8", layer, [Request(40, width, None), Request(7, width, None)], layer._q_scale)
    # The last rows of each request are the level: not in the cache, and seen by themselves alone.
    lengths = batch.seq_lens - width
    common = batch.common(causal=False)
    common.seq_lens = lengths
    metadata = played.make_builder({"drafter": layer}, dtype=torch.uint8, cache_dtype="fp8").build(0, common)
    key = torch.randn(num_reqs * width, SHAPE.kv_heads, SHAPE.head_size, generator=torch.Generator().manual_seed(3))
    bits = torch.zeros(num_reqs * width, 32, dtype=torch.bool)
    bits[:, :width] = torch.eye(width).bool().repeat(num_reqs, 1)
    scratch = torch.full((num_reqs, 8, 2, SHAPE.kv_heads, SHAPE.head_size), torch.nan)
    metadata.draft_tail = DraftTail(scratch, pack_bits(bits), torch.tensor([width], dtype=torch.int32), num_reqs, width)
    out = flash_forward(batch, layer, metadata, key)
    for index, length in enumerate(lengths.tolist()):
        rows = slice(index * width, (index + 1) * width)
        content = torch.cat([exact.dense[index][:length], torch.stack([key[rows], key[rows]], dim=1)])
        mask = torch.cat([torch.ones(width, length).bool(), torch.eye(width).bool()], dim=1)
        whole = masked_softmax(exact.query[rows], content, mask, SCALE)
        torch.testing.assert_close(out[rows].double(), whole, atol=1e-5, rtol=0)


@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM has kernels for float8 with AVX-512 alone")
@pytest.mark.parametrize("kind", ["fp8", "fp8_e5m2"])
def test_fp8_kernels_of_vllm_are_what_stands_in_for_them(kind):
    """Where vLLM has kernels: the same bytes, and the same attention over them."""
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.rand(2, 50, 2, 32, generator=generator) + 0.5) * 8
    query = torch.randn(50, 4, 32, generator=generator)
    slots, form = torch.arange(50) + 32, {"k_scale": 0.03, "v_scale": 0.4, "kv_cache_dtype": kind}
    starts, lengths = (torch.tensor(x, dtype=torch.int32) for x in ([0, 50], [50]))
    found = []
    for write, attend_all in (
        (ops.cpu_attn_reshape_and_cache, ops.cpu_attention_with_kv_cache),
        (float8_kernels.reshape_and_cache, float8_kernels.attention),
    ):
        cache = torch.zeros(4, 2, 32, 64, dtype=torch.uint8)
        parts, out = cache.view(4, 2, 64, 32).chunk(2, dim=2), torch.empty_like(query)
        write(key, value, *parts, slots, "vec", **form)
        plan = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=1, num_heads=4, num_kv_heads=2, head_dim=32, seq_lens=lengths, dtype=query.dtype,
            query_start_loc=starts, causal=True, sliding_window_size=-1, isa="vec", enable_kv_split=False,
            kv_cache_dtype=kind,
        )  # fmt: skip
        attend_all(
            query=query, key_cache=parts[0], value_cache=parts[1], output=out, query_start_loc=starts,
            seq_lens=lengths, scale=0.02, causal=True, alibi_slopes=None, sliding_window=-1,
            block_table=torch.tensor([[1, 2]], dtype=torch.int32), softcap=0.0, scheduler_metadata=plan, s_aux=None,
            dynamic_causal=None, **form,
        )  # fmt: skip
        found.append((cache, out))
    assert torch.equal(found[0][0], found[1][0]) and found[0][0].any()
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-4, rtol=1e-4)
