"""The one speculator that vLLM sees: it holds our proposers and runs the round."""

import copy
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_crossspec.adaptive.calibration import policies
from vllm_crossspec.config import settings_of
from vllm_crossspec.drafters.base import drafter_kind
from vllm_crossspec.engine.draft_settings import draft_settings
from vllm_crossspec.engine.proposers.base import Proposer, empty_tree, first_rows
from vllm_crossspec.engine.requests import WARM_UP_REQUESTS
from vllm_crossspec.engine.vllm_api.speculative import drafter_configs
from vllm_crossspec.metrics.adaptive import TreeSizeCounters
from vllm_crossspec.metrics.counters import AcceptanceCounters
from vllm_crossspec.metrics.export import start_worker_export
from vllm_crossspec.tree.chain import chain
from vllm_crossspec.tree.state import CHAIN, NOTHING, TreeState
from vllm_crossspec.tree.to_chain import to_chain
from vllm_crossspec.types import Candidates, Sizing, StepInputs, TokenTree

# Under vLLM's own logger, so that its settings apply.
logger = init_logger("vllm.crossspec")


class ProposerHost(DraftModelSpeculator):
    """Loads every proposer of the settings beside one target, and lets the chosen one draft.

    It is a ``DraftModelSpeculator`` because the runner asks for that class, but owns none of that class's buffers:
    every proposer has its own, and the base's initialiser, which would allocate them once more, does not run.

    Args:
        vllm_config: of the engine; our settings ride in its ``additional_config``.
        device: of the target.
        req_states: the runner's request states.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, req_states: Any):
        settings = settings_of(vllm_config)
        speculative = vllm_config.speculative_config
        assert settings is not None and speculative is not None
        self.settings = settings
        self.vllm_config, self.device, self.speculative_config = vllm_config, device, speculative
        self.method = speculative.method
        self.req_states = req_states
        assert settings.num_speculative_tokens is not None
        # Draft nodes; what the scheduler plans beyond them are contemplate rows.
        self.num_speculative_steps = settings.num_speculative_tokens
        self.proposers = self._build_proposers(vllm_config, device)
        self.active = self.proposers[settings.active]
        all_proposers = self.proposers.values()
        self.num_query_per_req = max(p.num_query_per_req for p in all_proposers)
        self.num_extra_query_per_req = max(p.num_extra_query_per_req for p in all_proposers)
        self.dcp_size = 1
        self.enable_adaptive_verification = False
        self.supports_mm_inputs = False
        # One drafter's own buffers are what the runner reads; several share a padded one.
        self.draft_logits = self.active.draft_logits
        self.draft_token_confidence_probs = self.active.draft_token_confidence_probs
        self.draft_watermarker = self.active.draft_watermarker
        max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        self.padded_tokens = torch.zeros(max_num_reqs, self.num_speculative_steps, dtype=torch.int64, device=device)
        num_planned = settings.planned(self.num_speculative_steps)
        self.planned_tokens = torch.zeros(max_num_reqs, num_planned, dtype=torch.int64, device=device)
        self.counters = AcceptanceCounters(
            tuple(self.proposers), max_num_reqs, self.num_speculative_steps, device, settings.contemplates
        )
        self.sizes = {name: TreeSizeCounters(policy) for name, policy in policies(settings).items()}
        self.state: TreeState | None = None
        # Several drafters, or trees, change a slot's shape from round to round; one drafter of chains never does.
        self.stores_trees = settings.verification == "match" and (settings.has_trees or len(self.proposers) > 1)
        if self.stores_trees:
            self.chains = empty_tree(max_num_reqs, self.num_speculative_steps, device)
        self._pcp_manager: Any = None
        self._serving = False

    def _build_proposers(self, vllm_config: VllmConfig, device: torch.device) -> dict[str, Proposer]:
        """Every proposer with its own config; those that read the target's slot mappings come first."""
        configs = drafter_configs(self.settings, vllm_config.model_config, vllm_config.parallel_config)
        carrier = next(iter(configs))
        proposers = {}
        for name, drafter in self.settings.drafters.items():
            kind, drafts = drafter_kind(drafter.kind, "drafter"), draft_settings(self.settings, drafter)
            build = kind.load_proposer(is_tree=not drafter.tree.is_chain)
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

    @property
    def tree_layer_names(self) -> set[str]:
        """Attention layers of the drafters whose own forward passes are over trees."""
        names = [p.draft_attn_layer_names for p in self.proposers.values() if p.drafts_over_trees]
        return set().union(*names)

    def bind(self, state: TreeState) -> None:
        """Take the place where drafts are kept for the runner's verification (``match`` only)."""
        self.state = state
        self.counters.modes = state.modes_on_device

    # -- loading ----------------------------------------------------------------------------------------------

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        """The models of all proposers, as one module."""
        return nn.ModuleDict({name: p.model for name, p in self.proposers.items()})

    def load_model(self, target_model: nn.Module) -> None:
        """Load every proposer, then let the target hand out the union of the layers that they tap."""
        for proposer in self.proposers.values():
            proposer.load_model(target_model)
        self.model = self.load_draft_model(target_model, set())
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
        self.attn_groups = [group for p in self.proposers.values() for group in p.attn_groups]

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Each proposer manages its own graphs."""
        for proposer in self.proposers.values():
            proposer.init_cudagraph_manager(cudagraph_mode)

    def capture(self) -> None:
        """Capture every proposer's graphs."""
        for proposer in self.proposers.values():
            proposer.capture()

    # -- the round --------------------------------------------------------------------------------------------

    def observe_verification(
        self, idx_mapping: torch.Tensor, num_sampled: torch.Tensor, num_rejected: torch.Tensor
    ) -> None:
        """Count what became of the last drafts, on the device, by the drafter that made them."""
        states = self.req_states
        self.counters.record(
            idx_mapping, num_sampled, num_rejected, states.num_computed_tokens.gpu, states.prefill_len.gpu
        )

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor],
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        """One round of drafting (vLLM's protocol): the active proposer drafts, the others catch up.

        Returns:
            int64 [R, K] draft tokens; K is the longest drafter's, shorter drafts are padded with their last token, and
            contemplate rows are 0.
        """
        options = {
            "dp_sync_state": dp_sync_state,
            "dummy_run": dummy_run,
            "skip_attn_for_dummy_run": skip_attn_for_dummy_run,
            "mm_inputs": mm_inputs,
            "is_profile": is_profile,
        }
        drafted = None
        wants_none = not dummy_run and (num_speculative_tokens == 0 or self._all_opted_out(input_batch))
        for name, proposer in self.proposers.items():
            tapped = [aux_hidden_states[i] for i in self.tap_indices[name]] if aux_hidden_states else None
            step = StepInputs(
                input_batch,
                attn_metadata,
                slot_mappings,
                last_hidden_states,
                tapped,
                num_sampled,
                num_rejected,
                last_sampled,
                next_prefill_tokens,
                temperature,
                seeds,
                dict(options),
            )
            # A dummy run must touch every drafter: graphs, memory profile and expert parallelism depend on it.
            if (proposer is self.active and not wants_none) or dummy_run:
                if len(self.proposers) == 1:
                    step.options["num_speculative_tokens"] = num_speculative_tokens
                candidates = proposer.propose_step(step)
                drafted = candidates if proposer is self.active else drafted
            else:
                proposer.catch_up(step)
        if drafted is None:
            # The scheduler may have planned rows all the same (``engine.scheduler``), whose tokens must be valid.
            return self.planned_tokens[: input_batch.num_reqs].fill_(-1 if num_speculative_tokens == 0 else 0)
        if not dummy_run:
            if not self._serving and not input_batch.req_ids[0].startswith(WARM_UP_REQUESTS):
                self._start_serving()
            self.counters.mark_drafted(input_batch.idx_mapping, tuple(self.proposers).index(self.active.name))
        return self._plan(self._keep(drafted, input_batch, dummy_run))

    def _all_opted_out(self, batch: Any) -> bool:
        """Whether no request of the batch wants drafts."""
        return self.state is not None and bool((self.state.modes[batch.idx_mapping_np] == NOTHING).all())

    def _keep(self, drafted: Candidates, batch: Any, dummy_run: bool) -> torch.Tensor:
        """Keep the drafts' shapes for the verification, where they may differ; the draft tokens [R, K] for vLLM."""
        if not self.stores_trees:
            assert drafted.tokens is not None
            return self._pad(drafted.tokens)
        tree = drafted.tree
        if tree is None:
            chain(tokens=drafted.tokens, out=self.chains)
            tree = first_rows(self.chains, batch.num_reqs)
        state, sizing = self.state, drafted.sizing
        if state is None:
            return tree.tokens
        # A dummy run compiles the kernel, which the first request for a chain would otherwise wait for.
        if dummy_run or (state.modes[batch.idx_mapping_np] == CHAIN).any():
            self._make_chains(batch, tree)
        if not dummy_run:
            state.store(batch.idx_mapping, tree)
            self._note_sizing(self.active.name, batch, sizing)
        return tree.tokens

    def _plan(self, tokens: torch.Tensor) -> torch.Tensor:
        """The draft tokens [R, N] as the scheduler plans them: contemplate rows follow, whatever their ids."""
        if self.planned_tokens.shape[1] == tokens.shape[1]:
            return tokens
        planned = self.planned_tokens[: tokens.shape[0]]
        planned[:, : tokens.shape[1]] = tokens
        planned[:, tokens.shape[1] :] = 0
        return planned

    def _note_sizing(self, name: str, batch: Any, sizing: Sizing | None) -> None:
        """Keep and count what the trees of ``name`` were given, as far as they differ in size."""
        assert self.state is not None
        self.state.note_sizing(batch, sizing, keeps_phi=self.settings.records_trees)
        if sizing is not None and name in self.sizes:
            self.sizes[name].count(sizing)

    def _make_chains(self, batch: Any, tree: TokenTree) -> None:
        """Narrow the trees of requests that may only have chains, in place."""
        state = self.state
        assert state is not None
        to_chain(
            tokens=tree.tokens,
            parents=tree.parents,
            log_probs=tree.log_probs,
            sizes=tree.sizes,
            chain_only=state.modes_on_device,
            max_depth=state.max_depth,
            idx_mapping=batch.idx_mapping,
        )

    def _pad(self, tokens: torch.Tensor) -> torch.Tensor:
        """Bring [R, k] to [R, K] with each row's last token: padding goes through the embedding and must be valid."""
        num_reqs, width = tokens.shape
        if width == self.num_speculative_steps:
            return tokens
        padded = self.padded_tokens[:num_reqs]
        padded[:, :width] = tokens
        padded[:, width:] = tokens[:, -1:]
        return padded

    # -- figures ----------------------------------------------------------------------------------------------

    def acceptance_stats(self) -> dict[str, Any]:
        """What the counters hold; waits for the device, so it is not for the decoding path."""
        if not self._serving:
            self.counters.reset()  # so far they hold the warm-up's
        return self.counters.snapshot()

    def adaptive_stats(self) -> dict[str, dict[str, Any]]:
        """Trees and levels by drafter and bin so far; empty where all trees are the same."""
        return {name: counters.snapshot() for name, counters in self.sizes.items()}

    def _start_serving(self) -> None:
        """At the first round of a user's request: forget the warm-up's counts, and begin to publish."""
        self._serving = True
        self.counters.reset()
        for sizes in self.sizes.values():
            sizes.reset()
        # Not earlier: a copy in another thread breaks a CUDA graph capture, and the warm-up comes before the capture.
        if self.vllm_config.parallel_config.rank == 0:
            self._start_export()

    def _start_export(self) -> None:
        start_worker_export(self.counters, sizes=self.sizes)
