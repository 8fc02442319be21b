"""vLLM's model runner with sample-and-match verification, and hooks for features."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler

from vllm_crossspec.config.schema import settings_of
from vllm_crossspec.frontend.refuse import check_taps
from vllm_crossspec.load import measure
from vllm_crossspec.load.costs import StepTable
from vllm_crossspec.platform import platform
from vllm_crossspec.runner.features import make_features
from vllm_crossspec.runner.verifier import MatchVerifier
from vllm_crossspec.step.requests import draft_mode
from vllm_crossspec.step.step import Step
from vllm_crossspec.trees.draft_state import DraftState
from vllm_crossspec.vllm_api.texts import texts_where_searched

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as Native
else:
    Native = object

logger = init_logger("vllm.crossspec")


class LiveDraftTokensHandler(DraftTokensHandler):
    """Marks draft tokens past a request's live nodes as absent for the scheduler's grammar check."""

    def __init__(self, device: torch.device, state: DraftState):
        super().__init__(device)
        self.state = state
        self.columns = torch.arange(state.num_rows - 1, dtype=torch.int32, device=device)

    def set_draft_tokens(self, input_batch: Any, draft_tokens: torch.Tensor) -> None:
        """Take the round's draft tokens [R, n]; with a grammar, tokens past the live ones become -1."""
        if self.state.has_stopped:  # no drafts; synchronous scheduling then plans none
            draft_tokens = draft_tokens[:, :0]
        if input_batch.has_structured_output_reqs:
            live = self.state.sizes[input_batch.idx_mapping]
            dead = self.columns[None, : draft_tokens.shape[1]] >= live[:, None]
            draft_tokens = draft_tokens.masked_fill(dead, -1)
        super().set_draft_tokens(input_batch, draft_tokens)


class MatchRunner(Native):
    """A mixin for the platform's runner: our verification and features."""

    def __init__(self, vllm_config: Any, device: torch.device):
        settings = settings_of(vllm_config)
        assert settings is not None
        with texts_where_searched(settings, vllm_config):
            super().__init__(vllm_config, device)
        self.settings = settings
        self.step: Step | None = None  # the current step, from its batch's layout to its verification
        self.chains_only = False  # whether a custom logits processor expects the rows of chains
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
        self._step_costs: StepTable | None = None
        logger.info(
            "crossspec: drafts of up to %d tokens, %d deep; %.1f MiB for their shapes and masks",
            self.draft_state.num_nodes,
            settings.max_depth,
            self.draft_state.num_bytes / 2**20,
        )

    # -- loading ----------------------------------------------------------------------------------------------

    def load_model(self, *arguments: Any, **options: Any) -> None:
        """Load, then replace the rejection sampler with the verifier."""
        check_taps(self.settings, self.model_config)
        with platform().loading():
            super().load_model(*arguments, **options)
        # FlashInfer uses a generator of its own. Its samples are correct, but a drafter cannot predict them.
        self.sampler.use_flashinfer = False
        self.rejection_sampler = MatchVerifier(
            self.sampler, self.draft_state, lambda: None if self.step is None else self.step.planned_rows
        )
        self.model_state.features = tuple(self.features.values())
        for feature in self.features.values():
            feature.loaded()

    def initialize_kv_cache(self, *arguments: Any, **options: Any) -> None:
        super().initialize_kv_cache(*arguments, **options)
        for feature in self.features.values():
            feature.kv_ready()

    def capture_model(self, *, profile_only: bool = False) -> int:
        """Capture, then time the captured steps: vLLM expects no kernel compilation after this call."""
        size = super().capture_model(profile_only=profile_only)
        if not profile_only:
            for feature in self.features.values():
                feature.captured()
            self.measured_step_costs()
        return size

    def measured_step_costs(self) -> StepTable | None:
        """Step costs, measured at the first call; None if the schedule does not depend on them."""
        if self._step_costs is None and measure.steps_wanted(self.vllm_config):
            self._step_costs = measure.measure_steps(self)
        return self._step_costs

    # -- requests come and go ---------------------------------------------------------------------------------

    def add_requests(self, scheduler_output: Any) -> None:
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
        leaving = scheduler_output.finished_req_ids | (scheduler_output.preempted_req_ids or set())
        slots = (self.req_states.req_id_to_index.get(req_id) for req_id in leaving)
        self._leave(sorted(slot for slot in slots if slot is not None))
        super().finish_requests(scheduler_output)

    def _remove_request(self, req_id: str) -> bool:
        # vLLM may also free the slot of an unfinished request.
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
        for feature in () if dummy_run else self.features.values():
            scheduler_output = feature.plan(scheduler_output)
        return super().execute_model(scheduler_output, *arguments, dummy_run=dummy_run, **options)

    def prepare_inputs(self, *arguments: Any, **options: Any) -> Any:
        """Begin the step: vLLM's batch, in which features may take logits from some rows."""
        batch = super().prepare_inputs(*arguments, **options)
        self.step = Step(batch, has_drafts=batch.num_draft_tokens > 0)
        for feature in self.features.values():
            feature.split(self.step)
        return self.step.batch

    def prepare_attn(self, input_batch: Any) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """KV slots from linear positions, as in vLLM, then the drafts' positions and masks."""
        prepared = super().prepare_attn(input_batch)
        if self.step is not None and self.step.has_drafts:
            self.draft_state.lay_out(self.step, self.req_states.prefill_len.gpu)
        return prepared

    def _set_active_loras(
        self, prompt_lora_mapping: tuple[int, ...], token_lora_mapping: tuple[int, ...], *others: Any, **options: Any
    ) -> None:
        # A LoRA of the output layer needs the request of every row with logits; vLLM assumes one row per request.
        step = self.step
        if step is not None and step.has_drafts:
            counts = np.diff(step.batch.cu_num_logits_np)
            prompt_lora_mapping = tuple(np.repeat(prompt_lora_mapping, counts).tolist())
        super()._set_active_loras(prompt_lora_mapping, token_lora_mapping, *others, **options)

    def sample_tokens(self, grammar_output: Any) -> Any:
        # Features read and move the tapped states.
        executed = self.execute_model_state
        if self.step is not None and executed is not None:
            self.step.tapped = list(executed.aux_hidden_states or ())
        return super().sample_tokens(grammar_output)

    def sample(self, hidden_states: torch.Tensor, input_batch: Any, grammar_output: Any) -> Any:
        """End the step: verify the drafts, and show the result to the features."""
        step = self.step = self.step or Step(input_batch)
        batch = input_batch
        for feature in self.features.values():
            batch, grammar_output = feature.before_sampling(step, batch, grammar_output)
        out = super().sample(hidden_states, batch, grammar_output)
        step.num_sampled = out[1]
        for feature in self.features.values():
            feature.sampled(step, hidden_states)
        self.step = None
        return out
