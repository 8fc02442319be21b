"""The speculator that vLLM calls: it holds our proposers and runs the round."""

import copy
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.logger import init_logger

from vllm_crossspec.config.schema import settings_of
from vllm_crossspec.drafting.proposer import Proposer
from vllm_crossspec.metrics.counters import AcceptanceCounters
from vllm_crossspec.metrics.export import start_worker_export
from vllm_crossspec.ngram_store.store import LostFileError
from vllm_crossspec.platform import platform
from vllm_crossspec.speculator.kept import KeptDrafts
from vllm_crossspec.speculator.swap import DrafterModels, DrafterSwaps
from vllm_crossspec.step.requests import WARM_UP_REQUESTS
from vllm_crossspec.trees.draft_state import DraftState
from vllm_crossspec.types import NO_DRAFTS, Candidates, StepInputs
from vllm_crossspec.vllm_api.propose import step_inputs
from vllm_crossspec.vllm_api.speculative import drafter_configs
from vllm_crossspec.vllm_api.stand_in import StandInSpeculator

# A child of vLLM's logger, so that vLLM's settings apply.
logger = init_logger("vllm.crossspec")


class Speculator(StandInSpeculator):
    """Loads every proposer of the settings beside one target, and runs a round of drafting after every step.

    Our settings are in the ``additional_config`` of ``vllm_config``.

    Attributes:
        proposers: by the drafters' names; those that read the target's slot mappings come first.
        drafting: proposers that draft in a dummy round.
        active: the proposer that drafts by default.
        kept: drafts kept for the step that verifies them.
        features: of the runner, by name; empty with vLLM's own runner.
        counters: acceptance by drafter.
        tapped_layers: all target layers that a drafter taps, ascending.
        tap_indices: indices of each drafter's own states among the tapped states.
        swaps: new weights for loaded drafters; exists after loading.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, req_states: Any):
        super().__init__(vllm_config, device, req_states)
        settings = settings_of(vllm_config)
        assert settings is not None
        self.settings = settings
        # Draft nodes; the scheduler may plan more rows.
        self.num_speculative_steps = settings.num_nodes
        self.drafting = self.proposers = self._build_proposers(vllm_config, device)
        self.active = self.proposers[settings.active]
        self.lead(self.active, list(self.proposers.values()))
        taps = {name: settings.drafters[name].target_layers for name in self.proposers}
        self.tapped_layers = tuple(sorted(set().union(*taps.values())))
        self.tap_indices = {name: [self.tapped_layers.index(x) for x in layers] for name, layers in taps.items()}
        max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        self.features: Mapping[str, Any] = {}
        self.counters = AcceptanceCounters(
            {name: settings.depth_of(name) for name in self.proposers}, max_num_reqs, device, settings.rows_per_node
        )
        self.kept = KeptDrafts(settings, max_num_reqs, device, self.counters)
        self.pcp_manager: Any = None  # the runner's, of context parallelism
        self._serving = False

    def _build_proposers(self, vllm_config: VllmConfig, device: torch.device) -> dict[str, Proposer]:
        """Build every proposer with its own config; those that read the target's slot mappings come first."""
        configs = drafter_configs(self.settings, vllm_config.model_config, vllm_config.parallel_config)
        carrier = next(iter(configs))
        proposers = {}
        for name, drafter in self.settings.drafters.items():
            build = drafter.load_proposer()
            own, num_steps = copy.copy(vllm_config), build.native_steps(drafter)
            speculative = vllm_config.speculative_config if name == carrier else configs[name]
            if speculative.num_speculative_tokens != num_steps:
                speculative = copy.copy(speculative)
                speculative.num_speculative_tokens = num_steps
            own.speculative_config = speculative
            proposers[name] = build(own, device, name, self.settings)
            proposers[name].engine_config, proposers[name].req_states = vllm_config, self.req_states
        order = sorted(proposers, key=lambda name: not self.settings.drafters[name].traits.reads_target_slots)
        return {name: proposers[name] for name in order}

    def bind(self, state: DraftState, features: Mapping[str, Any]) -> None:
        """Connect the runner's draft state and features; called for verification ``match`` only."""
        self.kept.state, self.features = state, features
        self.counters.modes = state.modes_on_device

    # -- loading ----------------------------------------------------------------------------------------------

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        """The models of all proposers, as one module."""
        models = {name: self.proposers[name].model for name in self.settings.owners}
        return DrafterModels(models, lambda weights: self.swaps.receive(weights))

    def load_model(self, target_model: nn.Module) -> None:
        """Load every proposer, then have the target return the states of all tapped layers."""
        for name, proposer in self.proposers.items():
            if self.settings.owner_of(name) == name:
                with platform().loading_in(self.settings.drafters[name].dtype):
                    proposer.load_model(target_model)
        for name, proposer in self.proposers.items():
            owner = self.proposers[self.settings.owner_of(name)]
            if proposer is not owner:
                proposer.borrow(owner, target_model)
        self.model = self.load_draft_model(target_model, set())
        by_our_runner = self.kept.state is not None
        self.swaps = DrafterSwaps(self.settings, self.proposers, target_model, self.device, by_our_runner)
        self.draft_attn_layer_names = set().union(*(p.draft_attn_layer_names for p in self.proposers.values()))
        if self.tapped_layers:
            target_model.set_aux_hidden_state_layers(self.tapped_layers)
        logger.info(
            "crossspec: drafters %s; target layers tapped %s; %s drafts",
            {name: type(p.model).__name__ for name, p in self.proposers.items()},
            {name: self.settings.drafters[name].target_layers for name in self.proposers},
            self.active.name,
        )

    def commit_swap(self) -> list[str]:
        """Put prepared drafters in place, between two steps; return the names of the changed drafters."""
        if names := self.swaps.commit():
            for feature in self.features.values():
                feature.swapped(names)
            self.counters.count_swaps(names)
            logger.info("crossspec: new weights for the drafters %s", ", ".join(names))
        return names

    def set_eplb_state(self, eplb_state: Any) -> None:
        for proposer in self.proposers.values():
            proposer.set_eplb_state(eplb_state)

    def set_attn(
        self,
        model_state: Any,
        kv_cache_config: Any,
        block_tables: Any,
        target_input_buffers: Any,
        target_attn_groups: Any,
    ) -> None:
        for proposer in self.proposers.values():
            proposer.pcp_manager = self.pcp_manager  # vLLM has set it before
            proposer.set_attn(model_state, kv_cache_config, block_tables, target_input_buffers, target_attn_groups)
        self.kv_cache_config, self.block_tables = kv_cache_config, block_tables
        self.attn_groups = [group for name in self.settings.owners for group in self.proposers[name].attn_groups]

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        for proposer in self.proposers.values():
            proposer.init_cudagraph_manager(cudagraph_mode)

    def capture(self) -> None:
        for proposer in self.proposers.values():
            proposer.capture()

    # -- requests come and go ---------------------------------------------------------------------------------

    def add_requests(self, slots: list[int], num_computed: list[int]) -> None:
        """Requests take slots; the prefix cache had ``num_computed`` first tokens of each."""

    def remove_requests(self, slots: list[int]) -> None:
        """Requests leave their slots (ended, aborted or preempted); other requests may still reuse their blocks."""
        for proposer in self.proposers.values() if self._serving else ():
            proposer.requests_leave(slots)

    # -- the round --------------------------------------------------------------------------------------------

    def observe_verification(
        self, idx_mapping: torch.Tensor, num_sampled: torch.Tensor, num_rejected: torch.Tensor
    ) -> None:
        """Count on the device how many of the last drafts were accepted, by drafter."""
        states = self.req_states
        self.counters.count_verified(
            idx_mapping, num_sampled, num_rejected, states.num_computed_tokens.gpu, states.prefill_len.gpu
        )

    @torch.inference_mode()
    def propose(self, *arguments: Any, **options: Any) -> torch.Tensor:
        """Run one round of drafting (vLLM's protocol, whose arguments ``vllm_api.propose`` names).

        If a round runs out of memory, or a file that it reads is gone, drafting stops and generation continues.

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
        """Stop drafting for good: a round that failed half-way cannot be resumed."""
        state.stop()
        self.counters.has_stopped = True
        logger.error(
            "crossspec: drafting has stopped, and texts go on without drafts until the engine is started again: %s",
            " ".join(str(problem).split()),
        )

    def step_of(self, name: str, step: StepInputs) -> StepInputs:
        """The step with only the tapped states of one drafter."""
        tapped = step.tapped_hidden_states
        own = [tapped[i] for i in self.tap_indices[name]] if tapped else None
        return step._replace(tapped_hidden_states=own)

    @abstractmethod
    def round(self, step: StepInputs) -> torch.Tensor:
        """int64 [R, N] draft tokens of one round, as the scheduler plans them; the step has all tapped states."""

    @property
    def num_drafting(self) -> int:
        """Number of drafters that draft in a dummy round."""
        return len(self.drafting)

    def all_opted_out(self, batch: Any) -> bool:
        """Whether no request of the batch wants drafts."""
        state = self.kept.state
        return state is not None and bool((state.modes[batch.idx_mapping_np] == NO_DRAFTS).all())

    def keep(self, name: str, batch: Any, drafted: Candidates) -> torch.Tensor:
        """Keep the drafts of drafter ``name`` for a batch; return its draft tokens, int64 [R, N]."""
        tokens = self.kept.keep(drafted, batch, tuple(self.proposers).index(name))
        for feature in self.features.values():
            feature.drafted(name, batch, drafted)
        return tokens

    # -- figures ----------------------------------------------------------------------------------------------

    def acceptance_stats(self) -> dict[str, Any]:
        """The counters' values; waits for the device, so do not call it while decoding."""
        if not self._serving:
            self.counters.reset()  # drop the warm-up's counts
        return self.counters.snapshot()

    def feature_stats(self, name: str) -> dict[str, Any] | None:
        """A feature's counts so far; None if the engine has no such feature."""
        feature = self.features.get(name)
        return None if feature is None else feature.stats()

    def serve(self, batch: Any) -> None:
        """At the first round of a user's request, drop the warm-up's counts and begin to publish."""
        if self._serving or batch.req_ids[0].startswith(WARM_UP_REQUESTS):
            return
        self._serving = True
        self.counters.reset()
        for feature in self.features.values():
            feature.reset()
        # Not before graph capture, which follows the warm-up: a copy in another thread breaks a capture.
        parallel = self.vllm_config.parallel_config
        if parallel.rank == 0:
            published = {key: v for feature in self.features.values() for key, v in feature.published().items()}
            try:
                start_worker_export(self.counters, parallel.data_parallel_index, **published)
            except OSError as problem:
                logger.warning("crossspec: /metrics has no counters of ours, for want of room: %s", problem)
