"""Every function and class of vLLM below its public surface that this project replaces, overrides or calls."""

from typing import NamedTuple


class TouchPoint(NamedTuple):
    """One touch point.

    Attributes:
        module: of vLLM.
        name: attribute path inside it.
        parameters: names of its parameters, in order, as this project relies on them; None for a class or value.
        reason: what we do with it.
    """

    module: str
    name: str
    parameters: str | None
    reason: str


_PROPOSE = (
    "self input_batch attn_metadata slot_mappings last_hidden_states aux_hidden_states num_sampled num_rejected "
    "last_sampled next_prefill_tokens temperature seeds dp_sync_state dummy_run skip_attn_for_dummy_run mm_inputs "
    "is_profile num_speculative_tokens"
)
_SAMPLE_DRAFT = (
    "self hidden_states sample_src_positions idx_mapping temperature seeds draft_step draft_logits spec_step_idx"
)
_SET_ATTN = "self model_state kv_cache_config block_tables target_input_buffers target_attn_groups"
_DFLASH_INPUTS = (
    "input_buffers query_slot_mapping context_positions context_slot_mapping sample_indices sample_pos "
    "sample_idx_mapping temperature seeds input_batch num_sampled num_rejected last_sampled next_prefill_tokens "
    "input_temperature input_seeds block_table block_size cp_rank cp_size cp_interleave parallel_drafting_token_id "
    "num_query_per_req num_speculative_steps max_num_reqs max_num_tokens max_model_len sample_from_anchor"
)
_GPU = "vllm.v1.worker.gpu"

TOUCH_POINTS = (
    # Replaced (the only setattrs on vLLM in this project, all in hooks.py).
    TouchPoint(
        "vllm.engine.arg_utils",
        "EngineArgs.create_speculative_config",
        "self target_model_config target_parallel_config",
        "replaced: accepts our speculative_config and hands vLLM a native one",
    ),
    TouchPoint(
        f"{_GPU}.spec_decode",
        "init_speculator",
        "vllm_config device req_states",
        "replaced: builds our proposer host where our settings are present",
    ),
    TouchPoint(
        "vllm.config.vllm",
        "VllmConfig._get_v2_model_runner_unsupported_features",
        "self",
        "replaced: vLLM itself reports what our proposers do not support",
    ),
    TouchPoint(
        "vllm.config.vllm",
        "VllmConfig._get_v1_model_runner_unsupported_features",
        "self",
        "replaced: the V1 runner is refused",
    ),
    TouchPoint(
        "vllm.v1.worker.worker_base",
        "WorkerBase",
        None,
        "gains the methods crossspec_stats and crossspec_step_costs, which collective_rpc calls by name",
    ),
    TouchPoint(
        "vllm.v1.engine.core",
        "EngineCore._initialize_kv_caches",
        "self vllm_config",
        "replaced: the schedule chosen from measured steps is in the config before the scheduler is made",
    ),
    TouchPoint(
        "vllm.model_executor.models.qwen3_dflash",
        "DFlashQwen3Model._normalize_context_k",
        "self all_k",
        "replaced on CPU, whose kernel norms every layer's keys with the first layer's weights",
    ),
    TouchPoint(
        "vllm.v1.engine.input_processor",
        "InputProcessor._validate_params",
        "self params supported_tasks",
        "replaced: refuses a request whose extra argument is none of ours",
    ),
    TouchPoint(
        "vllm.exceptions",
        "VLLMValidationError",
        None,
        "raised for such a request, as a subclass: what vLLM's servers answer with 400",
    ),
    TouchPoint(
        "vllm.v1.worker.cpu.model_runner",
        "CPUModelRunner",
        None,
        "replaced while a CPU worker makes its runner, by a subclass of it",
    ),
    TouchPoint(
        "vllm.config.scheduler",
        "SchedulerConfig.get_scheduler_cls",
        "self",
        "replaced: gives a subclass of the scheduler, which plans no drafts for requests that opted out",
    ),
    # Subclassed.
    TouchPoint(
        "vllm.v1.core.sched.scheduler",
        "Scheduler._update_after_schedule",
        "self scheduler_output",
        "overridden: the asynchronous scheduler sets the placeholders of drafts here",
    ),
    TouchPoint(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.update_draft_token_ids",
        "self draft_token_ids",
        "overridden: the other one takes the drafts here",
    ),
    TouchPoint(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.make_spec_decoding_stats",
        "self spec_decoding_stats num_draft_tokens num_accepted_tokens num_invalid_spec_tokens request_id",
        "overridden: rows of a request that opted out are no drafts",
    ),
    TouchPoint("vllm.v1.worker.gpu_worker", "Worker._make_model_runner", "self", "overridden: our runner"),
    TouchPoint("vllm.v1.worker.cpu_worker", "CPUWorker.init_device", "self", "overridden: our runner"),
    TouchPoint(
        f"{_GPU}.model_runner",
        "GPUModelRunner.load_model",
        "self load_dummy_weights args model kwargs",
        "overridden: our verifier takes the rejection sampler's place",
    ),
    TouchPoint(
        f"{_GPU}.model_runner",
        "GPUModelRunner.initialize_kv_cache",
        "self kv_cache_config is_profiling kv_cache_allocation_context",
        "overridden: notes where the target's K and V lie",
    ),
    TouchPoint(
        f"{_GPU}.model_runner",
        "GPUModelRunner.capture_model",
        "self profile_only",
        "overridden: steps are timed once they are captured",
    ),
    TouchPoint(
        f"{_GPU}.model_runner",
        "GPUModelRunner.add_requests",
        "self scheduler_output",
        "overridden: what each request lets its drafter do",
    ),
    TouchPoint(
        f"{_GPU}.model_runner",
        "GPUModelRunner.execute_model",
        "self scheduler_output intermediate_tensors dummy_run skip_attn_for_dummy_run is_profile context_len "
        "valid_dummy_state_slots randomize_inputs",
        "overridden: draft tokens that adaptive trees do not need are taken out of the step",
    ),
    TouchPoint(
        "vllm.v1.core.sched.output",
        "SchedulerOutput",
        None,
        "copied with fewer scheduled_spec_decode_tokens, num_scheduled_tokens and total_num_scheduled_tokens",
    ),
    TouchPoint(
        f"{_GPU}.cudagraph_utils",
        "CudaGraphManager._init_candidates",
        "self",
        "overridden: CUDA graphs of the widths of adaptive trees; sets _candidates and _capture_descs",
    ),
    TouchPoint(
        f"{_GPU}.cudagraph_utils",
        "CudaGraphManager.dispatch",
        "self num_reqs num_tokens uniform_token_count num_active_loras max_query_len num_ubatches",
        "overridden: notes which graph a step replays",
    ),
    TouchPoint(
        f"{_GPU}.cudagraph_utils",
        "ModelCudaGraphManager.__init__",
        "self vllm_config device cudagraph_mode decode_query_len lora_capture_cases varlen_decode ubatch_runner",
        "subclassed: the target's graphs of several widths",
    ),
    TouchPoint(
        f"{_GPU}.spec_decode.target_dependent_ar.cudagraph_utils",
        "SpeculatorCudaGraphManager",
        None,
        "made with the engine's width, and subclassed: graphs of a drafter's first pass",
    ),
    TouchPoint(
        f"{_GPU}.attn_utils",
        "get_varlen_cudagraph_unsupported_backend",
        "attn_groups vllm_config max_query_len checked_layer_names",
        "called: whether a graph may hold requests of several widths",
    ),
    TouchPoint(
        f"{_GPU}.model_runner",
        "GPUModelRunner.prepare_attn",
        "self input_batch",
        "overridden: positions and masks of trees",
    ),
    TouchPoint(
        f"{_GPU}.model_runner",
        "GPUModelRunner.sample",
        "self hidden_states input_batch grammar_output",
        "overridden: commits the accepted path",
    ),
    TouchPoint(
        f"{_GPU}.model_runner",
        "GPUModelRunner.sample_tokens",
        "self grammar_output",
        "overridden: keeps hold of the tapped states",
    ),
    TouchPoint(
        f"{_GPU}.spec_decode.utils",
        "DraftTokensHandler.set_draft_tokens",
        "self input_batch draft_tokens",
        "overridden: a grammar is not shown dead draft tokens",
    ),
    TouchPoint(
        f"{_GPU}.spec_decode.dflash.speculator",
        "DFlashSpeculator._generate_draft",
        "self num_reqs num_tokens_padded attn_metadata slot_mappings num_tokens_across_dp cudagraph_runtime_mode",
        "overridden for trees",
    ),
    TouchPoint(
        f"{_GPU}.spec_decode.dflash.speculator",
        "DFlashSpeculator._num_graph_context_tokens",
        "self num_reqs",
        "overridden: the context of a whole verification goes into the graph",
    ),
    TouchPoint(f"{_GPU}.spec_decode.speculator", "DraftModelSpeculator.propose", _PROPOSE, "overridden by the host"),
    TouchPoint(f"{_GPU}.spec_decode.speculator", "DraftModelSpeculator.set_attn", _SET_ATTN, "overridden by the host"),
    TouchPoint(
        f"{_GPU}.spec_decode.speculator",
        "DraftModelSpeculator.load_model",
        "self target_model",
        "overridden by the host",
    ),
    TouchPoint(
        f"{_GPU}.spec_decode.speculator",
        "DraftModelSpeculator.observe_verification",
        "self idx_mapping num_sampled num_rejected",
        "overridden by the host: counts acceptance",
    ),
    TouchPoint(
        f"{_GPU}.spec_decode.speculator",
        "DraftModelSpeculator.sample_draft",
        _SAMPLE_DRAFT,
        "overridden by EAGLE-3",
    ),
    TouchPoint(
        "vllm.model_executor.layers.logits_processor",
        "LogitsProcessor.__init__",
        "self vocab_size org_vocab_size scale logits_as_input soft_cap",
        "read: what a drafter's logits are beside products, before a FlashHead takes its place",
    ),
    TouchPoint(
        "vllm.model_executor.layers.logits_processor",
        "LogitsProcessor.forward",
        "self lm_head hidden_states embedding_bias skip_gather",
        "called: a drafter's logits in its own vocabulary",
    ),
    TouchPoint(
        f"{_GPU}.spec_decode.eagle.speculator",
        "EagleSpeculator.propose",
        _PROPOSE,
        "called by the EAGLE-3 proposer",
    ),
    TouchPoint(
        f"{_GPU}.spec_decode.eagle.speculator",
        "EagleSpeculator.load_draft_model",
        "self target_model target_attn_layer_names",
        "overridden: each drafter's layers get a prefix of their own",
    ),
    TouchPoint(
        f"{_GPU}.spec_decode.dflash.speculator",
        "DFlashSpeculator.propose",
        _PROPOSE,
        "called by the DFlash proposer",
    ),
    TouchPoint(
        f"{_GPU}.spec_decode.dflash.speculator",
        "DFlashSpeculator.load_draft_model",
        "self target_model target_attn_layer_names",
        "overridden: each drafter's layers get a prefix of their own",
    ),
    TouchPoint(
        f"{_GPU}.spec_decode.dflash.speculator",
        "DFlashSpeculator._precompute_context_kv",
        "self start end dummy_run",
        "called to catch a drafter up without drafting",
    ),
    # Called.
    TouchPoint(
        "vllm.v1.attention.backends.registry",
        "register_backend",
        "backend class_path is_mamba",
        "called: our attention takes the place of the platform's where trees are verified",
    ),
    TouchPoint(
        "vllm.v1.attention.backends.registry", "AttentionBackendEnum.clear_override", "self", "called: gives it back"
    ),
    TouchPoint(
        "vllm.v1.attention.selector",
        "_cached_get_attn_backend",
        None,
        "its cache is cleared when the attention changes",
    ),
    TouchPoint(
        "vllm.v1.attention.backend",
        "AttentionMetadataBuilder.build",
        "self common_prefix_len common_attn_metadata fast_build",
        "overridden: the step's trees join the metadata",
    ),
    TouchPoint(
        "vllm.v1.attention.backend",
        "AttentionMetadataBuilder.build_for_cudagraph_capture",
        "self common_attn_metadata",
        "overridden: the step's trees join the metadata",
    ),
    TouchPoint(
        "vllm.v1.attention.backend",
        "AttentionImpl.forward",
        "self layer query key value kv_cache attn_metadata output output_scale output_block_scale",
        "overridden: attention over trees",
    ),
    TouchPoint(
        "vllm.v1.attention.backends.cpu_attn",
        "CPUAttentionBackendImpl.do_kv_cache_update",
        "self layer key value kv_cache slot_mapping",
        "ours on a CPU has the same interface",
    ),
    TouchPoint(
        f"{_GPU}.sample.sampler",
        "Sampler.sample",
        "self logits expanded_idx_mapping idx_mapping idx_mapping_np pos input_ids expanded_local_pos "
        "seq_lens_upper_bound_np return_logprobs",
        "called at every node",
    ),
    TouchPoint(
        f"{_GPU}.sample.penalties",
        "PenaltiesState.apply",
        "self logits ctx",
        "called for steps without drafts; its tensors are read by ours",
    ),
    TouchPoint(
        f"{_GPU}.sample.logprob",
        "compute_topk_scores",
        "logits num_logprobs sampled_token_ids cu_num_logits logprob_token_ids_state expanded_idx_mapping "
        "max_per_req_token_ids logits_mode",
        "called for the accepted path",
    ),
    TouchPoint(
        f"{_GPU}.spec_decode.rejection_sampler",
        "_iter_request_chunks",
        "cu_num_logits max_chunk_logits",
        "called: how many logits are sampled at once",
    ),
    TouchPoint(
        f"{_GPU}.sample.gumbel",
        "murmur3_uniform32",
        None,
        "called by coupled drafts: the noise of the target's sampler",
    ),
    TouchPoint(
        f"{_GPU}.sample.gumbel",
        "_log1p_neg_stable",
        None,
        "called by coupled drafts: the noise of the target's sampler",
    ),
    TouchPoint(
        f"{_GPU}.spec_decode.dflash.cudagraph",
        "DFlashCudaGraphManager.capture",
        "self forward_fn input_buffers block_tables attn_groups kv_cache_config max_model_len causal "
        "prepare_forward progress_bar_desc",
        "called: captures the growth of draft trees, and first passes over a drafter's own rows",
    ),
    TouchPoint("vllm.compilation.cudagraph_pool", "capture_pool", "pool vllm_config", "called: captures catch-ups"),
    TouchPoint("vllm.distributed.parallel_state", "graph_capture", "device", "called: captures catch-ups"),
    TouchPoint(
        f"{_GPU}.spec_decode.target_dependent_ar.speculator",
        "prepare_prefill_inputs",
        "last_token_indices current_draft_step input_buffers input_batch num_sampled num_rejected last_sampled "
        "next_prefill_tokens max_num_reqs",
        "called: EAGLE-3's first pass over one row a request",
    ),
    TouchPoint(
        f"{_GPU}.spec_decode.target_dependent_ar.speculator",
        "prepare_decode_inputs",
        "draft_tokens target_seq_lens num_rejected input_buffers sample_src_positions max_model_len max_num_reqs "
        "advance_draft_positions",
        "called: a draft model's passes over one row a request",
    ),
    *(
        TouchPoint(
            f"{_GPU}.spec_decode.target_dependent_ar.speculator",
            f"TargetDependentARSpeculator.{name}",
            "self num_reqs skip_attn batch_desc num_tokens_across_dp seq_lens_cpu_upper_bound num_speculative_steps",
            "called: a draft model's passes over one row a request",
        )
        for name in ("_multi_step_decode", "_fused_multi_step_decode")
    ),
    TouchPoint(
        f"{_GPU}.spec_decode.target_dependent_ar.speculator",
        "TargetDependentARSpeculator._prefill",
        "self num_reqs num_tokens attn_metadata slot_mappings num_tokens_across_dp cudagraph_runtime_mode mm_inputs",
        "overridden: a draft model's first pass over two rows a request",
    ),
    TouchPoint(
        f"{_GPU}.spec_decode.target_dependent_ar.speculator",
        "TargetDependentARSpeculator._run_model",
        "self num_tokens attn_metadata slot_mappings num_tokens_across_dp cudagraph_runtime_mode mm_inputs",
        "overridden: a draft model reads no states of the target",
    ),
    TouchPoint(
        f"{_GPU}.spec_decode.speculator",
        "DraftModelSpeculator._update_draft_decode_metadata",
        "self attn_metadata num_reqs",
        "called in the CUDA graph of a draft model's first pass",
    ),
    TouchPoint(
        f"{_GPU}.spec_decode.speculator",
        "DraftModelSpeculator.load_draft_model",
        "self target_model target_attn_layer_names",
        "overridden: a draft model of its own",
    ),
    TouchPoint(
        f"{_GPU}.attn_utils",
        "build_attn_metadata",
        "attn_groups num_reqs num_tokens query_start_loc_gpu query_start_loc_cpu max_query_len seq_lens max_seq_len "
        "block_tables slot_mappings kv_cache_config seq_lens_cpu_upper_bound dcp_local_seq_lens "
        "dcp_local_seq_lens_cpu_upper_bound positions is_prefilling mm_req_doc_ranges model_specific_attn_metadata "
        "for_cudagraph_capture causal rswa_prefix_lens ubatch_idx fast_prefill req_idx",
        "called: a draft model takes in prompts over the target's rows",
    ),
    TouchPoint(
        f"{_GPU}.block_table",
        "BlockTables.compute_slot_mappings",
        "self idx_mapping query_start_loc positions num_tokens_padded out",
        "called: where a first pass over a drafter's own rows writes",
    ),
    TouchPoint(
        f"{_GPU}.block_table",
        "BlockTables.gather_block_tables",
        "self idx_mapping num_reqs_padded out out_ptrs",
        "called: the blocks of the requests that a drafter drafts for",
    ),
    TouchPoint(
        f"{_GPU}.block_table",
        "BlockTables.get_dummy_slot_mappings",
        "self num_tokens",
        "called: dummy rounds write nothing",
    ),
    TouchPoint(
        f"{_GPU}.spec_decode.dflash.speculator",
        "prepare_dflash_inputs",
        _DFLASH_INPUTS,
        "called to catch a drafter up without drafting",
    ),
    TouchPoint(
        f"{_GPU}.spec_decode.eagle.utils",
        "maybe_share_target_embed",
        "draft_model draft_inner target_inner",
        "called when a drafter is loaded",
    ),
    TouchPoint(
        f"{_GPU}.spec_decode.eagle.utils",
        "_should_share",
        "eagle flag draft target",
        "called when a drafter is loaded",
    ),
    TouchPoint(
        f"{_GPU}.spec_decode.eagle.utils",
        "get_target_lm_head",
        "target_model target_language_model",
        "called when a drafter is loaded",
    ),
    TouchPoint(
        f"{_GPU}.spec_decode.utils",
        "get_pp_safe_draft_load_config",
        "load_config",
        "called when a drafter is loaded",
    ),
    TouchPoint(
        "vllm.model_executor.model_loader",
        "get_model",
        "vllm_config model_config prefix load_config",
        "called when a drafter is loaded",
    ),
    TouchPoint(
        "vllm.config.speculative",
        "SpeculativeConfig.apply_draft_overrides",
        "self vllm_config",
        "called when an autoregressive drafter is loaded",
    ),
    TouchPoint(
        f"{_GPU}.model_runner",
        "GPUModelRunner._dummy_run",
        "self num_tokens args skip_attn uniform_decode context_len skip_eplb is_profile valid_dummy_state_slots "
        "randomize_inputs kwargs",
        "called: the steps that are timed; its step_timing and decode_query_len are exchanged meanwhile",
    ),
    TouchPoint(
        f"{_GPU}.model_runner",
        "GPUModelRunner.prepare_inputs",
        "self scheduler_output batch_req_state batch_desc num_active_loras",
        "overridden: contemplate rows get no logits",
    ),
    TouchPoint(
        f"{_GPU}.model_states.default",
        "DefaultModelState.prepare_inputs_embeds",
        "self scheduled_encoder_inputs input_batch req_states",
        "stood in for on the instance: embeddings of contemplate rows (``uses_inputs_embeds`` asks for it)",
    ),
    TouchPoint(
        f"{_GPU}.model_states.default",
        "DefaultModelState.prepare_dummy_inputs",
        "self num_reqs num_tokens",
        "stood in for on the instance: CUDA graphs read the same embeddings",
    ),
    TouchPoint(
        f"{_GPU}.model_states.default",
        "DefaultModelState.dummy_inputs_embeds",
        "self num_tokens",
        "stood in for on the instance: so do dummy runs",
    ),
    TouchPoint(
        f"{_GPU}.structured_outputs",
        "_build_grammar_mapping",
        "req_ids grammar_req_ids cu_num_logits_np num_draft_tokens_per_req num_bonus_tokens mask_stride",
        "relied on: a grammar has one mask for each of a request's drafts and the root",
    ),
    TouchPoint(
        "vllm.transformers_utils.configs.speculators.algos",
        "register_speculator",
        "name",
        "called: vLLM reads ConFu's config.json as it reads the speculators library's",
    ),
    TouchPoint(
        "vllm.model_executor.models.llama_eagle3",
        "Eagle3LlamaForCausalLM.forward",
        "self input_ids positions hidden_states inputs_embeds",
        "overridden: ConFu's drafter reads embeddings",
    ),
    TouchPoint(
        f"{_GPU}.input_batch",
        "InputBatch.make_dummy",
        "num_reqs num_tokens input_buffers max_query_len is_padding",
        "called: the batch whose verification is timed",
    ),
    TouchPoint(
        f"{_GPU}.async_utils",
        "StepTimingCollector",
        None,
        "our clock has the same methods",
    ),
    TouchPoint(
        "vllm.config.speculative",
        "SpeculativeConfig.uses_dynamic_speculative_decoding",
        "self",
        "called: whether vLLM kept the schedule",
    ),
    TouchPoint(
        "vllm.v1.worker.gpu.states",
        "RequestState",
        None,
        "its prefill_len and num_computed_tokens tell real drafts",
    ),
    TouchPoint(
        f"{_GPU}.spec_decode.dflash.speculator",
        "DFlashSpeculator._prepare_graph_forward",
        "self num_reqs attn_metadata",
        "called while DART's graphs are captured: it caches the context through our _precompute_context_kv",
    ),
    TouchPoint(
        f"{_GPU}.spec_decode.speculator",
        "DraftModelSpeculator._build_uniform_attn_metadata",
        "self batch_desc num_reqs num_query_per_req seq_lens_cpu_upper_bound step causal dcp_local_seq_lens",
        "called by the proposers whose passes are their own",
    ),
    TouchPoint(
        "vllm.model_executor.models.llama_eagle3",
        "LlamaDecoderLayer.__init__",
        "self vllm_config prefix config layer_idx",
        "DART's layer descends from it",
    ),
    TouchPoint(
        "vllm.model_executor.models.llama_eagle3",
        "LlamaDecoderLayer._norm_after_residual",
        "self hidden_states",
        "called when accepted tokens are cached",
    ),
    TouchPoint(
        "vllm.model_executor.models.registry",
        "_ModelRegistry.register_model",
        "self model_arch model_cls",
        "called: DART's model",
    ),
)
