"""What vLLM needs to run right on a machine without a GPU, its kernels in Triton's interpreter.

Development only. Each mend restores what a compiled kernel does; both the plain engine and ours run with them.
"""

import functools
import types
from typing import Any


def mend() -> None:
    """Mend the interpreter's masks and the two kernels of vLLM's samplers that it cannot run."""
    _accept_integer_masks()
    _provide_log1p()
    _filter_with_torch()
    _sample_with_torch()


def _accept_integer_masks() -> None:
    """A mask made by chaining ``&`` comes out as an integer in the interpreter, which then refuses it."""
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    if getattr(builder, "_crossspec_masks", False):
        return
    load, store = builder.create_masked_load, builder.create_masked_store

    def as_bool(mask: Any) -> Any:
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

    @functools.wraps(topk_topp_sampler.apply_top_k_top_p_triton)
    def apply_top_k_top_p(logits: Any, k: Any, p: Any, **_: Any) -> Any:
        return topk_topp_sampler.apply_top_k_top_p_pytorch(logits, k, p, allow_cpu_sync=True)

    topk_topp_sampler.apply_top_k_top_p_triton = apply_top_k_top_p


def _sample_with_torch() -> None:
    """Sampling is one program for every thousand logits of every row: interpreted, it is what a tree's step waits for.

    The same in PyTorch, for plain generation, vLLM's own speculation and ours alike.
    """
    from vllm.v1.worker.gpu.sample import gumbel

    if not isinstance(gumbel._gumbel_sample_kernel, _GumbelSample):
        gumbel._gumbel_sample_kernel = _GumbelSample(gumbel._gumbel_sample_kernel)


class _GumbelSample:
    """Stands where vLLM's kernel stands, and is called as it is."""

    def __init__(self, original: Any):
        self.__wrapped__ = original

    def __getitem__(self, grid: Any) -> Any:
        return self._run

    @staticmethod
    def _run(
        local_argmax: Any,
        _argmax_stride: int,
        local_max: Any,
        _max_stride: int,
        logits_cache: Any,
        _cache_stride_0: int,
        _cache_stride_1: int,
        logits_cache_col: Any,
        logits_cache_source: Any,
        _source_stride: int,
        logits: Any,
        _logits_stride: int,
        expanded_idx_mapping: Any,
        seeds: Any,
        positions: Any,
        temperature: Any,
        vocab_size: int,
        **options: Any,
    ) -> None:
        import torch
        from vllm.v1.worker.gpu.sample.gumbel import _DRAFT_NOISE_SALT

        from vllm_crossspec.engine.noise import gumbel_noise_naive

        slots = expanded_idx_mapping.long()
        if logits_cache is not None:
            column = logits_cache_col if logits_cache_col.dim() else logits_cache_col.expand_as(slots)
            real = slots >= 0
            logits_cache[slots[real], column[real].long(), :vocab_size] = logits_cache_source[real]
        scale = torch.where(slots >= 0, temperature[slots.clamp(min=0)].float(), 0.0)
        values = logits.to(local_max.dtype)
        rows = scale.nonzero().flatten()
        if rows.numel():
            scores = logits[rows].float()
            if options["APPLY_TEMPERATURE"]:
                scores = scores / scale[rows, None]
            keys = positions[rows] + (_DRAFT_NOISE_SALT.value if options["IS_DRAFTING"] else 0)
            tokens = torch.arange(vocab_size)
            values = values.clone()
            values[rows] = scores.to(values.dtype) + gumbel_noise_naive(
                seeds[slots[rows]], keys, tokens, options["USE_FP64"]
            ).to(values.dtype)
        num_rows, num_blocks = local_max.shape
        block = options["BLOCK_SIZE"]
        padded = torch.nn.functional.pad(values, (0, num_blocks * block - vocab_size), value=float("-inf"))
        best, index = padded.view(num_rows, num_blocks, block).max(dim=-1)
        local_max.copy_(best)
        local_argmax.copy_(index + torch.arange(num_blocks) * block)


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


def mend_recurrence() -> None:
    """Mamba-2 over draft tokens, of which vLLM's CPU kernels take one alone and keep no state to go back to.

    Without it the text of vLLM's own speculation changes as ours does.
    """
    from vllm.model_executor.layers.mamba import mamba_mixer2

    from vllm_crossspec.engine import cpu_recurrence

    if hasattr(mamba_mixer2.causal_conv1d_update, "__wrapped__"):
        return
    mamba_mixer2.causal_conv1d_update = cpu_recurrence.convolution(mamba_mixer2.causal_conv1d_update)
    mamba_mixer2.selective_state_update = cpu_recurrence.recurrence(mamba_mixer2.selective_state_update)
