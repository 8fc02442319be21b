"""The CUDA backend's wiring, run on a CPU with a plain stand-in for FlashAttention: who attends to what, by which plan.

The stand-in does what FlashAttention 3 does, refuses a plan that was made for another batch, and poisons what it leaves
undefined. Whether the compiled kernels agree is for a GPU to say.
"""

import random
from types import SimpleNamespace

import attention_batches as made
import pytest
import torch
from attention_batches import BLOCK_SIZE, FORMS, PLAIN, SCALE, SINKS, Batch, Layer, Request, Shape
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends import flash_attn

from vllm_crossspec.trees.attention import base
from vllm_crossspec.trees.attention import flash as flash_module
from vllm_crossspec.trees.attention.flash import (
    TreeFlashBackend,
    TreeFlashImpl,
    TreeFlashMetadata,
    TreeFlashMetadataBuilder,
)
from vllm_crossspec.trees.verify.naive import cap
from vllm_crossspec.trees.verify.tail_attention import Scales

SHAPE = Shape(4, 2, 32, torch.float32)
MAX_SPLITS = 8


def layer_of(is_draft_layer, scales=None):
    return Layer(is_draft_layer, SimpleNamespace(num_heads=SHAPE.heads), TreeFlashBackend, scales)


TARGET, DRAFTER = layer_of(False), layer_of(True)
FP8_SCALES = Scales(torch.tensor(0.02), torch.tensor(0.013), torch.tensor(0.4))


def plan(lengths, starts, causal):
    """A work plan: FlashAttention's size, and enough to tell for which batch it was made."""
    entries = torch.zeros(1 + -(-lengths.shape[0] // 4) * 16, dtype=torch.int32)
    entries[0] = 1 + int(causal)
    entries[1 : 1 + lengths.shape[0]] = lengths
    entries[-lengths.shape[0] :] = starts.diff()
    return entries


class Flash:
    """FlashAttention 3 over a paged cache, a request at a time; ``calls`` remembers the arguments.

    Over float8, queries, keys and values each have their scales by request and head.
    """

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
        if k.dtype == torch.float8_e4m3fn:
            scales = [rest[f"{part}_descale"] for part in "qkv"]
            assert q.dtype == v.dtype == k.dtype
            assert {x.shape for x in scales} == {(seqused_k.shape[0], SHAPE.kv_heads)}
            q, k, v = (x.float() * scale[0, 0] for x, scale in zip((q, k, v), scales, strict=True))
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
    for asked in ("flash_attn_supports_kv_cache_dtype", "flash_attn_supports_sinks"):
        monkeypatch.setattr(flash_attn, asked, lambda *_, **__: True, raising=False)
    for function in ("flash_attn_varlen_func", "get_scheduler_metadata"):
        monkeypatch.setattr(flash_attn, function, getattr(stand_in, function), raising=False)
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
    sizes = {"num_kv_heads": SHAPE.kv_heads, "head_size": SHAPE.head_size, "block_size": BLOCK_SIZE}
    spec = SimpleNamespace(**sizes, dtype=dtype, dcp_sharded=False)
    return TreeFlashMetadataBuilder(spec, list(layers), config, torch.device("cpu"))


def forward(
    batch: Batch, metadata: TreeFlashMetadata, layer=TARGET, form=PLAIN, kind="auto", key=None, value=None
) -> torch.Tensor:
    window, soft_cap = form.window or None, form.soft_cap or None
    impl = TreeFlashImpl(
        SHAPE.heads, SHAPE.head_size, SCALE, SHAPE.kv_heads, None, window, kind, soft_cap, sinks=form.sinks
    )
    out = torch.full(batch.query.shape, torch.nan)
    poison = torch.full_like(out[:, : SHAPE.kv_heads], torch.nan)
    # The cache as FlashAttention has it: blocks of tokens with the heads inside, seen the other way round.
    cache = batch.cache if kind == "auto" else batch.cache.view(torch.uint8)
    cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
    key, value = (poison if x is None else x for x in (key, value))
    assert impl.forward(layer, batch.query, key, value, cache, metadata, out) is out and out.isfinite().all()
    return out


def close(found, wanted, atol=2e-6):
    torch.testing.assert_close(found.double(), wanted.double(), atol=atol, rtol=0)


def mixed(with_prompts: bool) -> list[Request]:
    rng = random.Random(1)
    trees = [
        made.verification(rng, 70, 13),
        made.verification(rng, 0, 6),
        Request(45, 1, []),
        made.verification(rng, 33, 40),
    ]
    return trees + [Request(0, 37, None), Request(64, 3, None)] * with_prompts


@pytest.mark.parametrize("full_graphs", [True, False])
@pytest.mark.parametrize("with_prompts", [True, False])
def test_trees_and_the_rest(flash, with_prompts, full_graphs):
    batch = made.make_batch(SHAPE, mixed(with_prompts), seed=2)
    base.set_tree_source(lambda common, capturing: batch.tail)
    metadata = make_builder({"target": TARGET}, full_graphs).build(0, batch.common())
    out = forward(batch, metadata)
    close(out, made.expected(batch))
    assert [call["causal"] for call in flash.calls] == [False] + [True] * with_prompts
    assert all(call["scheduler_metadata"] is not None for call in flash.calls)
    assert {call["num_splits"] for call in flash.calls} == {MAX_SPLITS if full_graphs else 0}
    cache, same = made.as_on_a_cpu(batch.cache), torch.empty_like(out)
    made.implementation(SHAPE).forward(TARGET, batch.query, None, None, cache, made.metadata_of(batch), same)
    close(out, same)


@pytest.mark.parametrize("is_exact", [False, True], ids=["flash", "float32"])
@pytest.mark.parametrize("with_prompts", [True, False])
@pytest.mark.parametrize("form", FORMS, ids=made.name)
def test_sliding_trees(flash, form, with_prompts, is_exact, monkeypatch):
    """Which pass is FlashAttention's, with what; and all rows as by definition."""
    form = form._replace(sinks=None if form.sinks is None else SINKS[:4])
    monkeypatch.setattr(flash_module, "is_exact", lambda dtype: is_exact)
    batch = made.make_batch(SHAPE, mixed(with_prompts), seed=12)
    base.set_tree_source(lambda common, capturing: batch.tail)
    impl = TreeFlashImpl(4, 32, SCALE, 2, None, form.window or None, "auto")
    monkeypatch.setattr(flash_attn, "_get_sliding_window_configs", lambda config: {impl.sliding_window})
    out = forward(batch, make_builder({"target": TARGET}).build(0, batch.common()), form=form)
    close(out, made.expected(batch, form), 1e-5)
    if not is_exact:
        kinds = [(call["causal"], call["window_size"], call.get("s_aux") is not None) for call in flash.calls]
        prefix = [] if form.window else [(False, [-1, -1], False)]
        behind = [form.window - 1, 0] if form.window else [-1, -1]
        assert kinds == prefix + [(True, behind, form.sinks is not None)] * with_prompts
    for wrong in made.wrong_forms(form, int(batch.seq_lens.max())):
        assert (out - made.expected(batch, wrong)).abs().max() > 1e-3, made.name(wrong)


@pytest.mark.parametrize("window", [0, 24])
def test_fp8_trees(flash, window):
    """Prefix and rest are FlashAttention's, planned for float8; a window's prefix and the tails are ours."""
    layer, form = layer_of(False, FP8_SCALES), PLAIN._replace(window=window)
    batch = made.make_batch(SHAPE, mixed(with_prompts=not window), seed=2)
    batch, exact = made.quantised_batch(batch, "fp8", layer, layer._q_scale)
    base.set_tree_source(lambda common, capturing: batch.tail)
    metadata = make_builder({"target": layer}, dtype=torch.uint8, cache_dtype="fp8").build(0, batch.common())
    whole = made.expected(exact, form)
    close(forward(batch, metadata, layer, form, "fp8"), whole, 1e-5)
    assert {plan["qkv_dtype"] for plan in flash.plans} == {torch.float8_e4m3fn}
    assert [call["causal"] for call in flash.calls] == ([] if window else [False, True])
    for wrong in made.wrong_scales(FP8_SCALES):
        assert (forward(batch, metadata, layer_of(False, wrong), form, "fp8") - whole).abs().max() > 0.05


@pytest.mark.parametrize("with_prompts", [True, False])
def test_contemplate_rows_see_the_layers_soft_prompts(flash, with_prompts):
    requests = [made.contemplating(r) if r.rows > 1 and r.parents else r for r in mixed(with_prompts)]
    batch = made.make_batch(SHAPE, requests, seed=12, num_soft=20)
    base.set_tree_source(lambda common, capturing: batch.tail)
    layer = layer_of(False)
    layer.soft_prompts = batch.soft
    metadata = make_builder({"target": layer}).build(0, batch.common())
    out = forward(batch, metadata, layer)
    close(out, made.expected(batch))
    layer.soft_prompts = batch.soft.flip(2)  # other prompts in each place, but the same ones in all
    close(forward(batch, metadata, layer), out)
    layer.soft_prompts = batch.soft.flip(0)
    assert (forward(batch, metadata, layer) - out).abs().max() > 0.1
    # A drafter's first pass is given the same metadata and has no soft prompts.
    close(forward(batch, metadata, DRAFTER), made.expected(batch, plain=True))


def test_a_drafters_first_pass_is_causal_without_a_plan(flash):
    """It runs with the target's metadata, and in a CUDA graph with what was captured of it."""
    batch = made.make_batch(SHAPE, mixed(with_prompts=True), seed=3)
    base.set_tree_source(lambda common, capturing: batch.tail)
    metadata = make_builder({"target": TARGET, "drafter": DRAFTER}).build(0, batch.common())
    close(forward(batch, metadata, DRAFTER), made.expected(batch, plain=True))
    assert [(call["causal"], call["scheduler_metadata"]) for call in flash.calls] == [(True, None)]


@pytest.mark.parametrize("layers", [{"target": TARGET}, {"drafter": DRAFTER}], ids=["target", "drafter"])
def test_without_a_tail_it_is_vllms_own(flash, layers):
    batch = made.make_batch(SHAPE, [Request(20, 5, None), Request(3, 1, None)], seed=4)
    wrong = made.make_batch(SHAPE, mixed(with_prompts=False), seed=5)
    base.set_tree_source(lambda common, capturing: wrong.tail if "drafter" in layers else None)
    builder = make_builder(layers)
    metadata = builder.build(0, batch.common())
    assert metadata.target_tail is None
    own = flash_attn.FlashAttentionMetadataBuilder.build(builder, 0, batch.common())
    for field, value in vars(own).items():
        mine = getattr(metadata, field)
        assert torch.equal(mine, value) if isinstance(value, torch.Tensor) else mine == value, field
    close(forward(batch, metadata, next(iter(layers.values()))), made.expected(batch))


def test_graphs_read_the_plan_of_every_replay_from_one_place(flash):
    """A captured batch and later ones of its shape, padding included; smaller ones must not leave work behind."""
    rng = random.Random(6)
    builder = make_builder({"target": TARGET, "drafter": DRAFTER})
    kept = builder.prefix_schedule
    asked = []

    def build(requests, capturing, num_reqs=6):
        batch = made.make_batch(SHAPE, requests, seed=7)
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

    captured = build([made.verification(rng, 50, 7)] * 6, capturing=True)[1]
    assert (captured.target_tail.num_reqs, captured.target_tail.num_tokens, captured.rest) == (6, 48, None)
    for count in (6, 2, 5):
        requests = [made.verification(rng, rng.randint(1, 90), 7) for _ in range(count)]
        batch, metadata = build(requests, capturing=False)
        assert metadata.target_tail.num_reqs == 6
        assert metadata.prefix_schedule.data_ptr() == captured.prefix_schedule.data_ptr() == kept.data_ptr()
        assert metadata.prefix_schedule.shape == captured.prefix_schedule.shape
        assert builder.scheduler_metadata.data_ptr() != kept.data_ptr()
        close(forward(batch, metadata), made.expected(batch))
    smaller = build([made.verification(rng, 30, 7)] * 2, capturing=False, num_reqs=2)[1].prefix_schedule
    assert smaller.shape < captured.prefix_schedule.shape and not kept[smaller.shape[0] :].any()
    assert asked == [True] + [False] * 4
    # A dummy batch that replays the graph has no tail: what it finds must be no work, not another batch's.
    base.set_tree_source(lambda common, capturing: None)
    assert kept.any()
    builder.build(0, made.make_batch(SHAPE, [Request(20, 8, None)], seed=11).common())
    assert not kept.any()


@pytest.mark.parametrize("has_shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize(("kind", "causal"), [("auto", False), ("auto", True), ("fp8", False)])
def test_a_level_of_a_draft_tree(flash, kind, causal, has_shared):
    """Its plan is used if it was made without a mask. Over a cache in float8 the tree's own rows are not."""
    width, num_reqs, prefixes = 3, 2, (40, 7)
    layer = layer_of(True, FP8_SCALES if kind == "fp8" else None)
    exact = batch = made.make_batch(SHAPE, [Request(prefix, width, None) for prefix in prefixes], seed=8)
    if kind == "fp8":
        batch, exact = made.quantised_batch(batch, kind, layer, layer._q_scale)
    common = batch.common(causal=causal)
    common.seq_lens = torch.tensor(prefixes, dtype=torch.int32)
    dtype = torch.uint8 if kind == "fp8" else SHAPE.dtype
    metadata = make_builder({"drafter": layer}, dtype=dtype, cache_dtype=kind).build(0, common)
    generator = torch.Generator().manual_seed(9)
    key, value = torch.randn(2, num_reqs * width, SHAPE.kv_heads, SHAPE.head_size, generator=generator)
    scratch = torch.randn(num_reqs, 8, 2, SHAPE.kv_heads, SHAPE.head_size, generator=generator)
    seen = torch.zeros(num_reqs, width, 32, dtype=torch.bool)
    seen[..., :width] = torch.eye(width).bool()
    seen[..., width : 2 * width] = torch.eye(width).bool().roll(1, dims=0)
    seen[..., 0] |= has_shared
    metadata.draft_tail = made.draft_tail(scratch, seen, 2 * width, has_shared)
    out = forward(batch, metadata, layer, kind=kind, key=key, value=value)
    for index, prefix in enumerate(prefixes):
        rows = slice(index * width, (index + 1) * width)
        content = torch.cat([exact.dense[index][:prefix], scratch[index, : 2 * width]])
        mask = torch.cat([torch.ones(width, prefix, dtype=torch.bool), seen[index, :, : 2 * width]], dim=1)
        close(out[rows], made.masked_softmax(exact.query[rows], content, mask), 2e-6 if kind == "auto" else 1e-5)
    level = torch.stack([key, value], dim=1).unflatten(0, (num_reqs, width))
    places = [*range(width + 1, 2 * width), 0] if has_shared else range(width, 2 * width)
    assert torch.equal(scratch[:, list(places)], level)
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
