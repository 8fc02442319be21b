"""A router from the settings of an engine."""

from typing import Any

import torch

from vllm_crossspec.config import CrossSpecConfig
from vllm_crossspec.drafters.base import drafter_kind
from vllm_crossspec.router.base import Router, RouterSettings
from vllm_crossspec.router.checkpoint import read_router
from vllm_crossspec.router.costs import read_costs
from vllm_crossspec.tree.schedule import expected_tokens


def make_router(settings: CrossSpecConfig, vllm_config: Any, device: torch.device) -> Router:
    """The router of these settings, its weights read."""
    router, order = settings.router, settings.routing_order
    assert router is not None
    model_config = vllm_config.model_config
    hidden_size = model_config.get_hidden_size()
    checkpoint = None
    if router.model is not None:
        checkpoint = read_router(
            router.model, hidden_size=hidden_size, drafters=order, key="speculative_config.router.model"
        )
    return Router(
        RouterSettings(
            policy=router.policy,
            drafters=order,
            thresholds=_thresholds(router.threshold),
            by_category=tuple(router.by_category.values()),
            tempers=router.entropy_of == "sampling",
            checkpoint=checkpoint,
            costs=None if router.costs is None else read_costs(router.costs, order, "speculative_config.router.costs"),
            fixed=order.index(settings.active),
            owners=tuple(order.index(settings.owner_of(name)) for name in order),
            priors=tuple(expected_tokens(settings.width_of(name)) for name in order),
            tried=_tried(settings),
            correct=router.correct,
        ),
        hidden_size=hidden_size,
        vocab_size=model_config.get_vocab_size(),
        max_num_reqs=vllm_config.scheduler_config.max_num_seqs,
        dtype=model_config.dtype,
        device=device,
    )


def _tried(settings: CrossSpecConfig) -> tuple[int, ...]:
    """The drafters of which only trying tells what they are worth; the others say it before they draft."""
    assert settings.router is not None
    if not settings.router.explore:
        return ()
    kinds = [drafter_kind(settings.drafters[name].kind, "") for name in settings.routing_order]
    return tuple(number for number, kind in enumerate(kinds) if kind.supplies not in ("matches", "none"))


def _thresholds(given: Any) -> tuple[float, ...] | None:
    """One number for each drafter but the reference; None where they are to follow from the costs."""
    if given == "auto":
        return None
    return given if isinstance(given, tuple) else (given,)
