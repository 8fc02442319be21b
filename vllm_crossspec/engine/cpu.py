"""What vLLM needs to run right on a machine without a GPU, its kernels in Triton's interpreter.

Development only. Each mend restores what a compiled kernel does; both the plain engine and ours run with them.
"""

import types
from typing import Any


def mend() -> None:
    """Mend the interpreter's masks and the two kernels of vLLM's samplers that it cannot run."""
    _accept_integer_masks()
    _provide_log1p()
    _filter_with_torch()


def _accept_integer_masks() -> None:
    """A mask made by chaining ``&`` comes out as an integer in the interpreter, which then refuses it."""
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    if getattr(builder, "_crossspec_masks", False):
        return
    load, store = builder.create_masked_load, builder.create_masked_store

    def as_bool(mask):
        if mask is not None and mask.data.dtype != bool:
            return interpreter.TensorHandle(mask.data != 0, interpreter.tl.int1)
        return mask

    builder.create_masked_load = lambda self, ptr, mask, *rest: load(self, ptr, as_bool(mask), *rest)
    builder.create_masked_store = lambda self, ptr, value, mask, *rest: store(self, ptr, value, as_bool(mask), *rest)
    builder._crossspec_masks = True


def _provide_log1p() -> None:
    """libdevice functions answer None in the interpreter; vLLM's rejection sampler uses one of them."""
    import vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils as utils
    from triton import language as tl

    utils.tldevice = types.SimpleNamespace(log1p=lambda x: tl.log(1.0 + x))


def _filter_with_torch() -> None:
    """The kernel of top-k and top-p cannot be interpreted; vLLM has the same in torch for machines without Triton."""
    from vllm.v1.sample.ops import topk_topp_sampler

    def apply_top_k_top_p(logits, k, p):
        return topk_topp_sampler.apply_top_k_top_p_pytorch(logits, k, p, allow_cpu_sync=True)

    topk_topp_sampler.apply_top_k_top_p_triton = apply_top_k_top_p


def mend_context_norm() -> None:
    """DFlash norms the context keys of all its layers in one call, with a row of weights for each layer.

    vLLM's CPU kernel takes the first row for all of them, so that every layer but the first drafts from wrong keys:
    natively as with us, and lossless, but accepted less often. Only z-lab's own code shows it.
    """
    import torch
    from vllm import _custom_ops as ops
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    def normalize_by_layer(self: Any, all_k: torch.Tensor) -> torch.Tensor:
        normed = torch.empty_like(all_k)
        for keys, weight, out in zip(all_k, self._k_norm_weights, normed, strict=True):
            ops.rms_norm(out, keys, weight, self._rms_norm_eps)
        return normed

    DFlashQwen3Model._normalize_context_k = normalize_by_layer
