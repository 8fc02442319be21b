"""Makes a router from the settings of an engine."""

from typing import Any

import torch

from vllm_crossspec.config.schema import CrossSpecConfig
from vllm_crossspec.load.schedule import expected_tokens
from vllm_crossspec.routing.base import Router, RouterSettings
from vllm_crossspec.routing.checkpoint import load_router


def make_router(settings: CrossSpecConfig, vllm_config: Any, device: torch.device) -> Router:
    """The router of these settings, with its weights."""
    router, order = settings.router, settings.routing_order
    assert router is not None
    model_config = vllm_config.model_config
    hidden_size = model_config.get_hidden_size()
    checkpoint = None
    if router.model is not None:
        checkpoint = load_router(router.model, settings.router_facts, "speculative_config.router.model")
    return Router(
        RouterSettings(
            policy=router.policy,
            drafters=order,
            thresholds=None if router.threshold == "auto" else router.threshold,
            by_category=tuple(router.by_category.values()),
            uses_temperature=router.entropy_of == "sampling",
            checkpoint=checkpoint,
            costs=settings.costs,
            owners=tuple(order.index(settings.owner_of(name)) for name in order),
            priors=tuple(expected_tokens(settings.width_of(name)) for name in order),
            explored=_explored(settings),
            correct=router.correct,
            is_late=not router.wait,
        ),
        hidden_size=hidden_size,
        vocab_size=model_config.get_vocab_size(),
        max_num_reqs=vllm_config.scheduler_config.max_num_seqs,
        dtype=model_config.dtype,
        device=device,
    )


def _explored(settings: CrossSpecConfig) -> tuple[int, ...]:
    """Drafters that must be tried to learn what they accept; the others give a forecast."""
    assert settings.router is not None
    if not settings.router.explore:
        return ()
    supplies = [settings.drafters[name].traits.supplies for name in settings.routing_order]
    return tuple(number for number, what in enumerate(supplies) if what not in ("matches", "none"))
