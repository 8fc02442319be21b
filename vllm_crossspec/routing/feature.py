"""The runner's side of routing: the router's logits, and its measurements (WhiFlash)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.model_executor.models.interfaces_base import VllmModelForTextGeneration
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_crossspec.load import measure
from vllm_crossspec.routing.speculator import RoutedSpeculator
from vllm_crossspec.step.feature import Feature
from vllm_crossspec.step.requests import category_number
from vllm_crossspec.step.step import Step
from vllm_crossspec.trees.verify.walk import last_rows

COMPILED_BATCHES = (1, 2, 16)
"""Triton compiles separate kernels for arguments that are 1, a multiple of 16, or neither."""


class Routing(Feature):
    """Gives the router the target's logits, and compiles its kernels before serving."""

    name = "routing"

    def __init__(self, runner: Any):
        super().__init__(runner)
        self.speculator: RoutedSpeculator = runner.speculator
        self._is_measured = False
        settings = self.speculator.settings.router
        assert settings is not None
        self._categories = list(settings.by_category)
        self._last_rows = torch.zeros(runner.max_num_reqs, dtype=torch.int64, device=runner.device)

    @staticmethod
    def is_wanted(runner: Any) -> bool:
        return isinstance(runner.speculator, RoutedSpeculator)

    def loaded(self) -> None:
        """Keep the step's logits for a router that reads them after verification."""
        if not self.speculator.router.needs_logits:
            return
        runner = self.runner
        target: VllmModelForTextGeneration = runner.model
        compute = target.compute_logits

        def compute_logits(*arguments: Any, **options: Any) -> torch.Tensor:
            logits = compute(*arguments, **options)
            if runner.step is not None:  # prompt log-probabilities are computed after the step
                runner.step.logits = logits
            return logits

        target.compute_logits = compute_logits

    def added(self, requests: Sequence[Any], slots: list[int]) -> None:
        """Give the router the requests' categories and temperatures: three small copies to the device, no wait."""
        router, device = self.speculator.router, self.runner.device
        if not router.asks_requests:
            return
        parameters = [request.sampling_params for request in requests]
        numbers = [category_number(given, self._categories) for given in parameters]
        temperatures = [given.temperature if given is not None else 0.0 for given in parameters]
        router.admit(
            async_tensor_h2d(np.array(slots, dtype=np.int64), device=device),
            async_tensor_h2d(np.array(numbers, dtype=np.int32), device=device),
            async_tensor_h2d(np.array(temperatures, dtype=np.float32), device=device),
        )

    def captured(self) -> None:
        self._warm_up()
        self.measure()

    def measure(self) -> None:
        """Measure the rounds' costs, if the router uses them."""
        if self._is_measured:
            return
        self._is_measured = True
        self.runner.measured_step_costs()
        if measure.rounds_wanted(self.speculator):
            self.speculator.router.set_costs(measure.measure_rounds(self.runner))

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Compile the kernels of router and drafters: vLLM's warm-up may have used only one drafter."""
        runner = self.runner
        states = torch.zeros(1, runner.model_config.get_hidden_size(), dtype=runner.dtype, device=runner.device)
        self.speculator.router.warm_up(runner.model.compute_logits(states), states)
        for num_reqs in COMPILED_BATCHES:
            num_tokens = num_reqs * runner.decode_query_len
            if num_reqs <= runner.max_num_reqs and num_tokens <= runner.max_num_tokens:
                runner._dummy_run(num_tokens, uniform_decode=True, skip_eplb=True)

    def sampled(self, step: Step, final_states: torch.Tensor) -> None:
        """Give the router the logits after each request's last accepted token."""
        logits, step.logits = step.logits, None
        if logits is None:
            return
        batch, state = step.batch, self.runner.draft_state
        if step.has_drafts:
            rows = self._last_rows[: batch.num_reqs]
            last_rows(cu_num_logits=batch.cu_num_logits, num_sampled=step.num_sampled, path=state.path, rows=rows)
        else:
            rows = batch.cu_num_logits[1:].long() - 1
        self.speculator.router.observe_logits(logits, rows, batch.idx_mapping[: batch.num_reqs])

    def reset(self) -> None:
        self.speculator.routing.reset()
        self.speculator.clock.reset()

    def published(self) -> dict[str, Any]:
        return {"routing": self.speculator.routing, "clock": self.speculator.clock}

    def stats(self) -> dict[str, Any]:
        """Decisions, switches, missed tokens, waits and seconds so far."""
        host = self.speculator
        return {**host.routing.snapshot(), "waits": host.copied.num_waits, "seconds": dict(host.clock.seconds)}
