"""What targets and engines cannot do with drafts, seen before any weight is loaded: one sentence for each."""

import copy
from typing import Any

from vllm_crossspec.config.schema import CrossSpecConfig, settings_of
from vllm_crossspec.platform import platform
from vllm_crossspec.ranks import step_together
from vllm_crossspec.types import FLOAT8

V1_REFUSAL = "vllm_crossspec's proposers (set VLLM_USE_V2_MODEL_RUNNER=1 or leave it unset)"


def check_target(settings: CrossSpecConfig, model_config: Any) -> None:
    """Raise ValueError for a target whose layers cannot hold a draft tree."""
    if not settings.has_trees:
        return
    kinds = {
        "recurrent (mamba) layers": model_config.is_hybrid or model_config.is_attention_free,
        "latent attention (MLA)": model_config.use_mla,
        # Soft prompts stand in front of the text, and a window ends before them.
        "sliding-window attention": settings.contemplates and bool(model_config.get_sliding_window()),
    }
    found = [what for what, present in kinds.items() if present]
    if found:
        raise ValueError(
            f"speculative_config.tree: {model_config.model} has {' and '.join(found)}, over which draft trees cannot "
            'be verified; use "tree": {"type": "chain"}'
        )


def check_taps(settings: CrossSpecConfig, model_config: Any) -> None:
    """Raise ValueError for a target that hands out no states of its layers, where a drafter reads some."""
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.interfaces import supports_eagle3

    tapping = [name for name, drafter in settings.drafters.items() if drafter.target_layers]
    if not tapping:
        return
    model_class, architecture = ModelRegistry.resolve_model_cls(model_config.architectures, model_config=model_config)
    if not supports_eagle3(model_class):
        raise ValueError(
            f"speculative_config: drafter {tapping[0]} reads states of the target's layers, which vLLM's "
            f"{architecture} does not hand out; use draft_model, suffix or ngram"
        )


def unsupported_features(vllm_config: Any) -> list[str]:
    """What our proposers do not do, in words that vLLM's own message ends with."""
    settings = settings_of(vllm_config)
    if settings is None:
        return []
    parallel, drafters = vllm_config.parallel_config, settings.drafters.values()
    by_context = parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1
    copies = any(d.head is not None and d.head.grouped for d in drafters) and parallel.tensor_parallel_size > 1
    has_dtype = any(d.dtype is not None for d in drafters) and not platform().has_drafter_dtypes
    together = step_together(parallel)
    in_step = "of a target with experts or an external launcher, whose ranks run every step together"
    recurrent = (
        f"speculation over the recurrent layers of {vllm_config.model_config.architecture}, whose states have no room "
        "for drafts (leave out speculative_config, or use a target with Mamba-2 or gated delta nets)"
    )
    connects = vllm_config.kv_transfer_config is not None
    wrong = {
        "pipeline parallelism with vllm_crossspec (use tensor parallelism)": parallel.pipeline_parallel_size > 1,
        "context parallelism with vllm_crossspec": by_context,
        "micro-batching (DBO) with vllm_crossspec": parallel.use_ubatching,
        "tensor parallelism with a FlashHead's copy by clusters (leave out head.grouped)": copies,
        "a drafter's dtype on a GPU, where it is the target's (leave out dtype)": has_dtype,
        f"adaptive trees with data parallelism {in_step} (leave out adaptive)": together and settings.is_adaptive,
        f"several drafters with data parallelism {in_step} (give one drafter)": together and settings.is_routed,
        recurrent: _forgets_drafts(vllm_config),
        "KV connectors with several drafters of vllm_crossspec (layers are saved before all have caught up)": connects
        and settings.is_routed,
    }
    if settings.verification == "match":
        by_match, model = "with verification 'match' of vllm_crossspec (use 'rejection')", vllm_config.model_config
        wrong |= {
            f"watermarking {by_match}": vllm_config.watermark_config is not None,
            f"batch-sharded sampling {by_match}": parallel.enable_batch_sharded_sampling,
            f"sampling masks and trace replay {by_match}": model.return_sampling_mask or model.enable_trace_replay,
        }
    found = [sentence for sentence, is_so in wrong.items() if is_so]
    return [*found, *_unsupported_by_trees(vllm_config)] if settings.has_trees else found


def _forgets_drafts(vllm_config: Any) -> bool:
    """Whether the target has recurrent layers that could not go back to the accepted tokens.

    Those that can keep the inputs of a step's drafts, and so are larger with speculation than without. Mamba-1 and
    linear attention are not: their states would stand behind refused drafts, and the text would change.
    """
    from vllm.model_executor.models import ModelRegistry

    model = vllm_config.model_config
    if not (model.is_hybrid or model.is_attention_free):
        return False
    model_class, _ = ModelRegistry.resolve_model_cls(model.architectures, model_config=model)
    without = copy.copy(vllm_config)
    without.speculative_config = None
    sizes = [model_class.get_mamba_state_shape_from_config(config) for config in (vllm_config, without)]
    return sizes[0] == sizes[1]


def _unsupported_by_trees(vllm_config: Any) -> list[str]:
    """What draft trees do not do; chains do."""
    connectors = (
        "KV connectors with draft trees (layers are saved before the accepted path is in place; set tree to chain)"
    )
    found = [connectors] if vllm_config.kv_transfer_config is not None else []
    cache, dtype = vllm_config.cache_config, vllm_config.cache_config.cache_dtype
    if dtype == "auto" and getattr(vllm_config.quant_config, "kv_cache_scheme", None):
        dtype = "fp8"  # which vLLM finds out when it builds the layers
    if dtype in ("auto", "bfloat16", "float16", "float32"):
        return found
    if dtype not in FLOAT8:
        problem: str | None = "(use --kv-cache-dtype auto or fp8)"
    elif cache.kv_cache_dtype_skip_layers:
        problem = "that some layers have in another type (leave out --kv-cache-dtype-skip-layers)"
    else:
        problem = platform().cache_problem(dtype, vllm_config.model_config.dtype)
    return [*found, f"a KV cache in {dtype} with draft trees {problem}"] if problem else found
