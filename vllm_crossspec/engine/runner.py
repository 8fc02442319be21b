"""vLLM's model runner with sample-and-match verification, and hooks for all that a step does beyond it."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.logger import init_logger

from vllm_crossspec.config import settings_of
from vllm_crossspec.engine.cpu_products import lane_products
from vllm_crossspec.engine.draft_state import DraftState
from vllm_crossspec.engine.features.registry import make_features
from vllm_crossspec.engine.frontend.refuse import check_taps
from vllm_crossspec.engine.requests import draft_mode
from vllm_crossspec.engine.startup import step_costs
from vllm_crossspec.engine.step import Step
from vllm_crossspec.engine.verification.live_drafts import LiveDraftTokensHandler
from vllm_crossspec.engine.verification.sampler import MatchVerifier

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as Native
else:
    Native = object

logger = init_logger("vllm.crossspec")


class MatchRunner(Native):
    """What our runners add to vLLM's; mixed in before its class, for a GPU and for a CPU alike.

    Attributes:
        settings: ours, resolved.
        features: what a step does beyond verifying chains, by name, in the order of their hooks.
        draft_state: what is remembered of drafts between the round that proposes them and the step that verifies them.
        step: the one under way, from the layout of its batch to its verification; else None.
        chains_only: whether something in this engine expects the rows of chains.
    """

    def __init__(self, vllm_config: Any, device: torch.device):
        super().__init__(vllm_config, device)
        settings = settings_of(vllm_config)
        assert settings is not None
        self.settings = settings
        self.step: Step | None = None
        self.chains_only = False
        self.features = make_features(self)
        self.draft_state = DraftState(
            self.max_num_reqs,
            self.max_num_tokens,
            self.speculator.num_speculative_steps,
            settings.max_depth,
            device,
            num_rows=self.num_speculative_steps + 1,
            num_soft=max((feature.num_soft_prompts for feature in self.features.values()), default=0),
            rows_per_node=settings.rows_per_node,
        )
        self.speculator.bind(self.draft_state, self.features)
        self.draft_tokens_handler = LiveDraftTokensHandler(device, self.draft_state)
        self._step_costs: step_costs.StepTable | None = None
        logger.info(
            "crossspec: drafts of up to %d tokens, %d deep; %.1f MiB for their shapes and masks",
            self.draft_state.num_nodes,
            settings.max_depth,
            self.draft_state.num_bytes / 2**20,
        )

    # -- loading ----------------------------------------------------------------------------------------------

    def load_model(self, *arguments: Any, **options: Any) -> None:
        """Load, then put the verifier in the rejection sampler's place."""
        check_taps(self.settings, self.model_config)
        with lane_products(self.device):
            super().load_model(*arguments, **options)
        # FlashInfer draws from a generator of its own: right in distribution, but no drafter can foresee it.
        self.sampler.use_flashinfer = False
        self.rejection_sampler = MatchVerifier(
            self.sampler, self.draft_state, lambda: None if self.step is None else self.step.planned_rows
        )
        for feature in self.features.values():
            feature.loaded()

    def initialize_kv_cache(self, *arguments: Any, **options: Any) -> None:
        """Allocate, and tell the features."""
        super().initialize_kv_cache(*arguments, **options)
        for feature in self.features.values():
            feature.kv_ready()

    def capture_model(self, *, profile_only: bool = False) -> int:
        """Capture, then time the captured steps: after this vLLM expects no kernel to be compiled any more."""
        size = super().capture_model(profile_only=profile_only)
        if not profile_only:
            for feature in self.features.values():
                feature.captured()
            self.measured_step_costs()
        return size

    def measured_step_costs(self) -> step_costs.StepTable | None:
        """What steps cost, measured at the first call; None where the schedule does not depend on it."""
        if self._step_costs is None and step_costs.is_wanted(self.vllm_config):
            self._step_costs = step_costs.measure(self)
        return self._step_costs

    # -- requests come and go ---------------------------------------------------------------------------------

    def add_requests(self, scheduler_output: Any) -> None:
        """Note what each new request lets its drafter do."""
        super().add_requests(scheduler_output)
        requests = scheduler_output.scheduled_new_reqs
        if not requests:
            return
        slots = [self.req_states.req_id_to_index[request.req_id] for request in requests]
        if not self.draft_state.has_stopped:
            for slot, request in zip(slots, requests, strict=True):
                self.draft_state.modes[slot] = draft_mode(request.sampling_params, self.chains_only)
            self.speculator.add_requests(slots, [request.num_computed_tokens for request in requests])
        for feature in self.features.values():
            feature.added(requests, slots)
        self.draft_state.take_modes(self.speculator.kept.stores_shapes)

    def finish_requests(self, scheduler_output: Any) -> None:
        """Requests that leave together are told to the speculator and the features together."""
        leaving = scheduler_output.finished_req_ids | (scheduler_output.preempted_req_ids or set())
        slots = (self.req_states.req_id_to_index.get(req_id) for req_id in leaving)
        self._leave(sorted(slot for slot in slots if slot is not None))
        super().finish_requests(scheduler_output)

    def _remove_request(self, req_id: str) -> bool:
        """A slot may be given up without the request's having finished."""
        slot = self.req_states.req_id_to_index.get(req_id)
        self._leave([] if slot is None else [slot])
        return super()._remove_request(req_id)

    def _leave(self, slots: list[int]) -> None:
        if not slots:
            return
        if not self.draft_state.has_stopped:
            self.speculator.remove_requests(slots)
        for feature in self.features.values():
            feature.removed(slots)

    # -- the step ---------------------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: Any, *arguments: Any, dummy_run: bool = False, **options: Any) -> Any:
        """The step as the features would have it planned."""
        for feature in () if dummy_run else self.features.values():
            scheduler_output = feature.plan(scheduler_output)
        return super().execute_model(scheduler_output, *arguments, dummy_run=dummy_run, **options)

    def prepare_inputs(self, *arguments: Any, **options: Any) -> Any:
        """vLLM's batch, of which not every row may get logits: here the step begins."""
        batch = super().prepare_inputs(*arguments, **options)
        self.step = Step(batch, has_drafts=batch.num_draft_tokens > 0)
        for feature in self.features.values():
            feature.split(self.step)
        return self.step.batch

    def prepare_attn(self, input_batch: Any) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """KV slots from linear positions as ever, then the drafts' positions and masks."""
        prepared = super().prepare_attn(input_batch)
        if self.step is not None and self.step.has_drafts:
            self.draft_state.lay_out(self.step, self.req_states.prefill_len.gpu)
        return prepared

    def _set_active_loras(
        self, prompt_lora_mapping: tuple[int, ...], token_lora_mapping: tuple[int, ...], *others: Any, **options: Any
    ) -> None:
        """A LoRA of the output layer is told whose every row with logits is; vLLM counts one row a request."""
        step = self.step
        if step is not None and step.has_drafts:
            counts = np.diff(step.batch.cu_num_logits_np)
            prompt_lora_mapping = tuple(np.repeat(prompt_lora_mapping, counts).tolist())
        super()._set_active_loras(prompt_lora_mapping, token_lora_mapping, *others, **options)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Keep hold of the tapped states, which features read and move."""
        executed = self.execute_model_state
        if self.step is not None and executed is not None:
            self.step.tapped = list(executed.aux_hidden_states or ())
        return super().sample_tokens(grammar_output)

    def sample(self, hidden_states: torch.Tensor, input_batch: Any, grammar_output: Any) -> Any:
        """Verify, and let the features see what became of the drafts: here the step ends."""
        step = self.step = self.step or Step(input_batch)
        batch = input_batch
        for feature in self.features.values():
            batch, grammar_output = feature.before_sampling(step, batch, grammar_output)
        out = super().sample(hidden_states, batch, grammar_output)
        for feature in self.features.values():
            feature.sampled(step, hidden_states)
        self.step = None
        return out
