"""Tree attention on CPU against a masked softmax, FlexAttention and vLLM's own kernel, in both of its modes."""

import dataclasses
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
    masked_softmax,
    ordinary_rows,
    random_parents,
    verification,
    without_contemplation,
)
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from two_passes import in_two_passes
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_crossspec.engine.attention import base, cpu, scratch
from vllm_crossspec.engine.attention.base import DraftTail
from vllm_crossspec.engine.attention.cpu import (
    TreeCpuBackend,
    TreeCpuImpl,
    TreeCpuMetadata,
    TreeCpuMetadataBuilder,
)
from vllm_crossspec.verify.naive import ancestors_of, pack_bits

TARGET, DRAFTER = SimpleNamespace(is_draft_layer=False), SimpleNamespace(is_draft_layer=True)
SHAPES = [
    Shape(4, 2, 32, torch.float32),
    Shape(6, 2, 32, torch.float32),
    Shape(3, 3, 64, torch.float32),
    Shape(8, 1, 128, torch.bfloat16),
    Shape(4, 4, 80, torch.bfloat16),
]
SCALE = 0.21
# Outputs reach 4, where a step of bfloat16 is 1/64; two passes round the prefix's output and the weights, too.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2 / 64}


@pytest.fixture(params=[False, True], ids=["one-pass", "two-passes"])
def two_passes(request, monkeypatch):
    """The CPU backend, and in its place the GPU's algorithm and kernel."""
    if request.param:
        monkeypatch.setattr(TreeCpuImpl, "forward", in_two_passes(TreeCpuImpl.forward))
    return request.param


def implementation(shape: Shape, **options) -> TreeCpuImpl:
    return TreeCpuImpl(shape.heads, shape.head_size, SCALE, shape.kv_heads, **options)


def metadata_of(batch: Batch, **changes) -> TreeCpuMetadata:
    common = vars(batch.common())
    fields = {name: common[name] for name in TreeCpuMetadata.__dataclass_fields__ if name in common}
    return TreeCpuMetadata(**(fields | {"block_table": batch.block_table, "target_tail": batch.tail} | changes))


def attend(batch: Batch, layer=TARGET, impl=None, **changes) -> torch.Tensor:
    """Run a layer; the output and the rows that it is not to read begin as NaN."""
    poison = torch.full_like(batch.query, torch.nan)
    impl = impl or implementation(batch.shape)
    cache, metadata = as_on_a_cpu(batch.cache), metadata_of(batch, **changes)
    out = impl.forward(layer, batch.query, poison, poison, cache, metadata, poison.clone())
    assert out.isfinite().all()
    return out


def mixed(seed: int) -> list[Request]:
    """Trees, a request without drafts, a placeholder chain and two chunks of prompts."""
    rng = random.Random(seed)
    return [
        verification(rng, 70, 13),
        verification(rng, BLOCK_SIZE, 31),
        verification(rng, 1, 5),
        Request(45, 1, []),
        Request(9, 8, list(range(7))),
        Request(0, 37, None),
        Request(64, 3, None),
    ]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_sees_its_prefix_and_its_ancestors(shape, two_passes):
    batch = make_batch(shape, mixed(seed=1), seed=2)
    out = attend(batch)
    torch.testing.assert_close(out.double(), expected(batch, SCALE), atol=TOLERANCE[shape.dtype], rtol=0)


@pytest.mark.parametrize("num_nodes", [1, 63, 64, 130, 255])
def test_wide_trees(num_nodes, two_passes):
    rng = random.Random(num_nodes)
    shape = SHAPES[0]
    batch = make_batch(shape, [verification(rng, 40, num_nodes), verification(rng, 33, num_nodes)], seed=3, num_words=8)
    torch.testing.assert_close(attend(batch).double(), expected(batch, SCALE), atol=2e-6, rtol=0)


@pytest.mark.parametrize("seed", range(4))
def test_flex_attention_agrees(seed, two_passes):
    """PyTorch's own masked attention, which knows the tree by its parents only."""
    rng = random.Random(seed)
    shape = SHAPES[seed % 3]
    request = verification(rng, rng.randint(1, 90), rng.randint(1, 40))
    batch = make_batch(shape, [request], seed=seed)
    assert request.parents is not None
    lines = [[row, *ancestors_of(row, request.parents)] for row in range(request.rows)]
    ancestry = torch.tensor([[other in line for other in range(request.rows)] for line in lines])

    def mask(batch_index, head, row, key):
        node = (key - request.prefix).clamp(min=0)
        return (key < request.prefix) | ancestry[row, node]

    keys, values = batch.dense[0].permute(1, 2, 0, 3)
    block_mask = create_block_mask(mask, None, None, request.rows, keys.shape[1], device="cpu")
    query = batch.query.transpose(0, 1)[None]
    oracle = flex_attention(query, keys[None], values[None], block_mask=block_mask, scale=SCALE, enable_gqa=True)
    torch.testing.assert_close(attend(batch), oracle[0].transpose(0, 1), atol=2e-6, rtol=0)


def test_dead_rows_see_the_root_and_themselves(two_passes):
    """Rows past the live nodes: their answer is not used, but it must be a number and not disturb the others."""
    rng = random.Random(5)
    parents = random_parents(rng, 9) + [0] * 6
    batch = make_batch(SHAPES[0], [Request(20, 16, parents), Request(50, 16, [0] * 15)], seed=6)
    torch.testing.assert_close(attend(batch).double(), expected(batch, SCALE), atol=2e-6, rtol=0)


def test_a_drafters_layer_ignores_the_targets_tail(two_passes):
    batch = make_batch(SHAPES[0], mixed(seed=7), seed=8)
    out = attend(batch, DRAFTER)
    torch.testing.assert_close(out.double(), expected(batch, SCALE, plain=True), atol=2e-6, rtol=0)
    assert torch.equal(out, attend(batch, target_tail=None))


def test_the_target_ignores_a_drafters_tail():
    batch = make_batch(SHAPES[0], [Request(30, 4, None)], seed=9)
    level = DraftTail(torch.empty(0), torch.empty(0), torch.ones(1, dtype=torch.int32), 1, 4)
    assert torch.equal(attend(batch, draft_tail=level, target_tail=None), attend(batch, target_tail=None))


def test_padding_of_a_graph_is_left_alone(two_passes):
    """Requests without rows or tokens behind the real ones."""
    batch = make_batch(SHAPES[0], mixed(seed=10)[:3], seed=11)
    pad = torch.nn.functional.pad
    padded = {
        "num_reqs": 5,
        "query_start_loc": torch.cat([batch.query_start_loc, batch.query_start_loc[-1:].repeat(2)]),
        "seq_lens": pad(batch.seq_lens, (0, 2)),
        "block_table": pad(batch.block_table, (0, 0, 0, 2)),
        "target_tail": batch.tail._replace(num_reqs=5, prefix_len=pad(batch.tail.prefix_len[:3], (0, 2))),
    }
    assert torch.equal(attend(batch, **padded), attend(batch))


# -- contemplate rows -------------------------------------------------------------------------------------------------


def contemplation(shape: Shape, num_soft: int, seed: int) -> Batch:
    """Requests with contemplate rows beside some without and chunks of prompts."""
    requests = mixed(seed)
    return make_batch(
        shape, [contemplating(r) for r in requests[:3]] + requests[3:], seed, num_words=None, num_soft=num_soft
    )


def softened(batch: Batch) -> SimpleNamespace:
    """A layer of the target with the batch's soft prompts."""
    return SimpleNamespace(is_draft_layer=False, soft_prompts=batch.soft)


@pytest.mark.parametrize(("shape", "num_soft"), list(zip(SHAPES, [1, 40, 16, 16, 33], strict=True)), ids=str)
def test_contemplate_rows_see_soft_prompts(shape, num_soft, two_passes):
    batch = contemplation(shape, num_soft, seed=20)
    out = attend(batch, softened(batch))
    torch.testing.assert_close(out.double(), expected(batch, SCALE), atol=TOLERANCE[shape.dtype], rtol=0)
    # The comparison can fail: without soft prompts contemplate rows, and they alone, are others.
    words = batch.tail.row_mask.shape[1] - -(-num_soft // 32)
    without = attend(batch, target_tail=batch.tail._replace(row_mask=batch.tail.row_mask[:, :words].contiguous()))
    changed = ((out - without).abs().amax((1, 2)) > 10 * TOLERANCE[shape.dtype]).nonzero().flatten()
    assert len(changed) and not torch.isin(changed, ordinary_rows(batch)).any()


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.dtype == torch.float32], ids=str)
@pytest.mark.parametrize("num_nodes", [1, 8, 31, 60])
def test_ordinary_rows_are_the_same_bits_with_and_without_contemplate_rows(shape, num_nodes):
    rng = random.Random(num_nodes)
    requests = [contemplating(verification(rng, prefix, num_nodes)) for prefix in (40, 97, 3)]
    batch = make_batch(shape, [*requests, Request(45, 1, []), Request(64, 3, None)], seed=21, num_soft=16)
    alone = without_contemplation(batch)
    torch.testing.assert_close(attend(alone).double(), expected(alone, SCALE), atol=2e-6, rtol=0)
    rows = ordinary_rows(batch)
    assert torch.equal(attend(batch, softened(batch))[rows], attend(alone))
    # An ordinary row that sees a contemplate row, or the soft prompts, is another.
    for bits in (1 << (num_nodes + 1) % 32, -1):
        mask = batch.tail.row_mask.clone()
        mask[1, (num_nodes + 1) // 32 if bits > 0 else -1] |= bits
        found = attend(batch, softened(batch), target_tail=batch.tail._replace(row_mask=mask))[rows]
        assert (found[1] - attend(alone)[1]).abs().max() > 1e-3, bits
        torch.testing.assert_close(found[2:], attend(alone)[2:], atol=2e-6, rtol=0)


# -- drafters ---------------------------------------------------------------------------------------------------------


def test_a_drafters_layer_reads_its_lengths_in_every_pass():
    """A chain drafter's positions move on in place, under metadata that was made once."""
    shape = SHAPES[0]
    batch = make_batch(shape, [Request(40, 1, None), Request(70, 1, None)], seed=14)
    metadata, impl = metadata_of(batch, target_tail=None), implementation(shape)
    first, second = (torch.empty_like(batch.query) for _ in range(2))
    cache = as_on_a_cpu(batch.cache)
    impl.forward(DRAFTER, batch.query, None, None, cache, metadata, first)
    metadata.seq_lens -= 3
    impl.forward(DRAFTER, batch.query, None, None, cache, metadata, second)
    for row, dense in enumerate(batch.dense):
        whole = torch.ones(1, len(dense) - 3, dtype=torch.bool)
        alone = masked_softmax(batch.query[row : row + 1], dense[:-3], whole, SCALE)
        torch.testing.assert_close(second[row : row + 1].double(), alone, atol=2e-6, rtol=0)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("in_lane", [True, False], ids=["lane", "torch"])
@pytest.mark.parametrize("has_shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[1], SHAPES[3]], ids=str)
def test_levels_of_a_draft_tree_equal_the_whole_tree(shape, has_shared, in_lane, two_passes, monkeypatch):
    """Three levels of different beams, each written once and read by those below it, against one masked softmax.

    A shared entry is written anew by every level, before all nodes, and seen by all of them.
    """
    if not in_lane:
        monkeypatch.setattr(cpu, "lane_ops", lambda: None)
    width, num_reqs, depth = 3, 3, 3
    rng = random.Random(12)
    batch = make_batch(shape, [Request(prefix, 1, None) for prefix in (40, 7, 95)], seed=13)
    rows = torch.full((num_reqs + 1, 16, 2, shape.kv_heads, shape.head_size), torch.nan, dtype=shape.dtype)
    cache, impl = as_on_a_cpu(batch.cache), implementation(shape)
    before = cache.clone()
    parents = [[rng.choice(range(-1, 0)) for _ in range(width)] for _ in range(num_reqs)]
    written = torch.randn(num_reqs, depth * width, 2, shape.kv_heads, shape.head_size).to(shape.dtype)
    extra = int(has_shared)
    shared, queries = torch.randn_like(written[:, :depth]), width + extra
    bounds = torch.arange(0, num_reqs * queries + 1, queries, dtype=torch.int32)
    metadata = metadata_of(batch, causal=False, query_start_loc=bounds)
    for level in range(depth):
        first, length = level * width, (level + 1) * width
        if level:
            for tree in parents:
                tree += [rng.randrange(first - width, first) for _ in range(width)]
        seen = torch.zeros(num_reqs, queries, 32, dtype=torch.bool)
        seen[..., :extra] = True
        for request, tree in enumerate(parents):
            for beam in range(width):
                node = first + beam
                while node >= 0:
                    seen[request, beam, extra + node] = True
                    node = tree[node]
        query = torch.randn(num_reqs * queries, shape.heads, shape.head_size).to(shape.dtype)
        entry = shared[:, level : level + extra]
        keys, values = torch.cat([written[:, first:length], entry], dim=1).flatten(0, 1).unbind(1)
        tail_length = torch.tensor([length + extra], dtype=torch.int32)
        tail = DraftTail(rows, pack_bits(seen.flatten(0, 1)), tail_length, num_reqs, queries, has_shared)
        metadata = dataclasses.replace(metadata, draft_tail=tail)
        out = impl.forward(
            DRAFTER,
            query,
            keys,
            values,
            cache,
            metadata,
            torch.full_like(query, torch.nan),
        )
        for request in range(num_reqs):
            content = torch.cat([batch.dense[request], entry[request], written[request, :length]])
            mask = torch.ones(queries, content.shape[0], dtype=torch.bool)
            mask[:, -length - extra :] = seen[request, :, : length + extra]
            mine = slice(request * queries, (request + 1) * queries)
            whole = masked_softmax(query[mine], content, mask, SCALE)
            torch.testing.assert_close(out[mine].double(), whole, atol=TOLERANCE[shape.dtype], rtol=0)
    assert torch.equal(cache, before), "a draft was written to the cache"
    assert rows[num_reqs:].isnan().all() and rows[:, extra + depth * width :].isnan().all()


@pytest.mark.parametrize("head_size", [1, 24, 64])
@pytest.mark.parametrize("length", [5, 8, 13, 2, 40])
@pytest.mark.parametrize("has_shared", [False, True])
def test_kernel_that_writes_a_level_against_its_twin(length, head_size, has_shared):
    """The last two lengths do not fit: what a stale graph may find must not be written anywhere."""
    num_reqs, queries, heads, capacity = 3, 5, 2, 13
    fused = torch.randn(num_reqs * queries, 3 * heads, head_size)
    key, held = fused[:, :heads], torch.tensor([length], dtype=torch.int32)
    filled = []
    for write in (scratch.write_level, scratch.write_level_naive):
        target = torch.full((num_reqs + 2, capacity, 2, heads, head_size), -7777.0)
        write(key, fused[:, 2 * heads :], DraftTail(target, torch.empty(0), held, num_reqs, queries, has_shared))
        filled.append(target)
    assert torch.equal(*filled)
    written = (filled[0][:num_reqs] != -7777).flatten(2).any(2)
    level = range(max(length - queries + has_shared, 0), min(length, capacity))
    expected_rows = [row in level or (has_shared and row == 0) for row in range(capacity)]
    assert written.tolist() == [expected_rows] * num_reqs and (filled[0][num_reqs:] == -7777).all()
    if has_shared:
        assert torch.equal(filled[0][:num_reqs, 0, 0], key[queries - 1 :: queries])


# -- vLLM's own CPU attention -----------------------------------------------------------------------------------------


def native(batch: Batch, causal: bool, window: int) -> torch.Tensor:
    """vLLM's kernel on the same tokens, in a cache that it laid out itself."""
    from vllm import _custom_ops as ops

    shape, isa = batch.shape, "vec"
    cache = torch.zeros(batch.cache.shape[0], shape.kv_heads, 2 * BLOCK_SIZE, shape.head_size, dtype=shape.dtype)
    keys, values = cache.chunk(2, dim=2)
    for content, blocks in zip(batch.dense, batch.block_table.long(), strict=True):
        place = torch.arange(content.shape[0])
        slots = blocks[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE
        ops.cpu_attn_reshape_and_cache(content[:, 0].contiguous(), content[:, 1].contiguous(), keys, values, slots, isa)
    out = torch.empty_like(batch.query)
    schedule = ops.cpu_attn_get_scheduler_metadata(
        len(batch.requests),
        shape.heads,
        shape.kv_heads,
        shape.head_size,
        batch.seq_lens,
        shape.dtype,
        batch.query_start_loc,
        causal,
        window,
        isa,
        True,
    )
    ops.cpu_attention_with_kv_cache(
        batch.query,
        keys,
        values,
        out,
        batch.query_start_loc,
        batch.seq_lens,
        SCALE,
        causal,
        None,
        window,
        batch.block_table,
        0,
        schedule,
        None,
    )
    return out


@pytest.mark.parametrize("window", [None, 11], ids=["full", "window"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "non-causal"])
def test_without_trees_it_is_vllms_own_attention(causal, window, two_passes):
    shape = Shape(4, 2, 64, torch.float32)
    requests = [Request(60, 8, None), Request(33, 1, None), Request(0, 20, None), Request(5, 8, None)]
    batch = make_batch(shape, requests, seed=14)
    impl = implementation(shape, sliding_window=window)
    out = attend(batch, DRAFTER, impl, causal=causal, target_tail=None)
    torch.testing.assert_close(out, native(batch, causal, -1 if window is None else window), atol=1e-5, rtol=0)
    flags = torch.full((4,), int(causal), dtype=torch.int32)
    assert torch.equal(out, attend(batch, DRAFTER, impl, causal=flags, target_tail=None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_size", [64, 80])
def test_keys_and_values_are_written_where_they_are_read(head_size, dtype):
    """By vLLM's kernel, of any of its orders for this processor; what our own products read are the views."""
    shape = Shape(4, 2, head_size, dtype)
    cache = torch.full((4, shape.kv_heads, BLOCK_SIZE, 2 * head_size), -7777.0, dtype=dtype)
    impl, (keys, values) = implementation(shape), TreeCpuImpl.kv_views(cache)
    key, value = torch.randn(2, 5, shape.kv_heads, head_size)
    impl.do_kv_cache_update(TARGET, key, value, cache, torch.tensor([BLOCK_SIZE + 3, -1, 0]))
    for row, (block, token) in {0: (1, 3), 2: (0, 0)}.items():
        assert torch.equal(keys[block, :, token], key[row].to(dtype))
        assert torch.equal(values[block, :, token], value[row].to(dtype))
    assert (cache != -7777).sum() == 2 * 2 * key[0].numel()
    before = cache.clone()
    impl.do_kv_cache_update(TARGET, key, value, cache, torch.full((3,), -1))
    assert torch.equal(cache, before), "padding was written"


# -- the hook, registration, refusals ---------------------------------------------------------------------------------


class Layer(AttentionLayerBase):
    """Of a model: what the builders and the refusals look at."""

    def __init__(self, impl, is_draft_layer=False, backend=TreeCpuBackend):
        self.impl, self.is_draft_layer, self.backend = impl, is_draft_layer, backend

    def get_attn_backend(self):
        return self.backend

    def get_kv_cache_spec(self, vllm_config):
        return None


def config(layers, **parallel):
    sizes = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        parallel_config=SimpleNamespace(**(sizes | parallel)),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=False),
    )


@pytest.fixture
def no_source():
    """Leave no tree source behind."""
    yield
    base.set_tree_source(None)


@pytest.mark.parametrize("drafters", [[False, False], [False, True], [True, True]])
def test_builders_of_the_targets_layers_ask_for_the_tail(drafters, no_source):
    layers = {f"layers.{i}": Layer(implementation(SHAPES[0]), draft) for i, draft in enumerate(drafters)}
    batch = make_batch(SHAPES[0], mixed(seed=15), seed=16)
    builder = TreeCpuMetadataBuilder(None, list(layers), config(layers), torch.device("cpu"))
    asked = []

    def source(common, capturing):
        asked.append((common, capturing))
        return batch.tail

    common = batch.common()
    assert builder.build(0, common).target_tail is None
    base.set_tree_source(source)
    metadata = builder.build(0, common)
    has_target = not all(drafters)
    assert asked == [(common, False)] * has_target
    assert metadata.target_tail is (batch.tail if has_target else None)
    assert metadata.draft_tail is None and metadata.causal is True
    layer = layers["layers.0"]
    out = implementation(SHAPES[0]).forward(
        layer, batch.query, None, None, as_on_a_cpu(batch.cache), metadata, torch.empty_like(batch.query)
    )
    torch.testing.assert_close(out.double(), expected(batch, SCALE, plain=layer.is_draft_layer), atol=2e-6, rtol=0)


def test_registration_replaces_and_gives_back():
    member = AttentionBackendEnum.CPU_ATTN
    base.unregister()
    assert not member.is_overridden()
    try:
        for _ in range(2):
            base.register()
            assert member.get_class() is TreeCpuBackend
        assert TreeCpuBackend.get_name() == member.name, "layers look their backend up by this name"
    finally:
        base.unregister()
    assert not member.is_overridden()


def with_attributes(**attributes):
    impl = implementation(SHAPES[0])
    vars(impl).update(attributes)
    return impl


@pytest.mark.parametrize(
    ("impl", "words"),
    [
        (with_attributes(kv_cache_dtype="nvfp4"), "KV cache is nvfp4; set kv_cache_dtype to auto or fp8"),
        (with_attributes(alibi_slopes=[0.5]), "ALiBi"),
        (with_attributes(attn_type="encoder_only"), "decoder"),
        (SimpleNamespace(), "its attention is CPU_ATTN; start vLLM with --attention-backend CPU_ATTN"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_what_the_tail_does_not_know_is_refused(impl, words):
    good = Layer(implementation(SHAPES[0]))
    with pytest.raises(ValueError, match="draft trees cannot run on layer layers.1: ") as error:
        base.check_backends(config({"layers.0": good, "layers.1": Layer(impl)}))
    assert words in str(error.value) and '"tree"' in str(error.value)
    layers = {"layers.0": good, "drafter": Layer(impl, is_draft_layer=True)}
    base.check_backends(config(layers))
    with pytest.raises(ValueError, match="layer drafter"):
        base.check_backends(config(layers), draft_layers=["drafter"])


def test_context_parallel_and_partial_prefill_are_refused():
    with pytest.raises(ValueError, match="context-parallel"):
        base.check_backends(config({}, decode_context_parallel_size=2))
    partial = config({})
    partial.cache_config.kv_sharing_fast_prefill = True
    with pytest.raises(ValueError, match="kv-sharing-fast-prefill"):
        base.check_backends(partial)


@pytest.mark.parametrize("option", [{"alibi_slopes": [1.0]}, {"kv_cache_dtype": "nvfp4"}])
def test_a_cpu_layer_that_could_only_be_wrong_is_not_built(option):
    with pytest.raises(ValueError, match="draft trees cannot run on this attention"):
        implementation(SHAPES[0], **option)
