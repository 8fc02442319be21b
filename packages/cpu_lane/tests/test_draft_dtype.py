"""A drafter whose products are in bfloat16 beside a target in float32: other sums, the same text."""

import engines
import pytest
import torch
from crossspec_cpu_lane.vllm import products as cpu_products
from crossspec_cpu_lane.vllm.products import FAST_ROWS, products_in
from torch import nn
from vllm.model_executor.layers import utils as layers
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

SPECS = {
    "eagle3": engines.ours("eagle3", engines.EAGLE3),
    "eagle3-tree": engines.tree("eagle3", engines.EAGLE3, num_nodes=12, depth=4),
    "dflash": engines.ours("dflash", engines.DFLASH),
}


def loaded(layer, dtype):
    with products_in(dtype):
        layers.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    return layer.cpu_linear


@pytest.mark.skipif(not cpu_products.multiplies_bfloat16(), reason="this processor does not multiply bfloat16")
@pytest.mark.parametrize("rows", [1, 2, FAST_ROWS, 9])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_of_bfloat16_and_come_out_in_float32(rows, has_bias):
    torch.manual_seed(rows)
    layer = nn.Linear(64, 48, bias=has_bias)
    x = torch.randn(rows, 64)
    out = loaded(layer, "bfloat16")(x, layer.weight, layer.bias)
    narrow = x.bfloat16().float() @ layer.weight.detach().bfloat16().float().T
    if has_bias:
        narrow = narrow + layer.bias.detach()
    exact = layer(x).detach()
    assert out.dtype == torch.float32 and out.shape == (rows, 48)
    torch.testing.assert_close(out, narrow, rtol=2**-8, atol=2**-8)
    assert not torch.equal(out, exact)


def test_a_processor_without_bfloat16_stays_in_float32(monkeypatch):
    monkeypatch.setattr(cpu_products, "multiplies_bfloat16", lambda: False)
    layer, x = nn.Linear(64, 48), torch.randn(3, 64)
    torch.testing.assert_close(loaded(layer, "bfloat16")(x, layer.weight, layer.bias), layer(x).detach())


def test_nothing_else_changes(monkeypatch):
    """No dtype, other weights, embeddings and output layers; and the replaced function is back, whatever happens."""
    monkeypatch.setattr(cpu_products, "multiplies_bfloat16", lambda: True)
    native = layers.dispatch_cpu_unquantized_gemm
    layer, x = nn.Linear(64, 48), torch.randn(3, 64)
    torch.testing.assert_close(loaded(layer, None)(x, layer.weight, layer.bias), layer(x).detach())
    head = VocabParallelEmbedding.__new__(VocabParallelEmbedding)
    nn.Module.__init__(head)
    head.weight, head.bias = nn.Parameter(torch.randn(48, 64)), None
    torch.testing.assert_close(loaded(head, "bfloat16")(x, head.weight, None), x @ head.weight.detach().T)
    with pytest.raises(KeyError), products_in("bfloat16"):
        raise KeyError
    assert layers.dispatch_cpu_unquantized_gemm is native


def test_it_is_refused_on_a_gpu(monkeypatch):
    from types import SimpleNamespace
    from unittest import mock

    from vllm_crossspec.config.parse import parse
    from vllm_crossspec.frontend import refuse
    from vllm_crossspec.platform import Platform

    settings = parse(SPECS["eagle3"] | {"dtype": "bfloat16"}, {"num_speculative_tokens"})
    monkeypatch.setattr(refuse, "settings_of", lambda config: settings)
    monkeypatch.setattr(refuse, "platform", Platform)
    found = refuse.unsupported_features(
        mock.MagicMock(
            model_config=mock.MagicMock(is_hybrid=False, is_attention_free=False),
            parallel_config=SimpleNamespace(
                pipeline_parallel_size=1,
                decode_context_parallel_size=1,
                prefill_context_parallel_size=1,
                use_ubatching=False,
                tensor_parallel_size=1,
                data_parallel_size=1,
                enable_batch_sharded_sampling=False,
            ),
        )
    )
    assert "a drafter's dtype on a GPU, where it is the target's (leave out dtype)" in found


@pytest.mark.e2e
@pytest.mark.parametrize("name", SPECS)
def test_text_is_plains(name):
    prompts = engines.prompts(4)
    with engines.engine(None) as llm:
        plain = engines.generate(llm, prompts, max_tokens=24)
    with engines.engine(SPECS[name] | {"dtype": "bfloat16"}) as llm:
        assert engines.generate(llm, prompts, max_tokens=24) == plain
        (counts,) = llm.collective_rpc("crossspec_stats")[0].values()
    assert counts["accepted_tokens"] > counts["drafts"]
