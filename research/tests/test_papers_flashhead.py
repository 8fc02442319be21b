"""research/papers/flashhead.py: its walks against training's own, its heads against one another, and bad input."""

from types import SimpleNamespace

import confu_offline
import engines
import pytest
import torch
from made_tables import make_table, refusal
from papers import flashhead
from texts import POCKET, open_target

from crossspec_tools.train import draft_model, eagle3
from crossspec_tools.train.acceptance import measure
from crossspec_tools.train.generations import Generation, read_generations, write_shard
from crossspec_tools.train.states import load_target


@pytest.fixture(scope="module")
def responses(tmp_path_factory):
    """What the pocket target answers to two prompts."""
    folder = tmp_path_factory.mktemp("responses")
    model, tokenizer = load_target(engines.TARGET, torch.float32)
    rows = []
    for prompt in ("Add 3 and 4.", "Write a loop over ten numbers in Python."):
        ids = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True,
                                            return_tensors="pt", return_dict=True)["input_ids"]  # fmt: skip
        tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)[0]
        rows.append(Generation(ids[0].tolist(), tokens[ids.shape[1] :].tolist(), "chat", True))
    write_shard(folder / "dev-00000.jsonl.gz", rows)
    return folder


def options(responses, **given):
    known = {"responses": responses, "rows": 10, "tokens": 4, "temperature": 0.8, "new_tokens": 16, "probes": "8"}
    return SimpleNamespace(**known | given)


def test_walks_are_trainings(responses):
    """A text's own tokens in the place of the drafter's give the same rounds."""
    made = flashhead.load(options(responses), tuple(flashhead.DRAFTERS))
    target = open_target(engines.TARGET)
    rows = read_generations(responses, "dev", target.config.vocab_size)
    one_layer = confu_offline.load_control(POCKET / "eagle3", target)
    small, _ = load_target(POCKET / "draft-model", torch.float32)
    drafts = {
        "eagle3": lambda batch, anchors: eagle3.drafts(one_layer, target, batch, anchors, 4),
        "draft-model": lambda batch, anchors: draft_model.drafts(small, batch, anchors, 4),
    }
    for name, draft in drafts.items():
        found = flashhead.walk(made[name], flashhead.dense(made[name]))
        expected = measure(rows, draft, 4)["dev_accept"]
        assert found.tokens.sum() / found.rounds.sum() == pytest.approx(expected) and expected > 1.5


def test_with_all_clusters_every_way_to_choose_them_is_the_dense_head(responses):
    for temperature in (0.0, 0.8):
        for made in flashhead.load(options(responses), tuple(flashhead.DRAFTERS), temperature).values():
            most, whole = len(made.assets.members), flashhead.dense(made, temperature)
            for clusters in ("nearest", "drawn", "independent"):
                every = flashhead.flashhead(made, most, temperature, clusters)
                few = flashhead.flashhead(made, 2, temperature, clusters)
                chosen = [(whole(text), every(text).clone(), few(text).clone()) for text in made.texts]
                assert all(torch.equal(one, other) for one, other, _ in chosen)
                assert not all(torch.equal(one, other) for one, _, other in chosen)


def test_a_drawn_text_is_the_samplers(responses):
    """The target's own logits and the noise of their places choose every token of it, and a greedy text's do not."""
    opts = options(responses)
    made = flashhead.load(opts, ("draft-model",), 0.8)["draft-model"]
    model, _ = load_target(engines.TARGET, torch.float32)
    row = read_generations(responses, "dev", model.config.vocab_size)[0]
    drawn = flashhead.draw(model, row, 0, 0.8, 16).response_ids
    tokens = torch.tensor(row.prompt_ids + drawn)
    places = torch.arange(len(row.prompt_ids) - 1, len(tokens) - 1)
    logits = model(input_ids=tokens[None]).logits[0, places]
    noisy = logits / 0.8 + flashhead.noise_at(0, places, torch.arange(logits.shape[1]))
    assert noisy.argmax(1).tolist() == drawn != logits.argmax(1).tolist()
    assert made.texts[0].truth[:4].tolist() == drawn[1:5]


def test_every_table_is_made(responses, tmp_path):
    for table, extra in (("table-4-9", []), ("section-5-3", []), ("section-2-5", ["--probes", "8"])):
        rows, shown = make_table(tmp_path, "flashhead", table, "--responses", responses, "--tokens", "4", *extra)
        assert {row["drafter"] for row in rows} == set(flashhead.DRAFTERS)
        assert "2 " in shown


def test_what_a_round_reads():
    """Qwen3-0.6B's output layer is the thesis's 155,582,464 numbers (section 2.1), and Qwen3-32B's 777,912,320."""
    assert flashhead.weights(flashhead.DRAFT_SHAPE) == (440_401_920, 155_582_464)
    assert flashhead.weights(flashhead.TARGET_SHAPES["Qwen3-32B-AWQ"][0])[1] == 777_912_320
    row = flashhead.ceiling(SimpleNamespace(tokens="6"))[0].values[0]
    assert row["bytes"] == pytest.approx(24.3e9, rel=0.005)
    assert sum(row[f"{part}_percent"] for part in ("verify", "draft_body", "head")) == pytest.approx(100)
    assert (
        row["ceiling"] == pytest.approx(1 / (1 - row["head_percent"] / 100)) and 1 < row["flashhead"] < row["ceiling"]
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["table-4-9", "--responses", "nowhere"], "--responses nowhere: no dev-"),
        (["table-4-9", "--responses", ".", "--tokens", "0"], "--tokens 0 and --rows 1000 are at least 1"),
        (["section-2-5", "--responses", ".", "--temperature", "0"], "--temperature 0.0 is above 0"),
        (["section-2-5", "--responses", ".", "--probes", "some"], "--probes some: give whole numbers"),
        (["section-2-5", "--responses", ".", "--probes", "999"], "--probes 999: give 1 to 256"),
        (["table-4-8", "--tokens", "six"], "--tokens six: give whole numbers"),
    ],
)
def test_bad_input_is_a_sentence(arguments, sentence):
    assert sentence in refusal("flashhead", *arguments)
