"""Training's responses and batches on a tiny random target."""

import pytest
import torch
from tiny_training import VOCAB, random_rows, texts

from vllm_crossspec.training.generate import GenerateConfig, generate, generate_batch, prepare_for_generation
from vllm_crossspec.training.generations import collate, generation_batches, read_generations, sample_anchors
from vllm_crossspec.training.states import load_target

# ---- responses


def test_batched_responses_equal_one_by_one_greedy(target_folder):
    """Left padding, the slab cache, folded attention and leaving rows do not change a greedy answer."""
    model, tokenizer = load_target(target_folder, torch.float32)
    prompts = tokenizer([r["prompt"] for r in texts()[:7]])["input_ids"]
    # An end token that greedy text does contain, so that rows end at different lengths.
    plain = [_greedy(model, prompt, 20, end_id=-1) for prompt in prompts]
    flat = [token for answer in plain for token in answer]
    end_id = max(set(flat), key=lambda token: sum(token in answer for answer in plain[:4]))
    expected = [_greedy(model, prompt, 20, end_id) for prompt in prompts]
    got = generate_batch(
        prepare_for_generation(model), prompts, [0.0] * 7, 20, end_id, torch.Generator().manual_seed(0)
    )
    assert got == expected
    assert len({len(answer) for answer in got}) > 1


def _greedy(model, prompt: list[int], count: int, end_id: int) -> list[int]:
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax().item())
            if tokens[-1] == end_id:
                break
    return tokens[len(prompt) :]


def test_responses_are_resumable_and_seeded(tmp_path, data, target_folder, responses):
    config = GenerateConfig(max_new_tokens=24, shard_rows=20)
    assert generate(data, target_folder, responses, config) == 0  # nothing is missing
    copy = tmp_path / "again"
    assert generate(data, target_folder, copy, config) > 0
    names = sorted(p.name for p in responses.glob("*.gz"))
    assert names == ["dev-00000.jsonl.gz", "train-00000.jsonl.gz", "train-00001.jsonl.gz"]
    (copy / names[1]).unlink()
    generate(data, target_folder, copy, config)
    for name in names:
        assert (copy / name).read_bytes() == (responses / name).read_bytes()
    with pytest.raises(ValueError, match="other max_new_tokens"):
        generate(data, target_folder, copy, GenerateConfig(max_new_tokens=12, shard_rows=20))


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
