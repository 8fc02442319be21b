"""Stored states of the target: an engine's are transformers', and a training's loss from them is the live target's."""

import gzip
import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import engines
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_training import (
    CONFU,
    DART,
    DEPTH,
    DFLASH,
    DRAFT_MODEL,
    EAGLE3,
    HIDDEN,
    LOOP,
    RESPONSES,
    TRAINERS,
    VOCAB,
    frozen_target,
    losses,
    train_command,
    write_target,
)

from crossspec_tools.train import drafter_run, job_generate
from crossspec_tools.train.dart import DartDrafter, dart_loss
from crossspec_tools.train.dflash import DFlashDrafter, dflash_loss
from crossspec_tools.train.draft_model import build_draft_model, distillation_loss
from crossspec_tools.train.drafter_run import Run, open_target, read_responses
from crossspec_tools.train.eagle3 import Eagle3Drafter, eagle3_loss
from crossspec_tools.train.generate import STATES_BYTES, generate, plan, state_layers
from crossspec_tools.train.generations import Generation, collate, read_generations
from crossspec_tools.train.job_states import Recording, StateRecorder, Step
from crossspec_tools.train.states import load_ends
from crossspec_tools.train.stored import Wanted, states_path, write_states
from vllm_crossspec.kinds.identity import identify

LAYERS = tuple(state_layers("", DEPTH))


def test_an_engines_states_are_transformers(tmp_path, data, monkeypatch):
    """Several requests at once, prompts in chunks of 12 tokens, and too few blocks for all, so that some wait again."""
    config = replace(RESPONSES, states=True, sampled_share=0.5, max_rows=9)
    job, shards = plan(data, engines.TARGET, tmp_path, config)
    job["engine"] = {
        "model": str(engines.TARGET),
        "dtype": "float32",
        "max_num_seqs": 6,
        "max_model_len": 96,
        "max_num_batched_tokens": 12,
        "block_size": 32,
        "num_gpu_blocks_override": 9,
    }
    computed, take = Counter(), Recording.take

    def counted(self, lengths):
        for step in self._steps:
            computed.update({name: count for name, _, count in step.requests})
        return take(self, lengths)

    monkeypatch.setattr(Recording, "take", counted)
    shard = next(shard for shard in shards if shard["file"].startswith("train"))
    assert max(len(prompt["ids"]) for prompt in shard["prompts"]) > 12
    follow = job_generate.generate({**job, "shards": [shard]}, lambda *about, **more: None)
    follow({"shard": 0})

    layers = job["states"]["layers"]
    wanted = Wanted(tuple(layers), identify(str(engines.TARGET), "--target"))
    rows = read_generations(tmp_path, "train", 4096, wanted=wanted)
    sizes = [len(row.prompt_ids + row.response_ids) for row in rows]
    assert (
        len(computed) == len(rows) == 9 and max(n - size for n, size in zip(computed.values(), sizes, strict=True)) > 12
    )
    target = frozen_target(engines.TARGET, layers)
    live = [target.states(collate([row]).tokens) for row in rows]
    for row, states in zip(rows, live, strict=True):
        taps, last, top = row.states()
        assert taps.dtype == last.dtype == torch.bfloat16
        _assert_rounded(taps, states.taps[0, :-1])
        _assert_rounded(last, states.last[0, :-1])
        asked = collate([row]).is_asked[0, :-1]
        logits = states.last[0, :-1] @ target.head.T
        sure = asked & (logits.topk(2).values.diff().abs()[:, 0] > 1e-3)
        assert sure.any() and torch.equal(top[sure].long(), logits.argmax(-1)[sure])
    with pytest.raises(AssertionError):
        _assert_rounded(rows[0].states()[0][-8:], live[1].taps[0, -9:-1])  # states of another row
    with pytest.raises(AssertionError):
        _assert_rounded(rows[0].states()[1][1:], live[0].last[0, :-2])  # of the token before


def _assert_rounded(stored: torch.Tensor, live: torch.Tensor) -> None:
    """bfloat16 keeps 8 bits; two orders of summing in float32 differ by far less, but may round to the other side."""
    torch.testing.assert_close(stored.float(), live, rtol=2**-7, atol=1e-3)


def test_states_go_to_their_positions():
    """A preempted request is computed again; a step too many, and requests of another shard, are not read."""
    width = 2
    runner = SimpleNamespace(
        model_config=SimpleNamespace(get_hidden_size=lambda: width),
        sample_tokens=None,
        model=SimpleNamespace(compute_logits=None),
    )
    recording = Recording(runner)
    state = lambda *values: torch.tensor(values, dtype=torch.bfloat16)[:, None].expand(-1, 2 * width)  # noqa: E731
    tops = lambda *values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    recording._steps = [
        Step([("1.0", 0, 2), ("0.7", 3, 1)], state(1, 2, 99), tops(5, 9)),
        Step([("1.0", 2, 1), ("1.1", 0, 1)], state(3, 21), tops(6, 7)),
        Step([("1.0", 0, 4)], state(1, 2, 3, 4), None),  # it had been preempted
        Step([("1.1", 1, 1), ("1.0", 4, 1)], state(22, 99), tops(8, 9)),
    ]
    made = recording.take({"1.0": 4, "1.1": 2})
    assert made["last"][:, 0].tolist() == [1, 2, 3, 4, 21, 22] and made["taps"].shape == (6, width)
    assert made["top"].tolist() == [-1, 5, 6, -1, 7, 8] and made["offsets"].tolist() == [0, 4, 6]
    recording._steps = [Step([("2.0", 1, 1)], state(1), None)]
    with pytest.raises(AssertionError, match="never computed"):
        recording.take({"2.0": 2})


# ---- trainings


def store(folder: Path, target_folder: Path, layers, dtype: torch.dtype, shift: int = 0) -> None:
    """What `train generate --states` would have stored, by transformers; ``shift`` takes those of an earlier row."""
    target = frozen_target(target_folder, layers)
    wanted = Wanted(tuple(layers), identify(str(target_folder), "--target"))
    for file in folder.glob("*.jsonl.gz"):
        rows = [Generation(**json.loads(line)) for line in gzip.decompress(file.read_bytes()).splitlines()]
        parts = {"taps": [], "last": [], "top": []}
        for i, row in enumerate(rows):
            count, source = len(row.prompt_ids + row.response_ids) - 1, collate([rows[i - shift]]).tokens
            known = target.states(source.repeat(1, 8)[:, :count] if shift else source)
            parts["taps"].append(known.taps[0, :count].to(dtype))
            parts["last"].append(known.last[0, :count].to(dtype))
            parts["top"].append((known.last[0, :count] @ target.head.T).argmax(-1).int())
        tensors = {name: torch.cat(part) for name, part in parts.items()}
        ends = [0, *(len(part) for part in parts["last"])]
        write_states(states_path(file), tensors | {"offsets": torch.tensor(ends).cumsum(0)}, wanted)


@pytest.fixture
def copied(tmp_path, responses) -> Path:
    """The responses, without states."""
    folder = tmp_path / "copied"
    shutil.copytree(responses, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


def loss_of(kind: str, target, batch) -> torch.Tensor:
    """Of one training step of a fresh drafter, summed with its gradient's norm."""
    generator = torch.Generator().manual_seed(0)
    kept = torch.arange(0, VOCAB, 3)
    if kind == "eagle3":
        model = Eagle3Drafter(EAGLE3, target.config, kept, seed=0)
        loss, _ = eagle3_loss(model, target, batch, EAGLE3, generator)
    elif kind == "dart":
        model = DartDrafter(DART, target.config, kept, seed=0)
        loss, _ = dart_loss(model, target, batch, DART, generator)
    elif kind == "dflash":
        model = DFlashDrafter(DFLASH, target.config, mask_id=3, seed=0)
        loss, _ = dflash_loss(model, target, batch, DFLASH, generator)
    else:
        model = build_draft_model(DRAFT_MODEL, target, seed=0)
        loss, _ = distillation_loss(model, target, batch, DRAFT_MODEL)
    loss.backward()
    norms = [x.grad.norm() for x in model.parameters() if x.grad is not None]
    return torch.stack([loss.detach(), torch.stack(norms).norm()])


TAPS = {"eagle3": (2, 4, 5), "dart": (2, 4, 5), "dflash": (2, 4, 6), "draft-model": ()}


@pytest.mark.parametrize("kind", TAPS)
def test_a_steps_loss_is_the_live_targets(copied, target_folder, kind):
    """Exactly, from states stored in float32: top tokens are looked up and fewer rows of the head are multiplied."""
    target = frozen_target(target_folder, TAPS[kind])
    wanted = Wanted(TAPS[kind], identify(str(target_folder), "--target"))

    def batch(has_states: bool = True):
        rows = read_generations(copied, "train", VOCAB, wanted=wanted if has_states else None)
        found = collate(rows[:6])
        assert (found.states is not None) == has_states
        return found

    live = loss_of(kind, target, batch(False))
    store(copied, target_folder, LAYERS, torch.float32)
    stored = batch()
    assert torch.equal(target.states_of(stored).taps[:, :4], target.states(stored.tokens).taps[:, :4])
    torch.testing.assert_close(loss_of(kind, target, stored), live, rtol=1e-5, atol=1e-6)
    store(copied, target_folder, LAYERS, torch.bfloat16)
    torch.testing.assert_close(loss_of(kind, target, batch()), live, rtol=3e-3, atol=0)
    store(copied, target_folder, LAYERS, torch.float32, shift=1)
    assert ((loss_of(kind, target, batch()) - live) / live).abs().max() > 6e-3  # states of another row


def test_tokens_that_were_not_stored_are_computed(copied, target_folder):
    store(copied, target_folder, LAYERS, torch.float32)
    target = frozen_target(target_folder, TAPS["eagle3"])
    wanted = Wanted(TAPS["eagle3"], identify(str(target_folder), "--target"))
    batch, kept = collate(read_generations(copied, "train", VOCAB, wanted=wanted)[:4]), torch.arange(50)
    states = target.states_of(batch)
    teach = lambda top: target.teach(states._replace(top=top), batch, 1.0, kept)  # noqa: E731
    expected = teach(states.top)
    assert torch.equal(teach(torch.full_like(states.top, -1)).top, expected.top)
    assert not torch.equal(teach(torch.zeros_like(states.top)).top, expected.top)


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dart"])
def test_the_targets_layers_are_not_loaded(tmp_path, copied, target_folder, kind, monkeypatch):
    train, config = TRAINERS[kind]
    loop = replace(LOOP, steps=3)
    train(copied, target_folder, tmp_path / "live", config, loop)
    store(copied, target_folder, LAYERS, torch.float32)
    monkeypatch.setattr(drafter_run, "load_target", None)
    train(copied, target_folder, tmp_path / "stored", config, loop)
    assert losses(tmp_path / "stored") == pytest.approx(losses(tmp_path / "live"), rel=1e-4)
    found, expected = (json.loads((tmp_path / x / "acceptance.json").read_text()) for x in ("stored", "live"))
    assert found == pytest.approx(expected, rel=1e-3) and found["dev_accept"] >= 1


def test_ends_are_the_targets(target_folder):
    ends, whole = load_ends(target_folder), frozen_target(target_folder, (0,))
    assert len(ends.model.layers) == 0 and torch.equal(ends.get_input_embeddings().weight, whole.embedding)
    assert torch.equal(ends.get_output_embeddings().weight, whole.head)


def test_a_shard_without_states_lets_the_target_run(tmp_path, copied, target_folder):
    store(copied, target_folder, LAYERS, torch.float32)
    run = Run(copied, target_folder, tmp_path, EAGLE3, LOOP)
    assert len(open_target(run, TAPS["eagle3"], torch.device("cpu")).model.model.layers) == 0
    states_path(copied / "dev-00000.jsonl.gz").unlink()
    target = open_target(run, TAPS["eagle3"], torch.device("cpu"))
    assert len(target.model.model.layers) == DEPTH
    train, dev = (read_responses(run, split, TAPS["eagle3"]) for split in ("train", "dev"))
    assert collate(train[:3]).states is not None and collate([*train[:3], dev[0]]).states is None
    without = run._replace(config=replace(EAGLE3, states=False))
    assert collate(read_responses(without, "train", TAPS["eagle3"])).states is None
    assert not CONFU.states


# ---- refusals


def test_states_that_are_not_the_wanted_ones_are_one_sentence(tmp_path, copied, target_folder):
    store(copied, target_folder, (2, 5), torch.bfloat16)
    run = Run(copied, target_folder, tmp_path, EAGLE3, LOOP)
    with pytest.raises(ValueError, match=r"layers \[2, 5\], not of \[4\]; .*--state-layers 2,4,5, or .*--no-states"):
        read_responses(run, "train", TAPS["eagle3"])
    assert len(read_responses(run, "train", (5,))) == len(read_responses(run, "train", (2, 5)))
    other = tmp_path / "other"
    write_target(other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    with pytest.raises(ValueError, match=r"which is not --target as it is now; .*--no-states"):
        read_responses(run._replace(target_folder=other), "train", (2, 5))
    file = states_path(copied / "train-00000.jsonl.gz")
    shutil.copy(states_path(copied / "dev-00000.jsonl.gz"), file)
    with pytest.raises(ValueError, match="states of other responses"):
        read_responses(run, "train", (2, 5))
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="is damaged"):
        read_responses(run, "train", (2, 5))
    save_file({"last": torch.zeros(1)}, file)
    with pytest.raises(ValueError, match="is damaged"):
        read_responses(run, "train", (2, 5))


def test_layers_and_shards(tmp_path, data, target_folder):
    assert LAYERS == (2, 3, 4, 5, 6) and state_layers("5, 2", DEPTH) == [2, 5]
    assert state_layers("", 30) == [2, 9, 15, 21, 27, 28]
    for asked, sentence in (("8", r"must lie within 0..7"), ("-1", "must lie within"), ("two", "give numbers")):
        with pytest.raises(ValueError, match=f"--state-layers {asked}.*{sentence}"):
            state_layers(asked, DEPTH)
    with pytest.raises(ValueError, match="--state-layers 2 needs --states"):
        plan(data, target_folder, tmp_path, replace(RESPONSES, state_layers="2"))
    long = replace(RESPONSES, states=True, shard_rows=10**9)
    _, shards = plan(data, target_folder, tmp_path / "a", replace(long, state_layers="2"))
    assert [shard["num_texts"] for shard in shards] == [8, 32]
    most = STATES_BYTES // (88 * 2 * 2 * HIDDEN)
    assert most > 32  # or the shards above would not be whole
    words = ["--data", data, "--target", target_folder, "--out", tmp_path / "b", "--states", "--engines", 2]
    assert str(train_command("generate", *words)).startswith("--states is for one engine")


def test_shards_are_bounded(tmp_path, data, target_folder, monkeypatch):
    monkeypatch.setattr("crossspec_tools.train.generate.STATES_BYTES", 11 * 88 * 2 * 2 * HIDDEN + 5)
    _, shards = plan(data, target_folder, tmp_path, replace(RESPONSES, states=True, state_layers="2"))
    assert max(shard["num_texts"] for shard in shards) == 11


def test_a_target_without_states_is_refused():
    class Model:
        pass

    worker = StateRecorder()
    worker.model_runner, worker.use_v2_model_runner = SimpleNamespace(model=Model()), True
    assert worker.crossspec_begin_states([2]) == (
        "--states: vLLM's Model does not hand out the states of its layers; leave --states out"
    )
    worker.use_v2_model_runner = False
    assert "V2 model runner" in worker.crossspec_begin_states([2])


def test_a_stopped_run_with_states_resumes(tmp_path, data, target_folder):
    config = replace(RESPONSES, states=True)
    generate(data, target_folder, tmp_path, config)
    names = sorted(p.name for p in tmp_path.glob("*-0*"))
    assert names == [
        f"{name}.{end}"
        for name in ("dev-00000", "train-00000", "train-00001")
        for end in ("jsonl.gz", "states.safetensors")
    ]
    before = {name: (tmp_path / name).read_bytes() for name in names}
    # Stopped between the two files of a shard: its states are there, and it is not done.
    (tmp_path / "train-00001.jsonl.gz").unlink()
    states = tmp_path / "train-00001.states.safetensors"
    states.write_bytes(b"old")
    generate(data, target_folder, tmp_path, config)
    assert {name: (tmp_path / name).read_bytes() for name in names if name != states.name} == {
        name: content for name, content in before.items() if name != states.name
    }
    assert load_file(states)["last"].shape == (int(load_file(states)["offsets"][-1]), HIDDEN)
    with pytest.raises(ValueError, match="other state_layers"):
        generate(data, target_folder, tmp_path, replace(config, states=False))
