"""The speculator of one drafter."""

import torch
from torch import nn

from vllm_crossspec.catch_up.queue import StateQueue
from vllm_crossspec.speculator.base import Speculator
from vllm_crossspec.types import StepInputs


class SingleSpeculator(Speculator):
    """The proposer drafts in every round; it has several only for recording (``recording``).

    In a round without drafts (the load is high, or no request wants drafts) it catches up. If it can do so without a
    forward pass, it takes in the tokens of many rounds at once.

    Attributes:
        queue: tokens to take in later; None if tokens are taken in at once.
    """

    queue: StateQueue | None = None

    def load_model(self, target_model: nn.Module) -> None:
        super().load_model(target_model)
        can_wait = len(self.proposers) == 1 and self.tapped_layers and self.active.writes_context
        # Only our runner reports when requests leave, and a connector may read blocks before they are written.
        if can_wait and self.kept.state is not None and self.vllm_config.kv_transfer_config is None:
            self.queue = StateQueue(self.active, self.tap_indices[self.active.name])

    def remove_requests(self, slots: list[int]) -> None:
        # Other requests may get or reuse their blocks.
        super().remove_requests(slots)
        if self.queue is not None:
            self.queue.flush()

    def round(self, step: StepInputs) -> torch.Tensor:
        drafted = None
        wants_none = not step.is_dummy and (step.num_scheduled == 0 or self.all_opted_out(step.batch))
        if self.queue is not None and not step.is_dummy:
            if wants_none and step.tapped_hidden_states and self.queue.keep(step.batch, step.tapped_hidden_states):
                return self.kept.nothing(step.batch.num_reqs, step.num_scheduled)
            self.queue.flush()
        # A dummy run must touch every drafter: graphs, memory profile and expert parallelism depend on it.
        for name, proposer in self.proposers.items():
            own = self.step_of(name, step)
            if len(self.proposers) == 1:  # several have different lengths
                own = own._replace(num_drafts=step.num_scheduled)
            if wants_none:
                proposer.catch_up(own)
                continue
            candidates = proposer.propose_step(own)
            drafted = candidates if proposer is self.active else drafted
        if drafted is None:
            return self.kept.nothing(step.batch.num_reqs, step.num_scheduled)
        if step.is_dummy:
            return self.kept.plan(self.kept.keep(drafted, step.batch, drafter=None))
        self.serve(step.batch)
        return self.kept.plan(self.keep(self.active.name, step.batch, drafted))
