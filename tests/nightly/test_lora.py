"""Requests with an adapter beside plain ones: the text of each is what it is without drafts."""

import json

import engines
import pytest
import sabotage
import target_kinds
import torch
from safetensors.torch import save_file

pytestmark = pytest.mark.e2e

SPECS = {**target_kinds.POCKET, "suffix-tree": target_kinds.LOOKUPS["tree"]}
SETTINGS = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2, "max_num_batched_tokens": 256}
"""On a CPU requests without an adapter get what is in the last place (their index is -1), so that one is left empty."""
WIDTHS = {"self_attn.q_proj": (256, 256), "self_attn.v_proj": (256, 128), "mlp.down_proj": (768, 256)}
"""Of the pocket target's matrices, in and out."""


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """A random adapter of the pocket target in PEFT's format, strong enough to change what it says."""
    folder, rank = tmp_path_factory.mktemp("adapter"), 8
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(8):
        for name, (width, out) in WIDTHS.items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(rank, width, generator=generator) * width**-0.5
            tensors[f"{key}.lora_B.weight"] = torch.randn(out, rank, generator=generator) * 0.3
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 16,
        "bias": "none",
        "target_modules": [name.split(".")[1] for name in WIDTHS],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def mixed(llm, adapter):
    """Answers to one batch, every second request of which has the adapter."""
    from vllm.lora.request import LoRARequest

    requests = [text for text in engines.prompts(2) for _ in range(2)]
    return target_kinds.answers(llm, requests, 24, lora_request=[None, LoRARequest("other", 1, str(adapter))] * 2)


@pytest.fixture(scope="module")
def plain(adapter):
    with engines.engine(None, **SETTINGS) as llm:
        return mixed(llm, adapter).texts


@pytest.mark.parametrize("name", SPECS)
def test_lora_requests_beside_plain_ones_say_what_they_say_without_drafts(plain, adapter, name):
    greedy = plain[0]
    assert greedy[0] != greedy[1] and greedy[2] != greedy[3], "the adapter changes nothing"
    with engines.engine(SPECS[name], **SETTINGS) as llm:
        found = mixed(llm, adapter)
        assert found.texts == plain
        assert found.counts.accepted > 20
        if name == "eagle3-tree":
            llm.collective_rpc(sabotage.accept_everything)
            assert mixed(llm, adapter).texts != plain
