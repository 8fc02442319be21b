"""The same drafter in every public format: loaded, lossless, and accepted exactly as often."""

import functools
import json

import checkpoints
import engines
import pytest
import torch
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.e2e


def reduced_vocabulary(source, folder):
    """The pocket EAGLE-3 drafter with every fourth of its output tokens dropped."""
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    vocab = config["vocab_size"]
    old = torch.arange(config["draft_vocab_size"])
    stay = old[old % 4 != 3]
    kept = (old + tensors["d2t"])[stay] if "d2t" in tensors else stay
    tensors["lm_head.weight"] = tensors["lm_head.weight"][stay]
    tensors["d2t"] = kept - torch.arange(len(kept))
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, kept, True)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"draft_vocab_size": len(kept)}))
    save_file(tensors, folder / "model.safetensors")
    return folder


@functools.cache
def run(method, folder, is_ours=True):
    spec = (engines.ours if is_ours else engines.native)(method, folder)
    with engines.engine(spec) as llm:
        tokens = engines.generate(llm, engines.prompts(6), max_tokens=32)
        return tokens, engines.counts(llm)


@pytest.fixture(scope="module")
def plain_tokens():
    return engines.plain(6, 32)


@pytest.mark.parametrize(
    ("method", "base", "rewrite"),
    [
        ("eagle3", engines.EAGLE3, lambda out: checkpoints.eagle3_as_bin(engines.EAGLE3, out)),
        (
            "eagle3",
            engines.EAGLE3,
            lambda out: checkpoints.eagle3_as_speculators(engines.EAGLE3, out, engines.TARGET, own_embedding=True),
        ),
        (
            "dflash",
            engines.DFLASH,
            lambda out: checkpoints.dflash_as_speculators(engines.DFLASH, out, engines.TARGET),
        ),
    ],
    ids=["eagle3 .bin", "eagle3 speculators, own embedding", "dflash speculators"],
)
def test_another_format_of_the_same_weights(tmp_path, plain_tokens, method, base, rewrite):
    tokens, counts = run(method, rewrite(tmp_path / "rewritten"))
    assert tokens == plain_tokens
    assert counts.per_position == run(method, base)[1].per_position
    assert counts.accepted > 0


def test_reduced_vocabulary(tmp_path, plain_tokens):
    folder = reduced_vocabulary(engines.EAGLE3, tmp_path / "reduced")
    tokens, counts = run("eagle3", folder)
    assert tokens == plain_tokens
    assert counts.per_position == run("eagle3", folder, False)[1].per_position
    assert 0 < counts.accepted < run("eagle3", engines.EAGLE3)[1].accepted
