"""The CPU lane's products in engines of ours: a round's rows cost what reading the weights costs, nearly.

Verification pays where several rows cost the target hardly more than one. oneDNN's products, which vLLM takes on a
CPU, need half as long again for 16 rows; see ``crossspec_cpu_lane.products``. For development, as the lane is.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers import utils as layers

VARIABLE = "CROSSSPEC_CPU_PRODUCTS"
"""Environment variable. ``0``: never; ``all``: linear layers of plain engines and of vLLM's own methods, too."""


def choice() -> str:
    """What the user has set.

    Raises:
        ValueError: it is none of the three.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", "0", "all"):
        raise ValueError(f"{VARIABLE} is {asked!r}: set it to 0 or all, or unset it")
    return asked


def lane_ops() -> Any | None:
    """``torch.ops.crossspec_cpu_lane``; None where the user wants none, or it would not be faster, or cannot be had.

    It is faster with AVX-512. Built for AVX2 it lost from 24 rows on, and vectors of 16 bytes are far too narrow.
    """
    return None if choice() == "0" else _loaded()


@cache
def _loaded() -> Any | None:
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return None
    try:
        from crossspec_cpu_lane import products

        products.load()
    except (ImportError, RuntimeError, OSError):
        return None
    return torch.ops.crossspec_cpu_lane


def use_everywhere() -> None:
    """Have every engine that this process starts load its layers for the lane."""
    if lane_ops() is not None:
        layers.dispatch_cpu_unquantized_gemm = _packing()


@contextlib.contextmanager
def lane_products(device: torch.device) -> Iterator[None]:
    """Have float32 layers that are loaded meanwhile packed for the lane."""
    native = layers.dispatch_cpu_unquantized_gemm
    if device.type == "cpu" and choice() != "all" and lane_ops() is not None:
        layers.dispatch_cpu_unquantized_gemm = _packing()
    try:
        yield
    finally:
        layers.dispatch_cpu_unquantized_gemm = native


def _packing() -> Callable[..., None]:
    """In the place of vLLM's choice of a product for a layer."""
    native = layers.dispatch_cpu_unquantized_gemm

    def dispatch(layer: nn.Module, remove_weight: bool) -> None:
        weight = layer.weight
        if weight.is_meta or weight.ndim != 2 or weight.dtype != torch.float32:
            native(layer, remove_weight=remove_weight)
            return
        packed, outputs = torch.ops.crossspec_cpu_lane.pack(weight), weight.shape[0]
        layer.cpu_linear = lambda x, weight, bias: torch.ops.crossspec_cpu_lane.linear(x, packed, outputs, bias)
        if remove_weight:
            layer.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)

    return dispatch
