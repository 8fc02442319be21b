"""The speculator of one drafter."""

import torch
from torch import nn

from vllm_crossspec.engine.speculators.base import Speculator
from vllm_crossspec.engine.speculators.deferred import DeferredRows
from vllm_crossspec.types import StepInputs


class SingleSpeculator(Speculator):
    """The proposer drafts in every round.

    Where nobody drafts (the load is high, or no request wants drafts) it catches up, by many tokens at once where it
    can take tokens in without a forward pass. Several are there to be recorded alone (``recording``).
    """

    may_defer = True
    deferred: DeferredRows | None = None

    def load_model(self, target_model: nn.Module) -> None:
        """See the base class; where our runner says when requests leave, tokens can be taken in later."""
        super().load_model(target_model)
        num_taps = len(set().union(*self.tap_indices.values()))
        can_defer = self.may_defer and num_taps and all(proposer.writes_context for proposer in self.proposers.values())
        # A connector may read blocks before they are written.
        if can_defer and self.kept.state is not None and self.vllm_config.kv_transfer_config is None:
            config = self.vllm_config.model_config
            max_num_reqs = self.vllm_config.scheduler_config.max_num_seqs
            width, dtype = config.get_hidden_size(), config.dtype
            self.deferred = DeferredRows(max_num_reqs, num_taps, width, dtype, self.device)

    def remove_requests(self, slots: list[int]) -> None:
        """Their blocks go to others, or are found by others."""
        super().remove_requests(slots)
        self._take_in_deferred()

    def round(self, step: StepInputs) -> torch.Tensor:
        """See the base class."""
        drafted = None
        wants_none = not step.is_dummy and (step.num_scheduled == 0 or self.all_opted_out(step.batch))
        if wants_none and self._defer(step):
            return self.kept.nothing(step.batch.num_reqs, step.num_scheduled)
        if not step.is_dummy:
            self._take_in_deferred()
        # A dummy run must touch every drafter: graphs, memory profile and expert parallelism depend on it.
        for name, proposer in self.proposers.items():
            own = self.step_of(name, step)
            if len(self.proposers) == 1:  # of several each has a length of its own
                own.options["num_speculative_tokens"] = step.num_scheduled
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

    def _defer(self, step: StepInputs) -> bool:
        """Keep the step's tokens for later; False where they must be taken in now."""
        deferred = self.deferred
        if deferred is None or not step.tapped_hidden_states:
            return False
        if not deferred.takes(step.batch):
            self._take_in_deferred()  # for want of room, it may be, and then there is some
        if not deferred.takes(step.batch):
            return False
        deferred.add(step.batch, step.tapped_hidden_states)
        return True

    @torch.inference_mode()
    def _take_in_deferred(self) -> None:
        """Keys and values of what was kept, in the caches of all drafters."""
        if self.deferred is None or not self.deferred.num_rows:
            return
        states, slots, positions = self.deferred.take()
        for name, proposer in self.proposers.items():
            features = proposer.fuse(torch.cat([states[i] for i in self.tap_indices[name]], dim=-1))
            self.write_context(name, features, slots, positions)
