"""What of vLLM is replaced, stood in for on an instance, or relied on without being named, each with the reason.

All else that this project overrides or uses of vLLM below its public surface is found in its syntax. ``tests/seam.py``
writes both, with the parameters of every release, into ``generated.py``; a method's own docstring says why it is there.
"""

from typing import NamedTuple


class StandIn(NamedTuple):
    """An object of ours that modules of vLLM (readers) have under a name, and read attributes of as of one of theirs.

    ``others`` are read under circumstances that are never ours; our class need not have them.
    """

    ours: str
    name: str
    readers: str
    attributes: str
    others: str = ""


_ROWS = """
vllm.config.scheduler SchedulerConfig.get_scheduler_cls replaced: requests that opted out are planned no drafts
vllm.config.speculative SpeculativeConfig.use_ngram stood in for on the instance, once: texts are searched on the device
vllm.config.vllm VllmConfig._get_v1_model_runner_unsupported_features replaced: the V1 runner is refused
vllm.config.vllm VllmConfig._get_v2_model_runner_unsupported_features replaced: what our proposers do not support
vllm.config.vllm VllmConfig._maybe_disable_dynamic_sd_for_data_parallel replaced: ranks of a dense target keep it
vllm.config.vllm VllmConfig._set_max_num_scheduled_tokens replaced: as many requests as a block drafter has rows for
vllm.config.vllm VllmConfig.num_hash_lookahead_tokens replaced: some drafters' caches depend on the token behind a block
vllm.distributed.parallel_state _TP replaced while a drafter is made whole: its layers ask for their ranks then
vllm.engine.arg_utils EngineArgs.create_engine_config replaced: first looks at our keys, and whether models are there
vllm.engine.arg_utils EngineArgs.create_speculative_config replaced: takes our keys and hands vLLM a native config
vllm.model_executor.layers.logits_processor LogitsProcessor.forward relied on: a drafter's own logits
vllm.model_executor.layers.mamba.mamba_mixer2 causal_conv1d_update replaced on a CPU: its kernel takes one token each
vllm.model_executor.layers.mamba.mamba_mixer2 selective_state_update replaced on a CPU: its kernel keeps no state
vllm.model_executor.layers.utils dispatch_cpu_unquantized_gemm replaced while models load on a CPU; sets cpu_linear
vllm.model_executor.models.interfaces_base VllmModelForTextGeneration.compute_logits stood in for on the instance
vllm.model_executor.models.qwen3_dflash DFlashQwen3Model._normalize_context_k replaced on a CPU: norms by layer
vllm.sampling_params SamplingParams._validate_spec_decode replaced: sample-and-match serves min_p and logit_bias
vllm.v1.engine.core EngineCore._initialize_kv_caches replaced: the measured schedule is there before the scheduler
vllm.v1.engine.core EngineCore.collective_rpc replaced: swaps drafters, also at the end of vLLM's updates of weights
vllm.v1.engine.input_processor InputProcessor._validate_params replaced: refuses extra arguments that we do not know
vllm.v1.worker.cpu.model_runner CPUModelRunner replaced while a CPU worker makes its runner, by a subclass of it
vllm.v1.worker.gpu.cudagraph_utils ModelCudaGraphManager relied on: a subclass of it is made as the runner makes it
vllm.v1.worker.gpu.model_runner GPUModelRunner.execute_model stood in for on the instance to time rounds; overridden
vllm.v1.worker.gpu.model_runner init_speculator replaced, where the runner is loaded already
vllm.v1.worker.gpu.model_states resolve_model_state_cls replaced by a subclass, whose inputs features change
vllm.v1.worker.gpu.spec_decode init_speculator replaced: builds our speculator where our settings are present
vllm.v1.worker.gpu.spec_decode.dflash.speculator DFlashSpeculator._prepare_graph_forward relied on to capture DART
vllm.v1.worker.gpu.spec_decode.speculator BaseSpeculator.propose stood in for on the instance to time rounds; overridden
vllm.v1.worker.gpu_worker Worker.finish_weight_update relied on by name: drafters are swapped after it
vllm.v1.worker.gpu_worker Worker.start_draft_weight_update relied on by name: tensors of drafters come after it
"""
OURS = {(module, name): why for module, name, why in (row.split(" ", 2) for row in _ROWS.split("\n")[1:-1])}
"""The reason for each, by module and name."""

_GPU = "vllm.v1.worker.gpu"

STAND_INS = (
    StandIn(
        ours="vllm_crossspec.speculator.base.Speculator",
        name="speculator",
        readers=f"{_GPU}.model_runner {_GPU}.eplb_utils vllm.model_executor.warmup.kernel_warmup "
        "vllm.distributed.elastic_ep.elastic_execute",
        attributes="attn_groups capture dcp_size draft_attn_layer_names draft_logits draft_token_confidence_probs "
        "enable_adaptive_verification init_cudagraph_manager load_model model num_extra_query_per_req "
        "num_query_per_req observe_verification pcp_manager prepare_watermarking propose set_attn set_eplb_state "
        "supports_mm_inputs",
    ),
    StandIn(
        ours="vllm_crossspec.runner.verifier.MatchVerifier",
        name="rejection_sampler",
        readers=f"{_GPU}.model_runner {_GPU}.warmup",
        attributes="enable_adaptive_verification",
    ),
    StandIn(
        ours="vllm_crossspec.budget.feature.JointBudget",
        name="adaptive_verification",
        readers=f"{_GPU}.model_runner {_GPU}.warmup",
        attributes="add_request batches_to_profile compact_batch get_num_tokens reallocate_drafts record_confidences "
        "set_initial_cost_curves",
    ),
    StandIn(
        ours="vllm_crossspec.load.clock.StepClock",
        name="step_timing",
        readers=f"{_GPU}.model_runner",
        attributes="drafter_end drafter_start forward_end forward_start record_batch",
        others="collect",  # around the dummy steps of adaptive verification, which is off
    ),
    StandIn(
        ours="vllm_crossspec.trees.penalties_state.TreePenalties",
        name="processor",
        readers=f"{_GPU}.sample.sampler",
        attributes="add_request apply apply_staged_writes",
    ),
    StandIn(
        ours="vllm_crossspec.graphs.rows.RowGraphManager",
        name="prefill_cudagraph_manager",
        readers=f"{_GPU}.spec_decode.target_dependent_ar.speculator",
        attributes="capture init_breakable_cg_runner run_fullgraph run_pw_graph use_breakable_cg",
    ),
)
"""Objects of ours that take a place of vLLM's, and all that vLLM's code reads of what stands there."""
