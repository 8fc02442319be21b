"""The speculator of one drafter; others beside it stay up to date and never draft."""

import torch

from vllm_crossspec.engine.speculators.base import Speculator
from vllm_crossspec.types import StepInputs


class SingleSpeculator(Speculator):
    """The active proposer drafts in every round, the others catch up."""

    def round(self, step: StepInputs) -> torch.Tensor:
        """See the base class."""
        drafted = None
        wants_none = not step.is_dummy and (step.num_scheduled == 0 or self.all_opted_out(step.batch))
        for name, proposer in self.proposers.items():
            own = self.step_of(name, step)
            # A dummy run must touch every drafter: graphs, memory profile and expert parallelism depend on it.
            if (proposer is self.active and not wants_none) or step.is_dummy:
                if len(self.proposers) == 1:
                    own.options["num_speculative_tokens"] = step.num_scheduled
                candidates = proposer.propose_step(own)
                drafted = candidates if proposer is self.active else drafted
            else:
                proposer.catch_up(own)
        if drafted is None:
            return self.kept.nothing(step.batch.num_reqs, step.num_scheduled)
        if step.is_dummy:
            return self.kept.plan(self.kept.keep(drafted, step.batch, drafter=None))
        self.serve(step.batch)
        return self.kept.plan(self.keep(self.active.name, step.batch, drafted))
