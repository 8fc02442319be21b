"""The replacements that put this project into vLLM; each is in the inventory of ``vllm_api``."""

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_crossspec.names import DEBUG_VARIABLE
from vllm_crossspec.twins import runs_kernels

_installed = False


def install() -> None:
    """Check this vLLM and hook in, once per process."""
    global _installed
    if _installed:
        return
    from vllm_crossspec.engine.vllm_api import check

    check.require()
    if not runs_kernels():
        from vllm_crossspec.engine.cpu_patches import mend

        mend()
    _use_the_lanes_products()
    _register_models()
    _hook_speculative_config()
    _hook_init_speculator()
    _hook_unsupported_features()
    _hook_draft_lengths()
    _hook_prefix_hashes()
    _hook_active_requests()
    _hook_request_validation()
    _hook_engine_core()
    _hook_scheduler()
    _add_worker_methods()
    _installed = True


def _use_the_lanes_products() -> None:
    """In every engine, where the user wants it; in those of ours our runner does."""
    from vllm_crossspec.engine import cpu_products

    if cpu_products.choice() == "all":
        cpu_products.use_lane_everywhere()


def _register_models() -> None:
    """Our own; those of other packages' drafters when one is asked for (``vllm_api.speculative``)."""
    from vllm_crossspec.drafters.base import own_kinds
    from vllm_crossspec.engine.vllm_api.models import register_models

    for kind in own_kinds():
        register_models(kind)


def _hook_speculative_config() -> None:
    from vllm.engine.arg_utils import EngineArgs

    from vllm_crossspec.engine.frontend import build

    original = EngineArgs.create_speculative_config

    @functools.wraps(original)
    def create_speculative_config(self: Any, target_model_config: Any, target_parallel_config: Any) -> Any:
        with _one_sentence_on_the_command_line():
            if build.is_ours(self):
                return build.build(self, target_model_config, target_parallel_config)
        return original(self, target_model_config, target_parallel_config)

    EngineArgs.create_speculative_config = create_speculative_config


@contextlib.contextmanager
def _one_sentence_on_the_command_line() -> Iterator[None]:
    """Under vLLM's own commands a mistake in the config ends the process with its sentence, without a traceback.

    They catch nothing, so that the sentence would stand below sixty lines of vLLM's calls. Programs that use vLLM as a
    library get the error.
    """
    try:
        yield
    except ValueError as problem:
        if os.environ.get(DEBUG_VARIABLE) or not _runs_vllms_command():
            raise
        sys.exit(f"vllm_crossspec: {problem}")


def _runs_vllms_command() -> bool:
    """Whether this process was started as `vllm ...` or `python -m vllm....`."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return Path(sys.argv[0]).stem == "vllm" if spec is None else spec.name.split(".")[0] == "vllm"


def _hook_init_speculator() -> None:
    import vllm.v1.worker.gpu.spec_decode as package

    from vllm_crossspec.config import settings_of

    original = package.init_speculator

    @functools.wraps(original)
    def init_speculator(vllm_config: Any, device: Any, req_states: Any) -> Any:
        if device.type == "cpu":
            from vllm_crossspec.engine.cpu_patches import mend_context_norm, mend_recurrence

            mend_context_norm()
            mend_recurrence()
        settings = settings_of(vllm_config)
        if settings is None:
            return original(vllm_config, device, req_states)
        from vllm_crossspec.engine.speculators.registry import speculator_class

        return speculator_class(settings)(vllm_config, device, req_states)

    package.init_speculator = init_speculator
    # The runner imports the function by name; where it is loaded already, its own name must change too.
    runner = sys.modules.get("vllm.v1.worker.gpu.model_runner")
    if runner is not None:
        runner.init_speculator = init_speculator  # type: ignore[attr-defined]


def _hook_unsupported_features() -> None:
    from vllm.config.vllm import VllmConfig

    from vllm_crossspec.config import settings_of
    from vllm_crossspec.engine.frontend import refuse

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


def _hook_draft_lengths() -> None:
    from vllm.config.vllm import VllmConfig

    from vllm_crossspec.config import settings_of
    from vllm_crossspec.ranks import step_together

    original = VllmConfig._maybe_disable_dynamic_sd_for_data_parallel

    # It takes draft lengths by load from every data-parallel engine, though ranks of a dense target are engines of
    # their own. This config is the front end's, from which theirs are made.
    @functools.wraps(original)
    def disable_unless_independent(self: Any) -> None:
        if settings_of(self) is None or step_together(self.parallel_config):
            original(self)

    VllmConfig._maybe_disable_dynamic_sd_for_data_parallel = disable_unless_independent


def _hook_prefix_hashes() -> None:
    from vllm.config.vllm import VllmConfig

    from vllm_crossspec.config import settings_of
    from vllm_crossspec.drafters.base import drafter_kind

    original = getattr(VllmConfig, "num_hash_lookahead_tokens", None)
    if original is None:  # vLLM 0.32 never reuses the last block of a prefix, whatever drafts
        return

    # It goes by the method that carries the engine, which may be a block drafter's, whose entries know their own token
    # alone. With the token behind a block in its hash nobody finds what another text left at a block's end.
    def num_hash_lookahead_tokens(self: Any) -> int:
        tokens: int = original.fget(self)
        settings = settings_of(self)
        if tokens or settings is None or not self.cache_config.enable_prefix_caching:
            return tokens
        if self.kv_transfer_config is not None or self.speculative_config.disable_lookahead_block_hashes:
            return tokens
        return int(any(drafter_kind(d.kind, "").reads_next_token for d in settings.drafters.values()))

    VllmConfig.num_hash_lookahead_tokens = property(num_hash_lookahead_tokens)


def _hook_active_requests() -> None:
    from vllm.config.vllm import VllmConfig

    from vllm_crossspec.config import settings_of

    original = VllmConfig._set_max_num_scheduled_tokens

    # From vLLM 0.33 on it lets no more requests run than a block drafter's pass has rows for, and counts a row for
    # each token that the engine verifies; of a tree the drafter's pass has a row a level.
    @functools.wraps(original)
    def set_max_num_scheduled_tokens(self: Any) -> None:
        config = self.scheduler_config
        asked = config.max_num_active_seqs
        original(self)
        settings = settings_of(self)
        if settings is None or config.max_num_active_seqs == asked:
            return
        rows = 1 + max(d.num_speculative_tokens or 0 for d in settings.drafters.values())
        config.max_num_active_seqs = min(asked or config.max_num_seqs, config.max_num_batched_tokens // rows)

    VllmConfig._set_max_num_scheduled_tokens = set_max_num_scheduled_tokens


def _hook_request_validation() -> None:
    from vllm.v1.engine.input_processor import InputProcessor

    from vllm_crossspec.config import settings_of

    original = InputProcessor._validate_params

    @functools.wraps(original)
    def validate_params(self: Any, params: Any, supported_tasks: Any) -> Any:
        result = original(self, params, supported_tasks)
        settings = settings_of(self.vllm_config)
        if settings is not None:
            from vllm_crossspec.engine.requests import check_request

            check_request(params, settings.router.by_category if settings.router is not None else ())
        return result

    InputProcessor._validate_params = validate_params


def _hook_engine_core() -> None:
    from vllm.v1.engine.core import EngineCore

    original = EngineCore._initialize_kv_caches

    # Not the initialiser, which is already running when an engine core in a process of its own loads plugins; and
    # this is the place between the warm-up of the workers and the making of the scheduler.
    @functools.wraps(original)
    def initialize_kv_caches(self: Any, vllm_config: Any) -> Any:
        kv_cache_config = original(self, vllm_config)
        from vllm_crossspec.config import settings_of

        settings = settings_of(vllm_config)
        if settings is not None:
            from vllm_crossspec.engine.startup.step_costs import use_measured_schedule

            if settings.is_routed:
                self.collective_rpc("crossspec_measure")
            use_measured_schedule(self.collective_rpc, vllm_config)
        return kv_cache_config

    EngineCore._initialize_kv_caches = initialize_kv_caches
    own_rpc = EngineCore.collective_rpc

    @functools.wraps(own_rpc)
    def collective_rpc(self: Any, method: Any, *rest: Any, **options: Any) -> list[Any]:
        from vllm_crossspec.engine import core

        return core.collective_rpc(self, functools.partial(own_rpc, self), method, *rest, **options)

    EngineCore.collective_rpc = collective_rpc


def _hook_scheduler() -> None:
    from vllm.config.scheduler import SchedulerConfig

    original = SchedulerConfig.get_scheduler_cls

    @functools.wraps(original)
    def get_scheduler_cls(self: Any) -> Any:
        from vllm_crossspec.engine.scheduler import with_opting_out

        return with_opting_out(original(self))

    SchedulerConfig.get_scheduler_cls = get_scheduler_cls


def _add_worker_methods() -> None:
    from vllm.v1.worker.worker_base import WorkerBase

    def crossspec_stats(self: Any) -> dict[str, Any] | None:
        """Acceptance by drafter so far (see ``metrics.counters``); None where our proposers do not run."""
        speculator = getattr(self.model_runner, "speculator", None)
        stats = getattr(speculator, "acceptance_stats", None)
        return None if stats is None else stats()

    def feature_stats(self: Any, feature: str) -> dict[str, Any] | None:
        """What a feature has counted so far; None where the engine has no such feature."""
        stats = getattr(getattr(self.model_runner, "speculator", None), "feature_stats", None)
        return None if stats is None else stats(feature)

    def crossspec_take_records(self: Any) -> list[tuple[list[str], bytes]]:
        """What every drafter drafted since the last call (``engine.speculators.recording``); policy "record" only."""
        return self.model_runner.speculator.take_records()

    def crossspec_take_rounds(self: Any) -> list[tuple[list[str], bytes]]:
        """What became of every tree since the last call (``engine.features.rounds``); adaptive type "record" only."""
        return self.model_runner.features["rounds"].take()

    def crossspec_measure(self: Any) -> None:
        """Have the features time what they go by, where that has not been done while graphs were captured."""
        for feature in self.model_runner.features.values():
            feature.measure()

    def crossspec_round_costs(self: Any) -> dict[str, Any] | None:
        """What the router goes by (see ``router.costs``); None where nothing was timed."""
        from vllm_crossspec.router.costs import as_json

        speculator = self.model_runner.speculator
        costs = speculator.router.costs
        return None if costs is None else as_json(costs, speculator.order)

    def crossspec_step_costs(self: Any) -> Any:
        """What steps cost by draft tokens and running requests (see ``engine.startup.step_costs``)."""
        return self.model_runner.measured_step_costs()

    def crossspec_begin_shares(self: Any) -> None:
        """Time the stages of every round from here on (see ``engine.startup.round_shares``)."""
        from vllm_crossspec.engine.startup import round_shares

        round_shares.begin(self.model_runner)

    def crossspec_end_shares(self: Any) -> dict[str, Any] | None:
        """Target's, draft's and the rest's part of these rounds; None where there were none."""
        from vllm_crossspec.engine.startup import round_shares

        return round_shares.end(self.model_runner)

    def problem_of(prepare: Any) -> str | None:
        try:
            prepare()
        except (ValueError, OSError) as problem:
            return str(problem)
        return None

    def crossspec_prepare_swap(self: Any, drafter: str, folder: str) -> str | None:
        """Load other weights for a drafter beside those in use (see ``engine.speculators.swap``); why not, if not."""
        return problem_of(lambda: self.model_runner.speculator.swaps.prepare(drafter, folder))

    def crossspec_begin_receiving(self: Any) -> None:
        """Weights of drafters are about to come by vLLM's own update."""
        self.model_runner.speculator.swaps.begin_receiving()

    def crossspec_prepare_received(self: Any) -> str | None:
        """As ``crossspec_prepare_swap``, with what came; nothing where it was not the drafters'."""
        return problem_of(self.model_runner.speculator.swaps.prepare_received)

    def crossspec_commit_swap(self: Any) -> list[str]:
        """Draft with what was prepared; names of the drafters that changed."""
        return self.model_runner.speculator.commit_swap()

    def crossspec_abandon_swap(self: Any) -> None:
        """Forget what was prepared."""
        self.model_runner.speculator.swaps.abandon()

    WorkerBase.crossspec_prepare_swap = crossspec_prepare_swap
    WorkerBase.crossspec_begin_receiving = crossspec_begin_receiving
    WorkerBase.crossspec_prepare_received = crossspec_prepare_received
    WorkerBase.crossspec_commit_swap = crossspec_commit_swap
    WorkerBase.crossspec_abandon_swap = crossspec_abandon_swap
    WorkerBase.crossspec_stats = crossspec_stats
    # Decisions, switches and catch-ups (``metrics.routing``), and trees and levels by bin (``metrics.adaptive``).
    WorkerBase.crossspec_routing = functools.partialmethod(feature_stats, "routing")
    WorkerBase.crossspec_adaptive = functools.partialmethod(feature_stats, "adaptive")
    WorkerBase.crossspec_take_records = crossspec_take_records
    WorkerBase.crossspec_take_rounds = crossspec_take_rounds
    WorkerBase.crossspec_measure = crossspec_measure
    WorkerBase.crossspec_round_costs = crossspec_round_costs
    WorkerBase.crossspec_step_costs = crossspec_step_costs
    WorkerBase.crossspec_begin_shares = crossspec_begin_shares
    WorkerBase.crossspec_end_shares = crossspec_end_shares
