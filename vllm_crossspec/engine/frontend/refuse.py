"""What files and targets must agree with, seen before any weight is loaded: one sentence for what does not."""

import copy
from pathlib import Path
from typing import Any

import torch

from vllm_crossspec import devices
from vllm_crossspec.adaptive.calibration import check_drafter_calibration
from vllm_crossspec.config import CrossSpecConfig, settings_of
from vllm_crossspec.drafters.base import drafter_kind, load
from vllm_crossspec.drafters.checkpoint import read_config
from vllm_crossspec.drafters.identity import known_model
from vllm_crossspec.ngram.store import open_store, tokenizer_hash
from vllm_crossspec.ranks import step_together
from vllm_crossspec.router.checkpoint import check_router
from vllm_crossspec.router.costs import read_costs
from vllm_crossspec.types import FLOAT8, TargetFacts

V1_REFUSAL = "vllm_crossspec's proposers (set VLLM_USE_V2_MODEL_RUNNER=1 or leave it unset)"


def check_ngram_stores(settings: CrossSpecConfig, target: TargetFacts, target_model_config: Any) -> None:
    """Refuse n-gram stores that are damaged, or of another tokenizer than the target's.

    Raises:
        ValueError: one sentence that names the key, the file and the fix.
    """
    folder = Path(str(target_model_config.tokenizer or target_model_config.model)).expanduser()
    # A target from the hub has its tokenizer in a cache; then the vocabulary's size is all that can be compared.
    tokenizer = tokenizer_hash(folder, "tokenizer") if (folder / "tokenizer.json").is_file() else None
    for name, drafter in settings.drafters.items():
        if drafter.ngram is None:
            continue
        open_store(
            Path(drafter.ngram.model).expanduser(),
            key=f"{settings.path_of(name)}ngram.model",
            order=drafter.ngram.order,
            vocab_size=target.vocab_size,
            tokenizer=tokenizer,
        )


def check_calibrations(settings: CrossSpecConfig, target_model_config: Any) -> None:
    """Refuse calibrations of adaptive trees that are damaged, or of another target, drafter or tree.

    Raises:
        ValueError: one sentence that names the key and the fix.
    """
    if not settings.is_adaptive:
        return
    target = known_model(str(target_model_config.model), target_model_config.revision)
    for name, drafter in settings.drafters.items():
        check_drafter_calibration(drafter, target, f"{settings.path_of(name)}adaptive.model")


def check_drafted_targets(settings: CrossSpecConfig, target_model_config: Any) -> None:
    """Refuse drafters that were trained for another target, as far as their kinds can tell.

    Raises:
        ValueError: one sentence that names the key, both targets and the fix.
    """
    for name, drafter in settings.drafters.items():
        kind = drafter_kind(drafter.kind, "")
        if kind.check_target:
            key = f"{settings.path_of(name)}model"
            config = read_config(drafter.model, key, drafter.native.get("revision"))
            load(kind.check_target)(config, key, str(target_model_config.model), target_model_config.revision)


def check_router_settings(settings: CrossSpecConfig, target: TargetFacts) -> None:
    """Refuse a buffer that holds no round, and a router of another target or of other drafters.

    Raises:
        ValueError: one sentence that names the key and the fix.
    """
    router = settings.router
    if router is None or not settings.is_routed:
        return
    key, needed = "speculative_config.router", settings.max_depth + 1
    if router.max_backlog < needed:
        raise ValueError(
            f"{key}.max_backlog is {router.max_backlog}, but one round can accept {needed} tokens; use {needed} or more"
        )
    if router.model is not None:
        check_router(router.model, hidden_size=target.hidden_size, drafters=settings.routing_order, key=f"{key}.model")
    if router.costs is not None:
        read_costs(router.costs, settings.routing_order, f"{key}.costs")


def check_target(settings: CrossSpecConfig, model_config: Any) -> None:
    """Refuse targets whose layers cannot hold a draft tree.

    Raises:
        ValueError: one sentence that names what the target has and the fix.
    """
    if not settings.has_trees:
        return
    kinds = {
        "recurrent (mamba) layers": model_config.is_hybrid or model_config.is_attention_free,
        "latent attention (MLA)": model_config.use_mla,
    }
    if settings.contemplates:  # soft prompts stand in front of the text, and a window ends before them
        kinds["sliding-window attention"] = bool(model_config.get_sliding_window())
    found = [what for what, present in kinds.items() if present]
    if found:
        raise ValueError(
            f"speculative_config.tree: {model_config.model} has {' and '.join(found)}, over which draft trees cannot "
            'be verified; use "tree": {"type": "chain"}'
        )


def check_taps(settings: CrossSpecConfig, model_config: Any) -> None:
    """Refuse targets that hand out no states of their layers, where a drafter reads some; before weights are loaded.

    Raises:
        ValueError: one sentence that names the drafter and the fix.
    """
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
    from vllm.platforms import current_platform

    settings = settings_of(vllm_config)
    if settings is None:
        return []
    parallel = vllm_config.parallel_config
    found = []
    if parallel.pipeline_parallel_size > 1:
        found.append("pipeline parallelism with vllm_crossspec (use tensor parallelism)")
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        found.append("context parallelism with vllm_crossspec")
    if parallel.use_ubatching:
        found.append("micro-batching (DBO) with vllm_crossspec")
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.enable_adaptive_verification:
        found.append("enable_adaptive_verification with vllm_crossspec")
    is_grouped = any(d.head is not None and d.head.grouped for d in settings.drafters.values())
    if is_grouped and parallel.tensor_parallel_size > 1:
        found.append("tensor parallelism with a FlashHead's copy by clusters (leave out head.grouped)")
    if any(d.dtype is not None for d in settings.drafters.values()) and not current_platform.is_cpu():
        found.append("a drafter's dtype on a GPU, where it is the target's (leave out dtype)")
    if step_together(parallel):
        why = "of a target with experts or an external launcher, whose ranks run every step together"
        if settings.is_adaptive:
            found.append(f"adaptive trees with data parallelism {why} (leave out adaptive)")
        if settings.is_routed:
            found.append(f"several drafters with data parallelism {why} (give one drafter)")
    if _forgets_drafts(vllm_config):
        found.append(
            f"speculation over the recurrent layers of {vllm_config.model_config.architecture}, whose states have no "
            "room for drafts (leave out speculative_config, or use a target with Mamba-2 or gated delta nets)"
        )
    if settings.is_routed and vllm_config.kv_transfer_config is not None:
        found.append(
            "KV connectors with several drafters of vllm_crossspec (layers are saved before all have caught up)"
        )
    if settings.verification == "match":
        found.extend(_unsupported_by_match(vllm_config))
    if settings.has_trees:
        found.extend(_unsupported_by_trees(vllm_config))
    return found


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


def _unsupported_by_match(vllm_config: Any) -> list[str]:
    """What sample-and-match does not do yet; vLLM's rejection sampler does."""
    found = []
    if vllm_config.watermark_config is not None:
        found.append("watermarking with verification 'match' of vllm_crossspec (use 'rejection')")
    if vllm_config.parallel_config.enable_batch_sharded_sampling:
        found.append("batch-sharded sampling with verification 'match' of vllm_crossspec (use 'rejection')")
    if vllm_config.model_config.return_sampling_mask or vllm_config.model_config.enable_trace_replay:
        found.append("sampling masks and trace replay with verification 'match' of vllm_crossspec (use 'rejection')")
    return found


def _unsupported_by_trees(vllm_config: Any) -> list[str]:
    """What draft trees do not do; chains do."""
    found = []
    if vllm_config.kv_transfer_config is not None:
        found.append(
            "KV connectors with draft trees (layers are saved before the accepted path is in place; set tree to chain)"
        )
    problem = _unsupported_cache(vllm_config)
    return [*found, problem] if problem else found


def _unsupported_cache(vllm_config: Any) -> str | None:
    """What of a quantised KV cache the rows of trees cannot read, with the way out; None if there is nothing."""
    from vllm.platforms import current_platform

    cache, dtype = vllm_config.cache_config, vllm_config.cache_config.cache_dtype
    if dtype == "auto" and getattr(vllm_config.quant_config, "kv_cache_scheme", None):
        dtype = "fp8"  # which vLLM finds out when it builds the layers
    what = f"a KV cache in {dtype} with draft trees"
    if dtype in ("auto", "bfloat16", "float16", "float32"):
        return None
    if dtype not in FLOAT8:
        return f"{what} (use --kv-cache-dtype auto or fp8)"
    if cache.kv_cache_dtype_skip_layers:
        return f"{what} that some layers have in another type (leave out --kv-cache-dtype-skip-layers)"
    if current_platform.is_cpu():
        if not devices.has_avx512():
            return f"{what} on a processor without AVX-512, which vLLM's kernel needs (use --kv-cache-dtype auto)"
        return None
    if vllm_config.model_config.dtype == torch.float32:
        return f"{what} and a target in float32 on a GPU (use --dtype bfloat16, or --kv-cache-dtype auto)"
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

    if not FlashAttentionBackend.supports_kv_cache_dtype(dtype):
        return f"{what} on a GPU whose FlashAttention does not read it (use fp8 on Hopper, or --kv-cache-dtype auto)"
    return None
