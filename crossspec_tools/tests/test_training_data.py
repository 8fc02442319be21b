"""Training's responses and batches on a tiny random target."""

import shutil
from dataclasses import replace

import pytest
import torch
from tiny_training import RESPONSES, VOCAB, random_rows
from transformers import AutoTokenizer

from crossspec_tools.records.sharded import run_missing
from crossspec_tools.train.generate import GENERATE, generate, plan
from crossspec_tools.train.generations import collate, generation_batches, read_generations, sample_anchors
from crossspec_tools.train.states import load_target
from crossspec_tools.train.target import CHAT_TEMPLATE

SYSTEM = "<|im_start|>system\nBe short.<|im_end|>\n"

# ---- responses


def test_responses_are_the_targets_own(tmp_path, data, target_folder):
    """Whatever is in the batch, a greedy answer is what the target says alone, up to the token that ends it."""
    model, _ = load_target(target_folder, torch.float32)
    job, shards = plan(data, target_folder, tmp_path, replace(RESPONSES, sampled_share=0.0, rows_per_batch=7))
    prompts = [prompt["ids"] for prompt in shards[1]["prompts"]]
    # An end token that greedy text does contain, so that rows end at different lengths.
    plain = [_greedy(model, prompt, 24, end_id=-1) for prompt in prompts]
    tokens = {token for answer in plain for token in answer}
    end_id = max(tokens, key=lambda token: len({answer.index(token) for answer in plain if token in answer}))
    engine = {"model": str(target_folder), "dtype": "float32", "max_num_seqs": 7, "max_model_len": 88}
    made = run_missing(GENERATE, {**job, "end_id": end_id, "engine": engine}, shards[1:2], 24, engines=1)
    expected = [_greedy(model, prompt, 24, end_id) for prompt in prompts]
    got = [row.response_ids for row in read_generations(tmp_path, "train", VOCAB)]
    assert got == [answer for answer in expected if len(answer) > 1]  # others have nothing to draft
    assert len({len(answer) for answer in got}) > 1 and made == sum(map(len, expected))


def _greedy(model, prompt: list[int], count: int, end_id: int) -> list[int]:
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax().item())
            if tokens[-1] == end_id:
                break
    return tokens[len(prompt) :]


def test_responses_are_resumable_and_seeded(tmp_path, data, target_folder, responses):
    assert generate(data, target_folder, responses, RESPONSES) == 0  # nothing is missing
    names = sorted(p.name for p in responses.glob("*.gz"))
    assert names == ["dev-00000.jsonl.gz", "train-00000.jsonl.gz", "train-00001.jsonl.gz"]
    shutil.copytree(responses, copy := tmp_path / "again")
    (copy / names[1]).unlink()
    assert generate(data, target_folder, copy, RESPONSES) > 0
    for name in names:
        assert (copy / name).read_bytes() == (responses / name).read_bytes()
    with pytest.raises(ValueError, match="other max_new_tokens"):
        generate(data, target_folder, copy, replace(RESPONSES, max_new_tokens=12))


def test_prompts_are_rendered_by_the_targets_own_template(tmp_path, data, target_folder):
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    made = {}
    for name, template in (("own", tokenizer.chat_template), ("none", None), ("system", SYSTEM + CHAT_TEMPLATE)):
        shutil.copytree(target_folder, folder := tmp_path / name)
        tokenizer.chat_template = template
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        tokenizer.save_pretrained(folder)
        _, shards = plan(data, folder, tmp_path / f"{name}-out", RESPONSES)
        made[name] = [prompt["ids"] for shard in shards for prompt in shard["prompts"]]
    assert made["own"] == made["none"] != made["system"]
    system = tokenizer(SYSTEM, add_special_tokens=False)["input_ids"]
    assert all(ids[: len(system)] == system for ids in made["system"])


def test_only_training_prompts_are_sampled(responses):
    assert all(row.greedy for row in read_generations(responses, "dev", VOCAB))
    assert {row.greedy for row in read_generations(responses, "train", VOCAB)} == {True, False}


# ---- batches


def test_anchors_are_places_where_a_draft_can_begin():
    batch = collate(random_rows(50))
    generator = torch.Generator().manual_seed(0)
    for first in (0, -1):
        anchors, real = sample_anchors(batch, first, 6, generator)
        assert (anchors >= batch.starts[:, None] + first).all()
        last = (batch.ends[:, None] + first - 1).expand_as(anchors)
        assert (anchors[real] < last[real]).all()
        counts = torch.minimum(batch.ends - batch.starts - 1, torch.tensor(6))
        assert torch.equal(real.sum(1), counts)
        for row, keep in zip(anchors, real, strict=True):
            assert len(set(row[keep].tolist())) == keep.sum()


def test_batches_depend_on_the_seed_alone():
    rows = random_rows(40)
    one, two = generation_batches(rows, 4, 3), generation_batches(rows, 4, 3)
    for _ in range(25):
        assert torch.equal(next(one).tokens, next(two).tokens)
