"""EAGLE-3 with draft trees: a node's pass starts from its parent's state."""

from collections.abc import Callable

import torch
from vllm.config import CUDAGraphMode, VllmConfig

from vllm_crossspec.config.schema import CrossSpecConfig
from vllm_crossspec.drafters.eagle3.proposer import Eagle3Proposer
from vllm_crossspec.drafting.level_trees import LevelPass, LevelTrees
from vllm_crossspec.drafting.levels import prepare_level
from vllm_crossspec.graphs.query_lens import FirstPassGraphs
from vllm_crossspec.kinds.contemplate_layout import planned_tokens
from vllm_crossspec.trees.builders.dynamic import Beam
from vllm_crossspec.types import StepInputs
from vllm_crossspec.vllm_api.propose import native_arguments


class Eagle3TreeProposer(LevelTrees, Eagle3Proposer):
    """Trees of EAGLE-3's one layer (Li et al. 2025, section 3); the first pass is that of :class:`Eagle3Proposer`."""

    token_offset = 1  # a row joins the state of one token with the embedding of the next

    def __init__(self, vllm_config: VllmConfig, device: torch.device, name: str, settings: CrossSpecConfig):
        super().__init__(vllm_config, device, name, settings)
        self.prepare_level: Callable[..., None] = prepare_level
        # Two buffers in turn: on a GPU a model overwrites its input states and returns them as its children's.
        max_rows = self.level_positions.shape[0]
        self.level_states = torch.zeros(2, max_rows, self.hidden_size, dtype=self.dtype, device=device)

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        # The first pass runs over the rows that the target verified, so it needs graphs of every width.
        super().init_cudagraph_manager(cudagraph_mode)
        if self.sizer is None or self.settings.starts_from_last_token:
            return
        mode = self.prefill_cudagraph_manager.cudagraph_mode
        widths = tuple(planned_tokens(width, self.contemplates) + 1 for width in self.sizer.policy.widths)
        self.prefill_cudagraph_manager = FirstPassGraphs(
            self.engine_config, self.device, mode, self.settings.num_rows, query_lens=widths
        )

    def _take_in(self, step: StepInputs) -> None:
        self.propose(**native_arguments(step._replace(num_drafts=None)))

    def _prepare_beam(self, level: int, beam: Beam, states: torch.Tensor) -> torch.Tensor:
        own = self.level_states[level % 2]
        self.prepare_level(
            parent_states=states,
            beam_parents=beam.parents,
            root_positions=self.input_buffers.positions,
            states=own,
            positions=self.level_positions,
            level=level,
            last_position=self.max_model_len - 1,
        )
        return own

    def _forward_level(
        self, token_ids: torch.Tensor, level_states: torch.Tensor, told: LevelPass, embeds: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_rows = token_ids.shape[0]
        inputs = {"input_ids": token_ids, "positions": self.level_positions[:num_rows], "inputs_embeds": embeds}
        with self._level_context(num_rows, told):
            return self.model(hidden_states=level_states, **inputs)
