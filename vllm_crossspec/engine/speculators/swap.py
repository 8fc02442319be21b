"""New weights for loaded drafters, in the place of the old ones: tensors stay where CUDA graphs know them.

A new drafter is loaded beside the old one, by the loaders that loaded that one: whatever is made of weights (fused
projections, packed products, a rank's own part) is made once more, and all that can fail has failed before anything of
the old drafter is written over. Then it is copied. For that moment there is memory for both.
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

from vllm_crossspec.config import CrossSpecConfig
from vllm_crossspec.drafters.identity import local_folder
from vllm_crossspec.drafters.manifest import Manifest, read_tensors
from vllm_crossspec.engine.cpu_products import lane_products, products_in, take_products
from vllm_crossspec.engine.heads import output_layer
from vllm_crossspec.engine.proposers.base import Proposer
from vllm_crossspec.engine.proposers.stateless import CachelessProposer
from vllm_crossspec.engine.weights import loading_from


class DrafterModels(nn.ModuleDict):
    """The models of all drafters, as vLLM's runner has them and as its weight updates see them.

    Such an update takes layers apart at its start and puts them together at its end, while requests may go on in
    between. It finds none here: tensors that come are kept, and swapped in at the end.

    Args:
        models: by the drafters' names.
        receive: takes tensors as they come.
    """

    def __init__(self, models: dict[str, nn.Module], receive: Any):
        super().__init__(models)
        self._receive = receive

    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        """No layers."""
        yield self

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Some of a checkpoint's tensors, by name; of several drafters the name begins with the drafter's and a dot."""
        self._receive(weights)


class DrafterSwaps:
    """The swaps of one engine's drafters, on one rank.

    Args:
        settings: of the engine, resolved.
        proposers: by name, loaded.
        target: the model that they draft for.
        device: of both.
        packs: whether layers that a CPU loads are packed for the lane.

    Attributes:
        manifests: of the checkpoints that are loaded, by the name of the drafter that owns them; None where its files
            are not at hand.
    """

    def __init__(
        self,
        settings: CrossSpecConfig,
        proposers: Mapping[str, Proposer],
        target: nn.Module,
        device: torch.device,
        packs: bool,
    ):
        self.settings, self.proposers, self.target = settings, proposers, target
        self.device, self.packs = device, packs
        self.manifests = {name: self._manifest_of_loaded(name) for name in self._swappable()}
        self._received: dict[str, torch.Tensor] | None = None
        self._prepared: dict[str, nn.Module] = {}

    def _swappable(self) -> list[str]:
        owners = (name for name in self.settings.owners if not isinstance(self.proposers[name], CachelessProposer))
        return [name for name in owners if self.settings.drafters[name].model]

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
        """An update of the drafters begins: forget what came of one that never ended."""
        self._received = {}

    def receive(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Keep tensors as they come, on the host; the sender may use their memory again."""
        assert self._received is not None, "no update of drafters has begun"
        for name, tensor in weights:
            self._received[name] = tensor.detach().to("cpu", copy=True)

    # -- the swap ---------------------------------------------------------------------------------------------

    def prepare(self, name: str, folder: str) -> None:
        """Load the checkpoint of ``folder`` for the drafter ``name``.

        Raises:
            ValueError: one sentence: it cannot take the place of what is loaded. Nothing has changed.
        """
        self.abandon()
        key = f"swap of drafter {name}"
        owner = self._owner_of(name, key)
        path = Path(folder).expanduser()
        if not path.is_dir():
            raise ValueError(
                f"{key}: there is no folder {folder!r}; give the checkpoint's folder on the engine's machine"
            )
        key = f"{key}: {folder}"
        tensors = read_tensors(path, key)
        self._prepare(owner, tensors, Manifest.of(tensors, path, key), key, path)

    def prepare_received(self) -> bool:
        """Load what came by vLLM's update, if it was the drafters'; whether it was.

        Raises:
            ValueError: as :meth:`prepare`.
        """
        self.abandon()
        received, self._received = self._received, None
        if received is None:
            return False
        for name, tensors in self._by_drafter(received).items():
            key = f"weight update of drafter {name}"
            owner = self._owner_of(name, key)
            loaded = self.manifests[owner]
            # Trainers send parameters, and leave these out; they must be as they are in any case.
            tensors = {**(loaded.constants if loaded is not None else {}), **tensors}
            self._prepare(owner, tensors, Manifest.of(tensors, None, key), key, None)
        return True

    def _by_drafter(self, received: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
        """Received tensors by drafter, with the names that they have in its checkpoint."""
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

    def _owner_of(self, name: str, key: str) -> str:
        """The drafter whose weights ``name`` drafts with, if they can be swapped."""
        if name not in self.proposers:
            raise ValueError(f"{key}: this engine has no drafter {name}; it has {', '.join(self.proposers)}")
        owner = self.settings.owner_of(name)
        proposer = self.proposers[owner]
        if owner not in self.manifests:
            raise ValueError(f"{key}: it has no weights that could be swapped")
        if self.manifests[owner] is None:
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
        return owner

    def _prepare(
        self, owner: str, tensors: Mapping[str, torch.Tensor], manifest: Manifest, key: str, folder: Path | None
    ) -> None:
        loaded = self.manifests[owner]
        assert loaded is not None
        loaded.check(manifest, key)
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
        """The new drafter, by the old one's loaders, whose table of layers knows nothing of it."""
        twin = copy.copy(self.proposers[owner])
        twin.vllm_config = _scratch(twin.vllm_config)
        twin.speculative_config = twin.vllm_config.speculative_config
        if folder is not None:
            twin.speculative_config.draft_model_config.model = str(folder)
        lane = lane_products(self.device) if self.packs else nullcontext()
        with (
            lane,
            products_in(self.settings.drafters[owner].dtype),
            set_current_vllm_config(twin.vllm_config),
            loading_from(tensors),
        ):
            return twin.load_draft_model(self.target, set())

    def _check_alike(self, owner: str, new: nn.Module, key: str) -> None:
        """See that the new drafter has the old one's tensors, shares the same with the target, and suits the heads."""
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
        """Forget what was prepared."""
        self._prepared.clear()

    @torch.no_grad()
    def commit(self) -> list[str]:
        """What was prepared takes its place; names of the drafters that draft with new weights.

        Layers that are the target's stay its own.
        """
        prepared, self._prepared = self._prepared, {}
        for owner, model in prepared.items():
            for before, after in _layers(self.proposers[owner].model, model):
                if before is not after:
                    for mine, its in _tensors(before, after):
                        mine.data.copy_(its.data)
                    take_products(before, after)
        return [name for name in self.proposers if self.settings.owner_of(name) in prepared]


def _layers(old: nn.Module, new: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """The modules of both, in pairs."""
    for name, module in new.named_modules():
        yield old.get_submodule(name), module


def _tensors(old: nn.Module, new: nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Parameters, buffers and what was made of them, in pairs; what stands for no weights is left out."""
    for own, its in ((old._parameters, new._parameters), (old._buffers, new._buffers)):
        yield from ((tensor, its[name]) for name, tensor in own.items() if tensor is not None)
    if isinstance(old, AttentionLayerBase):  # beside weights these hold their cache
        return
    for name, value in vars(old).items():
        if isinstance(value, torch.Tensor):
            yield value, getattr(new, name)


def _scratch(config: VllmConfig) -> VllmConfig:
    """A copy that can be completed and registered with anew; nothing is compiled by it."""
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
