"""A drafter that drafts nothing, so that a router can choose to."""

import torch
from torch import nn
from vllm.config import VllmConfig

from vllm_crossspec.engine.draft_settings import DraftSettings
from vllm_crossspec.engine.proposers.base import empty_tree, first_rows
from vllm_crossspec.engine.proposers.stateless import CachelessProposer
from vllm_crossspec.types import Candidates, StepInputs


class NothingProposer(CachelessProposer):
    """Trees without nodes."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, name: str, drafts: DraftSettings):
        super().__init__(vllm_config, device, name, drafts)
        max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        self.tree = empty_tree(max_num_reqs, drafts.num_nodes, device)
        self.nothing = torch.zeros(max_num_reqs, dtype=torch.float32, device=device)

    def load_model(self, target_model: nn.Module) -> None:
        """There is nothing to load."""

    def forecast(self, step: StepInputs) -> torch.Tensor:
        """Nothing is accepted of nothing."""
        return self.nothing[: step.batch.num_reqs]

    def propose_step(self, step: StepInputs) -> Candidates:
        """No launch; where no shapes are stored, tokens that nobody plans."""
        tree = first_rows(self.tree, step.batch.num_reqs)
        return Candidates(tokens=tree.tokens, tree=tree)
