"""The one speculator that vLLM sees: it holds our proposers and runs the round."""

import copy
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.attention.backends.utils import PAD_SLOT_ID

from vllm_crossspec.catchup.kernels import locate
from vllm_crossspec.config import settings_of
from vllm_crossspec.drafters.base import drafter_kind
from vllm_crossspec.engine.cpu_products import products_in
from vllm_crossspec.engine.draft_settings import draft_settings
from vllm_crossspec.engine.draft_state import DraftState
from vllm_crossspec.engine.proposers.base import Proposer
from vllm_crossspec.engine.requests import WARM_UP_REQUESTS
from vllm_crossspec.engine.speculators.kept import KeptDrafts
from vllm_crossspec.engine.speculators.swap import DrafterModels, DrafterSwaps
from vllm_crossspec.engine.vllm_api.propose import step_inputs
from vllm_crossspec.engine.vllm_api.speculative import drafter_configs
from vllm_crossspec.engine.vllm_api.stand_in import StandInSpeculator
from vllm_crossspec.metrics.counters import AcceptanceCounters
from vllm_crossspec.metrics.export import start_worker_export
from vllm_crossspec.ngram.store import LostFileError
from vllm_crossspec.types import NO_DRAFTS, Candidates, StepInputs

# Under vLLM's own logger, so that its settings apply.
logger = init_logger("vllm.crossspec")


class Speculator(StandInSpeculator):
    """Loads every proposer of the settings beside one target, and has a round of drafting after every step.

    Args:
        vllm_config: of the engine; our settings ride in its ``additional_config``.
        device: of the target.
        req_states: the runner's request states.

    Attributes:
        proposers: by the drafters' names; those that read the target's slot mappings come first.
        active: the one that drafts where nobody chooses.
        kept: what is kept of drafts for the step that verifies them.
        features: of the runner, by name; none where vLLM's own runner runs.
        counters: acceptance, by drafter.
        tap_indices: of each drafter, which of the tapped states are its own; after loading.
        swaps: new weights for loaded drafters; after loading.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, req_states: Any):
        super().__init__(vllm_config, device, req_states)
        settings = settings_of(vllm_config)
        assert settings is not None and settings.num_speculative_tokens is not None
        self.settings = settings
        # Draft nodes; the scheduler may plan rows beyond them.
        self.num_speculative_steps = settings.num_speculative_tokens
        self.proposers = self._build_proposers(vllm_config, device)
        self.active = self.proposers[settings.active]
        self.lead(self.active, list(self.proposers.values()))
        max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        self.features: Mapping[str, Any] = {}
        self.counters = AcceptanceCounters(
            tuple(self.proposers), max_num_reqs, self.num_speculative_steps, device, settings.rows_per_node
        )
        self.kept = KeptDrafts(settings, max_num_reqs, device, self.counters)
        self._pcp_manager: Any = None
        self._serving = False

    def _build_proposers(self, vllm_config: VllmConfig, device: torch.device) -> dict[str, Proposer]:
        """Every proposer with its own config; those that read the target's slot mappings come first."""
        configs = drafter_configs(self.settings, vllm_config.model_config, vllm_config.parallel_config)
        carrier = next(iter(configs))
        proposers = {}
        for name, drafter in self.settings.drafters.items():
            kind, drafts = drafter_kind(drafter.kind, "drafter"), draft_settings(self.settings, drafter)
            build = kind.load_proposer(not drafts.is_chain)
            own = copy.copy(vllm_config)
            speculative = vllm_config.speculative_config if name == carrier else configs[name]
            if speculative.num_speculative_tokens != build.native_steps(drafts):
                speculative = copy.copy(speculative)
                speculative.num_speculative_tokens = build.native_steps(drafts)
            own.speculative_config = speculative
            proposer = build(own, device, name, drafts)
            proposer.engine_config = vllm_config
            proposer.req_states = self.req_states
            proposers[name] = (kind.reads_target_slots, proposer)
        order = sorted(proposers, key=lambda name: not proposers[name][0])
        return {name: proposers[name][1] for name in order}

    def bind(self, state: DraftState, features: Mapping[str, Any]) -> None:
        """Take the place where drafts are kept for the runner's verification, and its features (``match`` only)."""
        self.kept.state, self.features = state, features
        self.counters.modes = state.modes_on_device

    # -- loading ----------------------------------------------------------------------------------------------

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        """The models of all proposers, as one module."""
        models = {name: self.proposers[name].model for name in self.settings.owners}
        return DrafterModels(models, lambda weights: self.swaps.receive(weights))

    def load_model(self, target_model: nn.Module) -> None:
        """Load every proposer, then let the target hand out the union of the layers that they tap."""
        for name, proposer in self.proposers.items():
            if self.settings.owner_of(name) == name:
                with products_in(self.settings.drafters[name].dtype):
                    proposer.load_model(target_model)
        for name, proposer in self.proposers.items():
            owner = self.proposers[self.settings.owner_of(name)]
            if proposer is not owner:
                proposer.borrow(owner, target_model)
        self.model = self.load_draft_model(target_model, set())
        packs = self.kept.state is not None  # as our runner loads
        self.swaps = DrafterSwaps(self.settings, self.proposers, target_model, self.device, packs)
        self.draft_attn_layer_names = set().union(*(p.draft_attn_layer_names for p in self.proposers.values()))
        taps = {name: self.settings.drafters[name].target_layers for name in self.proposers}
        union = tuple(sorted(set().union(*taps.values())))
        if union:
            target_model.set_aux_hidden_state_layers(union)
        self.tap_indices = {name: [union.index(layer) for layer in layers] for name, layers in taps.items()}
        logger.info(
            "crossspec: drafters %s; target layers tapped %s; %s drafts",
            {name: type(p.model).__name__ for name, p in self.proposers.items()},
            taps,
            self.active.name,
        )

    def commit_swap(self) -> list[str]:
        """Drafters that were prepared take their places, between two steps; the names of those that changed."""
        names = self.swaps.commit()
        if not names:
            return names
        for feature in self.features.values():
            feature.swapped(names)
        self.counters.count_swaps(names)
        logger.info("crossspec: new weights for the drafters %s", ", ".join(names))
        return names

    def set_eplb_state(self, eplb_state: Any) -> None:
        """Handed to every proposer."""
        for proposer in self.proposers.values():
            proposer.set_eplb_state(eplb_state)

    @property
    def pcp_manager(self) -> Any:
        """The runner's context-parallel manager, which every proposer shares."""
        return self._pcp_manager

    @pcp_manager.setter
    def pcp_manager(self, manager: Any) -> None:
        self._pcp_manager = manager
        for proposer in self.proposers.values():
            proposer.pcp_manager = manager

    def set_attn(
        self,
        model_state: Any,
        kv_cache_config: Any,
        block_tables: Any,
        target_input_buffers: Any,
        target_attn_groups: Any,
    ) -> None:
        """Every proposer builds the attention of its own layers."""
        for proposer in self.proposers.values():
            proposer.set_attn(model_state, kv_cache_config, block_tables, target_input_buffers, target_attn_groups)
        self.kv_cache_config, self.block_tables = kv_cache_config, block_tables
        self.attn_groups = [group for name in self.settings.owners for group in self.proposers[name].attn_groups]

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Each proposer manages its own graphs."""
        for proposer in self.proposers.values():
            proposer.init_cudagraph_manager(cudagraph_mode)

    def capture(self) -> None:
        """Capture every proposer's graphs."""
        for proposer in self.proposers.values():
            proposer.capture()

    # -- requests come and go ---------------------------------------------------------------------------------

    def add_requests(self, slots: list[int], num_computed: list[int]) -> None:
        """Requests take slots; the first tokens of each, so many, were found in the prefix cache."""

    def remove_requests(self, slots: list[int]) -> None:
        """Requests leave their slots (ended, aborted or preempted); others may still find their blocks."""
        for proposer in self.proposers.values() if self._serving else ():
            proposer.requests_leave(slots)

    # -- the round --------------------------------------------------------------------------------------------

    def observe_verification(
        self, idx_mapping: torch.Tensor, num_sampled: torch.Tensor, num_rejected: torch.Tensor
    ) -> None:
        """Count what became of the last drafts, on the device, by the drafter that made them."""
        states = self.req_states
        self.counters.count_verified(
            idx_mapping, num_sampled, num_rejected, states.num_computed_tokens.gpu, states.prefill_len.gpu
        )

    @torch.inference_mode()
    def propose(self, *arguments: Any, **options: Any) -> torch.Tensor:
        """One round of drafting (vLLM's protocol, whose arguments ``vllm_api.propose`` names).

        Where a round runs out of memory, or a file that it reads is gone, drafting stops and generation goes on.

        Returns:
            int64 [R, N] draft tokens as the scheduler plans them; N is the longest drafter's.
        """
        step, state = step_inputs(*arguments, **options), self.kept.state
        if state is None or step.is_dummy:
            return self.round(step)
        if not state.has_stopped:
            try:
                return self.round(step)
            except (torch.OutOfMemoryError, LostFileError) as problem:
                if self.vllm_config.parallel_config.world_size > 1:  # the other ranks draft on
                    raise
                self._stop(state, problem)
        return self.kept.nothing(step.batch.num_reqs, step.num_scheduled)

    def _stop(self, state: DraftState, problem: Exception) -> None:
        """Draft nothing any more: a round that was left half way cannot be gone on from."""
        state.stop()
        self.counters.has_stopped = True
        logger.error(
            "crossspec: drafting has stopped, and texts go on without drafts until the engine is started again: %s",
            " ".join(str(problem).split()),
        )

    def step_of(self, name: str, step: StepInputs) -> StepInputs:
        """A step as one drafter takes it: with the states that it taps, and with options of its own."""
        tapped = step.tapped_hidden_states
        own = [tapped[i] for i in self.tap_indices[name]] if tapped else None
        return step._replace(tapped_hidden_states=own, options=dict(step.options))

    @abstractmethod
    def round(self, step: StepInputs) -> torch.Tensor:
        """One round of drafting.

        Args:
            step: with the states of all tapped layers.

        Returns:
            int64 [R, N] draft tokens as the scheduler plans them.
        """

    @property
    def num_drafting(self) -> int:
        """Drafters that draft in a dummy round."""
        return len(self.proposers)

    def all_opted_out(self, batch: Any) -> bool:
        """Whether no request of the batch wants drafts."""
        state = self.kept.state
        return state is not None and bool((state.modes[batch.idx_mapping_np] == NO_DRAFTS).all())

    def keep(self, name: str, batch: Any, drafted: Candidates) -> torch.Tensor:
        """Keep what the drafter ``name`` drafted for a batch; int64 [R, N] its draft tokens."""
        tokens = self.kept.keep(drafted, batch, tuple(self.proposers).index(name))
        for feature in self.features.values():
            feature.drafted(name, batch, drafted)
        return tokens

    def write_context(self, name: str, features: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        """A drafter takes accepted tokens into its cache: keys and values of them, and nothing else.

        Args:
            name: of the drafter, which has a cache.
            features: [n, F] of its ``fuse``.
            slots: int64 [n] request slots; negative for padding.
            positions: int64 [n].
        """
        proposer, tables = self.proposers[name], self.block_tables
        next_tokens, kv_slots = torch.empty_like(slots), []
        for group in proposer.kv_groups:
            kv_slots.append(torch.empty_like(slots))
            locate(
                slots=slots,
                positions=positions,
                block_table=tables.block_tables[group].gpu,
                block_size=tables.block_sizes[group],
                all_token_ids=self.req_states.all_token_ids.gpu,
                kv_slots=kv_slots[-1],
                next_tokens=next_tokens,
                pad=PAD_SLOT_ID,
            )
        proposer.write_context(features, next_tokens, positions, kv_slots)

    # -- figures ----------------------------------------------------------------------------------------------

    def acceptance_stats(self) -> dict[str, Any]:
        """What the counters hold; waits for the device, so it is not for the decoding path."""
        if not self._serving:
            self.counters.reset()  # so far they hold the warm-up's
        return self.counters.snapshot()

    def feature_stats(self, name: str) -> dict[str, Any] | None:
        """What a feature has counted so far; None where the engine has no such feature."""
        feature = self.features.get(name)
        return None if feature is None else feature.stats()

    def serve(self, batch: Any) -> None:
        """At the first round of a user's request: forget the warm-up's counts, and begin to publish."""
        if self._serving or batch.req_ids[0].startswith(WARM_UP_REQUESTS):
            return
        self._serving = True
        self.counters.reset()
        for feature in self.features.values():
            feature.reset()
        # Not earlier: a copy in another thread breaks a CUDA graph capture, and the warm-up comes before the capture.
        parallel = self.vllm_config.parallel_config
        if parallel.rank == 0:
            published = {key: v for feature in self.features.values() for key, v in feature.published().items()}
            try:
                start_worker_export(self.counters, parallel.data_parallel_index, **published)
            except OSError as problem:
                logger.warning("crossspec: /metrics has no counters of ours, for want of room: %s", problem)
