"""Record mode: the target decodes plainly, and every drafter drafts at every token of its text.

That is how a router's training set is made (WhiFlash, section 3.3.2: "a complete drafting cycle per decoding step for
each drafter separately") and what its oracles are computed from (section 4). Nothing is verified, so the text is the
target's own; how far each draft would have been accepted is read off the text afterwards.
"""

from typing import Any

import torch
from torch import nn

from vllm_crossspec.engine.requests import WARM_UP_REQUESTS
from vllm_crossspec.engine.speculators.single import SingleSpeculator
from vllm_crossspec.engine.step_records import StepRecords
from vllm_crossspec.types import Candidates, StepInputs

STEPS_ON_DEVICE = 32
"""Steps whose records wait on the device before they are moved to the host at once."""


class RecordingSpeculator(SingleSpeculator):
    """Asks every drafter for a draft after every token, keeps what they say, and hands the engine no draft at all.

    No drafter ever has anything to catch up with, for each takes part in every step.

    Of the requests that a step gave a token it keeps ``position`` int64 [R] of the last sampled token in its request,
    ``num_sampled`` int32 [R] (0 inside a prompt: no record), ``hidden`` [R, H] and ``entropy`` float32 [R] (nats) of
    the target where it sampled that token, and of every drafter ``tokens.NAME`` int32 [R, N] (-1 past its draft) and,
    if it drafts trees, ``parents.NAME`` uint8 [R, N] (row of each node's parent; 0 is the sampled token); and of those
    that know before they draft what to expect ``forecast.NAME`` float32 [R].
    """

    may_defer = False

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any):
        super().__init__(vllm_config, device, req_states)
        self._target: nn.Module | None = None
        self._records = StepRecords(STEPS_ON_DEVICE)
        self._slots: torch.Tensor | None = None

    def load_model(self, target_model: nn.Module) -> None:
        """As ever; the target's head is needed for the entropy."""
        super().load_model(target_model)
        self._target = target_model

    def round(self, step: StepInputs) -> torch.Tensor:
        """Every drafter's draft for every request of the batch is kept; none is for the engine.

        Returns:
            int64 [R, N] of -1.
        """
        if step.is_dummy:
            return super().round(step)
        drafts = self._drafts(step)
        if not step.batch.req_ids[0].startswith(WARM_UP_REQUESTS):
            self._records.add(list(step.batch.req_ids[: step.batch.num_reqs]), self._tensors(step, drafts))
        return self.kept.padded[: step.batch.num_reqs].fill_(-1)

    def _drafts(self, step: StepInputs) -> dict[str, Candidates]:
        """Every drafter's draft, in buffers of its own.

        A drafter's later passes write their slots into the target's, which the next drafter's first pass reads: each
        gets them as the target left them.
        """
        slots, drafts = self.block_tables.slot_mappings, {}
        if self._slots is None:
            self._slots = torch.empty_like(slots)
        self._slots.copy_(slots)
        for name, proposer in self.proposers.items():
            slots.copy_(self._slots)
            drafts[name] = proposer.propose_step(self.step_of(name, step))
        return drafts

    def _tensors(self, step: StepInputs, drafts: dict[str, Candidates]) -> dict[str, torch.Tensor]:
        batch, num_reqs = step.batch, step.batch.num_reqs
        rows = batch.query_start_loc[1 : num_reqs + 1].long() - 1 - step.num_rejected[:num_reqs]
        hidden = step.last_hidden_states[rows]
        assert self._target is not None
        tensors = {
            "position": batch.positions[rows] + 1,
            "num_sampled": step.num_sampled[:num_reqs].clone(),
            "hidden": hidden,
        }
        logits = self._target.compute_logits(hidden)
        if logits is not None:  # with tensor parallelism rank 0 alone has them
            tensors["entropy"] = torch.distributions.Categorical(logits=logits.float()).entropy()
        for name, draft in drafts.items():
            tensors |= {f"{key}.{name}": value for key, value in _draft_tensors(draft, num_reqs).items()}
            forecast = self.proposers[name].forecast(step)
            if forecast is not None:
                tensors[f"forecast.{name}"] = forecast.clone()
        return tensors

    def take_records(self) -> list[tuple[list[str], bytes]]:
        """What was recorded since the last call (see ``StepRecords.take``)."""
        return self._records.take()


def _draft_tensors(draft: Candidates, num_reqs: int) -> dict[str, torch.Tensor]:
    """Copies of a draft (its own buffers are written again at the next step), in the types of the records."""
    if draft.tree is None:
        assert draft.tokens is not None
        return {"tokens": draft.tokens[:num_reqs].to(torch.int32)}
    tree = draft.tree
    columns = torch.arange(tree.tokens.shape[1], device=tree.tokens.device)
    dead = columns >= tree.sizes[:num_reqs, None]
    return {
        "tokens": tree.tokens[:num_reqs].masked_fill(dead, -1).to(torch.int32),
        "parents": tree.parents[:num_reqs].to(torch.uint8),
    }
