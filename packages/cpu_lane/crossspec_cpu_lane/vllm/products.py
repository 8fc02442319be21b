"""What layers multiply with on a CPU: vLLM's own products, the CPU lane's, or, for a drafter, bfloat16.

Verification pays where several rows cost the target hardly more than one. oneDNN's products, which vLLM takes, need
half as long again for 16 rows; the plugin's engines have the lane's (``crossspec_cpu_lane.products``). For
development, as the lane is.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import nn
from vllm import _custom_ops as ops
from vllm.logger import init_logger
from vllm.model_executor.layers import utils as layers
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from crossspec_cpu_lane import products

logger = init_logger("vllm.crossspec")

VARIABLE = "CROSSSPEC_CPU_PRODUCTS"
"""Environment variable. ``0``: never; ``all``: linear layers of plain engines and of vLLM's own methods, too."""

FAST_ROWS = 4
"""Rows from which oneDNN multiplies bfloat16 at the speed of memory; for one row it takes as long as for forty."""

Choose = Callable[..., None]
"""vLLM's own: gives a layer what it multiplies with, and may take its weights out of it."""


def choice() -> str:
    """What the user has set.

    Raises:
        ValueError: it is none of the three.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", "0", "all"):
        raise ValueError(f"{VARIABLE} is {asked!r}: set it to 0 or all, or unset it")
    return asked


@cache
def lane_ops() -> Any | None:
    """``torch.ops.crossspec_cpu_lane``; None where the user wants none or it cannot be had."""
    if choice() == "0":
        return None
    try:
        products.load()
    except (RuntimeError, OSError) as problem:
        logger.warning("crossspec: vLLM's and PyTorch's own products stay, slower for a round's rows: %s", problem)
        return None
    return torch.ops.crossspec_cpu_lane


def lane_multiplies() -> bool:
    """Whether linear layers are faster in the lane: measured on two processors with AVX-512 and one with AVX2."""
    return lane_ops() is not None and torch.backends.cpu.get_cpu_capability() in ("AVX512", "AVX2")


def use_lane_everywhere() -> None:
    """Have every engine that this process starts load its layers for the lane."""
    if lane_multiplies():
        layers.dispatch_cpu_unquantized_gemm = _lane(layers.dispatch_cpu_unquantized_gemm)


def lane_products() -> contextlib.AbstractContextManager[None]:
    """Have float32 layers that are loaded meanwhile packed for the lane."""
    return _loading(_lane) if lane_multiplies() and choice() != "all" else contextlib.nullcontext()


def multiplies_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16; with AVX2 alone oneDNN refuses to."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def products_in(dtype: str | None) -> contextlib.AbstractContextManager[None]:
    """Have float32 layers that a CPU loads meanwhile multiply in bfloat16; their inputs and outputs stay float32.

    Half the bytes of weights, which is what a drafter's pass costs: drafts may change, and no text does. Embeddings and
    output layers stay as they are, so that near candidates are not rounded to one score. Nothing changes on a processor
    that has no products in bfloat16, and a line of the log says so.

    Args:
        dtype: "bfloat16"; None changes nothing.
    """
    if dtype is None:
        return contextlib.nullcontext()
    if not multiplies_bfloat16():
        logger.info_once("crossspec: drafters stay in float32, for this processor does not multiply bfloat16")
        return contextlib.nullcontext()
    return _loading(_bfloat16)


@contextlib.contextmanager
def _loading(replacement: Callable[[Choose], Choose]) -> Iterator[None]:
    native = layers.dispatch_cpu_unquantized_gemm
    layers.dispatch_cpu_unquantized_gemm = replacement(native)
    try:
        yield
    finally:
        layers.dispatch_cpu_unquantized_gemm = native


def _lane(native: Choose) -> Choose:
    def choose(layer: nn.Module, remove_weight: bool) -> None:
        weight = layer.weight
        if weight.is_meta or not _is_float32_matrix(weight):
            native(layer, remove_weight=remove_weight)
            return
        packed, outputs = torch.ops.crossspec_cpu_lane.pack(weight), weight.shape[0]
        layer.cpu_linear = lambda x, weight, bias: torch.ops.crossspec_cpu_lane.linear(x, packed, outputs, bias)
        _drop_weight(layer, remove_weight)

    return choose


def _bfloat16(native: Choose) -> Choose:
    def choose(layer: nn.Module, remove_weight: bool) -> None:
        weight = layer.weight
        if isinstance(layer, VocabParallelEmbedding) or not _is_float32_matrix(weight):
            native(layer, remove_weight=remove_weight)
            return
        handler = ops.create_onednn_mm(weight.to(torch.bfloat16).t())

        def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            rows = x.shape[0]
            narrow = nn.functional.pad(x, (0, 0, 0, max(FAST_ROWS - rows, 0))).to(torch.bfloat16)
            out = ops.onednn_mm(handler, narrow, None)[:rows].float()
            return out if bias is None else out + bias

        layer.cpu_linear = linear
        _drop_weight(layer, remove_weight)

    return choose


def _is_float32_matrix(weight: torch.Tensor) -> bool:
    return weight.ndim == 2 and weight.dtype == torch.float32


def _drop_weight(layer: nn.Module, remove_weight: bool) -> None:
    """What was packed is not needed twice."""
    if remove_weight:
        layer.weight = nn.Parameter(layer.weight.new_empty(0), requires_grad=False)
