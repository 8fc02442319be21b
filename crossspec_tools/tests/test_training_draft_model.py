"""The distilled draft model: how it begins, and its held-out acceptance against a real loop of drafts."""

from dataclasses import replace

import engines
import pytest
import torch
from tiny_training import DEPTH, DRAFT_MODEL, LOOP, VOCAB, frozen_target, load, random_rows
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from crossspec_tools.train import draft_model
from crossspec_tools.train.acceptance import measure
from crossspec_tools.train.draft_model import build_draft_model
from crossspec_tools.train.drafter_run import offline_acceptance
from crossspec_tools.train.generations import Generation


@pytest.fixture
def target(target_folder):
    return frozen_target(target_folder, ())


def write_llama(folder, target_folder, **more):
    """A random Llama target with the tiny target's tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=DEPTH, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=256, initializer_range=0.2, eos_token_id=2, **more,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(target_folder).save_pretrained(folder)


@pytest.mark.parametrize("more", [{"tie_word_embeddings": True}, {"tie_word_embeddings": True, "mlp_bias": True}])
def test_of_a_llama_target_it_is_a_llama(tmp_path, target_folder, more):
    write_llama(tmp_path, target_folder, **more)
    target = frozen_target(tmp_path, ())
    with torch.no_grad():
        for name, x in target.model.named_parameters():
            if name.endswith("bias"):
                x.normal_(generator=torch.Generator().manual_seed(1))
    model = build_draft_model(replace(DRAFT_MODEL, num_layers=DEPTH, intermediate_size=48), target, seed=0)
    tokens = torch.randint(0, 200, (2, 17), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=tokens).logits, target.model(input_ids=tokens).logits)
        fewer = build_draft_model(replace(DRAFT_MODEL, num_layers=2), target, seed=0)
        assert (fewer(input_ids=tokens).logits - target.model(input_ids=tokens).logits).abs().max() > 0.1
    assert fewer.config.num_hidden_layers == 2 and target.config.num_hidden_layers == DEPTH


@pytest.mark.e2e
def test_an_engine_drafts_with_a_llama(tmp_path, responses, target_folder):
    """It is trained, written and served beside its target, whose text stays."""
    write_llama(tmp_path / "target", target_folder, tie_word_embeddings=True)
    loop = replace(LOOP, steps=3)
    draft_model.train_draft_model(responses, tmp_path / "target", tmp_path / "out", DRAFT_MODEL, loop)
    config, tensors = load(tmp_path / "out" / "model")
    assert config["architectures"] == ["LlamaForCausalLM"] and config["num_hidden_layers"] == DRAFT_MODEL.num_layers
    assert {x.dtype for x in tensors.values()} == {torch.bfloat16} and "lm_head.weight" not in tensors
    spec = {"method": "draft_model", "model": str(tmp_path / "out" / "model"), "num_speculative_tokens": 3}
    prompts = [{"prompt_token_ids": row.prompt_ids} for row in random_rows(3)]
    found = []
    for given in (None, spec | {"tree": {"type": "chain"}}):
        with engines.engine(given, tmp_path / "target", max_model_len=64, max_num_seqs=4) as llm:
            found.append(engines.generate(llm, prompts, max_tokens=16))
            counts = None if given is None else engines.counts(llm)
    assert found[0] == found[1] and counts.drafts > 0


def test_with_all_layers_it_begins_as_the_target(target):
    model = build_draft_model(replace(DRAFT_MODEL, num_layers=DEPTH, intermediate_size=48), target, seed=0)
    tokens = torch.randint(0, 200, (2, 17), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=tokens).logits, target.model(input_ids=tokens).logits)
        fewer = build_draft_model(DRAFT_MODEL, target, seed=0)
        assert (fewer(input_ids=tokens).logits - target.model(input_ids=tokens).logits).abs().max() > 0.1


@pytest.mark.parametrize("trains_embedding", [True, False])
def test_the_targets_embedding_stays_if_asked(tmp_path, responses, target_folder, target, trains_embedding):
    config, loop = replace(DRAFT_MODEL, trains_embedding=trains_embedding), replace(LOOP, steps=3)
    draft_model.train_draft_model(responses, target_folder, tmp_path, config, loop)
    tensors = load(tmp_path / "model")[1]
    embedding = tensors["model.embed_tokens.weight"]
    assert torch.equal(embedding, target.head.bfloat16()) is not trains_embedding
    begun = build_draft_model(config, target, seed=0).state_dict()["model.layers.0.mlp.up_proj.weight"]
    assert not torch.equal(tensors["model.layers.0.mlp.up_proj.weight"], begun.bfloat16())


def test_the_heaviest_neurons_stay(target):
    with torch.no_grad():
        target.model.model.layers[0].mlp.down_proj.weight[:, 5] *= 100
        target.model.model.layers[0].mlp.down_proj.weight[:, 7] *= 0.001
    mlp, wide = (m.model.layers[0].mlp for m in (build_draft_model(DRAFT_MODEL, target, seed=0), target.model))
    rows = {tuple(row.tolist()) for row in mlp.gate_proj.weight}
    assert tuple(wide.gate_proj.weight[5].tolist()) in rows and tuple(wide.gate_proj.weight[7].tolist()) not in rows


def test_one_pass_measures_what_a_loop_of_drafts_would(target):
    """The rows are the draft model's own greedy text with errors, so that some drafts are right and some are not."""
    model, rows = build_draft_model(DRAFT_MODEL, target, seed=0), []
    for row in random_rows(6, seed=1):
        tokens = torch.tensor([row.prompt_ids])
        text = model.generate(tokens, max_new_tokens=14, do_sample=False, eos_token_id=None)[0, len(row.prompt_ids) :]
        text[5], text[11] = 0, 1
        rows.append(Generation(row.prompt_ids, text.tolist(), "chat", True))

    def loop(batch, anchors):
        drafts = torch.zeros(*anchors.shape, DRAFT_MODEL.num_drafts, dtype=torch.int64)
        for row, places in enumerate(anchors.tolist()):
            for column, place in enumerate(places):
                start = batch.tokens[row : row + 1, : place + 1]
                out = model.generate(start, max_new_tokens=DRAFT_MODEL.num_drafts, do_sample=False, eos_token_id=None)
                drafts[row, column] = out[0, place + 1 :]
        return drafts

    expected = measure(rows, loop, DRAFT_MODEL.num_drafts)
    assert 1 < expected["dev_accept"] < 1 + DRAFT_MODEL.num_drafts
    one_pass = lambda batch, anchors: draft_model.drafts(model, batch, anchors, DRAFT_MODEL.num_drafts)  # noqa: E731
    assert offline_acceptance(model, target, rows, one_pass, DRAFT_MODEL.num_drafts) == expected
