"""Loading of drafters' models, so that several can exist beside one target."""

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from vllm.compilation.backends import set_model_tag
from vllm.config import SpeculativeConfig, VllmConfig, replace
from vllm.distributed import get_pp_group, parallel_state
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.utils import get_draft_load_config
from vllm.v1.worker.gpu.spec_decode.eagle.utils import _should_share, get_target_lm_head, maybe_share_target_embed
from vllm.v1.worker.gpu.spec_decode.utils import get_pp_safe_draft_load_config

_given: ContextVar[Mapping[str, torch.Tensor] | None] = ContextVar("given", default=None)


class _GivenTensors(BaseModelLoader):
    """vLLM's model loader for tensors in memory."""

    def __init__(self, load_config: Any, tensors: Mapping[str, torch.Tensor]):
        super().__init__(load_config)
        self.tensors = tensors

    def download_model(self, model_config: Any) -> None:
        """Do nothing: the tensors are in memory."""

    def load_weights(self, model: Any, model_config: Any) -> None:
        model.load_weights(iter(self.tensors.items()))


@contextlib.contextmanager
def loading_from(tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Load drafters within the block from these tensors, named as in a checkpoint, instead of from files."""
    token = _given.set(tensors)
    try:
        yield
    finally:
        _given.reset(token)


def _load(vllm_config: VllmConfig, model_config: Any, name: str, tag: str) -> nn.Module:
    """Load a model under the layer prefix of drafter ``name``, on the ranks of its settings."""
    assert vllm_config.speculative_config is not None
    tensors, prefix = _given.get(), f"drafter_{name}"
    with set_model_tag(tag), draft_ranks(vllm_config.speculative_config):
        if tensors is None:
            return get_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        return _GivenTensors(vllm_config.load_config, tensors).load_model(vllm_config, model_config, prefix)


def load_drafter(target_model: nn.Module, vllm_config: VllmConfig, name: str, tag: str) -> nn.Module:
    """Load the draft model of ``vllm_config.speculative_config`` under its own layer prefix.

    vLLM has one table of layers by name, and numbers a drafter's layers after the target's. Without the prefix two
    drafters would collide. Embedding and output head are the target's unless the checkpoint has its own, as in vLLM.

    Args:
        target_model: loaded.
        vllm_config: with the drafter's attention settings already applied.
        name: of the drafter.
        tag: of vLLM's compile cache for this kind of model.
    """
    speculative = vllm_config.speculative_config
    assert speculative is not None
    load_config = get_pp_safe_draft_load_config(get_draft_load_config(vllm_config))
    vllm_config = replace(vllm_config, load_config=load_config)
    model = _load(vllm_config, speculative.draft_model_config, name, tag)
    language_model = target_model.get_language_model() if hasattr(target_model, "get_language_model") else target_model
    maybe_share_target_embed(model, model.model, getattr(language_model, "model", language_model))
    head = get_target_lm_head(target_model, language_model)
    own_head = getattr(model, "lm_head", None)
    keeps_own = getattr(model.config, "has_own_lm_head", False)
    if head is not None and not keeps_own and _should_share(model, "has_own_lm_head", own_head, head):
        model.lm_head = head
    return model


@contextlib.contextmanager
def draft_ranks(speculative: SpeculativeConfig) -> Iterator[None]:
    """Make layers whole on every rank within the block, if ``draft_tensor_parallel_size`` is 1.

    vLLM's layers read their ranks once, when they are made. So such a drafter waits for no other rank, while layers
    shared with the target stay sharded.
    """
    if speculative.draft_tensor_parallel_size != 1 or parallel_state.get_tp_group().world_size == 1:
        yield
        return
    of_target = parallel_state.get_tp_group()
    parallel_state._TP = get_pp_group()  # this rank alone: pipelines are refused
    try:
        yield
    finally:
        parallel_state._TP = of_target


def standalone_config(vllm_config: VllmConfig) -> VllmConfig:
    """The config of a standalone draft model with its own sizes and quantisation, derived from the engine's."""
    speculative = vllm_config.speculative_config
    assert speculative is not None
    overlaid = speculative.apply_draft_overrides(vllm_config)
    return replace(
        overlaid,
        model_config=speculative.draft_model_config,
        quant_config=None,
        load_config=get_pp_safe_draft_load_config(get_draft_load_config(vllm_config)),
        parallel_config=replace(speculative.draft_parallel_config, rank=vllm_config.parallel_config.rank),
    )


def load_language_model(draft_config: VllmConfig, name: str) -> nn.Module:
    """Load a draft model that shares nothing with the target, with its :func:`standalone_config`."""
    return _load(draft_config, draft_config.model_config, name, "draft_model")
