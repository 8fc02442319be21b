"""A draft model with draft trees: nodes see their ancestors' keys and values, and need no parent's state."""

import torch
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_crossspec.config.schema import CrossSpecConfig
from vllm_crossspec.drafters.draft_model.proposer import DraftModelProposer
from vllm_crossspec.drafting.level_trees import LevelPass, LevelTrees
from vllm_crossspec.trees.builders.dynamic import Beam
from vllm_crossspec.types import StepInputs


class DraftModelTreeProposer(LevelTrees, DraftModelProposer):
    """EAGLE-2's dynamic trees from a draft model.

    Difference from ``DraftModelProposer``: the first pass takes the whole accepted path and the bonus token. A tree's
    keys and values are in a scratch that does not outlast the round.
    """

    tokens_ahead = 1  # the bonus token

    @staticmethod
    def rows_of_round(settings: CrossSpecConfig) -> int:
        return settings.max_depth + 2

    state_size = 0  # the model reads only tokens

    def _configure_decode_metadata_update(self) -> None:
        # vLLM skips this for a drafter of one token, which a tree drafter is to it.
        DraftModelSpeculator._configure_decode_metadata_update(self)

    # -- the round --------------------------------------------------------------------------------------------

    def _take_in(self, step: StepInputs) -> None:
        self._round(step, 1)

    def _prepare_beam(self, level: int, beam: Beam, states: torch.Tensor) -> torch.Tensor:
        num_reqs, rows = beam.tokens.shape
        positions = self.level_positions[: num_reqs * rows]
        roots = self.input_buffers.positions[:num_reqs, None].expand(-1, rows)
        torch.add(roots, level, out=positions.view(num_reqs, rows)).clamp_(max=self.max_model_len - 1)
        return states

    def _forward_level(
        self, token_ids: torch.Tensor, level_states: torch.Tensor, told: LevelPass, embeds: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_rows = token_ids.shape[0]
        with self._level_context(num_rows, told):
            states = self.model(input_ids=token_ids, positions=self.level_positions[:num_rows])
        return states, states[:, :0]
