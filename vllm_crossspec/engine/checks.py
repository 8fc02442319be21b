"""What files and targets must agree with, seen before any weight is loaded: one sentence for what does not."""

from pathlib import Path
from typing import Any

from vllm_crossspec.adaptive.calibration import check_drafter_calibration, known_model
from vllm_crossspec.config import META_METHODS, CrossSpecConfig
from vllm_crossspec.drafters.base import drafter_kind
from vllm_crossspec.drafters.checkpoint import read_config
from vllm_crossspec.drafters.confu.checkpoint import check_target as check_target_of_confu
from vllm_crossspec.ngram.store import open_store, tokenizer_hash
from vllm_crossspec.router.checkpoint import check_router
from vllm_crossspec.types import TargetFacts


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
        prefix = f"drafters.{name}." if settings.method in META_METHODS else ""
        open_store(
            Path(drafter.ngram.model).expanduser(),
            key=f"speculative_config.{prefix}ngram.model",
            order=drafter.ngram.order,
            vocab_size=target.vocab_size,
            tokenizer=tokenizer,
        )


def check_calibrations(settings: CrossSpecConfig, target_model_config: Any) -> None:
    """Refuse calibrations of adaptive trees that are damaged, or of another target, drafter or tree.

    Raises:
        ValueError: one sentence that names the key and the fix.
    """
    if not settings.adapts:
        return
    target = known_model(str(target_model_config.model), target_model_config.revision)
    for name, drafter in settings.drafters.items():
        prefix = f"drafters.{name}." if settings.method in META_METHODS else ""
        check_drafter_calibration(drafter, target, f"speculative_config.{prefix}adaptive.model")


def check_contemplation(settings: CrossSpecConfig, target_model_config: Any) -> None:
    """Refuse soft prompts that were trained for another target.

    Raises:
        ValueError: one sentence that names the key, both targets and the fix.
    """
    for name, drafter in settings.drafters.items():
        if drafter_kind(drafter.kind, "").contemplates:
            prefix = f"drafters.{name}." if settings.method in META_METHODS else ""
            key = f"speculative_config.{prefix}model"
            config = read_config(drafter.model, key, drafter.native.get("revision"))
            check_target_of_confu(config, key, str(target_model_config.model), target_model_config.revision)


def check_router_settings(settings: CrossSpecConfig, target: TargetFacts) -> None:
    """Refuse a buffer that holds no round, and a router of another target or of other drafters.

    Raises:
        ValueError: one sentence that names the key and the fix.
    """
    router = settings.router
    if router is None or not settings.routes:
        return
    key, needed = "speculative_config.router", settings.max_depth + 1
    if router.max_backlog < needed:
        raise ValueError(
            f"{key}.max_backlog is {router.max_backlog}, but one round can accept {needed} tokens; use {needed} or more"
        )
    if router.model is not None:
        check_router(router.model, hidden_size=target.hidden_size, drafters=settings.routing_order, key=f"{key}.model")


def check_target(settings: CrossSpecConfig, model_config: Any) -> None:
    """Refuse targets whose layers cannot hold a draft tree.

    Raises:
        ValueError: one sentence that names what the target has and the fix.
    """
    if not settings.has_trees:
        return
    found = [
        what
        for what, present in (
            ("recurrent (mamba) layers", model_config.is_hybrid or model_config.is_attention_free),
            ("M-RoPE positions", model_config.uses_mrope),
            ("latent attention (MLA)", model_config.use_mla),
            ("sliding-window attention", model_config.get_sliding_window() is not None),
        )
        if present
    ]
    if found:
        raise ValueError(
            f"speculative_config.tree: {model_config.model} has {' and '.join(found)}, over which draft trees cannot "
            'be verified; use "tree": {"type": "chain"}'
        )
