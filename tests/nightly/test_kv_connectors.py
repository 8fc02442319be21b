"""KV connectors: chains save their drafter's layers with the target's; what would save half of them is refused."""

import engines
import pytest
import target_kinds
import torch
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.e2e

CHAINS = {
    "eagle3": engines.ours("eagle3", engines.EAGLE3),
    "dflash": engines.ours("dflash", engines.DFLASH),
    "suffix": target_kinds.LOOKUPS["chain"],
    "draft_model": {
        "method": "draft_model",
        "model": str(engines.TARGET),
        "num_speculative_tokens": 4,
        "tree": engines.CHAIN,
    },
}


def connector(folder):
    """vLLM's own connector of examples, which keeps each layer of a prompt in a file."""
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


def served(spec, folder):
    """Texts, accepted tokens and prompt tokens that another engine had left in ``folder``."""
    settings = {"block_size": 32, "enable_prefix_caching": False, "max_num_batched_tokens": 512}
    with engines.engine(spec, kv_transfer_config=connector(folder), **settings) as llm:
        texts = engines.generate(llm, engines.prompts(3), max_tokens=24)
        found = {m.name: getattr(m, "value", None) for m in llm.get_metrics()}
        return texts, engines.counts(llm), found["vllm:external_prefix_cache_hits"]


@pytest.fixture(scope="module")
def plain():
    with engines.engine(None) as llm:
        return engines.generate(llm, engines.prompts(3), max_tokens=24)


def spoil(folder):
    """Another cache in every file."""
    for file in folder.rglob("*.safetensors"):
        save_file({name: torch.randn_like(x) for name, x in load_file(file).items()}, file)


@pytest.mark.parametrize("name", CHAINS)
def test_connector_chains_go_on_from_what_another_engine_saved(plain, tmp_path, name):
    first = served(CHAINS[name], tmp_path)
    second = served(CHAINS[name], tmp_path)
    assert first[0] == second[0] == plain
    assert (first[2], second[2]) == (0, 128)
    # The drafter's layers were saved, too: it drafts as if it had read the prompt itself.
    assert second[1] == first[1] and first[1].accepted > 10
    if name == "eagle3":
        spoil(tmp_path)
        assert served(CHAINS[name], tmp_path)[0] != plain


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (engines.tree("eagle3", engines.EAGLE3), "KV connectors with draft trees .*; set tree to chain"),
        (engines.both("dflash"), "KV connectors with several drafters of vllm_crossspec .*before all have caught up"),
    ],
    ids=["tree", "whiflash"],
)
def test_connector_with_trees_or_several_drafters_is_refused(tmp_path, monkeypatch, spec, expected):
    from vllm import EngineArgs

    arguments = EngineArgs(
        str(engines.TARGET), dtype="float32", kv_transfer_config=connector(tmp_path), speculative_config=spec
    )
    with pytest.raises(ValueError, match=expected):
        arguments.create_engine_config()
