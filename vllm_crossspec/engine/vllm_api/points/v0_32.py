"""What this project relies on of vLLM 0.32 below its public surface, module by module.

``tests/test_vllm_seam.py`` finds every use in the package, and fails on one that has no row here and on a row that has
no use. How a row is written: :func:`~vllm_crossspec.engine.vllm_api.points.base.parse`.
"""

from vllm_crossspec.engine.vllm_api.points.base import Inventory, StandIn, parse

TOUCH_POINTS = parse("""
vllm._custom_ops
  cpu_attention_with_kv_cache(query key_cache value_cache output query_start_loc seq_lens scale causal alibi_slopes
      sliding_window block_table softcap scheduler_metadata s_aux dynamic_causal k_scale v_scale kv_cache_dtype) -
      called on a CPU: rows that see all before them
  cpu_attn_get_scheduler_metadata(num_reqs num_heads num_kv_heads head_dim seq_lens dtype query_start_loc causal
      sliding_window_size isa enable_kv_split dynamic_causal kv_cache_dtype) - called on a CPU: what that kernel needs
      to know
  cpu_attn_reshape_and_cache(key value key_cache value_cache slot_mapping isa k_scale v_scale kv_cache_dtype) - called
      on a CPU: keys and values
  create_onednn_mm(weight primitive_cache_size) - called on a CPU: a drafter's weights in bfloat16
  onednn_mm(dnnl_handler x bias) - called on a CPU: a drafter's products in bfloat16
  rms_norm(out input weight epsilon) - called on a CPU: norms one layer's keys
vllm.compilation.backends
  set_model_tag(tag is_encoder) - called when a drafter is loaded: its entry in the compile cache
vllm.compilation.cudagraph_pool
  capture_pool(pool vllm_config) - called: captures catch-ups
vllm.compilation.decorators
  support_torch_compile(cls dynamic_arg_dims mark_unbacked_dims enable_if is_encoder) - decorates DART's model
vllm.config.compilation
  CUDAGraphMode.decode_mode(self) - called: whether decode batches replay whole graphs
  CompilationConfig.{custom_ops mode static_all_moe_layers static_forward_context} - set on a copy: a drafter's new
      weights are loaded beside the old ones, whose layers' names they have
vllm.config.model
  PROCESSED_LOGPROBS_MODES - which log-probabilities are of processed logits
vllm.config.parallel
  ParallelConfig.{worker_cls} - set: the worker whose runner is ours
vllm.config.scheduler
  SchedulerConfig.{max_num_active_seqs} - set: as many requests as a block drafter's pass has rows for
  SchedulerConfig.get_scheduler_cls(self) - replaced: gives a subclass of the scheduler, which plans no drafts for
      requests that opted out
vllm.config.speculative
  SpeculativeConfig.apply_draft_overrides(self vllm_config) - called when an autoregressive drafter is loaded
  SpeculativeConfig.uses_dynamic_speculative_decoding(self) - called: whether vLLM kept the schedule
  SpeculativeConfig.{num_speculative_tokens num_speculative_tokens_per_batch_size} - set: the measured schedule, and a
      drafter's own length
  SpeculativeMethod - the names of methods that vLLM knows
  SpeculativeConfig.{draft_model_config} - set on a copy: a drafter's new weights come from another folder
  SpeculativeConfig.{target_model_config} - set back: a drafter's is made as of a target that may bring no code
vllm.config.vllm
  VllmConfig._get_v1_model_runner_unsupported_features(self) - replaced: the V1 runner is refused
  VllmConfig._get_v2_model_runner_unsupported_features(self) - replaced: vLLM itself reports what our proposers do not
      support
  VllmConfig._set_max_num_scheduled_tokens(self) - replaced: as many requests as a block drafter's pass has rows for
  VllmConfig._maybe_disable_dynamic_sd_for_data_parallel(self) - replaced: keeps draft lengths by load for ranks of a
      dense target, which are engines of their own
vllm.distributed
  get_tensor_model_parallel_rank() - called: which heads of the soft prompts are this rank's
  get_tensor_model_parallel_world_size() - called: which heads of the soft prompts are this rank's
  get_pp_group() - called: a rank alone, for drafters that are whole on every rank
  tensor_model_parallel_all_gather(input_ dim) - called: what a FlashHead's ranks found
vllm.distributed.parallel_state
  _TP - set while such a drafter is made
  get_tp_group() - called: rank 0's measured costs decide for all
  graph_capture(device) - called: captures catch-ups
vllm.engine.arg_utils
  EngineArgs.create_speculative_config(self target_model_config target_parallel_config) - replaced: accepts our
      speculative_config and hands vLLM a native one
  EngineArgs.{additional_config} - set: our settings ride in it
  EngineArgs.{async_scheduling} - set: steps wait for each other over latent attention
  EngineArgs.{load_format spec_method spec_model spec_tokens speculative_config} - read: our speculative_config
vllm.exceptions
  VLLMValidationError - raised for such a request, as a subclass: what vLLM's servers answer with 400
vllm.forward_context
  BatchDescriptor(num_tokens num_reqs uniform has_lora num_active_loras) - made for every pass of a drafter's own
  set_forward_context(attn_metadata vllm_config num_tokens num_tokens_across_dp cudagraph_runtime_mode batch_descriptor
      ubatch_slices slot_mapping skip_compiled is_padding) - called around every pass of a drafter's own
vllm.model_executor.layers.attention.attention
  Attention.{dtype head_size kv_cache_dtype kv_cache_torch_dtype num_kv_heads} - read: the heads, sizes and types of a
      layer
vllm.model_executor.layers.attention_layer_base
  AttentionLayerBase.get_attn_backend(self) - called: names the backend that cannot take trees
  AttentionLayerBase.{impl is_draft_layer kv_cache} - read: which layers are a drafter's, and where their cache is
vllm.model_executor.layers.layernorm
  RMSNorm(hidden_size eps var_hidden_size has_weight dtype) - DART's model is built from it
vllm.model_executor.layers.linear
  ReplicatedLinear(input_size output_size bias skip_bias_add params_dtype quant_config prefix return_bias disable_tp) -
      DART's model is built from it
  UnquantizedLinearMethod - tells weights that are plain matrices
vllm.model_executor.layers.logits_processor
  LogitsProcessor(vocab_size org_vocab_size scale logits_as_input soft_cap) - made: DART's own output layer
  LogitsProcessor.forward(self lm_head hidden_states embedding_bias skip_gather) - called: a drafter's logits in its own
      vocabulary
  LogitsProcessor.{org_vocab_size scale soft_cap} - read: what a drafter's logits are beside products, before a
      FlashHead takes its place
vllm.model_executor.layers.mamba.mamba_mixer2
  causal_conv1d_update - replaced on a CPU, whose kernel takes one token a request
  selective_state_update - replaced on a CPU, whose kernel keeps no state behind drafts
vllm.model_executor.layers.utils
  dispatch_cpu_unquantized_gemm(layer remove_weight) - replaced while our runner loads on a CPU, or a drafter with a
      dtype of its own; sets cpu_linear, which the layer calls
vllm.model_executor.layers.vocab_parallel_embedding
  VocabParallelEmbedding - such drafters keep their embeddings and output layers
  ParallelLMHead(num_embeddings embedding_dim bias params_dtype org_num_embeddings padding_size quant_config prefix
      disable_tp) - DART's model is built from it
vllm.model_executor.model_loader
  get_model(vllm_config model_config prefix load_config) - called when a drafter is loaded
vllm.model_executor.model_loader.base_loader
  BaseModelLoader.__init__(self load_config) - called: loads a drafter from tensors at hand
  BaseModelLoader.download_model(self model_config) - overridden: there is nothing to download
  BaseModelLoader.load_weights(self model model_config) - overridden: tensors at hand are loaded
vllm.model_executor.model_loader.utils
  get_draft_load_config(vllm_config) - called when a drafter is loaded
vllm.model_executor.models
  ModelRegistry - whose class says how large the states of recurrent layers are, and whether it hands states out
vllm.model_executor.models.interfaces
  supports_eagle3(model) - asked of a target's class before its weights are loaded
vllm.model_executor.models.interfaces_base
  VllmModelForTextGeneration.compute_logits(self hidden_states) - stood in for on the instance: keeps the step's logits
      for a router
vllm.model_executor.models.llama_eagle3
  Eagle3LlamaForCausalLM.__init__(self vllm_config prefix) - ConFu's drafter descends from it
  Eagle3LlamaForCausalLM.embed_input_ids(self input_ids multimodal_embeddings is_multimodal) - called: ConFu's drafter
      reads embeddings
  Eagle3LlamaForCausalLM.forward(self input_ids positions hidden_states inputs_embeds) - overridden: ConFu's drafter
      reads embeddings
  Eagle3LlamaForCausalLM.load_weights(self weights) - overridden: ConFu's own tensors are taken out
  Eagle3LlamaForCausalLM.{config model} - read by ConFu's drafter
  LlamaDecoderLayer.__init__(self vllm_config prefix config layer_idx) - DART's layer descends from it
  LlamaDecoderLayer.forward(self positions embeds hidden_states residual) - overridden: DART's layer reads entries and
      masks
  LlamaDecoderLayer.{hidden_norm} - read by DART's layer
  LlamaDecoderLayer.{_residual_norm} - called when accepted tokens are cached
  _Eagle3LlamaDecoderLayerBase.{input_layernorm mlp post_attention_layernorm self_attn} - read by DART's layer
vllm.model_executor.models.qwen3_dflash
  DFlashQwen3Model._normalize_context_k(self all_k) - replaced on CPU, whose kernel norms every layer's keys with the
      first layer's weights
  DFlashQwen3Model.{_k_norm_weights _rms_norm_eps} - read on a CPU: the norms of the context's keys
  dflash_has_any_non_causal(config) - called when a DFlash drafter is loaded
vllm.model_executor.models.utils
  AutoWeightsLoader(module ignore_unexpected_prefixes ignore_unexpected_suffixes) - loads DART's model
  WeightsMapper(orig_to_new_renaming orig_to_new_regex orig_to_new_substr orig_to_new_stacked orig_to_new_prefix
      orig_to_new_suffix) - DART's names of tensors into vLLM's
  extract_layer_index(layer_name num_attn_module) - called: which layer's soft prompts a layer gets
  get_draft_quant_config(vllm_config) - called: DART's model is built with it
  maybe_prefix(prefix name) - called: DART's model is built with it
vllm.transformers_utils.configs.speculators.algos
  SUPPORTED_SPECULATORS_TYPES - ConFu's config.json is read as EAGLE-3's, and what ConFu adds
  register_speculator(name) - called: vLLM reads ConFu's config.json as it reads the speculators library's
vllm.usage.usage_lib
  UsageContext.{LLM_CLASS} - read: engine arguments are checked as LLM's are
vllm.utils.torch_utils
  async_tensor_h2d(data device dtype out) - called: copies to the device that nothing waits for
  canonicalize_singleton_dim_strides(t) - called before FlashAttention, as vLLM's own forward does
  current_stream() - called: the stream of a capture
vllm.v1.attention.backend
  AttentionBackend.get_builder_cls() - overridden: tree attention on a CPU
  AttentionBackend.get_impl_cls() - overridden: tree attention on a CPU
  AttentionBackend.get_name() - overridden: the name that it takes the place of
  AttentionBackend.get_supported_head_sizes() - overridden: those of vLLM's kernel
  AttentionBackend.get_supported_kernel_block_sizes(kv_cache_spec) - overridden: any block size serves
  AttentionBackend.supported_kv_cache_layouts() - overridden: FlashAttention's layout on a CPU, too
  AttentionBackend.supports_non_causal() - overridden: block drafters attend without a causal mask
  AttentionBackend.supports_sliding_window() - overridden: as vLLM's for CPUs
  AttentionBackend.{forward_includes_kv_cache_update supported_dtypes supported_kv_cache_dtypes} - set by tree attention
      on a CPU
  AttentionCGSupport.{UNIFORM_BATCH} - read: graphs hold batches of verification rows only
  AttentionImpl.forward(self layer query key value kv_cache attn_metadata output output_scale output_block_scale) -
      overridden: attention over trees
  AttentionImpl.{kv_cache_dtype} - set by tree attention on a CPU
  AttentionImplBase.{head_size num_heads scale} - set by tree attention on a CPU
  AttentionLayer.{_k_scale _k_scale_float _q_scale _v_scale _v_scale_float} - read: of a layer with a quantised cache
  AttentionMetadata - subclassed on a CPU
  AttentionMetadataBuilder.__init__(self kv_cache_spec layer_names vllm_config device) - called by the builder for CPUs
  AttentionMetadataBuilder.build(self common_prefix_len common_attn_metadata fast_build) - overridden: the step's trees
      join the metadata
  AttentionMetadataBuilder.build_for_cudagraph_capture(self common_attn_metadata) - overridden: the step's trees join
      the metadata
  AttentionMetadataBuilder.get_varlen_cudagraph_max_query_len(vllm_config kv_cache_spec) - overridden: one graph for
      several widths
  AttentionType.{DECODER} - read: trees are refused where attention is no decoder's
  CommonAttentionMetadata.{block_table_tensor causal max_query_len max_seq_len num_actual_tokens num_reqs
      query_start_loc seq_lens slot_mapping} - read by the metadata builders
  MultipleOf(base) - says that any block size serves
  max_decode_query_len(vllm_config) - called: how wide a graph for several widths may be
vllm.v1.attention.backends.cpu_attn
  CPUAttentionBackend.get_supported_head_sizes() - called: the heads that its kernel knows
  CPUAttentionBackendImpl.do_kv_cache_update(self layer key value kv_cache slot_mapping) - ours on a CPU has the same
      interface
  CPUAttentionBackendImpl.forward(self layer query key value kv_cache attn_metadata output output_scale
      output_block_scale) - ours on a CPU has the same interface
  CPUAttentionBackendImpl.{alibi_slopes attn_type kv_sharing_target_layer_name logits_soft_cap num_kv_heads sinks
      sliding_window} - set by tree attention on a CPU
vllm.v1.attention.backends.flash_attn
  FlashAttentionBackend.get_builder_cls() - overridden: tree attention on a GPU
  FlashAttentionBackend.get_impl_cls() - overridden: tree attention on a GPU
  FlashAttentionBackend.supports_kv_cache_dtype(kv_cache_dtype) - called: trees over a cache that it does not read are
      refused
  FlashAttentionBackend.{supported_dtypes} - overridden: float32, too, which FlashAttention itself does not take
  FlashAttentionImpl.forward(self layer query key value kv_cache attn_metadata output output_scale output_block_scale) -
      overridden: attention over trees; called for everything else
  FlashAttentionImpl.{num_kv_heads vllm_flash_attn_version} - read by tree attention
  FlashAttentionMetadata(num_actual_tokens max_query_len query_start_loc max_seq_len seq_lens block_table slot_mapping
      max_dcp_context_kv_len dcp_context_kv_lens num_decode_reqs num_prefill_reqs num_decode_tokens num_prefill_tokens
      scheduler_metadata max_num_splits causal mm_prefix_query_range_tensor rswa_prefix_lens rswa_window
      rswa_window_tensor) - subclassed: the step's trees join it; made for the rest of a batch
  FlashAttentionMetadata.{block_table causal max_query_len max_seq_len num_actual_tokens query_start_loc seq_lens} -
      read: attention in float32
  FlashAttentionMetadataBuilder.__init__(self kv_cache_spec layer_names vllm_config device) - called by ours
  FlashAttentionMetadataBuilder._get_scheduler_metadata(self aot_schedule batch_size cu_query_lens max_query_len seqlens
      max_seq_len causal max_num_splits) - called: FlashAttention 3's plans of the split batch
  FlashAttentionMetadataBuilder.build(self common_prefix_len common_attn_metadata fast_build) - overridden: the step's
      trees join the metadata
  FlashAttentionMetadataBuilder.get_cudagraph_support(vllm_config kv_cache_spec) - overridden: batches of verification
      rows only
  FlashAttentionMetadataBuilder.{aot_schedule aot_sliding_window scheduler_metadata use_full_cuda_graph} - read: whether
      and how FlashAttention 3 plans
  flash_attn_varlen_func(q k v max_seqlen_q cu_seqlens_q max_seqlen_k cu_seqlens_k seqused_k q_v dropout_p softmax_scale
      causal window_size softcap alibi_slopes deterministic return_attn_probs block_table return_softmax_lse out
      scheduler_metadata q_descale k_descale v_descale num_splits output_scale fa_version s_aux cp_world_size cp_rank
      cp_tot_seqused_k mask_mod block_sparse_tensors aux_tensors aux_tensor_leading_dims dynamic_causal) - called: the
      prefix of the tails
vllm.v1.attention.backends.registry
  AttentionBackendEnum.clear_override(self) - called: gives it back
  AttentionBackendEnum.get_path(self include_classname) - called: whether our attention is in place
  AttentionBackendEnum.{CPU_ATTN FLASH_ATTN} - read: the names that our attention takes
  register_backend(backend class_path is_mamba) - called: our attention takes the place of the platform's where trees
      are verified
vllm.v1.attention.backends.utils
  PAD_SLOT_ID - the slot of rows that write nothing
vllm.v1.attention.selector
  _cached_get_attn_backend(backend attn_selector_config num_heads _run_kv_cache_dtype) - its cache is cleared when the
      attention changes
vllm.v1.core.block_pool
  BlockPool.evict_blocks(self block_ids) - called: the prefix cache is forgotten when a drafter gets new weights
  BlockPool.{num_gpu_blocks} - read: all blocks
vllm.v1.core.kv_cache_coordinator
  KVCacheCoordinator.{single_type_managers} - read: what running requests have in the prefix cache
vllm.v1.core.kv_cache_manager
  KVCacheManager.{coordinator enable_caching} - read: whether there is a prefix cache, and what is in it
vllm.v1.core.sched.async_scheduler
  AsyncScheduler._update_after_schedule(self scheduler_output) - overridden: the placeholders of drafts are set here
vllm.v1.core.sched.output
  GrammarOutput.{grammar_bitmask structured_output_request_ids} - read: masks of contemplate rows are left out
  SchedulerOutput.{finished_req_ids num_scheduled_tokens num_spec_tokens_to_schedule preempted_req_ids
      scheduled_new_reqs scheduled_spec_decode_tokens total_num_scheduled_tokens} - read: the requests of a step
      and their drafts
vllm.v1.core.sched.scheduler
  Scheduler._update_after_schedule(self scheduler_output) - overridden: the asynchronous scheduler sets the placeholders
      of drafts here
  Scheduler.make_spec_decoding_stats(self spec_decoding_stats num_draft_tokens num_accepted_tokens
      num_invalid_spec_tokens request_id) - overridden: rows of a request that opted out are no drafts
  Scheduler.update_draft_token_ids(self draft_token_ids) - overridden: the other one takes the drafts here
  Scheduler.schedule(self throttle_prefills) - overridden: rounds are timed where draft lengths follow the load
  Scheduler.{dynamic_sd_lookup} - set: draft lengths that follow the load
  Scheduler.{requests running vllm_config} - read: the requests, and which of them opted out
  Scheduler.{kv_cache_manager} - read: the prefix cache is forgotten when a drafter gets new weights
vllm.v1.core.single_type_kv_cache_manager
  SingleTypeKVCacheManager.{block_pool num_cached_block} - read and set: running requests leave nothing in the prefix
      cache
vllm.v1.engine.core
  EngineCore._initialize_kv_caches(self vllm_config) - replaced: the schedule chosen from measured steps is in the
      config before the scheduler is made
  EngineCore.collective_rpc(self method timeout args kwargs) - replaced: swaps drafters, by itself and at the end of
      vLLM's updates of weights
  EngineCore.{scheduler vllm_config} - read: our settings, and the prefix cache
vllm.v1.engine.input_processor
  InputProcessor._validate_params(self params supported_tasks) - replaced: refuses a request whose extra argument is
      none of ours
vllm.v1.kv_cache_interface
  AttentionSpec.{dtype} - read by the metadata builders: whether the cache is one of float32
  KVCacheLayout.{LBHNC} - read: the layout of the cache on a CPU
  KVCacheSpec - the type of an argument of the metadata builders
  is_quantized_kv_cache(kv_cache_dtype) - called: trees are refused over a quantised cache that is not of float8
vllm.v1.outputs
  LogprobsTensors - the type of the verifier's log-probabilities
vllm.v1.request
  Request.{spec_token_ids} - set: a request that opted out has none
vllm.v1.sample.ops.topk_topp_sampler
  apply_top_k_top_p_pytorch(logits k p allow_cpu_sync) - called on a CPU, in the place of the kernel
  apply_top_k_top_p_triton(logits k p mask_value) - replaced on a CPU: the kernel cannot be interpreted
vllm.v1.worker.cpu.model_runner
  CPUModelRunner - replaced while a CPU worker makes its runner, by a subclass of it
vllm.v1.worker.cpu_worker
  CPUWorker.init_device(self) - overridden: our runner
vllm.v1.worker.gpu.async_utils
  StepTimingCollector.drafter_end(self) - our clock has the same
  StepTimingCollector.drafter_start(self) - our clock has the same
  StepTimingCollector.forward_end(self) - our clock has the same
  StepTimingCollector.forward_start(self) - our clock has the same
  StepTimingCollector.record_batch(self input_batch full_cudagraph) - our clock has the same
vllm.v1.worker.gpu.attn_utils
  build_attn_metadata(attn_groups num_reqs num_tokens query_start_loc_gpu query_start_loc_cpu max_query_len seq_lens
      max_seq_len block_tables slot_mappings kv_cache_config seq_lens_cpu_upper_bound dcp_local_seq_lens
      dcp_local_seq_lens_cpu_upper_bound positions is_prefilling mm_req_doc_ranges model_specific_attn_metadata
      for_cudagraph_capture causal rswa_prefix_lens ubatch_idx fast_prefill req_idx) - called: a draft model takes in
      prompts over the target's rows
  build_slot_mappings_by_layer(slot_mappings kv_cache_config) - called: the cache slots of a drafter's own passes
  get_varlen_cudagraph_unsupported_backend(attn_groups vllm_config max_query_len checked_layer_names) - called: whether
      a graph may hold requests of several widths
vllm.v1.worker.gpu.block_table
  BlockTables.compute_slot_mappings(self idx_mapping query_start_loc positions num_tokens_padded out) - called: where a
      first pass over a drafter's own rows writes
  BlockTables.gather_block_tables(self idx_mapping num_reqs_padded out out_ptrs) - called: the blocks of the requests
      that a drafter drafts for
  BlockTables.get_dummy_block_tables(self num_reqs) - called: dummy rounds of one row a request
  BlockTables.get_dummy_slot_mappings(self num_tokens) - called: dummy rounds write nothing
  BlockTables.{block_sizes block_tables cp_interleave cp_rank input_block_tables slot_mappings} - read: where a
      drafter's passes find and write keys and values
vllm.v1.worker.gpu.cudagraph_utils
  BatchExecutionDescriptor.{cg_mode num_reqs num_tokens} - read: the size of a pass and whether it is a graph
  CudaGraphManager.__init__(self vllm_config device cudagraph_mode decode_query_len lora_capture_cases varlen_decode
      ubatch_runner) - called: graphs of a drafter's own rows
  CudaGraphManager._init_candidates(self) - overridden: CUDA graphs of the widths of adaptive trees; sets _candidates
      and _capture_descs
  CudaGraphManager.capture(self create_forward_fn progress_bar_desc) - called: captures the growth of draft trees
  CudaGraphManager.dispatch(self num_reqs num_tokens uniform_token_count num_active_loras max_query_len num_ubatches) -
      overridden: notes which graph a step replays
  CudaGraphManager.run_fullgraph(self desc) - called: replays a drafter's own graphs
  CudaGraphManager.{decode_query_len varlen_decode vllm_config} - set while graphs of several widths are listed
  CudaGraphManager.{_candidates _capture_descs cudagraph_mode} - read: the graphs that vLLM lists
  ModelCudaGraphManager(vllm_config device cudagraph_mode decode_query_len lora_capture_cases varlen_decode
      ubatch_runner) - subclassed and made: the target's graphs of several widths
vllm.v1.worker.gpu.dp_utils
  dispatch_cg_and_sync_dp(cudagraph_manager num_reqs num_tokens uniform_token_count dp_size dp_rank max_query_len
      need_eager num_active_loras parallel_config allow_ubatching uniform_decode dp_sync_state) - called: which graph a
      drafter's own pass replays
vllm.v1.worker.gpu.input_batch
  InputBatch.make_dummy(num_reqs num_tokens input_buffers max_query_len is_padding) - called: the batch whose
      verification is timed
  InputBatch.{cu_num_logits cu_num_logits_np expanded_idx_mapping expanded_local_pos has_structured_output_reqs
      idx_mapping idx_mapping_np input_ids is_prefilling_np logits_indices num_computed_prefill_tokens_np
      num_draft_tokens num_draft_tokens_per_req num_reqs num_reqs_after_padding num_scheduled_tokens num_tokens
      num_tokens_after_padding positions prefill_len_np query_start_loc query_start_loc_np req_ids seq_lens
      seq_lens_cpu_upper_bound} - read: the rows of a step
  InputBuffers.{input_ids positions query_start_loc seq_lens} - read and written: the rows of a drafter's pass
vllm.v1.worker.gpu.metrics.logits
  get_num_nans(logits) - called after a verification, as vLLM's rejection sampler does
vllm.v1.worker.gpu.model_runner
  GPUModelRunner.__init__(self vllm_config device) - called by ours
  GPUModelRunner._dummy_run(self num_tokens args skip_attn uniform_decode context_len skip_eplb is_profile
      valid_dummy_state_slots randomize_inputs kwargs) - called: the steps that are timed; its step_timing and
      decode_query_len are exchanged meanwhile
  GPUModelRunner._remove_request(self req_id) - overridden: what drafters missed of a request that leaves is taken in
  GPUModelRunner.add_requests(self scheduler_output) - overridden: what each request lets its drafter do
  GPUModelRunner.capture_model(self profile_only) - overridden: steps are timed once they are captured
  GPUModelRunner.execute_model(self scheduler_output intermediate_tensors dummy_run skip_attn_for_dummy_run is_profile
      context_len valid_dummy_state_slots randomize_inputs) - overridden: draft tokens that adaptive trees do not need
      are taken out of the step
  GPUModelRunner.finish_requests(self scheduler_output) - overridden: what drafters missed of requests that leave is
      taken in
  GPUModelRunner.initialize_kv_cache(self kv_cache_config is_profiling kv_cache_allocation_context) - overridden: notes
      where the target's K and V lie
  GPUModelRunner.load_model(self load_dummy_weights args model kwargs) - overridden: our verifier takes the rejection
      sampler's place
  GPUModelRunner.prepare_attn(self input_batch) - overridden: positions and masks of trees
  GPUModelRunner.prepare_inputs(self scheduler_output batch_req_state batch_desc num_active_loras) - overridden:
      contemplate rows get no logits
  GPUModelRunner.sample(self hidden_states input_batch grammar_output) - overridden: commits the accepted path
  GPUModelRunner.sample_tokens(self grammar_output) - overridden: keeps hold of the tapped states
  GPUModelRunner.{cudagraph_manager decode_query_len draft_tokens_handler rejection_sampler step_timing
      uses_inputs_embeds} - set: our graphs, verifier and clock
  GPUModelRunner.{attn_groups block_tables compilation_config device dtype execute_model_state fast_prefill
      input_buffers kv_cache_config lora_capture_cases max_num_reqs max_num_tokens model model_config model_state
      num_speculative_steps req_states sampler speculator ubatch_runner vllm_config} - read by our runner, its features
      and measurements
  init_speculator(vllm_config device req_states) - replaced, where the runner is loaded already
vllm.v1.worker.gpu.model_states.default
  DefaultModelState.dummy_inputs_embeds(self num_tokens) - stood in for on the instance: so do dummy runs
  DefaultModelState.prepare_dummy_inputs(self num_reqs num_tokens) - stood in for on the instance: CUDA graphs read the
      same embeddings
  DefaultModelState.prepare_inputs(self input_batch req_states) - stood in for on the instance: M-RoPE positions of
      trees
  DefaultModelState.prepare_inputs_embeds(self scheduled_encoder_inputs input_batch req_states) - stood in for on the
      instance: embeddings of contemplate rows (``uses_inputs_embeds`` asks for it)
vllm.v1.worker.gpu.sample.gumbel
  _DRAFT_NOISE_SALT - the noise of vLLM's own drafts, where sampling is done in PyTorch
  _gumbel_sample_kernel(local_argmax_ptr local_argmax_stride local_max_ptr local_max_stride logits_cache_ptr
      logits_cache_stride_0 logits_cache_stride_1 logits_cache_col_ptr logits_cache_source_ptr
      logits_cache_source_stride logits_ptr logits_stride expanded_idx_mapping_ptr seeds_ptr pos_ptr temp_ptr vocab_size
      BLOCK_SIZE IS_DRAFTING APPLY_TEMPERATURE USE_FP64 PER_TOKEN_COL) - replaced where kernels are interpreted: ours is
      called with the same arguments
  _log1p_neg_stable(value) - called by coupled drafts: the noise of the target's sampler
  murmur3_uniform32(seed pos offset) - called by coupled drafts: the noise of the target's sampler
  murmur3_uniform64(seed pos offset) - called by coupled drafts: the noise of the target's sampler
vllm.v1.worker.gpu.sample.logits_processor.interface
  LogitsContext.{expanded_idx_mapping expanded_local_pos idx_mapping_np input_ids} - read by the penalties of trees
  LogitsProcessor.add_request(self req_idx sampling_params) - overridden: penalties of trees
  LogitsProcessor.apply(self logits ctx) - overridden: penalties of trees
  LogitsProcessor.apply_staged_writes(self) - overridden: penalties of trees
vllm.v1.worker.gpu.sample.logprob
  compute_topk_scores(logits num_logprobs sampled_token_ids cu_num_logits logprob_token_ids_state expanded_idx_mapping
      max_per_req_token_ids logits_mode) - called for the accepted path
vllm.v1.worker.gpu.sample.output
  SamplerOutput(sampled_token_ids logprobs_tensors num_nans num_sampled num_rejected sampling_mask_tensors) - made by
      our verifier
vllm.v1.worker.gpu.sample.penalties
  PenaltiesState.add_request(self req_idx sampling_params) - called by the penalties of trees
  PenaltiesState.apply(self logits ctx) - called for steps without drafts; its tensors are read by ours
  PenaltiesState.apply_staged_writes(self) - called by the penalties of trees
  PenaltiesState.{frequency_penalty output_bin_counts presence_penalty prompt_bin_mask repetition_penalty use_penalty} -
      read by the penalties of trees
vllm.v1.worker.gpu.sample.sampler
  Sampler.get_logprobs_dims(self idx_mapping_np include_token_ids) - called: how many log-probabilities are asked for
  Sampler.sample(self logits expanded_idx_mapping idx_mapping idx_mapping_np pos input_ids expanded_local_pos
      seq_lens_upper_bound_np return_logprobs) - called at every node
  Sampler.{logits_processors use_flashinfer} - set: penalties of trees, and noise that drafters can foresee
  Sampler.{compute_nans logprobs_mode penalties_state req_states} - read by our verifier
vllm.v1.worker.gpu.spec_decode
  init_speculator(vllm_config device req_states) - replaced: builds our speculator where our settings are present
vllm.v1.worker.gpu.spec_decode.dflash.cudagraph
  DFlashCudaGraphManager.capture(self forward_fn input_buffers block_tables attn_groups kv_cache_config max_model_len
      causal prepare_forward progress_bar_desc) - called: captures the growth of draft trees, and first passes over a
      drafter's own rows
vllm.v1.worker.gpu.spec_decode.dflash.speculator
  DFlashSpeculator.__init__(self vllm_config device) - called by the DFlash proposer
  DFlashSpeculator._generate_draft(self num_reqs num_tokens_padded attn_metadata slot_mappings num_tokens_across_dp
      cudagraph_runtime_mode) - overridden for trees
  DFlashSpeculator._num_graph_context_tokens(self num_reqs) - overridden: the context of a whole verification goes into
      the graph
  DFlashSpeculator._precompute_context_kv(self start end dummy_run) - called to catch a drafter up without drafting
  DFlashSpeculator._prepare_graph_forward(self num_reqs attn_metadata) - called while DART's graphs are captured: it
      caches the context through our _precompute_context_kv
  DFlashSpeculator._run_model(self num_tokens attn_metadata slot_mappings num_tokens_across_dp cudagraph_runtime_mode) -
      called: a block's states, from which trees are built
  DFlashSpeculator.load_draft_model(self target_model target_attn_layer_names) - overridden: each drafter's layers get a
      prefix of their own
  DFlashSpeculator.propose(self input_batch attn_metadata slot_mappings last_hidden_states aux_hidden_states num_sampled
      num_rejected last_sampled next_prefill_tokens temperature seeds dp_sync_state dummy_run skip_attn_for_dummy_run
      mm_inputs is_profile num_speculative_tokens) - called by the DFlash proposer
  DFlashSpeculator.{requires_non_causal} - set by DART, whose forward is causal
  DFlashSpeculator.{_context_slot_mappings _group_causal _layer_group_idx context_positions draft_kv_cache_group_id
      draft_kv_cache_group_ids hidden_states parallel_drafting_token_id query_cudagraph_manager sample_from_anchor
      sample_idx_mapping sample_indices sample_pos} - read by the proposers of blocks
  prepare_dflash_inputs(input_buffers query_slot_mapping context_positions context_slot_mapping sample_indices
      sample_pos sample_idx_mapping temperature seeds input_batch num_sampled num_rejected last_sampled
      next_prefill_tokens input_temperature input_seeds block_table block_size cp_rank cp_size cp_interleave
      parallel_drafting_token_id num_query_per_req num_speculative_steps max_num_reqs max_num_tokens max_model_len
      sample_from_anchor) - called to catch a drafter up without drafting
vllm.v1.worker.gpu.spec_decode.eagle.speculator
  EagleSpeculator.load_draft_model(self target_model target_attn_layer_names) - overridden: each drafter's layers get a
      prefix of their own
vllm.v1.worker.gpu.spec_decode.eagle.utils
  _should_share(eagle flag draft target) - called when a drafter is loaded
  get_target_lm_head(target_model target_language_model) - called when a drafter is loaded
  maybe_share_target_embed(draft_model draft_inner target_inner) - called when a drafter is loaded
vllm.v1.worker.gpu.spec_decode.rejection_sampler
  RejectionSampler.__call__(self logits input_batch draft_logits invalid_drafts) - our verifier takes its place
  RejectionSampler.{enable_adaptive_verification sampler} - filled in by our verifier
  _iter_request_chunks(cu_num_logits max_chunk_logits) - called: how many logits are sampled at once
  get_max_chunk_logits(vocab_size) - called: how many logits are sampled at once
vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils
  tldevice - replaced where kernels are interpreted: its log1p answers None there
vllm.v1.worker.gpu.spec_decode.speculator
  BaseSpeculator.capture(self) - overridden by our speculator
  BaseSpeculator.init_cudagraph_manager(self cudagraph_mode) - overridden by our speculator
  BaseSpeculator.propose(self input_batch attn_metadata slot_mappings last_hidden_states aux_hidden_states num_sampled
      num_rejected last_sampled next_prefill_tokens temperature seeds dp_sync_state dummy_run skip_attn_for_dummy_run
      mm_inputs is_profile num_speculative_tokens) - overridden by our speculator
  BaseSpeculator.{num_extra_query_per_req num_query_per_req} - filled in by our speculator
  DraftModelSpeculator._build_attn_metadata(self num_reqs batch_desc query_start_loc_np seq_lens_cpu_upper_bound step
      causal dcp_local_seq_lens slot_mappings) - called: attention over one level of trees
  DraftModelSpeculator._build_uniform_attn_metadata(self batch_desc num_reqs num_query_per_req seq_lens_cpu_upper_bound
      step causal dcp_local_seq_lens) - called by the proposers whose passes are their own
  DraftModelSpeculator._build_uniform_batch_dp_sync(self target_dp_sync_state num_reqs num_query_per_req) - called: rows
      of a drafter's own passes, on every rank
  DraftModelSpeculator._configure_decode_metadata_update(self) - called: whether graphs hold the attention's plan
  DraftModelSpeculator._copy_request_inputs(self num_reqs idx_mapping temperature seeds dummy_run) - overridden: one
      launch
  DraftModelSpeculator._prepare_eplb_forward(self num_unpadded_tokens) - called before a drafter's own passes
  DraftModelSpeculator._update_draft_decode_metadata(self attn_metadata num_reqs) - called in the CUDA graphs of a draft
      model's first pass and of the growth of trees
  DraftModelSpeculator.attn_vllm_config - overridden: a draft model's own heads and sizes
  DraftModelSpeculator.load_draft_model(self target_model target_attn_layer_names) - overridden: a draft model of its
      own
  DraftModelSpeculator.load_model(self target_model) - overridden by our speculator
  DraftModelSpeculator.observe_verification(self idx_mapping num_sampled num_rejected) - overridden by our speculator:
      counts acceptance
  DraftModelSpeculator.sample_draft(self hidden_states sample_src_positions idx_mapping temperature seeds draft_step
      draft_logits spec_step_idx) - overridden by EAGLE-3
  DraftModelSpeculator.set_attn(self model_state kv_cache_config block_tables target_input_buffers target_attn_groups) -
      overridden by our speculator
  DraftModelSpeculator.set_eplb_state(self eplb_state) - overridden by our speculator
  DraftModelSpeculator.{attn_groups block_tables dcp_size device draft_attn_layer_names draft_logits draft_max_seq_len
      draft_token_confidence_probs draft_watermarker enable_adaptive_verification kv_cache_config method model
      num_speculative_steps speculative_config supports_mm_inputs vllm_config} - filled in by our speculator
  DraftModelSpeculator.{arange_np dp_rank dp_size draft_model_config draft_tokens dtype hidden_size idx_mapping
      input_buffers max_model_len max_num_reqs max_num_tokens pcp_manager seeds supports_decode_metadata_update
      temperature} - read by the proposers
vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils
  SpeculatorCudaGraphManager(vllm_config device cudagraph_mode decode_query_len lora_capture_cases varlen_decode
      ubatch_runner) - made: a first pass as wide as the engine's verification
  SpeculatorCudaGraphManager.specialize_spec_tokens(self desc num_speculative_tokens) - called: the graph of as many
      drafts as are wanted
vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator
  TargetDependentARSpeculator.__init__(self vllm_config device) - called by the EAGLE-3 proposer and the draft model's
  TargetDependentARSpeculator._configure_decode_metadata_update(self) - overridden: a draft model's tree has further
      passes, though vLLM's class has one step
  TargetDependentARSpeculator._fused_multi_step_decode(self num_reqs skip_attn batch_desc num_tokens_across_dp
      seq_lens_cpu_upper_bound num_speculative_steps) - called: a draft model's passes over one row a request
  TargetDependentARSpeculator._multi_step_decode(self num_reqs skip_attn batch_desc num_tokens_across_dp
      seq_lens_cpu_upper_bound num_speculative_steps) - called: a draft model's passes over one row a request
  TargetDependentARSpeculator._prefill(self num_reqs num_tokens attn_metadata slot_mappings num_tokens_across_dp
      cudagraph_runtime_mode mm_inputs) - overridden: a draft model's first pass over two rows a request
  TargetDependentARSpeculator._run_model(self num_tokens attn_metadata slot_mappings num_tokens_across_dp
      cudagraph_runtime_mode mm_inputs) - overridden: a draft model reads no states of the target
  TargetDependentARSpeculator.capture(self) - overridden: the growth of trees is captured, too
  TargetDependentARSpeculator.init_cudagraph_manager(self cudagraph_mode) - overridden: first passes over a drafter's
      own rows
  TargetDependentARSpeculator.load_model(self target_model) - overridden: the output layer is made
  TargetDependentARSpeculator.propose(self input_batch attn_metadata slot_mappings last_hidden_states aux_hidden_states
      num_sampled num_rejected last_sampled next_prefill_tokens temperature seeds dp_sync_state dummy_run
      skip_attn_for_dummy_run mm_inputs is_profile num_speculative_tokens) - called by the EAGLE-3 proposer
  TargetDependentARSpeculator.{hidden_states prefill_cudagraph_manager} - set: first passes over a drafter's own rows
  TargetDependentARSpeculator.{current_draft_step decode_cudagraph_manager last_token_indices sample_src_positions} -
      read by the autoregressive proposers
  prepare_decode_inputs(draft_tokens target_seq_lens num_rejected input_buffers sample_src_positions max_model_len
      max_num_reqs advance_draft_positions) - called: a draft model's passes over one row a request
  prepare_prefill_inputs(last_token_indices current_draft_step input_buffers input_batch num_sampled num_rejected
      last_sampled next_prefill_tokens max_num_reqs) - called: EAGLE-3's first pass over one row a request
vllm.v1.worker.gpu.spec_decode.utils
  DraftTokensHandler.__init__(self device) - called by ours
  DraftTokensHandler.set_draft_tokens(self input_batch draft_tokens) - overridden: a grammar is not shown dead draft
      tokens
  get_pp_safe_draft_load_config(load_config) - called when a drafter is loaded
vllm.v1.worker.gpu.states
  RequestState.{all_token_ids num_computed_tokens num_computed_tokens_np prefill_len prompt_len req_id_to_index} -
      read: the lengths and tokens of requests
vllm.v1.worker.gpu.structured_outputs
  _build_grammar_mapping(req_ids grammar_req_ids cu_num_logits_np num_draft_tokens_per_req num_bonus_tokens mask_stride)
      - relied on: a grammar has one mask for each of a request's drafts and the root
vllm.v1.worker.gpu_worker
  Worker._make_model_runner(self) - overridden: our runner
  Worker.finish_weight_update(self) - relied on by name: drafters are swapped after it
  Worker.start_draft_weight_update(self) - relied on by name: tensors of drafters come after it
vllm.v1.worker.lora_model_runner_mixin
  LoRAModelRunnerMixin._set_active_loras(self prompt_lora_mapping token_lora_mapping lora_requests mapping_type) -
      overridden: which adapter each row with logits has
vllm.v1.worker.utils
  AttentionGroup.map_to_kernel_block_table(self block_table ubatch_idx) - called: block tables as graphs of drafters'
      own passes read them
  AttentionGroup.{kv_cache_group_id layer_names} - read: the layers of a cache group
vllm.v1.worker.worker_base
  WorkerBase - gains the methods crossspec_stats, crossspec_step_costs and their like, which collective_rpc calls by
      name
  WorkerBase.{device vllm_config} - read by our worker
""")

_GPU = "vllm.v1.worker.gpu"

STAND_INS = (
    StandIn(
        ours="vllm_crossspec.engine.speculators.base.Speculator",
        name="speculator",
        readers=f"{_GPU}.model_runner {_GPU}.eplb_utils vllm.model_executor.warmup.kernel_warmup "
        "vllm.distributed.elastic_ep.elastic_execute",
        attributes="attn_groups capture dcp_size draft_attn_layer_names draft_logits draft_token_confidence_probs "
        "enable_adaptive_verification init_cudagraph_manager load_model model num_extra_query_per_req "
        "num_query_per_req observe_verification pcp_manager prepare_watermarking propose set_attn set_eplb_state "
        "supports_mm_inputs",
    ),
    StandIn(
        ours="vllm_crossspec.engine.verification.sampler.MatchVerifier",
        name="rejection_sampler",
        readers=f"{_GPU}.model_runner {_GPU}.warmup",
        attributes="enable_adaptive_verification",
    ),
    StandIn(
        ours="vllm_crossspec.engine.startup.clock.StepClock",
        name="step_timing",
        readers=f"{_GPU}.model_runner",
        attributes="drafter_end drafter_start forward_end forward_start record_batch",
        others="collect",  # around the dummy steps of adaptive verification, which is off
    ),
    StandIn(
        ours="vllm_crossspec.engine.verification.penalties.TreePenalties",
        name="processor",
        readers=f"{_GPU}.sample.sampler",
        attributes="add_request apply apply_staged_writes",
    ),
    StandIn(
        ours="vllm_crossspec.engine.graphs.rows.RowGraphManager",
        name="prefill_cudagraph_manager",
        readers=f"{_GPU}.spec_decode.target_dependent_ar.speculator",
        attributes="capture init_breakable_cg_runner run_fullgraph run_pw_graph use_breakable_cg",
    ),
)
"""Objects of ours that take a place of vLLM's, and all that vLLM's code reads of what stands there."""

INVENTORY = Inventory("0.32.0", TOUCH_POINTS, STAND_INS)
