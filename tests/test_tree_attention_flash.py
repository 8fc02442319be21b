"""The CUDA backend's wiring, run on a CPU with a plain stand-in for FlashAttention: who attends to what, by which plan.

The stand-in does what FlashAttention 3 does, refuses a plan that was made for another batch, and poisons what it leaves
undefined. Whether the compiled kernels agree is for a GPU to say.
"""

import random
from types import SimpleNamespace

import pytest
import torch
from attention_batches import (
    BLOCK_SIZE,
    Batch,
    Request,
    Shape,
    as_on_a_cpu,
    contemplating,
    expected,
    make_batch,
    verification,
)
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends import flash_attn

from vllm_crossspec.engine.attention import base
from vllm_crossspec.engine.attention import flash as flash_module
from vllm_crossspec.engine.attention.base import DraftTail
from vllm_crossspec.engine.attention.cpu import TreeCpuImpl, TreeCpuMetadata
from vllm_crossspec.engine.attention.flash import (
    TreeFlashBackend,
    TreeFlashImpl,
    TreeFlashMetadata,
    TreeFlashMetadataBuilder,
)
from vllm_crossspec.verify.naive import cap, pack_bits

SHAPE = Shape(4, 2, 32, torch.float32)
SCALE = 0.21
MAX_SPLITS = 8


class Layer(AttentionLayerBase):
    """With the scales that vLLM's own forward reads."""

    def __init__(self, is_draft_layer):
        self.is_draft_layer, self.impl = is_draft_layer, SimpleNamespace(num_heads=SHAPE.heads)
        self._q_scale = self._k_scale = self._v_scale = torch.ones(1)

    def get_attn_backend(self):
        return TreeFlashBackend

    def get_kv_cache_spec(self, vllm_config):
        return None


TARGET, DRAFTER = Layer(False), Layer(True)


def plan(lengths, starts, causal):
    """A work plan: FlashAttention's size, and enough to tell for which batch it was made."""
    entries = torch.zeros(1 + -(-lengths.shape[0] // 4) * 16, dtype=torch.int32)
    entries[0] = 1 + int(causal)
    entries[1 : 1 + lengths.shape[0]] = lengths
    entries[-lengths.shape[0] :] = starts.diff()
    return entries


class Flash:
    """FlashAttention 3 over a paged cache, a request at a time; ``calls`` remembers the arguments."""

    def __init__(self):
        self.calls, self.plans = [], []

    def get_scheduler_metadata(self, *, batch_size, cache_seqlens, cu_seqlens_q, causal, max_seqlen_q, **rest):
        assert cache_seqlens.shape[0] == batch_size == cu_seqlens_q.shape[0] - 1
        assert cu_seqlens_q.diff().max() <= max_seqlen_q
        self.plans.append(rest | {"causal": causal})
        return plan(cache_seqlens, cu_seqlens_q, causal)

    def flash_attn_varlen_func(
        self, *, q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, causal, block_table, **rest
    ):
        self.calls.append(rest | {"causal": causal, "lengths": seqused_k.tolist()})
        schedule = rest["scheduler_metadata"]
        if schedule is not None:
            assert torch.equal(schedule, plan(seqused_k, cu_seqlens_q, causal)), "the plan is another batch's"
        assert rest["fa_version"] == 3 and rest["softmax_scale"] == SCALE
        behind, before = rest["window_size"]
        assert before == -1 if behind == -1 else (before == 0 and causal)
        assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q and int(seqused_k.max()) <= max_seqlen_k
        assert block_table.shape[0] == seqused_k.shape[0] == cu_seqlens_q.shape[0] - 1
        lse = torch.full((q.shape[1], q.shape[0]), torch.nan)
        group = q.shape[1] // k.shape[2]
        bounds = cu_seqlens_q.tolist()
        for index, length in enumerate(seqused_k.tolist()):
            rows = slice(bounds[index], bounds[index + 1])
            if length == 0:
                lse[:, rows] = torch.inf
                continue
            blocks = block_table[index, : -(-length // BLOCK_SIZE)].long()
            keys, values = (x[blocks].flatten(0, 1)[:length].repeat_interleave(group, 1) for x in (k, v))
            logits = cap(torch.einsum("qhd,khd->hqk", q[rows], keys) * SCALE, rest["softcap"])
            if causal:
                num_rows = logits.shape[1]
                seen = torch.ones(num_rows, length).tril(length - num_rows)
                if behind >= 0:
                    seen = seen.triu(length - num_rows - behind)
                logits = logits.masked_fill(~seen.bool(), -torch.inf)
            if rest.get("s_aux") is not None:
                logits = torch.cat([logits, rest["s_aux"][:, None, None].expand(-1, logits.shape[1], 1)], dim=-1)
            lse[:, rows] = logits.logsumexp(-1)
            out[rows] = torch.einsum("hqk,khd->qhd", logits.softmax(-1)[..., :length], values)
        return (out, lse) if rest.get("return_softmax_lse") else out


@pytest.fixture
def flash(monkeypatch):
    """The stand-in, in the place of what vLLM imports on a GPU; afterwards there is no tree source."""
    stand_in = Flash()
    monkeypatch.setattr(flash_attn, "get_flash_attn_version", lambda *_, **__: 3)
    for name in ("flash_attn_varlen_func", "get_scheduler_metadata"):
        monkeypatch.setattr(flash_attn, name, getattr(stand_in, name), raising=False)
    monkeypatch.setattr(flash_module, "is_exact", lambda dtype: False)  # the stand-in takes float32
    yield stand_in
    base.set_tree_source(None)


def make_builder(layers, full_graphs=True, dtype=SHAPE.dtype, cache_dtype="auto"):
    config = SimpleNamespace(
        model_config=SimpleNamespace(rswa_window=None, is_mm_prefix_lm=False, hf_config=SimpleNamespace(model_type="")),
        parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=1),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        compilation_config=SimpleNamespace(
            cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: full_graphs),
            max_cudagraph_capture_size=512,
            static_forward_context=layers,
        ),
        attention_config=SimpleNamespace(flash_attn_max_num_splits_for_cuda_graph=MAX_SPLITS),
        kernel_config=SimpleNamespace(enable_jit_warmup=False),
        scheduler_config=SimpleNamespace(max_num_seqs=32),
    )
    spec = SimpleNamespace(
        num_kv_heads=SHAPE.kv_heads,
        head_size=SHAPE.head_size,
        dtype=dtype,
        block_size=BLOCK_SIZE,
        dcp_sharded=False,
    )
    return TreeFlashMetadataBuilder(spec, list(layers), config, torch.device("cpu"))


def forward(batch: Batch, metadata: TreeFlashMetadata, layer=TARGET) -> torch.Tensor:
    impl = TreeFlashImpl(SHAPE.heads, SHAPE.head_size, SCALE, SHAPE.kv_heads, None, None, "auto")
    out = torch.full_like(batch.query, torch.nan)
    poison = torch.full_like(batch.query[:, : SHAPE.kv_heads], torch.nan)
    # The cache as FlashAttention has it: blocks of tokens with the heads inside, seen the other way round.
    cache = batch.cache.transpose(1, 2).contiguous().transpose(1, 2)
    returned = impl.forward(layer, batch.query, poison, poison, cache, metadata, out)
    assert returned is out and out.isfinite().all()
    return out


def mixed(with_prompts: bool) -> list[Request]:
    rng = random.Random(1)
    trees = [verification(rng, 70, 13), verification(rng, 0, 6), Request(45, 1, []), verification(rng, 33, 40)]
    return trees + [Request(0, 37, None), Request(64, 3, None)] * with_prompts


@pytest.mark.parametrize("full_graphs", [True, False])
@pytest.mark.parametrize("with_prompts", [True, False])
def test_trees_and_the_rest(flash, with_prompts, full_graphs):
    batch = make_batch(SHAPE, mixed(with_prompts), seed=2)
    base.set_tree_source(lambda common, capturing: batch.tail)
    metadata = make_builder({"target": TARGET}, full_graphs).build(0, batch.common())
    out = forward(batch, metadata)
    torch.testing.assert_close(out.double(), expected(batch, SCALE), atol=2e-6, rtol=0)
    assert [call["causal"] for call in flash.calls] == [False] + [True] * with_prompts
    assert all(call["scheduler_metadata"] is not None for call in flash.calls)
    assert {call["num_splits"] for call in flash.calls} == {MAX_SPLITS if full_graphs else 0}
    cpu = TreeCpuImpl(SHAPE.heads, SHAPE.head_size, SCALE, SHAPE.kv_heads)
    fields = {name: getattr(metadata, name) for name in TreeCpuMetadata.__dataclass_fields__ if hasattr(metadata, name)}
    same = cpu.forward(
        TARGET,
        batch.query,
        None,
        None,
        as_on_a_cpu(batch.cache),
        TreeCpuMetadata(num_reqs=len(batch.requests), **fields),
        torch.empty_like(out),
    )
    torch.testing.assert_close(out, same, atol=2e-6, rtol=0)


@pytest.mark.parametrize("with_prompts", [True, False])
def test_contemplate_rows_see_the_layers_soft_prompts(flash, with_prompts):
    requests = [contemplating(r) if r.rows > 1 and r.parents else r for r in mixed(with_prompts)]
    batch = make_batch(SHAPE, requests, seed=12, num_soft=20)
    base.set_tree_source(lambda common, capturing: batch.tail)
    layer = Layer(False)
    layer.soft_prompts = batch.soft
    metadata = make_builder({"target": layer}).build(0, batch.common())
    out = forward(batch, metadata, layer)
    torch.testing.assert_close(out.double(), expected(batch, SCALE), atol=2e-6, rtol=0)
    layer.soft_prompts = batch.soft.flip(2)  # other prompts in each place, but the same ones in all
    torch.testing.assert_close(forward(batch, metadata, layer), out, atol=2e-6, rtol=0)
    layer.soft_prompts = batch.soft.flip(0)
    assert (forward(batch, metadata, layer) - out).abs().max() > 0.1
    # A drafter's first pass is given the same metadata and has no soft prompts.
    drafter = forward(batch, metadata, DRAFTER)
    torch.testing.assert_close(drafter.double(), expected(batch, SCALE, plain=True), atol=2e-6, rtol=0)


def test_a_drafters_first_pass_is_causal_without_a_plan(flash):
    """It runs with the target's metadata, and in a CUDA graph with what was captured of it."""
    batch = make_batch(SHAPE, mixed(with_prompts=True), seed=3)
    base.set_tree_source(lambda common, capturing: batch.tail)
    metadata = make_builder({"target": TARGET, "drafter": DRAFTER}).build(0, batch.common())
    out = forward(batch, metadata, DRAFTER)
    torch.testing.assert_close(out.double(), expected(batch, SCALE, plain=True), atol=2e-6, rtol=0)
    assert [(call["causal"], call["scheduler_metadata"]) for call in flash.calls] == [(True, None)]


@pytest.mark.parametrize("layers", [{"target": TARGET}, {"drafter": DRAFTER}], ids=["target", "drafter"])
def test_without_a_tail_it_is_vllms_own(flash, layers):
    batch = make_batch(SHAPE, [Request(20, 5, None), Request(3, 1, None)], seed=4)
    wrong = make_batch(SHAPE, mixed(with_prompts=False), seed=5)
    base.set_tree_source(lambda common, capturing: wrong.tail if "drafter" in layers else None)
    builder = make_builder(layers)
    metadata = builder.build(0, batch.common())
    assert metadata.target_tail is None
    own = flash_attn.FlashAttentionMetadataBuilder.build(builder, 0, batch.common())
    for name, value in vars(own).items():
        mine = getattr(metadata, name)
        assert torch.equal(mine, value) if isinstance(value, torch.Tensor) else mine == value, name
    out = forward(batch, metadata, next(iter(layers.values())))
    torch.testing.assert_close(out.double(), expected(batch, SCALE), atol=2e-6, rtol=0)


def test_graphs_read_the_plan_of_every_replay_from_one_place(flash):
    """A captured batch and later ones of its shape, padding included; smaller ones must not leave work behind."""
    rng = random.Random(6)
    builder = make_builder({"target": TARGET, "drafter": DRAFTER})
    kept = builder.prefix_schedule
    asked = []

    def build(requests, capturing, num_reqs=6):
        batch = make_batch(SHAPE, requests, seed=7)
        padding = num_reqs - len(requests)
        pad = torch.nn.functional.pad
        common = batch.common()
        common.num_reqs = num_reqs
        common.query_start_loc = torch.cat([batch.query_start_loc, batch.query_start_loc[-1:].repeat(padding)])
        common.seq_lens = pad(batch.seq_lens, (0, padding))
        common.block_table_tensor = pad(batch.block_table, (0, 0, 0, padding))
        prefix_len = pad(batch.tail.prefix_len[: len(requests)], (0, padding + 2))

        def source(_, flag):
            asked.append(flag)
            return batch.tail._replace(prefix_len=prefix_len)

        base.set_tree_source(source)
        return batch, builder.build_for_cudagraph_capture(common) if capturing else builder.build(0, common)

    captured = build([verification(rng, 50, 7)] * 6, capturing=True)[1]
    assert (captured.split_reqs, captured.split_tokens, captured.rest) == (6, 48, None)
    for count in (6, 2, 5):
        requests = [verification(rng, rng.randint(1, 90), 7) for _ in range(count)]
        batch, metadata = build(requests, capturing=False)
        assert metadata.split_reqs == 6
        assert metadata.prefix_schedule.data_ptr() == captured.prefix_schedule.data_ptr() == kept.data_ptr()
        assert metadata.prefix_schedule.shape == captured.prefix_schedule.shape
        assert builder.scheduler_metadata.data_ptr() != kept.data_ptr()
        out = forward(batch, metadata)
        torch.testing.assert_close(out.double(), expected(batch, SCALE), atol=2e-6, rtol=0)
    smaller = build([verification(rng, 30, 7)] * 2, capturing=False, num_reqs=2)[1].prefix_schedule
    assert smaller.shape < captured.prefix_schedule.shape and not kept[smaller.shape[0] :].any()
    assert asked == [True] + [False] * 4
    # A dummy batch that replays the graph has no tail: what it finds must be no work, not another batch's.
    base.set_tree_source(lambda common, capturing: None)
    assert kept.any()
    builder.build(0, make_batch(SHAPE, [Request(20, 8, None)], seed=11).common())
    assert not kept.any()


@pytest.mark.parametrize("has_shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("causal", [False, True], ids=["planned", "unplanned"])
def test_a_level_of_a_draft_tree(flash, causal, has_shared):
    """As the CPU backend, whose test compares it with the whole tree; the plan is used if made without a mask."""
    width, num_reqs = 3, 2
    batch = make_batch(SHAPE, [Request(40, 1, None), Request(7, 1, None)], seed=8)
    starts = torch.arange(0, num_reqs * width + 1, width, dtype=torch.int32)
    common = batch.common(causal=causal)
    common.query_start_loc, common.max_query_len, common.num_actual_tokens = starts, width, num_reqs * width
    metadata = make_builder({"drafter": DRAFTER}).build(0, common)
    generator = torch.Generator().manual_seed(9)
    key, value = torch.randn(2, num_reqs * width, SHAPE.kv_heads, SHAPE.head_size, generator=generator)
    query = torch.randn(num_reqs * width, SHAPE.heads, SHAPE.head_size, generator=generator)
    bits = torch.zeros(num_reqs * width, 32, dtype=torch.bool)
    bits[:, :width] = torch.eye(width).bool().repeat(num_reqs, 1)
    bits[:, width : 2 * width] = bits[:, :width].roll(1, dims=0)
    bits[:, 0] |= has_shared
    outs = []
    for impl in (
        TreeFlashImpl(SHAPE.heads, SHAPE.head_size, SCALE, SHAPE.kv_heads, None, None, "auto"),
        TreeCpuImpl(SHAPE.heads, SHAPE.head_size, SCALE, SHAPE.kv_heads),
    ):
        scratch = torch.randn(num_reqs, 8, 2, SHAPE.kv_heads, SHAPE.head_size, generator=generator.manual_seed(10))
        length = torch.tensor([2 * width], dtype=torch.int32)
        level = DraftTail(scratch, pack_bits(bits), length, num_reqs, width, has_shared)
        if isinstance(impl, TreeFlashImpl):
            metadata.draft_tail = level
            given = metadata
        else:
            fields = {
                name: getattr(metadata, name)
                for name in TreeCpuMetadata.__dataclass_fields__
                if hasattr(metadata, name)
            }
            given = TreeCpuMetadata(num_reqs=num_reqs, **(fields | {"draft_tail": level}))
        out = torch.full_like(query, torch.nan)
        cache = batch.cache if isinstance(impl, TreeFlashImpl) else as_on_a_cpu(batch.cache)
        outs.append(impl.forward(DRAFTER, query, key, value, cache, given, out))
    torch.testing.assert_close(*outs, atol=2e-6, rtol=0)
    assert flash.calls[-1]["causal"] is False
    assert (flash.calls[-1]["scheduler_metadata"] is None) == causal


def test_graphs_hold_verification_rows_only():
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=60, parallel_drafting=False),
        use_v2_model_runner=True,
    )
    assert TreeFlashMetadataBuilder.get_cudagraph_support(config, None) is AttentionCGSupport.UNIFORM_BATCH
    assert TreeFlashMetadataBuilder.get_varlen_cudagraph_max_query_len(config, None) == 61
    assert TreeFlashBackend.get_name() == "FLASH_ATTN"
