"""The CPU lane's products: right, the same bits in any batch, and taken where they should be."""

from types import SimpleNamespace

import engines
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from vllm_crossspec.platform import platform

pytestmark = pytest.mark.skipif(
    not platform().on_cores,
    reason="the CPU lane is installed on machines without a GPU and without triton-cpu only",
)

SHAPES = [(1, 1), (5, 7), (16, 128), (17, 129), (33, 300), (100, 1), (1024, 256)]
"""Outputs and inputs: less than a vector, whole ones and slabs, and a little more; enough for threads."""
ROWS = [1, 2, 6, 7, 12, 13, 24, 25, 49, 96, 97, 201]
"""On both sides of where blocks and panels of rows begin."""
CLOSE = {"rtol": 1e-5, "atol": 5e-5}


@pytest.fixture(scope="module")
def ops():
    from crossspec_cpu_lane import products

    products.load()
    return torch.ops.crossspec_cpu_lane


@pytest.mark.parametrize("outputs, inputs", SHAPES)
def test_the_product_is_right(ops, outputs, inputs):
    torch.manual_seed(0)
    weight, bias = torch.randn(outputs, inputs), torch.randn(outputs)
    packed = ops.pack(weight)
    for rows in ROWS:
        x = torch.randn(rows, inputs)
        product = x.double() @ weight.double().T
        assert_close(ops.linear(x, packed, outputs, None), product.float(), **CLOSE)
        assert_close(ops.linear(x, packed, outputs, bias), (product + bias).float(), **CLOSE)


@pytest.mark.parametrize("outputs, inputs", SHAPES)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_rows_bits_do_not_depend_on_its_batch(ops, outputs, inputs, threads):
    torch.manual_seed(0)
    packed, x = ops.pack(torch.randn(outputs, inputs)), torch.randn(max(ROWS), inputs)
    before = torch.get_num_threads()
    alone = torch.cat([ops.linear(row[None], packed, outputs, None) for row in x])
    torch.set_num_threads(threads)
    try:
        for rows in ROWS:
            assert torch.equal(ops.linear(x[:rows], packed, outputs, None), alone[:rows])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("outputs, inputs", SHAPES)
def test_weights_of_a_bfloat16_checkpoint_are_half_as_large_and_give_the_same_bits(ops, outputs, inputs):
    torch.manual_seed(0)
    weight = torch.randn(outputs, inputs).bfloat16().float()
    finer = torch.cat([weight, torch.full((1, inputs), 1 / 3)])  # what bfloat16 does not hold
    halves, whole = ops.pack(weight), ops.pack(finer)
    assert whole.dtype == torch.float32
    assert halves.dtype == (torch.bfloat16 if inputs % 2 == 0 else torch.float32)
    for rows in ROWS:
        x = torch.randn(rows, inputs)
        product = ops.linear(x, whole, outputs + 1, None)[:, :outputs]
        assert torch.equal(ops.linear(x, halves, outputs, None), product)


def test_other_shapes_and_strides_of_x(ops):
    torch.manual_seed(0)
    weight = torch.randn(40, 24)
    packed = ops.pack(weight.T.contiguous().T)
    x = torch.randn(24, 3, 5)
    assert_close(ops.linear(x.permute(1, 2, 0), packed, 40, None), x.permute(1, 2, 0) @ weight.T, **CLOSE)
    assert ops.linear(torch.empty(0, 24), packed, 40, None).shape == (0, 40)


@pytest.mark.parametrize("outputs, inputs", [(1, 1), (33, 300), (256, 768)])
def test_shapes_that_disagree_are_refused(ops, outputs, inputs):
    """Nothing is read beyond the weights, and nothing of them left out, whatever the rows."""
    packed = ops.pack(torch.randn(outputs, inputs))
    for wrong in (inputs // 2, inputs - 1, inputs + 1, inputs + 256, 100 * inputs):
        for rows in (0, 1, 7):
            with pytest.raises(RuntimeError, match=f"linear: x has {wrong} columns, and the weights of {outputs} out"):
                ops.linear(torch.randn(rows, wrong), packed, outputs, None)
    with pytest.raises(RuntimeError, match="linear: x has"):
        ops.linear(torch.randn(2, inputs), packed, outputs + 16, None)
    for wrong in (outputs - 1, outputs + 1):
        with pytest.raises(RuntimeError, match=f"there are {outputs} outputs, and a bias for {wrong}"):
            ops.linear(torch.randn(2, inputs), packed, outputs, torch.randn(wrong))
    assert ops.linear(torch.randn(2, inputs), packed, outputs, torch.randn(outputs)).shape == (2, outputs)


def test_more_candidates_than_logits_and_other_heads_than_the_caches_are_refused(ops):
    with pytest.raises(RuntimeError, match="top: 6 of 5 logits"):
        ops.top(torch.randn(1, 5), 6)
    line, hidden = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 1)
    for heads, size in ((3, 32), (2, 16)):
        query = torch.randn(1, heads, size)
        with pytest.raises(RuntimeError, match=f"attend: queries of {heads} heads of {size}, and a cache of 2 of 32"):
            ops.attend(query, torch.randn(1, 2, 32, 64), line, 1, hidden, 1.0, 0.0, None, query.clone())


def test_compilers_know_its_shape(ops):
    packed = ops.pack(torch.randn(40, 24))
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.linear, (torch.randn(2, 3, 24), packed, 40, torch.randn(40)), test_utils=checks)


@pytest.mark.parametrize(
    "rows, heads, kv_heads, head_size, num_keys",
    [(11, 16, 8, 64, 200), (1, 4, 2, 32, 5), (61, 4, 1, 64, 333), (7, 4, 4, 48, 64), (24, 1, 1, 16, 65)],
)
def test_rows_of_trees_attend_as_in_torch(ops, rows, heads, kv_heads, head_size, num_keys):
    from crossspec_cpu_lane.vllm.attention import _Request, _spans, attend

    from vllm_crossspec.trees.verify.tail_attention import Softmax

    torch.manual_seed(0)
    num_blocks, block_size, num_hidden = -(-num_keys // 32), 32, min(rows, num_keys)
    cache = torch.randn(num_blocks + 3, kv_heads, block_size, 2 * head_size)
    line = torch.randperm(num_blocks + 3)[:num_blocks].int()
    query = torch.randn(rows, heads + 2, head_size)[:, 1 : heads + 1]
    hidden = torch.where(torch.rand(rows, num_hidden) > 0.4, 0.0, float("-inf"))
    output = torch.full((rows, heads, head_size), float("nan"))
    sizes = (head_size**-0.5, 0.0, None)
    ops.attend(query, cache, line, num_keys, hidden, *sizes, output)
    request = _Request(slice(0, rows), num_keys, line.tolist(), line)
    wanted = attend(query, _spans(cache, request, num_keys), hidden, Softmax(head_size**-0.5))
    assert_close(output, wanted, rtol=1e-5, atol=2e-6)
    for row in range(rows):  # by itself: the same bits
        alone = torch.empty(1, heads, head_size)
        ops.attend(query[row : row + 1], cache, line, num_keys, hidden[row : row + 1], *sizes, alone)
        assert torch.equal(alone[0], output[row])


def test_a_row_that_sees_no_key_is_zero(ops):
    query, cache, line = torch.randn(2, 1, 32), torch.randn(1, 1, 32, 64), torch.zeros(1, dtype=torch.int32)
    hidden = torch.tensor([[0.0, 0.0, 0.0], [float("-inf")] * 3])
    output = torch.full((2, 1, 32), float("nan"))
    ops.attend(query, cache, line, 3, hidden, 1.0, 0.0, None, output)
    assert output[0].isfinite().all() and (output[1] == 0).all()


@pytest.mark.parametrize("length", [37, 43], ids=["inside", "beyond"])
@pytest.mark.parametrize("has_shared", [False, True])
@pytest.mark.parametrize("heads, kv_heads, head_size", [(4, 2, 64), (16, 8, 64), (3, 3, 48), (8, 1, 16)])
def test_a_level_of_a_drafters_trees_attends_as_in_torch(
    ops, heads, kv_heads, head_size, has_shared, length, monkeypatch
):
    """Noise for masks, which PyTorch's operations read alike; and each request by itself: the same bits.

    Rows beyond the scratch, which only a tree's last level can have, are neither kept nor seen.
    """
    from crossspec_cpu_lane.vllm import attention as cpu

    from vllm_crossspec.trees.attention.base import DraftTail

    torch.manual_seed(0)
    lengths, rows, capacity = [70, 1, 128, 33], 3 + has_shared, 41
    requests, width = len(lengths), (heads + 2 * kv_heads) * head_size
    cache = torch.randn(20, kv_heads, 32, 2 * head_size)
    table = torch.randperm(20)[: 5 * requests].view(requests, 5).int()
    fused = torch.randn(requests * rows, width)
    query, key, value = (
        part.view(requests * rows, -1, head_size)
        for part in fused.split([heads * head_size, kv_heads * head_size, kv_heads * head_size], dim=1)
    )
    masks = torch.randint(-(2**31), 2**31, (requests * rows, 2), dtype=torch.int32)
    impl, layer = cpu.TreeCpuImpl(heads, head_size, 0.2, kv_heads), SimpleNamespace(is_draft_layer=True)
    scratch = torch.randn(requests, capacity, 2, kv_heads, head_size)

    def level(first, last):
        mine, kept = slice(first * rows, last * rows), scratch[first:last].clone()
        tail = DraftTail(kept, masks[mine], torch.tensor([length]), last - first, rows, has_shared)
        bounds = torch.arange(0, last - first + 1, dtype=torch.int32) * rows
        metadata = cpu.TreeCpuMetadata(
            num_actual_tokens=int(bounds[-1]),
            num_reqs=last - first,
            max_query_len=rows,
            max_seq_len=128,
            query_start_loc=bounds,
            seq_lens=torch.tensor(lengths[first:last], dtype=torch.int32),
            block_table=table[first:last],
            slot_mapping=torch.empty(0),
            draft_tail=tail,
        )
        output = torch.full((len(query[mine]), heads, head_size), float("nan"))
        return impl.forward(layer, query[mine], key[mine], value[mine], cache, metadata, output), kept

    calls = []
    lane = SimpleNamespace(attend_level=lambda *a: (calls.append(1), ops.attend_level(*a)))
    monkeypatch.setattr(cpu, "lane_ops", lambda: lane)
    output, kept = level(0, requests)
    alone = [level(request, request + 1) for request in range(requests)]
    assert len(calls) == 1 + requests
    assert torch.equal(torch.cat([own for own, _ in alone]), output)
    assert torch.equal(torch.cat([own for _, own in alone]), kept)
    monkeypatch.setattr(cpu, "lane_ops", lambda: None)
    wanted, wanted_kept = level(0, requests)
    assert_close(output, wanted, rtol=1e-5, atol=2e-6)
    assert torch.equal(kept, wanted_kept) and not torch.equal(kept, scratch)


@pytest.mark.parametrize("rows, size, k", [(3, 4096, 3), (1, 5, 5), (7, 1003, 8), (2, 40, 1), (4, 151, 64)])
def test_candidates_are_those_of_torch(ops, rows, size, k):
    torch.manual_seed(0)
    logits = 9 * torch.randn(rows, size)
    logits[0, size // 2 :] = float("-inf") if size > 2 * k else 0.0
    log_probs, ids = ops.top(logits, k)
    assert_close(log_probs, logits.log_softmax(-1).topk(k).values, rtol=1e-6, atol=2e-6)
    assert_close(logits.log_softmax(-1).gather(1, ids), log_probs, rtol=1e-6, atol=2e-6)
    assert all(len(row.unique()) == k for row in ids)


def test_the_first_of_equals_comes_first(ops):
    logits = torch.zeros(2, 50)
    logits[0, [45, 17, 18]] = 1.0
    assert ops.top(logits, 4)[1].tolist() == [[17, 18, 45, 0], [0, 1, 2, 3]]
    assert ops.top(logits.T.contiguous().T, 1)[1].tolist() == [[17], [0]]


def test_a_row_without_probabilities(ops):
    """NaN is for no one: trees count it as impossible."""
    assert ops.top(torch.full((1, 20), float("-inf")), 2)[0].isnan().all()


class Layer(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(48, 32).to(dtype), requires_grad=False)


def calls_the_lane(layer):
    """Whether a layer that was loaded now multiplies in the lane; and that it is right."""
    from torch.profiler import profile
    from vllm.model_executor.layers import utils

    weight, x = layer.weight.clone(), torch.randn(3, 32).to(layer.weight.dtype)
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    with profile() as seen:
        y = layer.cpu_linear(x, layer.weight, None)
    assert_close(y, x @ weight.T, atol=0.1 if weight.dtype == torch.bfloat16 else 1e-4, rtol=1e-2)
    return any(event.key == "crossspec_cpu_lane::linear" for event in seen.key_averages())


@pytest.fixture
def fast(ops, monkeypatch):
    """A processor that the products are used on, and a user who has set nothing."""
    from crossspec_cpu_lane.vllm import products as cpu_products

    monkeypatch.delenv(cpu_products.VARIABLE, raising=False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    cpu_products.lane_ops.cache_clear()
    yield cpu_products
    cpu_products.lane_ops.cache_clear()


def test_what_our_runner_loads_multiplies_in_the_lane(fast, monkeypatch):
    with fast.lane_products():
        layer = Layer()
        assert calls_the_lane(layer) and layer.weight.numel() == 0
        assert not calls_the_lane(Layer(torch.bfloat16))
    assert not calls_the_lane(Layer())
    monkeypatch.setenv(fast.VARIABLE, "0")
    fast.lane_ops.cache_clear()
    with fast.lane_products():
        assert not calls_the_lane(Layer())


def test_the_users_choice(fast, monkeypatch):
    from vllm.model_executor.layers import utils

    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", utils.dispatch_cpu_unquantized_gemm)
    fast.use_lane_everywhere()
    assert calls_the_lane(Layer())
    monkeypatch.setenv(fast.VARIABLE, "yes")
    with pytest.raises(ValueError, match=r"CROSSSPEC_CPU_PRODUCTS is 'yes': set it to 0 or all, or unset it"):
        fast.choice()


def test_without_a_compiler_vllms_own_layers_stay(fast, monkeypatch):
    from crossspec_cpu_lane import products

    def fail():
        raise RuntimeError("no C compiler")

    said = []
    monkeypatch.setattr(products, "load", fail)
    monkeypatch.setattr(fast.logger, "warning", lambda sentence, *values: said.append(sentence % values))
    assert fast.lane_ops() is None
    assert said == ["crossspec: vLLM's and PyTorch's own products stay, slower for a round's rows: no C compiler"]
    with fast.lane_products():
        assert not calls_the_lane(Layer())


@pytest.mark.parametrize("capability, multiplies", [("AVX512", True), ("AVX2", True), ("DEFAULT", False)])
def test_linear_layers_are_for_wide_vectors(fast, monkeypatch, capability, multiplies):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert fast.lane_multiplies() == multiplies and fast.lane_ops() is not None


@pytest.mark.e2e
def test_an_engine_of_ours_runs_on_them_and_a_plain_one_does_not(fast):
    from torch.profiler import profile

    def run(spec):
        with engines.engine(spec) as llm, profile() as seen:
            tokens = engines.generate(llm, engines.prompts(2), max_tokens=12)
        own = {event.key for event in seen.key_averages() if event.key.startswith("crossspec_cpu_lane::")}
        return tokens, own

    plain, used = run(None)
    assert not used
    tokens, used = run(engines.tree("eagle3", engines.EAGLE3, num_nodes=12, depth=4))
    assert tokens == plain
    assert used == {f"crossspec_cpu_lane::{name}" for name in ("linear", "attend", "attend_level", "top")}
