"""Public checkpoint formats: what is read from them, and every way in which one can be wrong."""

import json

import checkpoints
import pytest

from vllm_crossspec.drafters.checkpoint import check_drafter, read_config
from vllm_crossspec.drafters.confu.checkpoint import ConfuShape, check_target, read_shape
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


def check(kind, folder, target=TARGET):
    return check_drafter(kind, str(folder), "speculative_config.model", target)


def edit(folder, **changes):
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def test_a_dart_checkpoint_is_read(tmp_path, target_folder):
    folder = checkpoints.random_dart(tmp_path / "dart", target_folder, draft_vocab_size=128, draft_length=5)
    facts = check("dart", folder)
    assert facts.target_layers == (2, 4, 5) and facts.draft_vocab_size == 128
    assert facts.max_draft_tokens == facts.default_draft_tokens == 6 and facts.mask_token_id is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"draft_length": None}, "has no draft_length .*; it is not a DART drafter"),
        ({"draft_length": 0}, "draft_length in config.json is 0; a DART drafter has at least one mask"),
        ({"draft_length": "7"}, "draft_length in config.json is '7'"),
        ({"num_hidden_layers": 2}, "describes 2 layers; a DART drafter has one"),
        ({"architectures": ["LlamaForCausalLMDartUnshifted"]}, 'set "architectures" in config.json to'),
        ({"hidden_size": 32}, "reads states of width 32, but the target has hidden size 64"),
        ({"vocab_size": 99}, "vocabulary of 99 tokens, but the target has 256"),
        ({"dflash_config": {}}, "it is not a DART drafter"),
    ],
)
def test_a_wrong_dart_checkpoint_gets_one_sentence(tmp_path, target_folder, changes, sentence):
    folder = checkpoints.random_dart(tmp_path / "dart", target_folder, draft_vocab_size=128)
    edit(folder, **changes)
    with pytest.raises(ValueError, match=sentence) as caught:
        check("dart", folder)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("speculative_config.model: ")


@pytest.fixture()
def confu(tmp_path, target_folder):
    return checkpoints.random_confu(tmp_path / "confu", target_folder, draft_vocab_size=128)


def test_a_confu_checkpoint_is_read(confu):
    facts = check("confu", confu)
    assert facts.target_layers == (2, 4, 5) and facts.draft_vocab_size == 128
    assert facts.max_draft_tokens is None and facts.default_draft_tokens == 5 and facts.mask_token_id is None
    assert read_shape(read_config(str(confu), "model"), "model") == ConfuShape(4, 3, 2, 8, 1, 32)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"speculators_model_type": "eagle3"}, "describes eagle3, not a ConFu drafter; train one with"),
        ({"speculators_model_type": None}, "not a ConFu drafter"),
        ({"architectures": ["Eagle3Speculator"]}, 'set "architectures" in config.json to'),
        ({"num_soft_prompts": 0}, "num_soft_prompts in config.json is 0; it must be 1 or more"),
        ({"num_soft_prompts": "16"}, "num_soft_prompts in config.json is '16'"),
        ({"num_soft_prompts": None}, "has no 'num_soft_prompts'"),
        ({"num_experts": None}, "has no 'num_experts'"),
        ({"top_experts": True}, "top_experts in config.json is True"),
        ({"top_experts": 4}, "top_experts in config.json is 4, but there are 3 experts"),
        ({"target": None}, "has no 'target'"),
        ({"target": "Qwen3"}, "'target' in config.json is 'Qwen3', not the target's identity"),
        ({"target": {"num_hidden_layers": 8, "num_key_value_heads": 1}}, "has no 'head_dim'"),
        (
            {"target": {"num_hidden_layers": 9, "num_key_value_heads": 1, "head_dim": 32}},
            "has soft prompts for 9 layers, but the target has 8",
        ),
        ({"eagle_aux_hidden_state_layer_ids": None}, "has no 'eagle_aux_hidden_state_layer_ids'"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, r"taps target layers \[2, 4, 9\], but the target has 8"),
        ({"norm_before_residual": True}, "has norm_before_residual, which no ConFu drafter has"),
        ({"draft_vocab_size": 512}, "draft_vocab_size 512 is larger than the vocabulary"),
        ({"transformer_layer_config": {"hidden_size": 64}}, "has no 'vocab_size'"),
        ({"transformer_layer_config": {"num_hidden_layers": 2}}, "describes 2 layers; a ConFu drafter has one"),
        ({"transformer_layer_config": {"hidden_size": 128, "vocab_size": 256}}, "reads states of width 128"),
        ({"transformer_layer_config": {"hidden_size": 64, "vocab_size": 300}}, "vocabulary of 300 tokens"),
    ],
)
def test_a_wrong_confu_checkpoint_gets_one_sentence(confu, changes, sentence):
    edit(confu, **changes)
    with pytest.raises(ValueError, match=sentence) as caught:
        check("confu", confu)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("speculative_config.model: ")


def test_confu_and_the_others_refuse_each_other(confu, eagle3, dflash):
    for kind, sentence in (
        ("eagle3", "describes confu, not an EAGLE-3 drafter"),
        ("dflash", "it is not a DFlash drafter"),
        ("dart", "it is not a DART drafter"),
        ("draft_model", "describes a drafter that reads the target's states"),
    ):
        with pytest.raises(ValueError, match=sentence):
            check(kind, confu)
    for folder in (eagle3, dflash):
        with pytest.raises(ValueError, match="not a ConFu drafter; train one with `crossspec train confu`"):
            check("confu", folder)


def _check_target(confu, target_folder):
    check_target(read_config(str(confu), "model"), "model", str(target_folder))


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


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"hidden_size": 128}, "reads states of width 128, but the target has hidden size 64"),
        ({"vocab_size": 300}, "vocabulary of 300 tokens, but the target has 256"),
        ({"draft_vocab_size": 512}, "draft_vocab_size 512 is larger than the vocabulary"),
        (
            {"eagle_aux_hidden_state_layer_ids": [2, 4, 9]},
            r"taps target layers \[2, 4, 9\], but the target has 8",
        ),
        ({"vocab_size": None}, "config.json has no 'vocab_size'"),
        ({"speculators_model_type": "dflash"}, "not an EAGLE-3 drafter"),
        ({"num_hidden_layers": 28}, "a model of 28 layers, not an EAGLE-3 drafter"),
    ],
)
def test_wrong_eagle3_config(eagle3, changes, sentence):
    edit(eagle3, **changes)
    with pytest.raises(ValueError, match=sentence):
        check("eagle3", eagle3)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 8]}}, r"taps target layers \[2, 9\]"),
        ({"dflash_config": {"mask_token_id": 999, "target_layer_ids": [1]}}, "mask_token_id 999 is outside"),
        ({"dflash_config": {"target_layer_ids": [1]}}, "config.json has no 'mask_token_id'"),
        ({"dflash_config": None}, "it is not a DFlash drafter"),
        ({"num_target_layers": 36}, "trained for a target of 36 layers, but the target has 8"),
        ({"block_size": None}, "config.json has no block_size"),
    ],
)
def test_wrong_dflash_config(dflash, changes, sentence):
    edit(dflash, **changes)
    with pytest.raises(ValueError, match=sentence):
        check("dflash", dflash)


def test_drafter_of_the_other_kind(eagle3, dflash):
    with pytest.raises(ValueError, match="it is not a DFlash drafter"):
        check("dflash", eagle3)
    with pytest.raises(ValueError, match="not an EAGLE-3 drafter"):
        check("eagle3", dflash)


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


@pytest.mark.parametrize("share", [0.001, 0.5, 0.999])
def test_truncated_safetensors(eagle3, share):
    file = eagle3 / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ValueError, match="model.safetensors is damaged or cut short"):
        check("eagle3", eagle3)


def test_truncated_bin(tmp_path, eagle3):
    folder = checkpoints.eagle3_as_bin(eagle3, tmp_path / "bin")
    file = folder / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:-2000])
    with pytest.raises(ValueError, match="pytorch_model.bin is damaged or cut short"):
        check("eagle3", folder)


def test_missing_shard(eagle3):
    index = {"weight_map": {"fc.weight": "model-00001-of-00002.safetensors"}}
    (eagle3 / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="model-00001-of-00002.safetensors is named by"):
        check("eagle3", eagle3)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("eagle3", {"architectures": 3}),
        ("eagle3", {"vocab_size": "4096", "draft_vocab_size": 1}),
        ("eagle3", {"speculators_config": [1]}),
        ("dflash", {"dflash_config": {"target_layer_ids": [None], "mask_token_id": 1}}),
        ("dflash", {"block_size": "8"}),
    ],
)
def test_config_with_a_field_of_another_kind(kind, fields, request):
    folder = request.getfixturevalue(kind)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(ValueError, match="^[^\n]*$"):
        check(kind, folder)


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {"fc.weight": "../other"}}'])
def test_index_that_names_no_files_beside_it(eagle3, index):
    (eagle3 / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match="holds no JSON object|names no weight files beside it"):
        check("eagle3", eagle3)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"{", "is not valid JSON"),
        (b"\xff\xfe", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b'"eagle3"', "holds no JSON object"),
    ],
    ids=["cut", "bytes", "deep", "word"],
)
def test_config_that_is_not_json(eagle3, content, sentence):
    (eagle3 / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=sentence):
        check("eagle3", eagle3)
