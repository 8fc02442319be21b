"""KV caches in float8: kernels, backends and engines read the cache's own numbers, by their scales."""

import pytest
import torch
from hopper import compile_in_subprocess
from steps import DEVICE
from test_tail_attention import TOLERANCE, attend, make_attention, rows_of_tails, softmax_attention, whole_and_prefix

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
