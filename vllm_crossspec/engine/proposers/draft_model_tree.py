"""A draft model of its own with draft trees: a level's nodes see their ancestors, and nothing else is handed on."""

from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_crossspec.engine.draft_settings import DraftSettings
from vllm_crossspec.engine.proposers.draft_model import DraftModelProposer
from vllm_crossspec.engine.proposers.level_trees import LevelTrees
from vllm_crossspec.tree.dynamic import Beam
from vllm_crossspec.types import StepInputs


class DraftModelTreeProposer(LevelTrees, DraftModelProposer):
    """EAGLE-2's dynamic trees of a model that reads the text alone.

    A tree's keys and values lie in a scratch and are gone with the round. So the first pass takes in the whole accepted
    path and the bonus token: as many rows a request as a path may be long, and two, in the place of a chain's two.
    """

    tokens_ahead = 1  # the bonus token

    @staticmethod
    def rows_of_round(drafts: DraftSettings) -> int:
        """Rows of a request in the first pass: the root, the longest path, and the bonus token."""
        return drafts.max_accepted + 2

    @property
    def state_size(self) -> int:
        """None: the model reads tokens alone."""
        return 0

    def _configure_decode_metadata_update(self) -> None:
        """Whether graphs hold the attention's plan; vLLM does not ask where a drafter drafts one token."""
        DraftModelSpeculator._configure_decode_metadata_update(self)

    # -- the round --------------------------------------------------------------------------------------------

    def _take_in(self, step: StepInputs) -> None:
        """See the base class."""
        self._round(step, 1)

    def _prepare_beam(self, level: int, beam: Beam, states: torch.Tensor) -> torch.Tensor:
        """See the base class; two launches of a few numbers."""
        num_reqs, rows = beam.tokens.shape
        positions = self.level_positions[: num_reqs * rows]
        roots = self.input_buffers.positions[:num_reqs, None].expand(-1, rows)
        torch.add(roots, level, out=positions.view(num_reqs, rows)).clamp_(max=self.max_model_len - 1)
        return states

    def _forward_level(
        self,
        token_ids: torch.Tensor,
        level_states: torch.Tensor,
        attn_metadata: dict[str, Any] | None,
        num_tokens_across_dp: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See the base class."""
        num_rows = token_ids.shape[0]
        with self._level_context(num_rows, attn_metadata, num_tokens_across_dp):
            states = self.model(input_ids=token_ids, positions=self.level_positions[:num_rows])
        return states, states[:, :0]
