"""vLLM's CPU kernels over a KV cache in float8, in PyTorch, for processors without AVX-512, where vLLM has none.

They do what vLLM's do (csrc/cpu/cpu_attn_fp8.hpp, cpu_attn_vec.hpp): the same bytes in the same places, rounded toward
zero, and attention in float32 over those bytes times their scales. Everything around them is vLLM's and ours.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends import cpu_attn

from vllm_crossspec import devices
from vllm_crossspec.types import FLOAT8

MANTISSA = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}


def truncate(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The nearest number of float8 toward zero."""
    limits, x = torch.finfo(dtype), x + 0.0  # no -0 is written as such
    _, exponent = torch.frexp(x.abs().clamp(min=limits.smallest_normal))
    step = torch.ldexp(torch.ones_like(x), exponent - 1 - MANTISSA[dtype])
    return ((x / step).trunc() * step).clamp(-limits.max, limits.max).to(dtype)


def views(key_cache: torch.Tensor, value_cache: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, each [blocks, tokens, Hkv, Dh], where vLLM's kernel for vectors has them."""
    blocks, heads, tokens, size = key_cache.shape
    block, head = key_cache.stride()[:2]
    dtype = FLOAT8[kind]
    shape, by_token = (blocks, tokens, heads, size), (block, size, head, 1)
    keys = key_cache.view(dtype).as_strided(shape, (block, 1, head, tokens))
    return keys, value_cache.view(dtype).as_strided(shape, by_token)


def reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, isa, k_scale, v_scale, kv_cache_dtype):
    """Write the rows whose slot is not negative."""
    rows = slot_mapping >= 0
    block, place = slot_mapping[rows] // key_cache.shape[2], slot_mapping[rows] % key_cache.shape[2]
    given = ((key, k_scale), (value, v_scale))
    for view, (x, scale) in zip(views(key_cache, value_cache, kv_cache_dtype), given, strict=True):
        numbers = truncate(x[: len(rows)][rows].float() * (1 / torch.tensor(scale)), view.dtype)
        view.view(torch.uint8)[block, place] = numbers.view(torch.uint8)  # PyTorch does not index float8


def attention(
    *, query, key_cache, value_cache, output, query_start_loc, seq_lens, scale, causal, alibi_slopes, sliding_window,
    block_table, softcap, scheduler_metadata, s_aux, dynamic_causal, k_scale, v_scale, kv_cache_dtype,
):  # fmt: skip
    """Attend, a request at a time."""
    assert alibi_slopes is None and sliding_window == -1 and not softcap and s_aux is None
    keys, values = (x.view(torch.uint8) for x in views(key_cache, value_cache, kv_cache_dtype))
    group, bounds = query.shape[1] // keys.shape[2], query_start_loc.tolist()
    for index, length in enumerate(seq_lens[: len(bounds) - 1].tolist()):
        rows = slice(bounds[index], bounds[index + 1])
        if rows.start == rows.stop:
            continue
        blocks = block_table[index, : -(-length // keys.shape[1])].long()
        k, v = (
            (x[blocks].flatten(0, 1)[:length].view(FLOAT8[kv_cache_dtype]).float() * by).repeat_interleave(group, 1)
            for x, by in ((keys, k_scale), (values, v_scale))
        )
        scores = torch.einsum("qhd,khd->hqk", query[rows].float(), k) * scale
        if causal if dynamic_causal is None else int(dynamic_causal[index]):
            num_rows = rows.stop - rows.start
            scores = scores.masked_fill(~torch.ones(num_rows, length).tril(length - num_rows).bool(), -torch.inf)
        output[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def for_float8(original: Any, stand_in: Any) -> Any:
    """A kernel of vLLM's, and what stands in for it where the cache is in float8."""

    @functools.wraps(original)  # whose signature is checked when an engine starts
    def kernel(*arguments: Any, **options: Any) -> Any:
        is_float8 = options.get("kv_cache_dtype") in FLOAT8
        return (stand_in if is_float8 else original)(*arguments, **options)

    return kernel


@contextlib.contextmanager
def on_any_cpu() -> Iterator[None]:
    """Let engines of this process have a KV cache in float8; nothing changes where vLLM has kernels for it."""
    if torch.cpu._is_avx512_supported():
        yield
        return
    plan = ops.cpu_attn_get_scheduler_metadata

    def schedule(**options):  # layers of another type may share it
        return plan(**options | {"kv_cache_dtype": "auto"})

    with contextlib.ExitStack() as stack:
        for name, stand_in in (
            ("cpu_attn_reshape_and_cache", reshape_and_cache),
            ("cpu_attention_with_kv_cache", attention),
            ("cpu_attn_get_scheduler_metadata", schedule),
        ):
            kernel = for_float8(getattr(ops, name), stand_in)
            stack.enter_context(mock.patch.object(ops, name, kernel))
        isa = lambda dtype, block_size, head_size=None, kv_cache_dtype=None: "vec"  # noqa: E731
        stack.enter_context(mock.patch.object(cpu_attn, "_get_attn_isa", isa))
        stack.enter_context(mock.patch.object(devices, "has_avx512", lambda: True))
        yield
