"""CUDA graphs of verifications in which requests have different numbers of draft nodes."""

from typing import Any

from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.attn_utils import get_varlen_cudagraph_unsupported_backend
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager, ModelCudaGraphManager
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import SpeculatorCudaGraphManager

from vllm_crossspec.config.schema import CrossSpecConfig
from vllm_crossspec.load.schedule import draft_widths
from vllm_crossspec.vllm_api.speculative import without_schedule


class QueryLenGraphs(CudaGraphManager):
    """A mixin for vLLM's graph managers that adds CUDA graphs of more widths.

    Differences from vLLM's managers:

    - A batch of one width (``query_lens``: rows of a request) replays a graph of that width.
    - With ``mixes``, a decode batch of several widths replays a graph for any widths, if the attention allows it. vLLM
      would run such a batch with piecewise graphs.
    """

    decode_query_len: int
    vllm_config: Any
    varlen_decode: bool

    def __init__(self, *arguments: Any, query_lens: tuple[int, ...], mixes: bool = False, **options: Any):
        self.query_lens, self.mixes = tuple(sorted(set(query_lens))), mixes
        self.chosen: BatchExecutionDescriptor | None = None
        super().__init__(*arguments, **options)

    def dispatch(self, *arguments: Any, max_query_len: int | None = None, **options: Any) -> BatchExecutionDescriptor:
        # A batch without drafts never uses the mixed-width graph.
        bound = None if max_query_len == 1 else max_query_len
        self.chosen = super().dispatch(*arguments, max_query_len=bound, **options)
        return self.chosen

    def _init_candidates(self) -> None:
        super()._init_candidates()
        found = {mode: list(descs) for mode, descs in self._capture_descs.items()}
        if not found:
            return
        given = self.decode_query_len, self.vllm_config, self.varlen_decode
        self.vllm_config = without_schedule(self.vllm_config)
        for query_len in self.query_lens:
            self.decode_query_len = query_len
            self._add(found, 0)
        if self.mixes and len(self.query_lens) > 1:
            self.decode_query_len, self.varlen_decode = given[0], True
            self._add(found, sum(self.query_lens[:2]))  # a smaller batch cannot have two widths
        self.decode_query_len, self.vllm_config, self.varlen_decode = given
        for mode, descs in found.items():
            self._capture_descs[mode] = sorted(descs, key=lambda desc: -desc.num_tokens)
        # vLLM takes the first graph that fits: one width before mixed widths, full graphs before piecewise ones.
        for descs in self._candidates.values():
            kept = list(dict.fromkeys(descs))
            descs[:] = sorted(kept, key=lambda d: (d.cg_mode != CUDAGraphMode.FULL, d.uniform_token_count is None))

    def _add(self, found: dict[CUDAGraphMode, list[BatchExecutionDescriptor]], min_tokens: int) -> None:
        """Make vLLM's list for the current width, and keep its new entries of at least ``min_tokens``."""
        before = {key: list(descs) for key, descs in self._candidates.items()}
        super()._init_candidates()
        for mode, descs in self._capture_descs.items():
            new = [desc for desc in descs if desc not in found.setdefault(mode, [])]
            found[mode] += [desc for desc in new if desc.num_tokens >= min_tokens]
        for key, descs in self._candidates.items():
            known = before.get(key, [])
            descs[:] = known + [d for d in descs[len(known) :] if d not in known and d.num_tokens >= min_tokens]


class FirstPassGraphs(QueryLenGraphs, SpeculatorCudaGraphManager):
    """Graphs of a drafter's first pass, which runs over the target's rows."""


class VerificationGraphs(QueryLenGraphs, ModelCudaGraphManager):
    """Graphs of the target's verification."""


def captured_query_len(manager: Any) -> int | None:
    """Most rows of a request in the graph that the step replays, which attention plans need; None without a bound."""
    return manager.chosen.max_query_len if isinstance(manager, QueryLenGraphs) and manager.chosen is not None else None


def target_graphs(runner: Any, settings: CrossSpecConfig) -> ModelCudaGraphManager:
    """The runner's graph manager, or a new one with the widths of its drafts; nothing may be captured yet."""
    manager = runner.cudagraph_manager
    if manager.cudagraph_mode == CUDAGraphMode.NONE or manager.varlen_decode or runner.fast_prefill is not None:
        return manager
    drafters = runner.speculator.draft_attn_layer_names
    targets = {name for group in runner.kv_cache_config.kv_cache_groups for name in group.layer_names} - drafters
    unsupported = get_varlen_cudagraph_unsupported_backend(
        runner.attn_groups, runner.vllm_config, runner.decode_query_len, checked_layer_names=targets
    )
    # Draft nodes of every drafter, and of every bin of drafters with sized trees.
    widths = {width for policy in settings.policies.values() for width in policy.widths}
    if settings.is_routed:
        widths |= {settings.width_of(name) for name in settings.drafters}
    if settings.shares_rows:
        widths |= set(draft_widths(settings))
    return VerificationGraphs(
        runner.vllm_config,
        runner.device,
        manager.cudagraph_mode,
        runner.decode_query_len,
        lora_capture_cases=runner.lora_capture_cases,
        ubatch_runner=runner.ubatch_runner,
        query_lens=tuple(settings.planned(width) + 1 for width in widths),
        mixes=unsupported is None,
    )
