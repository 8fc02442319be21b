"""DFlash as a proposer, on vLLM's block-diffusion speculator."""

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig, replace
from vllm.logger import init_logger
from vllm.model_executor.models.qwen3_dflash import dflash_has_any_non_causal
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator, prepare_dflash_inputs

from vllm_crossspec.config.schema import CrossSpecConfig
from vllm_crossspec.drafting.marginals import MarginalTreeProposer
from vllm_crossspec.drafting.noise import NoiseKeys
from vllm_crossspec.drafting.proposer import HeadSampling
from vllm_crossspec.drafting.weights import load_drafter
from vllm_crossspec.types import Candidates, StepInputs
from vllm_crossspec.vllm_api.propose import native_arguments
from vllm_crossspec.vllm_api.speculative import without_schedule

logger = init_logger("vllm.crossspec")


def warn_of_other_blocks(name: str, drafted: int, trained: int) -> None:
    """Warn if a drafter must draft blocks of another length than it was trained on; vLLM accepts this silently."""
    if drafted != trained:
        logger.warning(
            "crossspec: drafter %s drafts in blocks of %d and was trained on blocks of %d, whose masks see each other: "
            'it may accept much less; "num_speculative_tokens": %d is what it was trained for',
            *(name, drafted, trained, trained - 1),
        )


class DFlashProposer(HeadSampling, DFlashSpeculator):
    """K tokens from one non-causal forward over [last token, K masks]; the context is K/V of target states.

    Differences from vLLM's ``DFlashSpeculator``:

    - Several can be loaded beside one target.
    - Drafts can come from another head, and be coupled with the target's noise.
    - Its cache can catch up without a forward.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, name: str, settings: CrossSpecConfig):
        super().__init__(vllm_config, device, name, settings)
        self.vllm_config = without_schedule(self.vllm_config)
        # vLLM 0.33's graphs fuse the tapped states. A round from one row per request brings fused features, and a
        # buffer for whole trees would take hundreds of MiB.
        self._aux_staging = None
        trained = getattr(self.draft_model_config.hf_config, "block_size", self.num_query_per_req)
        if self.requires_non_causal:  # a causal block's rows do not see how long it is
            warn_of_other_blocks(name, drafted=self.num_query_per_req, trained=trained)

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        """Load the model under its own layer prefix, with attention that need not be causal."""
        speculative, config = self.speculative_config, self.vllm_config
        attention = replace(
            config.attention_config,
            use_non_causal=dflash_has_any_non_causal(speculative.draft_model_config.hf_config),
            backend=speculative.attention_backend,
        )
        cache = config.cache_config
        if speculative.kv_cache_dtype is not None:
            cache = replace(cache, cache_dtype=speculative.kv_cache_dtype)
        overlaid = replace(config, attention_config=attention, cache_config=cache)
        return load_drafter(target_model, overlaid, self.name, "dflash_head")

    @property
    def head_rows_per_req(self) -> int:
        return self.num_speculative_steps

    def _num_graph_context_tokens(self, num_reqs: int) -> int:
        """Context rows that a graph stores: those of a whole verification, which is wider than a block for trees."""
        if self.settings.starts_from_last_token:
            return num_reqs
        return min(num_reqs * (self.settings.num_nodes + 1), self.max_num_tokens)

    def row_keys(self, num_rows: int) -> NoiseKeys | None:
        """Keys of the target's noise for the rows of all blocks."""
        slots, positions = self.sample_idx_mapping[:num_rows], self.sample_pos[:num_rows] - 1
        return self.coupling(slots, positions, self.temperature, self.seeds)

    def propose_step(self, step: StepInputs) -> Candidates:
        return Candidates(tokens=self.propose(**native_arguments(step)))

    @torch.inference_mode()
    def write_context(
        self, features: torch.Tensor, next_tokens: torch.Tensor, positions: torch.Tensor, kv_slots: list[torch.Tensor]
    ) -> None:
        groups = self._layer_group_idx
        slots = kv_slots[0] if groups is None else [kv_slots[group] for group in groups]
        self.model.precompute_and_store_context_kv(features, positions, slots)

    @torch.inference_mode()
    def catch_up(self, step: StepInputs) -> None:
        """Write the context K/V of the step's tokens, without a forward."""
        if step.is_dummy or not step.tapped_hidden_states:
            return
        num_tokens, tables = step.batch.num_tokens, self.block_tables
        states = self.fuse(torch.cat(step.tapped_hidden_states, dim=-1))
        self.hidden_states[:num_tokens].copy_(states[:num_tokens])
        samples = (self.sample_indices, self.sample_pos, self.sample_idx_mapping, self.temperature, self.seeds)
        sampled = (step.num_sampled, step.num_rejected, step.last_sampled, step.next_prefill_tokens)
        ranks = (tables.cp_rank, self.dcp_size, tables.cp_interleave)
        lengths = (self.num_query_per_req, self.num_speculative_steps)
        limits = (self.max_num_reqs, self.max_num_tokens, self.max_model_len)
        for index, group in enumerate(self.draft_kv_cache_group_ids):
            context = (tables.slot_mappings[group], self.context_positions, self._context_slot_mappings[index])
            given = (step.batch, *sampled, step.temperature, step.seeds)
            blocks = (tables.input_block_tables[group], tables.block_sizes[group], *ranks)
            numbers = (self.parallel_drafting_token_id, *lengths, *limits, self.sample_from_anchor)
            prepare_dflash_inputs(self.input_buffers, *context, *samples, *given, *blocks, *numbers)
        self._precompute_context_kv(0, num_tokens)


class DFlashTreeProposer(MarginalTreeProposer, DFlashProposer):
    """Trees from the block's marginals, from the same forward."""

    def run_block(
        self, num_reqs: int, num_tokens_padded: int, *told: Any, **options: Any
    ) -> tuple[torch.Tensor, NoiseKeys | None]:
        num_rows = num_reqs * self.num_speculative_steps
        states = self._run_model(num_tokens_padded, *told, **options)
        return states[self.sample_indices[:num_rows]], self.row_keys(num_rows)
