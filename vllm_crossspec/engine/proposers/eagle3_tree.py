"""EAGLE-3 with draft trees: a level's nodes go on from the states of their parents."""

from collections.abc import Callable
from typing import Any

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import SpeculatorCudaGraphManager

from vllm_crossspec.adaptive.heterospec import AdaptivePolicy
from vllm_crossspec.contemplate.layout import planned_tokens
from vllm_crossspec.drafters.eagle3 import torch_ops as levels_in_torch
from vllm_crossspec.drafters.eagle3.levels import prepare_level
from vllm_crossspec.engine.draft_settings import DraftSettings
from vllm_crossspec.engine.graphs.query_lens import FirstPassGraphs
from vllm_crossspec.engine.proposers.eagle3 import Eagle3Proposer
from vllm_crossspec.engine.proposers.level_trees import LevelTrees
from vllm_crossspec.engine.vllm_api.propose import native_arguments
from vllm_crossspec.tree.dynamic import Beam
from vllm_crossspec.twins import runs_kernels
from vllm_crossspec.types import StepInputs


class Eagle3TreeProposer(LevelTrees, Eagle3Proposer):
    """Trees of EAGLE-3's one layer (EAGLE-3, Li et al. 2025, section 3); the first pass is a chain's."""

    token_offset = 1  # a row has the state of one token beside the embedding of the next

    def __init__(self, vllm_config: VllmConfig, device: torch.device, name: str, drafts: DraftSettings):
        super().__init__(vllm_config, device, name, drafts)
        self.prepare_level: Callable[..., None] = prepare_level if runs_kernels() else levels_in_torch.prepare_level
        # By turns: on a GPU a model writes over the states that it is given, and returns them as those of its children.
        max_rows = self.level_positions.shape[0]
        self.level_states = torch.zeros(2, max_rows, self.hidden_size, dtype=self.dtype, device=device)

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """As of the trees; the first pass of adaptive ones has as many widths as they have."""
        super().init_cudagraph_manager(cudagraph_mode)
        if self.sizer is not None and not self.drafts.from_one_row:
            self._widen_first_pass(self.sizer.policy)

    def _widen_first_pass(self, policy: AdaptivePolicy) -> None:
        """The first pass runs over as many rows as the target verified: graphs for every width."""
        assert isinstance(self.prefill_cudagraph_manager, SpeculatorCudaGraphManager)
        self.prefill_cudagraph_manager = FirstPassGraphs(
            self.engine_config,
            self.device,
            self.prefill_cudagraph_manager.cudagraph_mode,
            self.drafts.num_rows,
            query_lens=tuple(planned_tokens(width, self.contemplates) + 1 for width in policy.widths),
        )

    def _take_in(self, step: StepInputs) -> None:
        """See the base class."""
        step.options["num_speculative_tokens"] = None
        self.propose(**native_arguments(step))

    def _prepare_beam(self, level: int, beam: Beam, states: torch.Tensor) -> torch.Tensor:
        """States [at least rows, H] and positions of one level's nodes, from the ``states`` of the level before."""
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
            return self.model(
                input_ids=token_ids,
                positions=self.level_positions[:num_rows],
                hidden_states=level_states,
                inputs_embeds=inputs_embeds,
            )
