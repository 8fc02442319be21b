"""Heads that do not fit are refused before any weight is loaded, in one sentence; clusters of drafters are built."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_flashhead_files import POCKET, call, embedding, made, published

from crossspec_tools.flashhead.files import read_output_embedding, read_target_ids, save_assets
from vllm_crossspec.config.schema import DrafterConfig
from vllm_crossspec.drafting.flashhead.assets import read_assets
from vllm_crossspec.drafting.flashhead.check import FINGERPRINT, check_fingerprint, check_head, fingerprint
from vllm_crossspec.kinds.checkpoint import read_config
from vllm_crossspec.types import DrafterFacts

FACTS = DrafterFacts(256, 4096, 3072, (2, 4, 5), None, 5, None)
RECALL = ("--out", "x", "--recall", 0.9)
SHIPPED, EAGLE3, TARGET = POCKET / "flashhead-eagle3", POCKET / "eagle3", POCKET / "target"


def drafter(folder=EAGLE3, tree=None, **head):
    """An EAGLE-3 drafter whose head has these settings beside the shipped clusters."""
    tree = {"tree": {"type": "dynamic", **tree}} if tree else {}
    return DrafterConfig(kind="eagle3", model=str(folder), head={"model": str(SHIPPED)} | head, **tree)


def check(config, facts=FACTS):
    check_head(config, read_config(config.model, "speculative_config.head"), facts, "speculative_config.head")


def copy_of_eagle3(folder, change=None, **config):
    """The pocket drafter with another output embedding, or another config.json."""
    shutil.copytree(EAGLE3, folder)
    tensors = load_file(EAGLE3 / "model.safetensors")
    if change is not None:
        tensors["lm_head.weight"] = change(tensors["lm_head.weight"])
        save_file(tensors, folder / "model.safetensors")
    content = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def test_the_shipped_clusters_fit_the_pocket_drafter():
    check(drafter())
    check(drafter(tree={"top_k": 10}))
    check(DrafterConfig(kind="eagle3", model=str(EAGLE3)))


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (drafter(folder="nowhere"), "there is no folder 'nowhere'"),
        ({"model": str(EAGLE3 / "none")}, "head.model: there is no folder"),
        ({"model": "someone/nothing"}, "head.model: no config.json for 'someone/nothing'"),
        ({"model": None}, "head.model: .*eagle3 has no clusters"),
        ({"model": str(TARGET)}, "head.model: .* has no clusters"),
        ({"num_probes": 385}, "head.num_probes 385: give 1 to 384"),
        ({"tree": {"top_k": 65}}, "tree.top_k is 65, but a FlashHead gives at most 64"),
        ({"tree": {"top_k": 20}, "num_probes": 2}, "tree.top_k is 20, but speculative_config.head scores 17 tokens"),
    ],
)
def test_what_does_not_fit_is_one_sentence(config, sentence):
    config = config if isinstance(config, DrafterConfig) else drafter(**config)
    with pytest.raises(ValueError, match=sentence) as refused:
        check(config)
    assert "speculative_config." in str(refused.value) and "\n" not in str(refused.value)


def test_clusters_of_another_vocabulary_or_width_are_refused(tmp_path):
    save_assets(tmp_path / "a", made(embedding(4096, 256), 512, iterations=1))
    with pytest.raises(ValueError, match="is for a vocabulary of 4096 tokens, the drafter's output embedding has 3072"):
        check(named(tmp_path / "a"))
    save_assets(tmp_path / "b", made(embedding(3072, 128), 512, iterations=1))
    with pytest.raises(ValueError, match="is for hidden states of width 128, the drafter's have 256"):
        check(named(tmp_path / "b"))


def named(folder):
    return DrafterConfig(kind="eagle3", model=str(EAGLE3), head={"model": str(folder)})


def test_clusters_of_other_weights_are_refused(tmp_path):
    """Of the same shape, as a drafter that was trained on has them; and once they are loaded, wherever they were."""
    other = copy_of_eagle3(tmp_path / "other", lambda weight: weight.roll(1, 0))
    with pytest.raises(
        ValueError, match=r"head.model: these clusters were made from another output embedding \(eagle3"
    ):
        check(drafter(folder=other))
    same = copy_of_eagle3(tmp_path / "same", lambda weight: weight.float())
    check(drafter(folder=same))
    weight, assets = read_output_embedding(EAGLE3), read_assets(SHIPPED)
    check_fingerprint(assets, weight, "key")
    assert fingerprint(weight) == fingerprint(weight.float()) == assets.facts[FINGERPRINT]
    with pytest.raises(ValueError, match="key: these clusters were made from another"):
        check_fingerprint(assets, weight.flip(0), "key")


def test_logits_that_are_more_than_products_are_refused(tmp_path):
    folder = copy_of_eagle3(tmp_path / "capped", final_logit_softcapping=30.0)
    with pytest.raises(ValueError, match="changes its logits by final_logit_softcapping, which no FlashHead does"):
        check(drafter(folder=folder))


def test_published_clusters_are_found_beside_the_weights(tmp_path):
    """As FlashHead models are published: no `head.model`, and no fingerprint."""
    folder = tmp_path / "model"
    published(folder, num_tokens=96, hidden_size=12, config={"hidden_size": 12, "vocab_size": 96})
    save_file({"lm_head.weight": embedding(96, 12)}, folder / "model.safetensors")
    config = DrafterConfig(kind="draft_model", model=str(folder), head={})
    check(config, DrafterFacts(12, 96, 96, (), None, 5, None))
    with pytest.raises(ValueError, match="is for a vocabulary of 96 tokens, the drafter's output embedding has 97"):
        check(config, DrafterFacts(12, 97, 97, (), None, 5, None))


# -- clusters of drafters ---------------------------------------------------------------------------------------------


def test_drafters_in_torchs_own_format_are_read(tmp_path):
    """Most public EAGLE-3 files are pytorch_model.bin."""
    tensors = load_file(EAGLE3 / "model.safetensors")
    shutil.copy(EAGLE3 / "config.json", tmp_path)
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert torch.equal(read_output_embedding(tmp_path), tensors["lm_head.weight"])
    kept = torch.arange(3072) + tensors["d2t"]
    assert torch.equal(read_target_ids(tmp_path), kept) and torch.equal(read_target_ids(EAGLE3), kept)
    check(drafter(folder=tmp_path))
    (tmp_path / "pytorch_model.bin").write_bytes((tmp_path / "pytorch_model.bin").read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"pytorch_model.bin is damaged or cut short"):
        read_output_embedding(tmp_path)


@pytest.mark.parametrize("kind", ["eagle3", "confu"])
def test_the_command_builds_for_a_drafter(tmp_path, kind):
    """Its recall is measured on the states of its own drafts; special ids are the target's, as far as it knows them."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "clusters"
    prompts.write_text('{"prompt": "Why is the sky blue?"}\n')
    settings = ("--target", TARGET, "--prompts", prompts, "--new-tokens", 5, "--device", "cpu")
    size = ("--cluster-size", 32, "--iterations", 1)
    done = call("build", POCKET / kind, "--out", out, *size, "--recall", 0.9, *settings)
    assert done.exit_code == 0, done.exception
    assets = read_assets(out, vocab_size=3072, hidden_size=256)
    kept = read_target_ids(POCKET / kind)
    specials = [int(token) for token in kept[list(assets.special_token_ids)]]
    assert specials and set(specials) <= {0, 1, 2, 3}
    assert assets.facts["measured_on"] == 7 * 5 and assets.num_probes < 96
    judged = call("recall", POCKET / kind, "--assets", out, *settings)
    assert judged.exit_code == 0, judged.exception
    check(DrafterConfig(kind=kind, model=str(POCKET / kind), head={"model": str(out)}))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("build", EAGLE3, *RECALL), "drafts from a target's states; name that target"),
        (("build", TARGET, *RECALL, "--target", TARGET), "is a language model of its own"),
        (("build", POCKET / "dflash", "--out", "x"), "uses its target's: give the target's folder"),
        (("build", POCKET / "confu", *RECALL, "--target", POCKET / "draft-model", "--iterations", 1),
         "MODEL: this drafter has soft prompts for 8 layers, but"),
        (("build", POCKET / "dart", *RECALL, "--target", TARGET, "--iterations", 1),
         "is a dart drafter, whose states cannot be had here; leave out --recall and choose --probes"),
    ],
)  # fmt: skip
def test_what_cannot_be_built_is_one_sentence(tmp_path, monkeypatch, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    refused = call(*arguments, "--device", "cpu")
    assert isinstance(refused.exception, ValueError) and sentence in str(refused.exception), refused.exception
    assert not list(tmp_path.iterdir())
