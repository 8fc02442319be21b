"""DART as training runs it: what a sequential forward computes, the paper's loss, the public format, bad input.

That the loss falls, that a killed run goes on to the same bits, and what every trainer refuses is tested for all
trainers at once in `test_training.py` and `test_training_commands.py`.
"""

import functools
import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tiny_training import (
    DART,
    DEPTH,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LOOP,
    VOCAB,
    check_entry_drafter,
    frozen_target,
    random_rows,
    train_command,
)
from typer.testing import CliRunner

from crossspec_tools.train import blocks, dart
from crossspec_tools.train.blocks import draft_attention, rotate
from crossspec_tools.train.cli import app as train_app
from crossspec_tools.train.dart import DartDrafter, dart_loss, flex_draft_attention, train_dart
from crossspec_tools.train.generations import Generation, collate, read_generations, write_shard
from crossspec_tools.train.recipes import DartConfig, LoopConfig
from crossspec_tools.train.states import States
from vllm_crossspec.drafters.eagle3.checkpoint import default_target_layers

# The form without compilation is meant to be slow.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
KEPT = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))[:96].sort().values
UNSHIFTED = DartConfig(**(vars(DART) | {"is_shifted": False}))
CONFIGS = pytest.mark.parametrize("config", [DART, UNSHIFTED], ids=["shifted", "unshifted"])
command = functools.partial(train_command, "dart")


@pytest.fixture(scope="module")
def target(target_folder):
    return frozen_target(target_folder, default_target_layers(DEPTH))


def make_drafter(target, config=DART):
    """A drafter whose every weight is random and loud, the norms' too, so that a forgotten one shows."""
    model = DartDrafter(config, target.config, KEPT, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(
                1 + 0.3 * noise if name.endswith("norm.weight") else noise if "mask" in name else 0.3 * noise
            )
    return model


# ---- one draft, as an engine computes it


def _norm(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def _turn(x, theta):
    """Rotate heads [n, T, D] by their place 0, 1, ..., T - 1, as complex numbers of the pairs (i, i + D / 2)."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[1])[:, None] / theta ** (torch.arange(half) / half)
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], dim=-1)


@torch.no_grad()
def sequential(w, tokens, target, config, theta):
    """Logits [num_drafts, draft vocabulary] of one draft: a plain causal layer over the entries and then the masks.

    Args:
        w: tensors of the checkpoint.
        tokens: int64 [p + 2], all that is known: the entry of the anchor p takes the last one.
    """
    hidden = target.model.model(input_ids=tokens[None, :-1], output_hidden_states=True).hidden_states
    features = torch.cat([hidden[i][0] for i in (2, DEPTH // 2, DEPTH - 3)], dim=-1) @ w["fc.weight"].T
    embedded = _norm(target.embedding[tokens[1:]], w["midlayer.input_layernorm.weight"])
    entries = torch.cat([embedded, _norm(features, w["midlayer.hidden_norm.weight"])], dim=-1)
    masks = w["midlayer.mask_rep"].expand(config.num_drafts - config.is_shifted, -1)
    x, residual = torch.cat([entries, masks]), torch.cat([features, masks[:, :HIDDEN]])
    q, k, v = (
        (x @ w[f"midlayer.self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, HEAD_DIM)).transpose(0, 1)
        for name in "qkv"
    )
    k, v = (y.repeat_interleave(HEADS // KV_HEADS, dim=0) for y in (_turn(k, theta), v))
    ahead = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    scores = (_turn(q, theta) @ k.transpose(1, 2) / HEAD_DIM**0.5).masked_fill(ahead, -torch.inf)
    seen = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
    x = residual + seen @ w["midlayer.self_attn.o_proj.weight"].T
    y = _norm(x, w["midlayer.post_attention_layernorm.weight"])
    gate, up = (y @ w[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    x = x + (F.silu(gate) * up) @ w["midlayer.mlp.down_proj.weight"].T
    return (_norm(_norm(x, w["norm.weight"]), w["norm.weight"]) @ w["lm_head.weight"].T)[-config.num_drafts :]


def largest_difference(target, config):
    """Between drafts of one training pass and each of them alone, relative to the logits' spread."""
    model = make_drafter(target, config)
    batch = collate(random_rows(3, seed=5))
    # The first and the last place of every row, and one between, close to the first: drafts that overlap.
    anchors = torch.stack([batch.starts - 1, batch.starts, batch.ends - 2], dim=1)
    with torch.no_grad():
        got = model(target.states(batch.tokens), batch.tokens, target.embedding, anchors)
    w = dart.checkpoint(model, target.config)[1]
    worst = 0.0
    for row, places in enumerate(anchors.tolist()):
        for column, place in enumerate(places):
            alone = sequential(w, batch.tokens[row, : place + 2], target, config, model.theta)
            worst = max(worst, ((got[row, column] - alone).abs().max() / alone.std()).item())
    return worst


TOLERANCE = 1e-4
"""Float32 sums in another order: some 1e-6 of the logits' spread; what the negative controls break shows at 1e-2."""


@CONFIGS
def test_drafts_of_one_pass_equal_each_alone(target, config):
    assert largest_difference(target, config) < TOLERANCE


def _entry_less(query, context, limits, own, *, is_causal):
    return draft_attention(query, context, (limits - 1).clamp(min=1), own, is_causal=is_causal)


def _entry_more(query, context, limits, own, *, is_causal):
    return draft_attention(query, context, limits + 1, own, is_causal=is_causal)


def _masks_ahead(query, context, limits, own, *, is_causal):
    return draft_attention(query, context, limits, own, is_causal=False)


def _masks_of_another(query, context, limits, own, *, is_causal):
    first = [torch.cat([o[:, 0], c], dim=1) for o, c in zip(own, context, strict=True)]
    return draft_attention(query, first, limits + own[0].shape[2], own, is_causal=is_causal)


def _places_off_by_one(x, positions, theta):
    return rotate(x, positions + (positions.ndim == 3), theta)


@CONFIGS
@pytest.mark.parametrize("broken", [_entry_less, _entry_more, _masks_ahead, _masks_of_another, _places_off_by_one])
def test_a_wrong_mask_shows(target, config, broken, monkeypatch):
    place = (blocks, "rotate") if broken is _places_off_by_one else (dart, "draft_attention")
    monkeypatch.setattr(*place, broken)
    assert largest_difference(target, config) > 100 * TOLERANCE


@torch.no_grad()
def test_a_draft_depends_on_nothing_past_its_anchor(target):
    model = make_drafter(target)
    batch = collate(random_rows(2, seed=6))
    states, place = target.states(batch.tokens), 3
    anchors = torch.full((2, 1), place)
    before = model(states, batch.tokens, target.embedding, anchors)
    taps, tokens = states.taps.clone(), batch.tokens.clone()
    taps[:, place + 1 :] += 1.0
    tokens[:, place + 2 :] = (tokens[:, place + 2 :] + 1) % VOCAB
    assert torch.equal(model(States(taps, states.last), tokens, target.embedding, anchors), before)
    tokens[:, place + 1] = (tokens[:, place + 1] + 1) % VOCAB  # the token that the target has just emitted
    assert not torch.equal(model(states, tokens, target.embedding, anchors), before)


# ---- FlexAttention


def attention_inputs(B, A, S, J, T, seed=0):
    generator = torch.Generator().manual_seed(seed)
    random = functools.partial(torch.randn, generator=generator)
    h, k, D = 4, 2, 16
    own = random(B, A, J, k, D), random(B, A, J, k, D)
    limits = torch.randint(1, T + 1, (B, A), generator=generator)
    return random(B, A, S, h, D), (random(B, T, k, D), random(B, T, k, D)), own, limits


@torch.no_grad()
@pytest.mark.parametrize("own_lag", [1, 0], ids=["shifted", "unshifted"])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("sizes", [(1, 1, 2, 5), (2, 5, 4, 20), (3, 40, 7, 131)], ids=str)
def test_flex_attention_computes_what_the_dense_form_does(sizes, is_causal, own_lag):
    B, A, S, T = sizes
    query, context, own, limits = attention_inputs(B, A, S, S - own_lag, T)
    dense = draft_attention(query, context, limits, own, is_causal=is_causal)
    flex = flex_draft_attention(query, context, limits, own, is_causal=is_causal)
    torch.testing.assert_close(flex, dense, atol=1e-5, rtol=1e-5)
    shorter = flex_draft_attention(query, context, (limits - 1).clamp(min=1), own, is_causal=is_causal)
    assert A == 1 or (shorter - dense).abs().max() > 1e-2


@torch.no_grad()
@CONFIGS
@pytest.mark.parametrize("bfloat16", [False, True])
def test_drafters_draft_alike_with_flex_attention(target, config, bfloat16):
    model = make_drafter(target, config)
    batch = collate(random_rows(3, seed=7))
    anchors = torch.stack([batch.starts - 1, batch.ends - 2], dim=1)
    arguments = target.states(batch.tokens), batch.tokens, target.embedding, anchors
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bfloat16):
        flex, dense = model(*arguments, "flex"), model(*arguments, "dense")
    # Eight bits of mantissa, and another order of sums: some 1e-2 of the logits' spread.
    assert (flex - dense).abs().max() < (0.1 if bfloat16 else TOLERANCE) * dense.float().std()


@pytest.mark.slow
@torch.no_grad()
def test_compiled_flex_attention_takes_every_length(monkeypatch):
    """As a GPU gets it, but for the code that it is compiled to: no batch of another length is compiled anew."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    monkeypatch.setattr(dart, "_flex", lambda is_compiled, make=dart._flex.__wrapped__: make(True))
    torch._dynamo.reset()
    seen = []
    for number, length in enumerate((20, 33, 150, 47, 51, 128)):
        query, context, own, limits = attention_inputs(2, 5, 4, 3, length, seed=number)
        flex = flex_draft_attention(query, context, limits, own, is_causal=True)
        torch.testing.assert_close(flex, draft_attention(query, context, limits, own, is_causal=True))
        seen.append(len(graphs))
    torch._dynamo.reset()
    assert 0 < seen[2] == seen[-1]


# ---- the loss


def by_hand(target, model, batch, config):
    """The annealed KL of section 3.3 over every place of the responses, one number at a time; drafted positions."""
    w = dart.checkpoint(model, target.config)[1]
    total, weights, count = 0.0, 0.0, 0
    for row in range(len(batch.tokens)):
        start, end = batch.starts[row].item(), batch.ends[row].item()
        tokens = batch.tokens[row, :end]
        teacher = target.model(input_ids=tokens[None]).logits[0]
        for place in range(start - 1, end - 2):
            logits = sequential(w, tokens[: place + 2], target, config, model.theta)
            for step in range(min(config.num_drafts, end - 2 - place)):
                said = teacher[place + 1 + step]  # after the token before the one that is drafted
                if said.argmax() not in KEPT:
                    continue
                q = (said[KEPT] / config.teacher_temperature).softmax(-1)
                divergence = (q * (q.log() - logits[step].log_softmax(-1))).sum().item()
                total += config.gamma**step * divergence
                weights += config.gamma**step
                count += 1
    return total / weights, count


@CONFIGS
def test_the_loss_is_the_papers(target, config):
    config = DartConfig(**(vars(config) | {"anchors_per_row": 0, "teacher_temperature": 0.7, "gamma": 0.6}))
    model = make_drafter(target, config)
    batch = collate(random_rows(8, seed=8))
    with torch.no_grad():
        expected, count = by_hand(target, model, batch, config)
        loss, shares = dart_loss(model, target, batch, config, torch.Generator())
    assert count > 20
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    assert 0 <= shares["hit_1"] <= 1 and f"hit_{config.num_drafts}" in shares
    other = DartConfig(**(vars(config) | {"gamma": 0.9}))
    assert dart_loss(model, target, batch, other, torch.Generator())[0].item() != pytest.approx(expected, rel=1e-3)


def test_gradients_reach_the_drafter_and_not_the_target(target):
    model = make_drafter(target)
    batch = collate(random_rows(4, seed=9))
    loss, _ = dart_loss(model, target, batch, DART, torch.Generator().manual_seed(0))
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
    assert (model.midlayer.mask_rep.grad != 0).all()  # as residual, and as input to the projections
    assert not any(p.requires_grad or p.grad is not None for p in target.model.parameters())
    assert not target.embedding.requires_grad and not target.head.requires_grad


def test_no_place_counts_where_the_targets_choice_is_unknown(target):
    batch = collate(random_rows(4, seed=9))
    tops = target.model(input_ids=batch.tokens).logits.argmax(-1)
    unknown = torch.tensor(sorted(set(range(VOCAB)) - set(tops.flatten().tolist())))[:96]
    model = DartDrafter(DART, target.config, unknown, seed=0)
    loss, shares = dart_loss(model, target, batch, DART, torch.Generator().manual_seed(0))
    loss.backward()
    assert loss.item() == 0 and not shares
    assert all(p.grad.isfinite().all() for p in model.parameters())


# ---- runs and what they write


@CONFIGS
def test_checkpoint_is_the_public_format(tmp_path, config, responses, target_folder):
    train_dart(responses, target_folder, tmp_path, config, LoopConfig(steps=1))
    settings = check_entry_drafter(tmp_path / "model", mask_rep=(2 * HIDDEN,))
    assert (settings["draft_vocab_size"], settings["vocab_size"], settings["num_hidden_layers"]) == (96, VOCAB, 1)
    assert settings["rope_theta"] == 10_000 and settings["rope_scaling"] is None
    if config.is_shifted:
        assert settings["architectures"] == ["LlamaForCausalLMDart"] and settings["draft_length"] == 3
    else:  # nothing takes it for a drafter that it is not
        assert settings["architectures"] == ["LlamaForCausalLMDartUnshifted"] and "draft_length" not in settings


@torch.no_grad()
def test_offline_acceptance_drafts_from_the_token_just_emitted(target):
    """The draft at a token reads the entry before it, which that token is part of, and nothing later."""
    model, batch = make_drafter(target), collate(random_rows(2, seed=10))
    anchors = batch.starts[:, None]
    got = dart.drafts(model, target, batch, anchors)
    assert got.shape == (2, 1, DART.num_drafts)
    w = dart.checkpoint(model, target.config)[1]
    for row, start in enumerate(batch.starts.tolist()):
        logits = sequential(w, batch.tokens[row, : start + 1], target, DART, model.theta)
        assert got[row, 0].tolist() == KEPT[logits.argmax(-1)].tolist()


def test_command_trains_resumes_and_restarts(tmp_path, responses, target_folder):
    words = ["--data", responses, "--target", target_folder, "--out", tmp_path, "--threads", 1, "--float32"]
    words += ["--rows-per-step", 4, "--anchors", 2, "--steps", 2, "--draft-vocab", 96, "--device", "cpu"]
    assert command(*words, "--num-drafts", 3) is None
    first = json.loads((tmp_path / "acceptance.json").read_text())
    assert first["dev_accept"] >= 1 and "accept_pos_3" in first
    assert command(*words, "--num-drafts", 3) is None  # done already
    assert "num_drafts" in str(command(*words, "--num-drafts", 4))
    assert command(*words, "--num-drafts", 4, "--gamma", 1.0, "--restart") is None
    assert json.loads((tmp_path / "model" / "config.json").read_text())["draft_length"] == 3
    assert command(*words, "--num-drafts", 4, "--unshifted", "--anchors", 0, "--restart") is None


def test_the_papers_recipe(tmp_path, responses, target_folder, target):
    """What `--recipe paper` sets, what an option changes of it, and where the output layer begins."""
    words = ["--data", responses, "--target", target_folder, "--threads", 1, "--float32", "--device", "cpu"]
    words += ["--rows-per-step", 4, "--draft-vocab", 96]
    assert (
        train_command(
            "dart", *words, "--out", tmp_path / "paper", "--recipe", "paper", "--epochs", 2, "--num-drafts", 3
        )
        is None
    )
    recipe = json.loads((tmp_path / "paper" / "recipe.json").read_text())
    asked = {"lr": 2e-5, "optimizer": "adamw", "beta2": 0.999, "schedule": "cosine", "weight_decay": 0.0, "clip": 0.5}
    assert {name: recipe[name] for name in asked} == asked
    assert (recipe["anchors_per_row"], recipe["head"], recipe["num_drafts"], recipe["gamma"]) == (0, "random", 3, 0.6)
    rows = len(read_generations(responses, "train", VOCAB))
    assert recipe["steps"] == 2 * (rows // 4) > 2
    assert command(*words, "--out", tmp_path / "ours", "--steps", 1, "--lr", 1e-9) is None
    assert (
        train_command(
            "dart", *words, "--out", tmp_path / "mixed", "--recipe", "paper", "--steps", 1, "--head", "target"
        )
        is None
    )
    for name, is_targets in (("paper", False), ("ours", True), ("mixed", True)):
        tensors = load_file(tmp_path / name / "model" / "model.safetensors")
        kept = tensors["d2t"] + torch.arange(96)
        distance = (tensors["lm_head.weight"].float() - target.head[kept]).abs().max()
        assert (distance < 0.01) == is_targets  # a bfloat16 of the head's 0.2, not another matrix
    with pytest.raises(ValueError, match="--recipe: no recipe is called .papre."):
        raise command(*words, "--out", tmp_path / "no", "--recipe", "papre")
    recipe = json.loads((tmp_path / "mixed" / "recipe.json").read_text())
    assert (recipe["steps"], recipe["lr"]) == (1, 2e-5)


def test_bad_input_is_one_sentence(tmp_path, responses, target_folder):
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=r"--draft-vocab 999 must lie within 1\.\.288"):
        train_dart(responses, target_folder, out, DartConfig(draft_vocab_size=999), LOOP)
    given = ("--data", responses, "--target", target_folder, "--out", out, "--num-drafts", 1)
    assert CliRunner().invoke(train_app, ["dart", *map(str, given)]).exit_code == 2
    with pytest.raises(ValueError, match="--device gpu: choose auto, cpu or cuda"):
        train_dart(responses, target_folder, out, DART, LOOP, "gpu")
    shard = tmp_path / "train-00000.jsonl.gz"
    write_shard(shard, [Generation([1], [VOCAB, 2], "chat", True)])
    with pytest.raises(ValueError, match=f"token {VOCAB}, but the target has {VOCAB} tokens: not its responses"):
        train_dart(tmp_path, target_folder, out, DART, LOOP)
    # A draft needs an entry to begin from, which is one token before the response, and a token to guess.
    write_shard(shard, [Generation([], [5, 6, 7], "chat", True), Generation([1], [5], "chat", True)])
    with pytest.raises(ValueError, match="no train row has a prompt and two response tokens"):
        train_dart(tmp_path, target_folder, out, DART, LOOP)
    assert not out.exists()
