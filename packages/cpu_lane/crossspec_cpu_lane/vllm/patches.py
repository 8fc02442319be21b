"""What vLLM needs to draft right on a machine without a GPU; for its own speculation and ours alike."""


def mend_context_norm() -> None:
    """DFlash norms the context keys of all its layers in one call, with a row of weights for each layer.

    vLLM's CPU kernel takes the first row for all of them, so that every layer but the first drafts from wrong keys:
    natively as with us, and lossless, but accepted less often. Only z-lab's own code shows it.
    """
    import torch
    from vllm import _custom_ops as ops
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    def normalize_by_layer(self: DFlashQwen3Model, all_k: torch.Tensor) -> torch.Tensor:
        normed = torch.empty_like(all_k)
        for keys, weight, out in zip(all_k, self._k_norm_weights, normed, strict=True):
            ops.rms_norm(out, keys, weight, self._rms_norm_eps)
        return normed

    DFlashQwen3Model._normalize_context_k = normalize_by_layer


def mend_recurrence() -> None:
    """Mamba-2 over several draft tokens. vLLM's CPU kernels take one token and keep no earlier state.

    Without it the text of vLLM's own speculation changes as ours does.
    """
    from vllm.model_executor.layers.mamba import mamba_mixer2

    from crossspec_cpu_lane.vllm import recurrence

    if hasattr(mamba_mixer2.causal_conv1d_update, "__wrapped__"):
        return
    mamba_mixer2.causal_conv1d_update = recurrence.convolution(mamba_mixer2.causal_conv1d_update)
    mamba_mixer2.selective_state_update = recurrence.recurrence(mamba_mixer2.selective_state_update)
