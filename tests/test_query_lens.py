"""Steps cut to the widths of adaptive trees, and which CUDA graphs they replay."""

import copy
from types import SimpleNamespace

import pytest
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

from vllm_crossspec.graphs.query_lens import QueryLenGraphs, captured_query_len
from vllm_crossspec.heterospec.feature import cut_drafts


def planned(**drafted):
    """A step in which each request brings so many drafts; a prompt's chunk of 5 tokens runs beside."""
    step = SchedulerOutput.make_empty()
    step.scheduled_spec_decode_tokens = {name: [-1] * n for name, n in drafted.items() if n}
    step.num_scheduled_tokens = {name: n + 1 for name, n in drafted.items()} | {"prompt": 5}
    step.total_num_scheduled_tokens = sum(step.num_scheduled_tokens.values())
    return step


def test_cut():
    step = planned(a=20, b=20, c=7, d=20, e=0)
    before = copy.deepcopy(vars(step))
    widths = {"a": 8, "b": 20, "c": 13, "d": None}
    cut = cut_drafts(step, widths.__getitem__)
    assert {name: len(tokens) for name, tokens in cut.scheduled_spec_decode_tokens.items()} == {
        "a": 8,
        "b": 20,
        "c": 7,
        "d": 20,
    }
    assert cut.num_scheduled_tokens == {"a": 9, "b": 21, "c": 8, "d": 21, "e": 1, "prompt": 5}
    assert cut.total_num_scheduled_tokens == sum(cut.num_scheduled_tokens.values())
    # The scheduler reads its own plan again when the step is through.
    assert vars(step) == before
    assert list(cut.num_scheduled_tokens) == list(step.num_scheduled_tokens)


def test_nothing_to_cut_is_the_plan_itself():
    for widths in ({"a": 20}, {"a": 60}, {"a": None}):
        step = planned(a=20)
        assert cut_drafts(step, widths.__getitem__) is step
    step = planned()
    assert cut_drafts(step, {}.__getitem__) is step


class Graphs(QueryLenGraphs):
    """The lists of a manager alone, as on a GPU; nothing is captured."""

    def __init__(self, query_lens, mixes, max_num_reqs=8, mode=CUDAGraphMode.FULL_AND_PIECEWISE):
        self.query_lens, self.mixes, self.chosen = tuple(sorted(set(query_lens))), mixes, None
        self.cudagraph_mode, self.decode_query_len, self.varlen_decode = mode, 21, False
        self.max_num_reqs, self.lora_capture_cases, self.ubatch_runner = max_num_reqs, [0], None
        self.compilation_config = SimpleNamespace(
            cudagraph_capture_sizes=[1, 2, 4, *range(8, 257, 8)], max_cudagraph_capture_size=256
        )
        speculative = SimpleNamespace(
            num_speculative_tokens_per_batch_size=None, uses_dynamic_speculative_decoding=lambda: False
        )
        self.vllm_config = SimpleNamespace(
            speculative_config=speculative,
            num_speculative_tokens=20,
            cache_config=SimpleNamespace(use_kda_recoverssm=False),
        )
        self._candidates, self._capture_descs, self._graphs_captured = {}, {}, True
        self._lora_dispatch_map, self._max_lora_case = {}, 0
        self._init_candidates()

    def choose(self, *rows, prefill=False):
        uniform = rows[0] if len(set(rows)) == 1 and not prefill else None
        return self.dispatch(len(rows), sum(rows), uniform, 0, max_query_len=None if prefill else max(rows))


def test_every_width_has_graphs_of_its_own():
    graphs = Graphs((9, 14, 21), mixes=True)
    for width in (9, 14, 21):
        for num_reqs in range(1, 9):
            if width * num_reqs > 256:
                continue
            desc = graphs.choose(*[width] * num_reqs)
            assert desc.cg_mode == CUDAGraphMode.FULL and desc.uniform_token_count == width
            assert desc.num_tokens % width == 0 and desc.num_tokens // width == desc.num_reqs >= num_reqs
            assert captured_query_len(graphs) is None
    assert graphs.decode_query_len == 21 and not graphs.varlen_decode


def test_several_widths_share_a_graph():
    graphs = Graphs((9, 14, 21), mixes=True)
    desc = graphs.choose(9, 14, 21, 9)
    assert desc.cg_mode == CUDAGraphMode.FULL and desc.uniform_token_count is None
    assert desc.max_query_len == 21 == captured_query_len(graphs) and 53 <= desc.num_tokens <= 56
    assert desc.num_reqs == 8
    # A prompt, or a batch in which nobody drafts, has no business there.
    assert graphs.choose(9, 14, 30, prefill=True).cg_mode == CUDAGraphMode.PIECEWISE
    assert graphs.choose(*[1] * 8).cg_mode == CUDAGraphMode.PIECEWISE
    assert captured_query_len(graphs) is None
    assert Graphs((9, 14, 21), mixes=False).choose(9, 14, 21, 9).cg_mode == CUDAGraphMode.PIECEWISE


def test_all_that_is_captured_is_used_and_nothing_twice():
    graphs = Graphs((9, 14, 21), mixes=True)
    for descs in graphs._capture_descs.values():
        assert len(descs) == len(set(descs))
        assert [desc.num_tokens for desc in descs] == sorted((desc.num_tokens for desc in descs), reverse=True)
    captured = {desc for descs in graphs._capture_descs.values() for desc in descs}
    offered = {desc for descs in graphs._candidates.values() for desc in descs}
    assert offered == captured
    for (num_tokens, _), descs in graphs._candidates.items():
        assert len(descs) == len(set(descs)) and all(desc.num_tokens >= num_tokens for desc in descs)


@pytest.mark.parametrize("mode", [CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.NONE])
def test_other_modes(mode):
    graphs = Graphs((9, 14, 21), mixes=True, mode=mode)
    expected = {
        CUDAGraphMode.PIECEWISE: CUDAGraphMode.PIECEWISE,
        CUDAGraphMode.FULL_DECODE_ONLY: CUDAGraphMode.FULL,
        CUDAGraphMode.NONE: CUDAGraphMode.NONE,
    }
    assert graphs.choose(9, 9).cg_mode == graphs.choose(9, 21).cg_mode == expected[mode]


def test_one_width_alone_adds_nothing():
    """The control: without further widths the lists are vLLM's own."""

    class Native(Graphs):
        _init_candidates = CudaGraphManager._init_candidates

    assert Graphs((21,), mixes=True)._capture_descs == Native((21,), mixes=False)._capture_descs
    assert Native((9, 21), mixes=False).choose(9, 9).cg_mode == CUDAGraphMode.PIECEWISE
