"""A drafter that drafts nothing, for routers."""

import torch
from vllm.config import VllmConfig

from vllm_crossspec.config.schema import CrossSpecConfig
from vllm_crossspec.drafting.proposer import empty_tree, first_rows
from vllm_crossspec.drafting.stateless import CachelessProposer
from vllm_crossspec.types import Candidates, StepInputs


class NothingProposer(CachelessProposer):
    """Trees without nodes."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, name: str, settings: CrossSpecConfig):
        super().__init__(vllm_config, device, name, settings)
        max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        self.tree = empty_tree(max_num_reqs, settings.num_nodes, device)
        self.nothing = torch.zeros(max_num_reqs, dtype=torch.float32, device=device)

    def forecast(self, step: StepInputs) -> torch.Tensor:
        return self.nothing[: step.batch.num_reqs]

    def propose_step(self, step: StepInputs) -> Candidates:
        # No launch; if shapes are not stored, the tokens are never planned.
        tree = first_rows(self.tree, step.batch.num_reqs)
        return Candidates(tokens=tree.tokens, tree=tree)
