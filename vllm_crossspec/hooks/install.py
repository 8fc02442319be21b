"""The replacements that put this project into vLLM; the inventory of ``vllm_api`` lists each."""

import functools
import sys
from typing import Any

from vllm_crossspec.config.schema import settings_of
from vllm_crossspec.frontend.command_line import one_sentence_at_the_end
from vllm_crossspec.kinds.drafter import own_kinds
from vllm_crossspec.platform import platform
from vllm_crossspec.ranks import step_together


@functools.cache
def install() -> None:
    """Check vLLM's version and install all hooks, once per process."""
    from vllm_crossspec.vllm_api import check

    check.require()
    platform().install()
    _register_models()
    _hook_speculative_config()
    _hook_init_speculator()
    _hook_model_state()
    _hook_features_and_draft_lengths()
    _hook_prefix_hashes()
    _hook_active_requests()
    _hook_request_validation()
    _hook_engine_core()
    _hook_scheduler()
    _add_worker_methods()


def _register_models() -> None:
    """Register our own models; ``vllm_api.speculative`` registers those of other packages when one is used."""
    from vllm_crossspec.vllm_api.models import register_models

    for kind in own_kinds():
        register_models(kind)


def _hook_speculative_config() -> None:
    from vllm.engine.arg_utils import EngineArgs

    from vllm_crossspec.frontend import build

    whole = EngineArgs.create_engine_config

    # vLLM calls this first, so we can refuse a missing target before vLLM asks the hub for it.
    @functools.wraps(whole)
    def create_engine_config(self: Any, *arguments: Any, **options: Any) -> Any:
        with one_sentence_at_the_end():
            build.check_first(self)
        return whole(self, *arguments, **options)

    EngineArgs.create_engine_config = create_engine_config
    original = EngineArgs.create_speculative_config

    @functools.wraps(original)
    def create_speculative_config(self: Any, target_model_config: Any, target_parallel_config: Any) -> Any:
        with one_sentence_at_the_end():
            if (ours := build.asked(self)) is not None:
                return build.build(self, ours, target_model_config, target_parallel_config)
        return original(self, target_model_config, target_parallel_config)

    EngineArgs.create_speculative_config = create_speculative_config


def _hook_init_speculator() -> None:
    import vllm.v1.worker.gpu.spec_decode as package

    original = package.init_speculator

    @functools.wraps(original)
    def init_speculator(vllm_config: Any, device: Any, req_states: Any) -> Any:
        platform().prepare()
        settings = settings_of(vllm_config)
        if settings is None:
            return original(vllm_config, device, req_states)
        from vllm_crossspec.routing.speculator import RoutedSpeculator
        from vllm_crossspec.speculator.recording import RecordingSpeculator
        from vllm_crossspec.speculator.single import SingleSpeculator

        routed = RecordingSpeculator if settings.records_drafts else RoutedSpeculator
        return (routed if settings.is_routed else SingleSpeculator)(vllm_config, device, req_states)

    package.init_speculator = init_speculator
    # The runner imports the function by name; where it is loaded already, its own name must change too.
    runner = sys.modules.get("vllm.v1.worker.gpu.model_runner")
    if runner is not None:
        runner.init_speculator = init_speculator  # type: ignore[attr-defined]


def _hook_model_state() -> None:
    import vllm.v1.worker.gpu.model_states as states

    original = states.resolve_model_state_cls

    @functools.wraps(original)
    def resolve_model_state_cls(vllm_config: Any, model: Any) -> Any:
        if settings_of(vllm_config) is None:
            return original(vllm_config, model)
        from vllm_crossspec.runner.model_state import with_features

        return with_features(original(vllm_config, model))

    states.resolve_model_state_cls = resolve_model_state_cls


def _hook_features_and_draft_lengths() -> None:
    from vllm.config.vllm import VllmConfig

    from vllm_crossspec.frontend import refuse

    original_v1 = VllmConfig._get_v1_model_runner_unsupported_features
    original_v2 = VllmConfig._get_v2_model_runner_unsupported_features

    @functools.wraps(original_v1)
    def v1_features(self: Any) -> list[str]:
        extra = [refuse.V1_REFUSAL] if settings_of(self) is not None else []
        return [*original_v1(self), *extra]

    @functools.wraps(original_v2)
    def v2_features(self: Any) -> list[str]:
        return [*original_v2(self), *refuse.unsupported_features(self)]

    VllmConfig._get_v1_model_runner_unsupported_features = v1_features
    VllmConfig._get_v2_model_runner_unsupported_features = v2_features
    original = VllmConfig._maybe_disable_dynamic_sd_for_data_parallel

    # vLLM turns draft lengths by load off under data parallelism. Ranks of a dense target are independent engines,
    # so they can keep them. The front end's config, from which the ranks' configs are made, passes here.
    @functools.wraps(original)
    def disable_unless_independent(self: Any) -> None:
        if settings_of(self) is None or step_together(self.parallel_config):
            original(self)

    VllmConfig._maybe_disable_dynamic_sd_for_data_parallel = disable_unless_independent


def _hook_prefix_hashes() -> None:
    from vllm.config.vllm import VllmConfig

    original = getattr(VllmConfig, "num_hash_lookahead_tokens", None)
    if original is None:  # vLLM 0.32 never reuses the last block of a prefix, whatever drafts
        return

    # vLLM looks only at the method that configures the engine. Another drafter's KV entries may depend on the next
    # token too, so the token after a block must be part of the block's hash.
    def num_hash_lookahead_tokens(self: Any) -> int:
        tokens: int = original.fget(self)
        settings = settings_of(self)
        if tokens or settings is None or not self.cache_config.enable_prefix_caching:
            return tokens
        if self.kv_transfer_config is not None or self.speculative_config.disable_lookahead_block_hashes:
            return tokens
        return int(any(d.traits.reads_next_token for d in settings.drafters.values()))

    VllmConfig.num_hash_lookahead_tokens = property(num_hash_lookahead_tokens)


def _hook_active_requests() -> None:
    from vllm.config.vllm import VllmConfig

    original = VllmConfig._set_max_num_scheduled_tokens

    # vLLM 0.33 limits the running requests by the rows of a block drafter's pass, and counts a row for each verified
    # token. For a tree the drafter's pass has only one row per level.
    @functools.wraps(original)
    def set_max_num_scheduled_tokens(self: Any) -> None:
        scheduler_config = self.scheduler_config
        asked = scheduler_config.max_num_active_seqs
        original(self)
        settings = settings_of(self)
        if settings is None or scheduler_config.max_num_active_seqs == asked:
            return
        rows = 1 + max(d.num_speculative_tokens or 0 for d in settings.drafters.values())
        room = scheduler_config.max_num_batched_tokens // rows
        scheduler_config.max_num_active_seqs = min(asked or scheduler_config.max_num_seqs, room)

    VllmConfig._set_max_num_scheduled_tokens = set_max_num_scheduled_tokens


def _hook_request_validation() -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.input_processor import InputProcessor

    original, refuse_options = InputProcessor._validate_params, SamplingParams._validate_spec_decode

    # vLLM refuses min_p and logit_bias with speculative decoding. Sample-and-match supports both, because it runs the
    # target's own sampler at every row. Only the engine knows which verification is used.
    SamplingParams._validate_spec_decode = lambda self, speculative_config: None

    @functools.wraps(original)
    def validate_params(self: Any, params: Any, supported_tasks: Any) -> Any:
        settings = settings_of(self.vllm_config)
        if isinstance(params, SamplingParams) and (settings is None or settings.verification != "match"):
            refuse_options(params, self.vllm_config.speculative_config)
        result = original(self, params, supported_tasks)
        if settings is not None:
            from vllm_crossspec.step.requests import check_request, check_token_lists

            if isinstance(params, SamplingParams):
                check_token_lists(params)
            check_request(params, settings.router.by_category if settings.router is not None else ())
        return result

    InputProcessor._validate_params = validate_params


def _hook_engine_core() -> None:
    from vllm.v1.engine.core import EngineCore

    original = EngineCore._initialize_kv_caches

    # A separate engine-core process loads plugins inside EngineCore.__init__, so that method cannot be replaced. This
    # one runs after the workers' warm-up and before the scheduler is made.
    @functools.wraps(original)
    def initialize_kv_caches(self: Any, vllm_config: Any) -> Any:
        kv_cache_config = original(self, vllm_config)
        settings = settings_of(vllm_config)
        if settings is not None:
            from vllm_crossspec.load.measure import use_measured_schedule

            if settings.is_routed or settings.shares_rows:
                self.collective_rpc("crossspec_measure")
            use_measured_schedule(self.collective_rpc, vllm_config)
        return kv_cache_config

    EngineCore._initialize_kv_caches = initialize_kv_caches
    own_rpc = EngineCore.collective_rpc

    @functools.wraps(own_rpc)
    def collective_rpc(self: Any, method: Any, *rest: Any, **options: Any) -> list[Any]:
        from vllm_crossspec.hooks import engine_core as core

        return core.collective_rpc(self, functools.partial(own_rpc, self), method, *rest, **options)

    EngineCore.collective_rpc = collective_rpc


def _hook_scheduler() -> None:
    from vllm.config.scheduler import SchedulerConfig

    original = SchedulerConfig.get_scheduler_cls

    @functools.wraps(original)
    def get_scheduler_cls(self: Any) -> Any:
        from vllm_crossspec.hooks.scheduler import with_opting_out

        return with_opting_out(original(self))

    SchedulerConfig.get_scheduler_cls = get_scheduler_cls


def _add_worker_methods() -> None:
    from vllm.v1.worker.worker_base import WorkerBase

    from vllm_crossspec.hooks.worker_methods import WorkerMethods

    for name, method in vars(WorkerMethods).items():
        if name.startswith("crossspec_"):
            setattr(WorkerBase, name, method)
