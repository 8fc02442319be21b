"""Tree attention on CPU by a masked softmax, FlexAttention and vLLM's own kernel, in each of its ways."""

import dataclasses
import random
from types import SimpleNamespace

import attention_batches as made
import float8_kernels
import pytest
import torch
from attention_batches import (
    BLOCK_SIZE,
    DRAFTER,
    FORMS,
    PLAIN,
    SCALE,
    TARGET,
    WAYS,
    Batch,
    Layer,
    Request,
    Shape,
    Trees,
)
from crossspec_cpu_lane.vllm.attention import TreeCpuBackend, TreeCpuImpl, TreeCpuMetadataBuilder
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_crossspec.trees.attention import base, scratch
from vllm_crossspec.trees.attention.base import DraftTail
from vllm_crossspec.trees.verify.naive import ancestors_of
from vllm_crossspec.trees.verify.tail_attention import Scales

SHAPES = [
    Shape(4, 2, 32, torch.float32),
    Shape(6, 2, 32, torch.float32),
    Shape(3, 3, 64, torch.float32),
    Shape(8, 1, 128, torch.bfloat16),
    Shape(4, 4, 80, torch.bfloat16),
]
# Outputs reach 4, where a step of bfloat16 is 1/64; two passes round the prefix's output and the weights, too.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2 / 64}

way = pytest.fixture(params=WAYS)(made.take_way)


def close(found, wanted, atol=2e-6):
    torch.testing.assert_close(found.double(), wanted.double(), atol=atol, rtol=0)


def name_of(value):
    return made.name(value) if hasattr(value, "sinks") else str(value)


@pytest.mark.parametrize(
    ("shape", "form"), [*((shape, PLAIN) for shape in SHAPES), *((SHAPES[1], form) for form in FORMS)], ids=name_of
)
def test_a_row_sees_its_prefix_and_its_ancestors(shape, form, way):
    """Trees, a request without drafts, a chain and prompts; each wrong form is told from the right one."""
    batch = made.make_batch(shape, made.mixed(seed=1), seed=2)
    out = made.attend(batch, impl=made.implementation(shape, **made.options(form)))
    close(out, made.expected(batch, form), TOLERANCE[shape.dtype])
    for wrong in made.wrong_forms(form, int(batch.seq_lens.max())):
        assert (out - made.expected(batch, wrong)).abs().max() > 1e-3, made.name(wrong)


def test_layers_of_one_metadata_do_not_share_their_rows(way):
    """Layers with and without a window, in one KV cache group, as without vLLM's hybrid manager."""
    batch = made.make_batch(SHAPES[1], made.mixed(seed=3), seed=4)
    metadata = TreeCpuMetadataBuilder(None, [], made.config({}), torch.device("cpu")).build(0, batch.common())
    metadata.target_tail = batch.tail
    for form in (PLAIN, PLAIN._replace(window=5), PLAIN._replace(window=19), PLAIN):
        out = torch.full_like(batch.query, torch.nan)
        impl = made.implementation(batch.shape, **made.options(form))
        impl.forward(TARGET, batch.query, None, None, made.as_on_a_cpu(batch.cache), metadata, out)
        close(out, made.expected(batch, form))


@pytest.mark.parametrize("kind", ["fp8", "fp8_e5m2"])
def test_fp8_trees(kind, way):
    """Trees, prompts and plain rows of one batch: all see the cache's numbers times the layer's scales."""
    scales = Scales(torch.tensor(0.02), torch.tensor(0.013), torch.tensor(0.4))
    layer = Layer(scales=scales)
    batch, exact = made.quantised_batch(made.make_batch(SHAPES[0], made.mixed(seed=1), seed=2), kind, layer)
    cache = torch.full(batch.cache.shape, 0x55, dtype=torch.uint8)  # where nothing was written are numbers
    written = ~batch.cache.float().isnan().chunk(2, -1)[0]
    for view, part in zip(TreeCpuImpl.kv_views(cache), batch.cache.view(torch.uint8).chunk(2, -1), strict=True):
        view[written] = part[written]

    def forward(layer):
        with float8_kernels.on_any_cpu():
            impl, out = made.implementation(batch.shape, kv_cache_dtype=kind), torch.empty_like(batch.query)
            return impl.forward(layer, batch.query, None, None, cache, made.metadata_of(batch), out)

    whole = made.expected(exact)
    close(forward(layer), whole, 1e-5)
    for wrong in made.wrong_scales(scales)[1:]:  # queries are not quantised
        assert (forward(Layer(scales=wrong)) - whole).abs().max() > 0.1


@pytest.mark.parametrize("num_nodes", [1, 63, 64, 130, 255])
def test_wide_trees(num_nodes, way):
    rng = random.Random(num_nodes)
    shape = SHAPES[0]
    batch = made.make_batch(
        shape, [made.verification(rng, 40, num_nodes), made.verification(rng, 33, num_nodes)], seed=3, num_words=8
    )
    close(made.attend(batch), made.expected(batch))


@pytest.mark.parametrize("seed", range(4))
def test_flex_attention_agrees(seed, way):
    """PyTorch's own masked attention, which knows the tree by its parents only."""
    rng = random.Random(seed)
    shape = SHAPES[seed % 3]
    request = made.verification(rng, rng.randint(1, 90), rng.randint(1, 40))
    batch = made.make_batch(shape, [request], seed=seed)
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
    torch.testing.assert_close(made.attend(batch), oracle[0].transpose(0, 1), atol=2e-6, rtol=0)


def test_dead_rows_see_the_root_and_themselves(way):
    """Rows past the live nodes: their answer is not used, but it must be a number and not disturb the others."""
    rng = random.Random(5)
    parents = made.random_parents(rng, 9) + [0] * 6
    batch = made.make_batch(SHAPES[0], [Request(20, 16, parents), Request(50, 16, [0] * 15)], seed=6)
    close(made.attend(batch), made.expected(batch))


def test_a_drafters_layer_ignores_the_targets_tail(way):
    batch = made.make_batch(SHAPES[0], made.mixed(seed=7), seed=8)
    out = made.attend(batch, DRAFTER)
    close(out, made.expected(batch, plain=True))
    assert torch.equal(out, made.attend(batch, target_tail=None))


def test_the_target_ignores_a_drafters_tail():
    batch = made.make_batch(SHAPES[0], [Request(30, 4, None)], seed=9)
    level = DraftTail(torch.empty(0), torch.empty(0), torch.ones(1, dtype=torch.int32), 1, 4)
    assert torch.equal(made.attend(batch, draft_tail=level, target_tail=None), made.attend(batch, target_tail=None))


def test_padding_of_a_graph_is_left_alone(way):
    """Requests without rows or tokens behind the real ones."""
    batch = made.make_batch(SHAPES[0], made.mixed(seed=10)[:3], seed=11)
    pad = torch.nn.functional.pad
    padded = {
        "num_reqs": 5,
        "query_start_loc": torch.cat([batch.query_start_loc, batch.query_start_loc[-1:].repeat(2)]),
        "seq_lens": pad(batch.seq_lens, (0, 2)),
        "block_table": pad(batch.block_table, (0, 0, 0, 2)),
        "target_tail": batch.tail._replace(num_reqs=5, prefix_len=pad(batch.tail.prefix_len[:3], (0, 2))),
    }
    assert torch.equal(made.attend(batch, **padded), made.attend(batch))


# -- contemplate rows -------------------------------------------------------------------------------------------------


def contemplation(shape: Shape, num_soft: int, seed: int) -> Batch:
    """Requests with contemplate rows beside some without and chunks of prompts."""
    requests = made.mixed(seed)
    return made.make_batch(
        shape, [made.contemplating(r) for r in requests[:3]] + requests[3:], seed, num_words=None, num_soft=num_soft
    )


def softened(batch: Batch) -> SimpleNamespace:
    """A layer of the target with the batch's soft prompts."""
    return SimpleNamespace(is_draft_layer=False, soft_prompts=batch.soft)


@pytest.mark.nightly(keep=6)
@pytest.mark.parametrize(("shape", "num_soft"), list(zip(SHAPES, [1, 40, 16, 16, 33], strict=True)), ids=str)
def test_contemplate_rows_see_soft_prompts(shape, num_soft, way):
    batch = contemplation(shape, num_soft, seed=20)
    out = made.attend(batch, softened(batch))
    close(out, made.expected(batch), TOLERANCE[shape.dtype])
    # The comparison can fail: without soft prompts contemplate rows, and they alone, are others.
    words = batch.tail.row_mask.shape[1] - -(-num_soft // 32)
    without = made.attend(batch, target_tail=batch.tail._replace(row_mask=batch.tail.row_mask[:, :words].contiguous()))
    changed = ((out - without).abs().amax((1, 2)) > 10 * TOLERANCE[shape.dtype]).nonzero().flatten()
    assert len(changed) and not torch.isin(changed, made.ordinary_rows(batch)).any()


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.dtype == torch.float32], ids=str)
@pytest.mark.parametrize("num_nodes", [1, 8, 31, 60])
def test_ordinary_rows_are_the_same_bits_with_and_without_contemplate_rows(shape, num_nodes):
    rng = random.Random(num_nodes)
    requests = [made.contemplating(made.verification(rng, prefix, num_nodes)) for prefix in (40, 97, 3)]
    batch = made.make_batch(shape, [*requests, Request(45, 1, []), Request(64, 3, None)], seed=21, num_soft=16)
    alone = made.without_contemplation(batch)
    close(made.attend(alone), made.expected(alone))
    rows = made.ordinary_rows(batch)
    assert torch.equal(made.attend(batch, softened(batch))[rows], made.attend(alone))
    # An ordinary row that sees a contemplate row, or the soft prompts, is another.
    for bits in (1 << (num_nodes + 1) % 32, -1):
        mask = batch.tail.row_mask.clone()
        mask[1, (num_nodes + 1) // 32 if bits > 0 else -1] |= bits
        found = made.attend(batch, softened(batch), target_tail=batch.tail._replace(row_mask=mask))[rows]
        assert (found[1] - made.attend(alone)[1]).abs().max() > 1e-3, bits
        torch.testing.assert_close(found[2:], made.attend(alone)[2:], atol=2e-6, rtol=0)


# -- drafters ---------------------------------------------------------------------------------------------------------


def test_a_drafters_layer_reads_its_lengths_in_every_pass():
    """A chain drafter's positions move on in place, under metadata that was made once."""
    shape = SHAPES[0]
    batch = made.make_batch(shape, [Request(40, 1, None), Request(70, 1, None)], seed=14)
    metadata, impl = made.metadata_of(batch, target_tail=None), made.implementation(shape)
    first, second = (torch.empty_like(batch.query) for _ in range(2))
    cache = made.as_on_a_cpu(batch.cache)
    impl.forward(DRAFTER, batch.query, None, None, cache, metadata, first)
    metadata.seq_lens -= 3
    impl.forward(DRAFTER, batch.query, None, None, cache, metadata, second)
    for row, dense in enumerate(batch.dense):
        whole = torch.ones(1, len(dense) - 3, dtype=torch.bool)
        alone = made.masked_softmax(batch.query[row : row + 1], dense[:-3], whole)
        close(second[row : row + 1], alone)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("has_shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize(
    ("shape", "form"),
    [*((SHAPES[i], PLAIN) for i in (0, 1, 3)), *((SHAPES[1], form) for form in FORMS)],
    ids=name_of,
)
def test_levels_of_a_draft_tree_equal_the_whole_tree(shape, form, has_shared, way):
    """Three levels of different beams, each written once and read by those below it, against one masked softmax.

    A row sees its request's cached tokens, then its own line, the last ``window`` of both. A shared entry is written
    anew by every level, before all nodes, and seen by all of them: a token of every line.
    """
    num_reqs, depth, rng = 3, 3, random.Random(12)
    trees = Trees([[] for _ in range(num_reqs)], width=3, extra=int(has_shared))
    width, extra = trees.width, trees.extra
    batch = made.make_batch(shape, [Request(prefix, 1, None) for prefix in (40, 7, 95)], seed=13)
    rows = torch.full((num_reqs + 1, 16, 2, shape.kv_heads, shape.head_size), torch.nan, dtype=shape.dtype)
    cache, impl = made.as_on_a_cpu(batch.cache), made.implementation(shape, **made.options(form))
    before, queries = cache.clone(), width + extra
    generator = torch.Generator().manual_seed(7)

    def random_numbers(*size):
        return torch.randn(*size, shape.head_size, generator=generator).to(shape.dtype)

    written, shared = (random_numbers(num_reqs, n, 2, shape.kv_heads) for n in (depth * width, depth))
    metadata = made.metadata_of(batch, causal=False, query_start_loc=made.starts_of(num_reqs, queries))
    for level in range(depth):
        first, length = level * width, (level + 1) * width
        trees.grow(rng)
        seen, query = trees.seen(), random_numbers(num_reqs * queries, shape.heads)
        entry = shared[:, level : level + extra]
        keys, values = torch.cat([written[:, first:length], entry], dim=1).flatten(0, 1).unbind(1)
        metadata = dataclasses.replace(metadata, draft_tail=made.draft_tail(rows, seen, length + extra, has_shared))
        out = impl.forward(DRAFTER, query, keys, values, cache, metadata, torch.full_like(query, torch.nan))
        for request, cached in enumerate(batch.dense):
            content = torch.cat([cached, entry[request], written[request, :length]])
            line = torch.cat([torch.ones(queries, len(cached)).bool(), seen[request, :, : length + extra]], dim=1)
            if form.window:
                line &= line.sum(1, keepdim=True) - line.cumsum(1) < form.window
            mine = slice(request * queries, (request + 1) * queries)
            close(out[mine], made.masked_softmax(query[mine], content, line, form), TOLERANCE[shape.dtype])
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
    shape, isa, starts, lengths = batch.shape, "vec", batch.query_start_loc, batch.seq_lens
    cache = torch.zeros(batch.cache.shape[0], shape.kv_heads, 2 * BLOCK_SIZE, shape.head_size, dtype=shape.dtype)
    keys, values = cache.chunk(2, dim=2)
    for content, blocks in zip(batch.dense, batch.block_table.long(), strict=True):
        place = torch.arange(content.shape[0])
        slots = blocks[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE
        ops.cpu_attn_reshape_and_cache(content[:, 0].contiguous(), content[:, 1].contiguous(), keys, values, slots, isa)
    out = torch.empty_like(batch.query)
    sizes = (len(batch.requests), shape.heads, shape.kv_heads, shape.head_size)
    plan = ops.cpu_attn_get_scheduler_metadata(*sizes, lengths, shape.dtype, starts, causal, window, isa, True)
    form = (SCALE, causal, None, window, batch.block_table, 0, plan, None)
    ops.cpu_attention_with_kv_cache(batch.query, keys, values, out, starts, lengths, *form)
    return out


@pytest.mark.parametrize("window", [None, 11], ids=["full", "window"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "non-causal"])
def test_without_trees_it_is_vllms_own_attention(causal, window, way):
    shape = Shape(4, 2, 64, torch.float32)
    requests = [Request(60, 8, None), Request(33, 1, None), Request(0, 20, None), Request(5, 8, None)]
    batch = made.make_batch(shape, requests, seed=14)
    impl = made.implementation(shape, sliding_window=window)
    out = made.attend(batch, DRAFTER, impl, causal=causal, target_tail=None)
    torch.testing.assert_close(out, native(batch, causal, -1 if window is None else window), atol=1e-5, rtol=0)
    flags = torch.full((4,), int(causal), dtype=torch.int32)
    assert torch.equal(out, made.attend(batch, DRAFTER, impl, causal=flags, target_tail=None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_size", [64, 80])
def test_keys_and_values_are_written_where_they_are_read(head_size, dtype):
    """By vLLM's kernel, of any of its orders for this processor; what our own products read are the views."""
    shape = Shape(4, 2, head_size, dtype)
    cache = torch.full((4, shape.kv_heads, BLOCK_SIZE, 2 * head_size), -7777.0, dtype=dtype)
    impl, (keys, values) = made.implementation(shape), TreeCpuImpl.kv_views(cache)
    key, value = torch.randn(2, 5, shape.kv_heads, head_size)
    impl.do_kv_cache_update(TARGET, key, value, cache, torch.tensor([BLOCK_SIZE + 3, -1, 0]))
    for row, (block, token) in {0: (1, 3), 2: (0, 0)}.items():
        assert torch.equal(keys[block, :, token], key[row].to(dtype))
        assert torch.equal(values[block, :, token], value[row].to(dtype))
    assert (cache != -7777).sum() == 2 * 2 * key[0].numel()
    before = cache.clone()
    impl.do_kv_cache_update(TARGET, key, value, cache, torch.full((3,), -1))
    assert torch.equal(cache, before), "padding was written"


@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM has kernels for float8 with AVX-512 alone")
@pytest.mark.parametrize("kind", ["fp8", "fp8_e5m2"])
def test_fp8_kernels_of_vllm_are_what_stands_in_for_them(kind):
    """Where vLLM has kernels: the same bytes, and the same attention over them."""
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.rand(2, 50, 2, 32, generator=generator) + 0.5) * 8
    query = torch.randn(50, 4, 32, generator=generator)
    slots, form = torch.arange(50) + 32, {"k_scale": 0.03, "v_scale": 0.4, "kv_cache_dtype": kind}
    starts, lengths = (torch.tensor(x, dtype=torch.int32) for x in ([0, 50], [50]))
    found = []
    for write, attend_all in (
        (ops.cpu_attn_reshape_and_cache, ops.cpu_attention_with_kv_cache),
        (float8_kernels.reshape_and_cache, float8_kernels.attention),
    ):
        cache = torch.zeros(4, 2, 32, 64, dtype=torch.uint8)
        parts, out = cache.view(4, 2, 64, 32).chunk(2, dim=2), torch.empty_like(query)
        write(key, value, *parts, slots, "vec", **form)
        plan = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=1, num_heads=4, num_kv_heads=2, head_dim=32, seq_lens=lengths, dtype=query.dtype,
            query_start_loc=starts, causal=True, sliding_window_size=-1, isa="vec", enable_kv_split=False,
            kv_cache_dtype=kind,
        )  # fmt: skip
        attend_all(
            query=query, key_cache=parts[0], value_cache=parts[1], output=out, query_start_loc=starts,
            seq_lens=lengths, scale=0.02, causal=True, alibi_slopes=None, sliding_window=-1,
            block_table=torch.tensor([[1, 2]], dtype=torch.int32), softcap=0.0, scheduler_metadata=plan, s_aux=None,
            dynamic_causal=None, **form,
        )  # fmt: skip
        found.append((cache, out))
    assert torch.equal(found[0][0], found[1][0]) and found[0][0].any()
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-4, rtol=1e-4)


# -- the hook, registration, refusals ---------------------------------------------------------------------------------


@pytest.fixture
def no_source():
    """Leave no tree source behind."""
    yield
    base.set_tree_source(None)


@pytest.mark.parametrize("drafters", [[False, False], [False, True], [True, True]])
def test_builders_of_the_targets_layers_ask_for_the_tail(drafters, no_source):
    layers = {f"layers.{i}": Layer(draft, made.implementation(SHAPES[0])) for i, draft in enumerate(drafters)}
    batch = made.make_batch(SHAPES[0], made.mixed(seed=15), seed=16)
    builder = TreeCpuMetadataBuilder(None, list(layers), made.config(layers), torch.device("cpu"))
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
    cache, out = made.as_on_a_cpu(batch.cache), torch.empty_like(batch.query)
    made.implementation(SHAPES[0]).forward(layer, batch.query, None, None, cache, metadata, out)
    close(out, made.expected(batch, plain=layer.is_draft_layer))


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
    impl = made.implementation(SHAPES[0])
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
    good = Layer(impl=made.implementation(SHAPES[0]))
    with pytest.raises(ValueError, match="draft trees cannot run on layer layers.1: ") as error:
        base.check_backends(made.config({"layers.0": good, "layers.1": Layer(impl=impl)}))
    assert words in str(error.value) and '"tree"' in str(error.value)
    layers = {"layers.0": good, "drafter": Layer(True, impl)}
    base.check_backends(made.config(layers))
    with pytest.raises(ValueError, match="layer drafter"):
        base.check_backends(made.config(layers), draft_layers=["drafter"])


def test_context_parallel_and_partial_prefill_are_refused():
    with pytest.raises(ValueError, match="context-parallel"):
        base.check_backends(made.config({}, decode_context_parallel_size=2))
    partial = made.config({})
    partial.cache_config.kv_sharing_fast_prefill = True
    with pytest.raises(ValueError, match="kv-sharing-fast-prefill"):
        base.check_backends(partial)


@pytest.mark.parametrize("option", [{"alibi_slopes": [1.0]}, {"kv_cache_dtype": "nvfp4"}])
def test_a_cpu_layer_that_could_only_be_wrong_is_not_built(option):
    with pytest.raises(ValueError, match="draft trees cannot run on this attention"):
        made.implementation(SHAPES[0], **option)


def test_sliding_layers_are_taken_and_those_that_could_only_be_wrong_refused():
    for form in FORMS:
        base.check_backends(made.config({"layers.0": Layer(impl=made.implementation(SHAPES[1], **made.options(form)))}))
    chunked = Layer(impl=made.implementation(SHAPES[1]))
    chunked.attention_chunk_size = 64
    with pytest.raises(ValueError, match=r"layers\.0: it attends within chunks of the context; use a target without"):
        base.check_backends(made.config({"layers.0": chunked}))
    softened = Layer(impl=made.implementation(SHAPES[1], sliding_window=9))
    softened.soft_prompts = torch.zeros(2, 2, 3, 32)
    with pytest.raises(ValueError, match="it has soft prompts and a sliding window, which ends before them"):
        base.check_backends(made.config({"layers.0": softened}))
