"""Public checkpoint formats: what is read from them, and every way in which one can be wrong."""

import json

import checkpoints
import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_crossspec.drafters.confu.checkpoint import ConfuShape, check_target, read_shape
from vllm_crossspec.kinds.checkpoint import check_drafter, read_config
from vllm_crossspec.kinds.identity import Target
from vllm_crossspec.types import TargetFacts

TARGET_CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 256,
    "num_hidden_layers": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
}
TARGET = TargetFacts("the target", hidden_size=64, vocab_size=256, num_layers=8)


@pytest.fixture()
def target_folder(tmp_path):
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TARGET_CONFIG))
    return folder


@pytest.fixture()
def eagle3(tmp_path, target_folder):
    return checkpoints.random_eagle3(tmp_path / "eagle3", target_folder, draft_vocab_size=128)


@pytest.fixture()
def dflash(tmp_path, target_folder):
    return checkpoints.random_dflash(tmp_path / "dflash", target_folder)


@pytest.fixture()
def confu(tmp_path, target_folder):
    return checkpoints.random_confu(tmp_path / "confu", target_folder, draft_vocab_size=128)


@pytest.fixture()
def dart(tmp_path, target_folder):
    return checkpoints.random_dart(tmp_path / "dart", target_folder, draft_vocab_size=128, draft_length=5)


@pytest.fixture()
def draft_model(target_folder):
    edit(target_folder, architectures=["LlamaForCausalLM"], model_type="llama")
    return target_folder


def check(kind, folder, has_weights=True):
    return check_drafter(kind, str(folder), "speculative_config.model", TARGET, has_weights=has_weights)


def edit(folder, **changes):
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


DFLASH_CONFIG = {"mask_token_id": 3, "target_layer_ids": [1, 4]}
NOT_EAGLE3 = "config.json describes .* not an EAGLE-3 drafter"
NOT_DFLASH = "config.json (describes|has) .*DFlash"
ATTENTION = {"num_hidden_layers": 8, "num_key_value_heads": 1}
# A kind of drafter, what its config.json says otherwise, and how it is refused.
# fmt: off
WRONG = [
    ("dart", {"draft_length": None}, "has no draft_length .*; it is not a DART drafter"),
    ("dart", {"draft_length": 0}, "draft_length in config.json is 0; a DART drafter has at least one mask"),
    ("dart", {"draft_length": "7"}, "draft_length in config.json is '7'"),
    ("dart", {"num_hidden_layers": 2}, "describes 2 layers; a DART drafter has one"),
    ("dart", {"architectures": ["LlamaForCausalLMDartUnshifted"]}, 'set "architectures" in config.json to'),
    ("dart", {"hidden_size": 32}, "reads states of width 32, but the target has hidden size 64"),
    ("dart", {"vocab_size": 99}, "vocabulary of 99 tokens, but the target has 256"),
    ("dart", {"dflash_config": {}}, "it is not a DART drafter"),
    ("confu", {"speculators_model_type": "eagle3"}, "describes eagle3, not a ConFu drafter; train one with"),
    ("confu", {"speculators_model_type": None}, "not a ConFu drafter"),
    ("confu", {"architectures": ["Eagle3Speculator"]}, 'set "architectures" in config.json to'),
    ("confu", {"num_soft_prompts": 0}, "num_soft_prompts in config.json is 0; it must be 1 or more"),
    ("confu", {"num_soft_prompts": "16"}, "num_soft_prompts in config.json is '16'"),
    ("confu", {"num_soft_prompts": None}, "has no 'num_soft_prompts'"),
    ("confu", {"num_experts": None}, "has no 'num_experts'"),
    ("confu", {"top_experts": True}, "top_experts in config.json is True"),
    ("confu", {"top_experts": 4}, "top_experts in config.json is 4, but there are 3 experts"),
    ("confu", {"target": None}, "has no 'target'"),
    ("confu", {"target": "Qwen3"}, "'target' in config.json is 'Qwen3', not the target's identity"),
    ("confu", {"target": ATTENTION}, "has no 'head_dim'"),
    ("confu", {"target": ATTENTION | {"num_hidden_layers": 9, "head_dim": 32}}, "for 9 layers, but the target has 8"),
    ("confu", {"eagle_aux_hidden_state_layer_ids": None}, "has no 'eagle_aux_hidden_state_layer_ids'"),
    ("confu", {"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, r"taps target layers \[2, 4, 9\], but the target has 8"),
    ("confu", {"norm_before_residual": True}, "has norm_before_residual, which no ConFu drafter has"),
    ("confu", {"draft_vocab_size": 512}, "draft_vocab_size 512 is larger than the vocabulary"),
    ("confu", {"transformer_layer_config": {"hidden_size": 64}}, "has no 'vocab_size'"),
    ("confu", {"transformer_layer_config": {"num_hidden_layers": 2}}, "describes 2 layers; a ConFu drafter has one"),
    ("confu", {"transformer_layer_config": {"hidden_size": 128, "vocab_size": 256}}, "reads states of width 128"),
    ("confu", {"transformer_layer_config": {"hidden_size": 64, "vocab_size": 300}}, "vocabulary of 300 tokens"),
    ("eagle3", {"hidden_size": 128}, "reads states of width 128, but the target has hidden size 64; it was trained"),
    ("eagle3", {"vocab_size": 300}, "vocabulary of 300 tokens, but the target has 256; it was trained for another"),
    ("eagle3", {"draft_vocab_size": 512}, "draft_vocab_size 512 is larger than the vocabulary"),
    ("eagle3", {"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, r"target layers \[2, 4, 9\], but the target has 8"),
    ("eagle3", {"vocab_size": None}, "config.json has no 'vocab_size'"),
    ("eagle3", {"speculators_model_type": "dflash"}, "not an EAGLE-3 drafter"),
    ("eagle3", {"architectures": None}, r'in config.json to \["LlamaForCausalLMEagle3"\] \(it is None\)'),
    ("eagle3", {"architectures": []}, 'set "architectures" in config.json to'),
    ("eagle3", {"architectures": "LlamaForCausalLMEagle3"}, 'set "architectures" in config.json to'),
    ("eagle3", {"model_type": None}, "config.json has no 'model_type'"),
    ("eagle3", {"eagle_config": {"use_aux_hidden_state": False}}, "reads the target's last state"),
    ("eagle3", {"architectures": 3}, ""),
    ("eagle3", {"vocab_size": "4096", "draft_vocab_size": 1}, ""),
    ("eagle3", {"speculators_config": [1]}, ""),
    *(("eagle3", {"architectures": [name]}, NOT_EAGLE3) for name in (
        "PEagleDraftModel", "PeagleLlamaForCausalLM", "EagleLlamaForCausalLM", "MiMoMTPModel", "Qwen3DSparkModel",
        "LiLiCorrDraftModel", "XPressDraftModel", "DFlash2DraftModel", "MedusaModel",
    )),
    ("eagle3", {"architectures": ["LlamaForCausalLMEagle3", "XPressDraftModel"]}, NOT_EAGLE3),
    *(("eagle3", {name: 5}, NOT_EAGLE3) for name in (
        "draft_length", "markov_rank", "pard_token", "ptd_token_id", "parallel_drafting",
    )),
    ("eagle3", {"speculators_model_type": "peagle"}, NOT_EAGLE3),
    ("eagle3", {"speculators_model_type": "mtp"}, NOT_EAGLE3),
    ("dflash", {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 8]}}, r"taps target layers \[2, 9\]"),
    ("dflash", {"dflash_config": {"mask_token_id": 999, "target_layer_ids": [1]}}, "mask_token_id 999 is outside"),
    ("dflash", {"dflash_config": {"target_layer_ids": [1]}}, "config.json has no 'mask_token_id'"),
    ("dflash", {"dflash_config": {"target_layer_ids": [None], "mask_token_id": 1}}, ""),
    ("dflash", {"dflash_config": None}, "it is not a DFlash drafter"),
    ("dflash", {"num_target_layers": 36}, "trained for a target of 36 layers, but the target has 8"),
    ("dflash", {"block_size": None}, "config.json has no block_size"),
    ("dflash", {"block_size": "8"}, ""),
    ("dflash", {"architectures": None}, r'"architectures" in config.json to \["DFlashDraftModel"\] \(it is None\)'),
    ("dflash", {"model_type": None}, "config.json has no 'model_type'"),
    *(("dflash", {"architectures": [name]}, NOT_DFLASH) for name in (
        "DFlash2DraftModel", "LiLiCorrDraftModel", "Qwen3DSparkModel", "DSparkDraftModel", "XPressDraftModel",
        "DFlashLagunaForCausalLM", "TreeFlashDraftModel", "PEagleDraftModel",
    )),
    *(("dflash", {"dflash_config": DFLASH_CONFIG | {name: value}}, NOT_DFLASH) for name, value in {
        "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256,
        "selector_top_k": 16, "lilicorr_candidate_topk": 8, "projector_type": "dspark", "markov_rank": 256,
        "target_hidden_size": 64, "anything": None, "sample_from_anchor": True, "use_aux_hidden_state": False,
    }.items()),
    ("dflash", {"dflash_config": DFLASH_CONFIG | {"causal_head": True}}, 'a JetSpec drafter; give "jetspec" where'),
    ("dflash", {"treeflash_config": {"candidate_tokens": 16}}, NOT_DFLASH),
    ("dflash", {"markov_rank": 256}, NOT_DFLASH),
    ("dflash", {"sample_from_anchor": True}, NOT_DFLASH),
    *(("draft_model", {name: 9}, name) for name in ("pard_token", "ptd_token_id", "markov_rank")),
]
# fmt: on


@pytest.mark.parametrize(("kind", "changes", "sentence"), WRONG, ids=str)
def test_a_wrong_config_gets_one_sentence(kind, changes, sentence, request):
    """Whether its weights are at hand or not."""
    folder = request.getfixturevalue(kind)
    edit(folder, **changes)
    for has_weights in (True, False):
        with pytest.raises(ValueError, match=f"^speculative_config.model: .*{sentence}") as caught:
            check(kind, folder, has_weights=has_weights)
        assert "\n" not in str(caught.value)


OTHERS = [
    ("eagle3", "confu", "describes confu, not an EAGLE-3 drafter"),
    ("dflash", "confu", "it is not a DFlash drafter"),
    ("dart", "confu", "it is not a DART drafter"),
    ("draft_model", "confu", "describes a drafter that reads the target's states"),
    ("confu", "eagle3", "not a ConFu drafter; train one with `crossspec train confu`"),
    ("confu", "dflash", "not a ConFu drafter; train one with `crossspec train confu`"),
    ("dflash", "eagle3", "it is not a DFlash drafter"),
    ("eagle3", "dflash", "not an EAGLE-3 drafter"),
]


@pytest.mark.parametrize(("kind", "other", "sentence"), OTHERS)
def test_kinds_refuse_each_other(kind, other, sentence, request):
    with pytest.raises(ValueError, match=sentence):
        check(kind, request.getfixturevalue(other))


def test_a_jetspec_checkpoint_is_read(dflash, tmp_path):
    """DFlash's facts, and vLLM is told that the block is causal; a DFlash drafter is refused."""
    folder = checkpoints.as_jetspec(tmp_path / "jetspec", dflash)
    found = check("jetspec", folder)
    assert found._replace(overrides={}) == check("dflash", dflash)._replace(overrides={})
    assert found.overrides == {"is_causal": 1}
    with pytest.raises(ValueError, match=r"no dflash_config.causal_head that is true: it is no JetSpec drafter"):
        check("jetspec", dflash)
    with pytest.raises(
        ValueError, match=r"has dflash_config.target_hidden_size, so that this drafter drafts in another"
    ):
        edit(folder, dflash_config=DFLASH_CONFIG | {"causal_head": True, "target_hidden_size": 9})
        check("jetspec", folder)


def test_a_dart_checkpoint_is_read(dart):
    facts = check("dart", dart)
    assert facts.target_layers == (2, 4, 5) and facts.draft_vocab_size == 128
    assert facts.max_draft_tokens == facts.default_draft_tokens == 6 and facts.mask_token_id is None


def test_a_confu_checkpoint_is_read(confu):
    facts = check("confu", confu)
    assert facts.target_layers == (2, 4, 5) and facts.draft_vocab_size == 128
    assert facts.max_draft_tokens is None and facts.default_draft_tokens == 5 and facts.mask_token_id is None
    assert read_shape(read_config(str(confu), "model"), "model") == ConfuShape(4, 3, 2, 8, 1, 32)


def _check_target(confu, target_folder):
    check_target(read_config(str(confu), "model"), "model", Target(TARGET, str(target_folder)))


def _weigh(folder, text):
    (folder / "model.safetensors").write_text(text)


def test_a_confu_drafter_knows_its_target_wherever_it_lies(tmp_path, target_folder):
    _weigh(target_folder, "these weights")
    confu = checkpoints.random_confu(tmp_path / "confu", target_folder)
    _check_target(confu, target_folder.rename(tmp_path / "elsewhere"))


def test_another_target_with_the_same_shape_is_refused(tmp_path, target_folder):
    _weigh(target_folder, "these weights")
    confu = checkpoints.random_confu(tmp_path / "confu", target_folder)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text((target_folder / "config.json").read_text())
    _check_target(confu, other)  # its weights are not at hand
    _weigh(other, "those weights")
    remedy = f"train one for it with `crossspec train confu --target {other}`"
    with pytest.raises(ValueError, match=f"^model: .* another target .target. than other, whose weight .*{remedy}"):
        _check_target(confu, other)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_hidden_layers": 9}, "num_layers 8. than target, which has 9"),
        ({"num_key_value_heads": 2}, "num_kv_heads 1. than target, which has 2"),
        ({"head_dim": 16}, "head_dim 32. than target, which has 16"),
    ],
)
def test_a_target_of_another_attention_is_refused_without_its_weights(confu, target_folder, changes, sentence):
    _check_target(confu, target_folder)
    edit(target_folder, **changes)
    with pytest.raises(ValueError, match=sentence) as caught:
        _check_target(confu, target_folder)
    assert "\n" not in str(caught.value) and "crossspec train confu --target" in str(caught.value)


def test_eagle3_formats_say_the_same(tmp_path, target_folder, eagle3):
    facts = check("eagle3", eagle3)
    assert facts.target_layers == (2, 4, 5) and facts.draft_vocab_size == 128 and facts.max_draft_tokens is None
    assert check("eagle3", checkpoints.eagle3_as_bin(eagle3, tmp_path / "bin")) == facts
    speculators = checkpoints.eagle3_as_speculators(eagle3, tmp_path / "speculators", target_folder)
    assert check("eagle3", speculators) == facts


def test_dflash_formats_say_the_same(tmp_path, target_folder, dflash):
    facts = check("dflash", dflash)
    assert facts.target_layers == (2, 5) and facts.max_draft_tokens == 7 and facts.mask_token_id == 3
    assert check("dflash", checkpoints.dflash_as_speculators(dflash, tmp_path / "s", target_folder)) == facts


def test_known_fields_of_dflash_configs_are_legal(dflash):
    edit(dflash, dflash_config=DFLASH_CONFIG | {
        "block_size": 8, "causal": True, "use_swa": True, "swa_window_size": 128, "attention_value_scale": 1.0,
        "use_aux_hidden_state": True, "sample_from_anchor": False,
    })  # fmt: skip
    check("dflash", dflash)
    edit(dflash, architectures=["MuseGlimmerAssistantModel"])
    check("dflash", dflash)


# -- tensors ----------------------------------------------------------------------------------------------------------


def rewrite(folder, change):
    """Have ``change`` edit the tensors of a folder in whatever file they are."""
    file = folder / "model.safetensors"
    if file.is_file():
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)
        return
    tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
    change(tensors)
    torch.save(tensors, folder / "pytorch_model.bin")


@pytest.fixture()
def folders(tmp_path, target_folder):
    """Every kind of drafter, and every format that it comes in."""
    eagle3 = checkpoints.random_eagle3(tmp_path / "eagle3", target_folder, draft_vocab_size=128)
    dflash = checkpoints.random_dflash(tmp_path / "dflash", target_folder)
    return {
        "eagle3": eagle3,
        "eagle3 qwen3": checkpoints.random_eagle3(tmp_path / "q", target_folder, 128, flavour="qwen3"),
        "eagle3 bin": checkpoints.eagle3_as_bin(eagle3, tmp_path / "bin"),
        "eagle3 speculators": checkpoints.eagle3_as_speculators(eagle3, tmp_path / "es", target_folder),
        "dflash": dflash,
        "dflash speculators": checkpoints.dflash_as_speculators(dflash, tmp_path / "ds", target_folder),
        "dart": checkpoints.random_dart(tmp_path / "dart", target_folder, 128),
        "confu": checkpoints.random_confu(tmp_path / "confu", target_folder, 128),
        "draft_model": checkpoints.random_draft_model(tmp_path / "lm", target_folder),
    }


KINDS = (
    "eagle3", "eagle3 qwen3", "eagle3 bin", "eagle3 speculators", "dflash", "dflash speculators", "dart", "confu",
    "draft_model",
)  # fmt: skip


@pytest.mark.parametrize("form", KINDS)
def test_every_tensor_must_be_there_in_its_shape(folders, form):
    """Each of them is taken away, made a row longer, and made a column longer; and one more is put there."""
    folder, kind = folders[form], form.split()[0]
    check(kind, folder)
    whole = {}
    rewrite(folder, whole.update)
    may_miss = {"t2d", "future_skip.weight"}
    for name, tensor in whole.items():
        changed = [(dim, torch.cat([tensor, tensor.narrow(dim, 0, 1)], dim)) for dim in range(tensor.ndim)]
        for dim, other in [(None, None), *changed]:
            tensors = whole | {name: other}
            rewrite(folder, lambda old, new=tensors: (old.clear(), old.update(drop_none(new))))
            if dim is None and name in may_miss:
                check(kind, folder)
                continue
            sentence = "its files have no tensor" if dim is None else "has the shape"
            with pytest.raises(ValueError, match=f"^speculative_config.model: .*{sentence}") as caught:
                check(kind, folder)
            assert "\n" not in str(caught.value) and name.replace("midlayer.", "") in str(caught.value)
    if kind != "draft_model":
        rewrite(folder, lambda old: (old.clear(), old.update(whole | {"candidate_selector.a": torch.ones(2)})))
        with pytest.raises(ValueError, match="have a tensor candidate_selector.a, which no .* drafter with this"):
            check(kind, folder)


def drop_none(tensors):
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def test_a_whole_vocabulary_needs_no_head_and_no_map(tmp_path, target_folder):
    folder = checkpoints.random_eagle3(tmp_path / "whole", target_folder)
    rewrite(folder, lambda tensors: tensors.pop("lm_head.weight"))
    assert check("eagle3", folder).draft_vocab_size == 256
    edit(folder, draft_vocab_size=None)
    check("eagle3", folder)


@pytest.mark.parametrize("form", ["eagle3", "eagle3 bin", "eagle3 speculators", "dflash", "dart"])
def test_an_embedding_of_its_own_is_legal(folders, form):
    kind = form.split()[0]
    rewrite(folders[form], lambda tensors: tensors.update({"embed_tokens.weight": torch.ones(256, 64)}))
    check(kind, folders[form])
    rewrite(folders[form], lambda tensors: tensors.update({"embed_tokens.weight": torch.ones(255, 64)}))
    with pytest.raises(ValueError, match=r"embed_tokens.weight has the shape \[255, 64\], .* asks for \[256, 64\]"):
        check(kind, folders[form])


@pytest.mark.parametrize("form", ["eagle3", "eagle3 speculators"])
@pytest.mark.parametrize("nested", [False, True])
def test_four_taps(folders, form, nested):
    """Named at top level or in eagle_config; ``fc`` must read as many."""
    layers = {"eagle_aux_hidden_state_layer_ids": [1, 2, 4, 6]}
    edit(folders[form], **({"eagle_config": layers} if nested else layers))
    with pytest.raises(ValueError, match=r"fc.weight has the shape \[64, 192\], but .* asks for \[64, 256\]"):
        check("eagle3", folders[form])
    rewrite(folders[form], lambda tensors: tensors.update({"fc.weight": torch.ones(64, 256)}))
    facts = check("eagle3", folders[form])
    assert facts.target_layers == (1, 2, 4, 6) and facts.overrides["num_aux_hidden_states"] == 4


def test_norms_before_fusing(folders):
    folder = folders["eagle3 speculators"]
    edit(folder, norm_before_fc=True, fc_norm=True)
    with pytest.raises(ValueError, match="have no tensor input_norm.weight"):
        check("eagle3", folder)
    norms = {"input_norm.weight": torch.ones(192), **{f"fc_norm.{i}.weight": torch.ones(64) for i in range(3)}}
    rewrite(folder, lambda tensors: tensors.update(norms))
    check("eagle3", folder)
    rewrite(folder, lambda tensors: tensors.pop("fc_norm.2.weight"))
    with pytest.raises(ValueError, match="have no tensor fc_norm.2.weight"):
        check("eagle3", folder)


@pytest.mark.parametrize("form", KINDS)
def test_packed_matrices_are_legal_and_their_norms_are_compared(folders, form):
    kind = form.split()[0]

    def pack(tensors):
        for name in [name for name in tensors if "_proj.weight" in name]:
            tensor, module = tensors.pop(name), name.removesuffix("weight")
            tensors[f"{module}weight_packed"] = torch.zeros(tensor.shape[0], 3, dtype=torch.int32)
            tensors[f"{module}weight_scale"] = torch.ones(tensor.shape[0], 1)

    rewrite(folders[form], pack)
    with pytest.raises(ValueError, match="its files have no tensor .*_proj.weight"):
        check(kind, folders[form])
    edit(folders[form], quantization_config={"quant_method": "compressed-tensors"})
    check(kind, folders[form])
    rewrite(folders[form], lambda tensors: tensors.pop(next(name for name in tensors if name.endswith("norm.weight"))))
    with pytest.raises(ValueError, match="its files have no tensor .*norm.weight"):
        check(kind, folders[form])


@pytest.mark.parametrize("form", ["eagle3", "eagle3 qwen3", "eagle3 bin", "eagle3 speculators"])
def test_a_count_of_the_targets_layers_is_read_as_one(folders, form, caplog):
    """As in yuhuili/EAGLE3-Vicuna-13B."""
    config = json.loads((folders[form] / "config.json").read_text())
    nested = config.get("transformer_layer_config")
    edit(folders[form], **({"transformer_layer_config": nested | {"num_hidden_layers": 40}} if nested else {
        "num_hidden_layers": 40
    }))  # fmt: skip
    assert check("eagle3", folders[form]).overrides["num_hidden_layers"] == 1
    assert "says num_hidden_layers 40, and its files hold one layer" in caplog.text


def test_more_layers_than_one(folders):
    folder = folders["eagle3"]
    edit(folder, num_hidden_layers=40)
    sentence = "a model of 40 layers, not an EAGLE-3 drafter; if its files hold one layer, set num_hidden_layers to 1"
    with pytest.raises(ValueError, match=sentence):  # as of a hub repository, whose files are not here yet
        check_drafter("eagle3", str(folder), "model", TARGET, has_weights=False)
    rewrite(folder, lambda tensors: tensors.update({"layers.1.input_layernorm.weight": torch.ones(64)}))
    with pytest.raises(ValueError, match=sentence):
        check("eagle3", folder)
    edit(folder, num_hidden_layers=2)
    with pytest.raises(ValueError, match="have no tensor layers.1."):
        check("eagle3", folder)


def test_layers_of_blocks_and_language_models_are_counted(folders):
    for form, count in (("dflash", 3), ("draft_model", 3)):
        edit(folders[form], num_hidden_layers=count)
        with pytest.raises(ValueError, match="have no tensor (model.)?layers.2."):
            check(form, folders[form])
        edit(folders[form], num_hidden_layers=1)
        with pytest.raises(ValueError, match=r"hold a layer 1, and|have a tensor layers.1.*which no DFlash drafter"):
            check(form, folders[form])


def test_an_index_says_which_files_are_read(folders):
    folder = folders["eagle3"]
    names = load_file(folder / "model.safetensors")
    save_file({"other.weight": torch.ones(3)}, folder / "consolidated.safetensors")
    with pytest.raises(ValueError, match="have a tensor other.weight"):
        check("eagle3", folder)
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    check("eagle3", folder)


def test_missing_folder_and_missing_files(tmp_path, eagle3, monkeypatch):
    with pytest.raises(ValueError, match="there is no folder"):
        check("eagle3", tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="has no config.json"):
        check("eagle3", tmp_path / "empty")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match="give a local folder"):
        check("eagle3", "no-such-org/no-such-drafter")
    (eagle3 / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds no .safetensors or .bin weights"):
        check("eagle3", eagle3)


CUT, INDEX, NO_INDEX = (
    "is damaged or cut short",
    "model.safetensors.index.json",
    "holds no JSON object|names no weight files",
)
# A file, what is in it or how much of it is left, and how it is refused.
DAMAGED = [
    *(("model.safetensors", share, f"model.safetensors {CUT}") for share in (0.001, 0.5, 0.999)),
    ("pytorch_model.bin", 0.99, f"pytorch_model.bin {CUT}"),
    (INDEX, b'{"weight_map": {"fc.weight": "model-1-of-2.safetensors"}}', "model-1-of-2.safetensors is named by"),
    *((INDEX, text, NO_INDEX) for text in (b"[]", b"{}", b'{"weight_map": []}', b'{"weight_map": {"fc": "../other"}}')),
    *(("config.json", text, "is not valid JSON") for text in (b"{", b"\xff\xfe", b"[" * 100_000)),
    ("config.json", b'"eagle3"', "holds no JSON object"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "left", "sentence"), DAMAGED)
def test_a_damaged_file_is_named(tmp_path, eagle3, name, left, sentence):
    folder = checkpoints.eagle3_as_bin(eagle3, tmp_path / "bin") if name.endswith(".bin") else eagle3
    file = folder / name
    whole = file.read_bytes() if file.is_file() else b""
    file.write_bytes(left if isinstance(left, bytes) else whole[: int(len(whole) * left)])
    with pytest.raises(ValueError, match=sentence):
        check("eagle3", folder)
