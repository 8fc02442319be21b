"""New weights for loaded drafters; tensors keep their addresses, which CUDA graphs hold.

A new drafter is loaded beside the old one by the same loaders. They also make everything derived from weights (fused
projections, packed products, a rank's part). All errors occur before the old drafter changes. Then the new tensors are
copied over the old ones. Memory must hold both drafters meanwhile.
"""

import copy
import dataclasses
import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.config import CompilationMode, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from vllm_crossspec.config.schema import CrossSpecConfig
from vllm_crossspec.drafting.heads import output_layer
from vllm_crossspec.drafting.proposer import Proposer
from vllm_crossspec.drafting.stateless import CachelessProposer
from vllm_crossspec.drafting.weights import loading_from
from vllm_crossspec.kinds.identity import local_folder
from vllm_crossspec.kinds.manifest import Manifest, read_tensors
from vllm_crossspec.platform import platform


class DrafterModels(nn.ModuleDict):
    """The models of all drafters, as vLLM's runner and its weight updates see them.

    A weight update converts layers at its start and again at its end, while requests may run. It finds no layers here:
    ``receive`` keeps the tensors, which are swapped in at the end.
    """

    def __init__(self, models: dict[str, nn.Module], receive: Any):
        super().__init__(models)
        self._receive = receive

    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        yield self  # no layers

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Receive tensors of a checkpoint by name; with several drafters names begin with "DRAFTER."."""
        self._receive(weights)


class DrafterSwaps:
    """The swaps of one engine's drafters, on one rank.

    Args:
        proposers: by name, loaded.
        by_our_runner: whether our runner loaded the models, instead of vLLM's.

    Attributes:
        manifests: of the loaded checkpoints, by owning drafter; None if its files are not available.
    """

    def __init__(
        self,
        settings: CrossSpecConfig,
        proposers: Mapping[str, Proposer],
        target: nn.Module,
        device: torch.device,
        by_our_runner: bool,
    ):
        self.settings, self.proposers, self.target = settings, proposers, target
        self.device, self.by_our_runner = device, by_our_runner
        swappable = (name for name in settings.owners if settings.drafters[name].model)
        self.manifests = {
            name: self._manifest_of_loaded(name)
            for name in swappable
            if not isinstance(proposers[name], CachelessProposer)
        }
        self._received: dict[str, torch.Tensor] | None = None
        self._prepared: dict[str, nn.Module] = {}

    def _manifest_of_loaded(self, name: str) -> Manifest | None:
        proposer = self.proposers[name]
        model = proposer.speculative_config.draft_model_config
        folder = local_folder(str(model.model), model.revision)
        if folder is None or proposer.engine_config.load_config.load_format == "dummy":
            return None
        try:
            return Manifest.of(read_tensors(folder, name), folder, name)
        except ValueError:  # vLLM has read files of another kind
            return None

    # -- vLLM's weight updates --------------------------------------------------------------------------------

    def begin_receiving(self) -> None:
        """Begin an update of the drafters; drop tensors of an unfinished one."""
        self._received = {}

    def receive(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy tensors to the host; the sender may reuse their memory."""
        assert self._received is not None, "no update of drafters has begun"
        for name, tensor in weights:
            self._received[name] = tensor.detach().to("cpu", copy=True)

    # -- the swap ---------------------------------------------------------------------------------------------

    def prepare(self, name: str, folder: str) -> None:
        """Load the checkpoint of ``folder`` for the drafter ``name``.

        Raises:
            ValueError: it cannot replace the loaded checkpoint. Nothing has changed.
        """
        self.abandon()
        key = f"swap of drafter {name}"
        owner, loaded = self._owner_of(name, key)
        path = Path(folder).expanduser()
        if not path.is_dir():
            raise ValueError(
                f"{key}: there is no folder {folder!r}; give the checkpoint's folder on the engine's machine"
            )
        key = f"{key}: {folder}"
        self._prepare(owner, loaded, read_tensors(path, key), path, key)

    def prepare_received(self) -> bool:
        """Load the tensors of vLLM's update, if they are the drafters'; return whether they are.

        Raises:
            ValueError: as :meth:`prepare`.
        """
        self.abandon()
        received, self._received = self._received, None
        if received is None:
            return False
        for name, tensors in self._by_drafter(received).items():
            key = f"weight update of drafter {name}"
            owner, loaded = self._owner_of(name, key)
            # Trainers send only parameters; the constants cannot change.
            self._prepare(owner, loaded, {**loaded.constants, **tensors}, None, key)
        return True

    def _by_drafter(self, received: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
        """Received tensors by drafter, under their names in its checkpoint."""
        names = list(self.manifests)
        if len(names) == 1:
            return {names[0]: received}
        found: dict[str, dict[str, torch.Tensor]] = {}
        for full, tensor in received.items():
            name = next((name for name in names if full.startswith(f"{name}.")), None)
            if name is None:
                raise ValueError(
                    f"weight update of drafters: no drafter is named in {full}; begin names of tensors with one of "
                    f"{', '.join(f'{name}.' for name in names)}"
                )
            found.setdefault(name, {})[full.removeprefix(f"{name}.")] = tensor
        return found

    def _owner_of(self, name: str, key: str) -> tuple[str, Manifest]:
        """The drafter whose weights ``name`` uses, and its manifest; ValueError if they cannot be swapped."""
        if name not in self.proposers:
            raise ValueError(f"{key}: this engine has no drafter {name}; it has {', '.join(self.proposers)}")
        owner = self.settings.owner_of(name)
        proposer = self.proposers[owner]
        if owner not in self.manifests:
            raise ValueError(f"{key}: it has no weights that could be swapped")
        loaded = self.manifests[owner]
        if loaded is None:
            raise ValueError(
                f"{key}: the files of what is loaded are not at hand, so that nothing can be compared with them; start "
                "the engine with a local folder"
            )
        model = proposer.speculative_config.draft_model_config
        if model.quantization is not None:
            raise ValueError(
                f"{key}: its weights are quantised ({model.quantization}); start an engine with the others"
            )
        mode = proposer.engine_config.compilation_config.mode
        if self.device.type == "cpu" and mode != CompilationMode.NONE:
            raise ValueError(
                f"{key}: compiled layers on a CPU keep their weights; start the engine with --enforce-eager"
            )
        return owner, loaded

    def _prepare(
        self, owner: str, loaded: Manifest, tensors: Mapping[str, torch.Tensor], folder: Path | None, key: str
    ) -> None:
        loaded.check(Manifest.of(tensors, folder, key), key)
        try:
            model = self._load(owner, tensors, folder)
        except torch.OutOfMemoryError:
            gc.collect()
            torch.accelerator.empty_cache()
            raise ValueError(
                f"{key}: there is no memory for it beside the loaded one; start with a lower --gpu-memory-utilization"
            ) from None
        self._check_alike(owner, model, key)
        self._prepared[owner] = model

    def _load(self, owner: str, tensors: Mapping[str, torch.Tensor], folder: Path | None) -> nn.Module:
        """Load the new drafter with the old one's loaders, without registering its layers."""
        twin = copy.copy(self.proposers[owner])
        twin.vllm_config = _scratch(twin.vllm_config)
        twin.speculative_config = twin.vllm_config.speculative_config
        if folder is not None:
            twin.speculative_config.draft_model_config.model = str(folder)
        as_loaded = platform().loading() if self.by_our_runner else nullcontext()
        with (
            as_loaded,
            platform().loading_in(self.settings.drafters[owner].dtype),
            set_current_vllm_config(twin.vllm_config),
            loading_from(tensors),
        ):
            return twin.load_draft_model(self.target, set())

    def _check_alike(self, owner: str, new: nn.Module, key: str) -> None:
        """Check that the new drafter has the old one's tensors and sharing, and fits the FlashHead clusters."""
        old, targets = self.proposers[owner].model, set(self.target.modules())
        storages: dict[int, int] = {}
        for before, after in _layers(old, new):
            if (before in targets) != (after in targets):
                what = "shares with the target what the loaded drafter has of its own"
                if after not in targets:
                    what = "has of its own what the loaded drafter shares with the target"
                raise ValueError(f"{key}: it {what} (embedding or output layer); start an engine with it")
            for mine, its in _tensors(before, after):
                if mine.shape != its.shape or mine.dtype != its.dtype:
                    raise ValueError(
                        f"{key}: it is laid out in another way than the loaded drafter; start an engine with it"
                    )
                if mine.numel() and storages.setdefault(mine.data_ptr(), its.data_ptr()) != its.data_ptr():
                    raise ValueError(f"{key}: it has twice what the loaded drafter shares; start an engine with it")
        has_head = any(
            self.settings.owner_of(name) == owner and self.settings.drafters[name].head is not None
            for name in self.proposers
        )
        if has_head and not torch.equal(output_layer(old).weight, output_layer(new).weight):
            raise ValueError(
                f"{key}: its output layer differs, and the clusters of the loaded drafter's head are of that one's; "
                "start an engine with it and with clusters of its own, or leave out head"
            )

    def abandon(self) -> None:
        """Discard prepared drafters."""
        self._prepared.clear()

    @torch.no_grad()
    def commit(self) -> list[str]:
        """Put prepared weights in place; return the names of drafters with new weights. The target's layers stay."""
        prepared, self._prepared = self._prepared, {}
        for owner, model in prepared.items():
            for before, after in _layers(self.proposers[owner].model, model):
                if before is not after:
                    for mine, its in _tensors(before, after):
                        mine.data.copy_(its.data)
                    platform().take_products(before, after)
        return [name for name in self.proposers if self.settings.owner_of(name) in prepared]


def _layers(old: nn.Module, new: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Modules of both models, in pairs."""
    for name, module in new.named_modules():
        yield old.get_submodule(name), module


def _tensors(old: nn.Module, new: nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Parameters, buffers and tensors derived from them, in pairs; None entries are skipped."""
    for own, its in ((old._parameters, new._parameters), (old._buffers, new._buffers)):
        yield from ((tensor, its[name]) for name, tensor in own.items() if tensor is not None)
    if isinstance(old, AttentionLayerBase):  # beside weights these hold their cache
        return
    for name, value in vars(old).items():
        if isinstance(value, torch.Tensor):
            yield value, getattr(new, name)


def _scratch(config: VllmConfig) -> VllmConfig:
    """A copy that models can be loaded with, without compilation or shared registries."""
    scratch = copy.copy(config)
    for field in dataclasses.fields(scratch):
        part = getattr(scratch, field.name)
        if dataclasses.is_dataclass(part) and not isinstance(part, type):
            setattr(scratch, field.name, copy.copy(part))
    compilation, speculative = scratch.compilation_config, scratch.speculative_config
    assert speculative is not None
    compilation.mode = CompilationMode.NONE
    compilation.static_forward_context, compilation.static_all_moe_layers = {}, []
    compilation.custom_ops = list(compilation.custom_ops)
    speculative.draft_model_config = copy.copy(speculative.draft_model_config)
    return scratch
