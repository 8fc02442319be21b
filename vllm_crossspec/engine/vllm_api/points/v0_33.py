"""What this project relies on of vLLM 0.33 below its public surface: what is not as in 0.32."""

from vllm_crossspec.engine.vllm_api.points import v0_32

INVENTORY = v0_32.INVENTORY.changed(
    "0.33.0",
    table="""
vllm.config.vllm
  VllmConfig.num_hash_lookahead_tokens - replaced: the token behind a block is in its hash where a drafter's cache
      depends on it
vllm.v1.core.sched.output
  SchedulerOutput.{skip_drafts} - read: such a round says nothing of a width's cost
vllm.v1.sample.ops.topk_topp_sampler
  apply_top_k_top_p_triton(logits k p mask_value has_topp_only_rows) - replaced on a CPU: the kernel cannot be
      interpreted
vllm.v1.worker.gpu.dp_utils
  dispatch_cg_and_sync_dp(cudagraph_manager num_reqs num_tokens uniform_token_count dp_size dp_rank max_query_len
      need_eager num_active_loras parallel_config allow_ubatching uniform_decode allow_skip_drafts dp_sync_state) -
      called: which graph a drafter's own pass replays
vllm.v1.worker.gpu.spec_decode.dflash.speculator
  DFlashSpeculator.{_aux_staging} - set: the tapped states are fused before the graph
vllm.v1.worker.gpu.spec_decode.speculator
  DraftModelSpeculator.sample_draft(self hidden_states sample_src_positions idx_mapping temperature seeds draft_step
      draft_logits spec_step_idx num_steps) - overridden by EAGLE-3
vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator
  TargetDependentARSpeculator._prefill(self num_reqs num_tokens attn_metadata slot_mappings num_tokens_across_dp
      cudagraph_runtime_mode mm_inputs skip_sample) - overridden: a draft model's first pass over two rows a request
""",
    gone=["vllm.v1.worker.gpu.structured_outputs._build_grammar_mapping"],
)
