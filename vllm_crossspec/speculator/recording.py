"""Record mode: the target decodes plainly, and every drafter drafts at every token of its text.

The records train a router (WhiFlash, section 3.3.2) and give its oracles (section 4). Nothing is verified. The accepted
length of each draft is computed from the target's text afterwards.
"""

from typing import Any

import torch
from torch import nn

from vllm_crossspec.speculator.single import SingleSpeculator
from vllm_crossspec.step.records import StepRecords
from vllm_crossspec.step.requests import WARM_UP_REQUESTS
from vllm_crossspec.types import Candidates, StepInputs

STEPS_ON_DEVICE = 32
"""Steps whose records are moved to the host together."""


class RecordingSpeculator(SingleSpeculator):
    """Asks every drafter for a draft after every token, records the drafts, and gives the engine none.

    Every drafter drafts in every step, so none has to catch up. A step's record has, for its R requests:

    - ``position``: int64 [R] of the last sampled token in its request.
    - ``num_sampled``: int32 [R]; 0 inside a prompt, where nothing is recorded.
    - ``hidden``, ``entropy``: [R, H] and float32 [R] (nats) of the target at the sampled token.
    - ``tokens.NAME``: int32 [R, N] of each drafter; -1 past its draft.
    - ``parents.NAME``: uint8 [R, N] row of each tree node's parent; 0 is the sampled token.
    - ``forecast.NAME``: float32 [R] of drafters that forecast accepted tokens.
    """

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any):
        super().__init__(vllm_config, device, req_states)
        self._target: nn.Module | None = None
        self._records = StepRecords(STEPS_ON_DEVICE)
        self._slots: torch.Tensor | None = None

    def load_model(self, target_model: nn.Module) -> None:
        super().load_model(target_model)
        self._target = target_model  # its head gives the entropy

    def round(self, step: StepInputs) -> torch.Tensor:
        """Record every drafter's draft for every request; return int64 [R, N] of -1."""
        if step.is_dummy:
            return super().round(step)
        drafts = self._drafts(step)
        if not step.batch.req_ids[0].startswith(WARM_UP_REQUESTS):
            self._records.add(list(step.batch.req_ids[: step.batch.num_reqs]), self._tensors(step, drafts))
        return self.kept.padded[: step.batch.num_reqs].fill_(-1)

    def _drafts(self, step: StepInputs) -> dict[str, Candidates]:
        """Every drafter's draft, in buffers of its own."""
        # A drafter's passes overwrite the target's slot mappings, which the next drafter reads: restore them each time.
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
        """Records since the last call (see ``StepRecords.take``)."""
        return self._records.take()


def _draft_tensors(draft: Candidates, num_reqs: int) -> dict[str, torch.Tensor]:
    """Copies of a draft, whose buffers the next step overwrites, in the types of the records."""
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
