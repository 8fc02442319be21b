"""DFlash as a proposer, on vLLM's block-diffusion speculator."""

import torch
from torch import nn
from vllm.config import VllmConfig, replace
from vllm.model_executor.models.qwen3_dflash import dflash_has_any_non_causal
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator, prepare_dflash_inputs

from vllm_crossspec.engine.loading import load_drafter
from vllm_crossspec.engine.proposers.base import Proposer, native_arguments
from vllm_crossspec.types import Candidates, StepInputs


class DFlashProposer(DFlashSpeculator, Proposer):
    """K tokens in one non-causal forward over [last token, K masks]; the context is K/V of target states."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, name: str):
        super().__init__(vllm_config, device)
        self.name = name

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        """The drafter's model, under a layer prefix of its own, with an attention that need not be causal."""
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

    def propose_step(self, step: StepInputs) -> Candidates:
        """Write the context K/V of the step's tokens and draft a block for every request."""
        return Candidates(tokens=self.propose(**native_arguments(step)))

    @torch.inference_mode()
    def catch_up(self, step: StepInputs) -> None:
        """Write the context K/V of the step's tokens: two projections and a cache write a layer, no forward."""
        if step.options.get("dummy_run") or not step.tapped_hidden_states:
            return
        batch = step.batch
        num_tokens = batch.num_tokens
        states = self.model.combine_hidden_states(torch.cat(step.tapped_hidden_states, dim=-1))
        self.hidden_states[:num_tokens].copy_(states[:num_tokens])
        for index, group in enumerate(self.draft_kv_cache_group_ids):
            prepare_dflash_inputs(
                self.input_buffers,
                self.block_tables.slot_mappings[group],
                self.context_positions,
                self._context_slot_mappings[index],
                self.sample_indices,
                self.sample_pos,
                self.sample_idx_mapping,
                self.temperature,
                self.seeds,
                batch,
                step.num_sampled,
                step.num_rejected,
                step.last_sampled,
                step.next_prefill_tokens,
                step.temperature,
                step.seeds,
                self.block_tables.input_block_tables[group],
                self.block_tables.block_sizes[group],
                self.block_tables.cp_rank,
                self.dcp_size,
                self.block_tables.cp_interleave,
                self.parallel_drafting_token_id,
                self.num_query_per_req,
                self.num_speculative_steps,
                self.max_num_reqs,
                self.max_num_tokens,
                self.max_model_len,
                self.sample_from_anchor,
            )
        self._precompute_context_kv(0, num_tokens)
