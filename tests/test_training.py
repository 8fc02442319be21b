"""Training of the drafters on a tiny random target: seconds, on CPU, without vLLM."""

import json
import math
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from typer.testing import CliRunner

from vllm_crossspec.cli.train import app as train_app
from vllm_crossspec.drafters.eagle3.checkpoint import default_target_layers
from vllm_crossspec.training import dflash, eagle3
from vllm_crossspec.training.acceptance import measure
from vllm_crossspec.training.blocks import draft_attention
from vllm_crossspec.training.data import IM_END, read_rows
from vllm_crossspec.training.dflash import DFlashConfig, DFlashDrafter, mask_blocks, train_dflash
from vllm_crossspec.training.eagle3 import Eagle3Config, Eagle3Drafter, train_eagle3
from vllm_crossspec.training.generate import GenerateConfig, generate, generate_batch, prepare_for_generation
from vllm_crossspec.training.generations import (
    Generation,
    collate,
    generation_batches,
    read_generations,
    sample_anchors,
    write_shard,
)
from vllm_crossspec.training.loop import LoopConfig, Trainer
from vllm_crossspec.training.states import FrozenTarget, load_target
from vllm_crossspec.training.tokenizer import train_tokenizer

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, DEPTH = 288, 32, 2, 1, 16, 8
EAGLE3 = Eagle3Config(
    intermediate_size=48, draft_vocab_size=96, num_steps=4, rows_per_step=4, anchors_per_row=8, bfloat16=False
)
DFLASH = DFlashConfig(
    intermediate_size=48,
    block_size=5,
    num_target_layers=3,
    rows_per_step=4,
    anchors_per_row=8,
    bfloat16=False,
)
LOOP = LoopConfig(steps=24, lr=1e-2, warmup=4, save_every=6, eval_every=12)


def _texts() -> list[dict[str, str]]:
    rng = random.Random(0)
    things, verbs = ["river", "stone", "lamp", "garden", "engine"], ["holds", "moves", "follows", "lights"]
    rows = []
    for number in range(40):
        a, verb, b = rng.choice(things), rng.choice(verbs), rng.choice(things)
        rows.append(
            {
                "category": ["chat", "math"][number % 2],
                "source": "test",
                "prompt": f"What does the {a} do?",
                "response": f"The {a} {verb} the {b}, and the {b} {verb} the {a}.",
            }
        )
    return rows


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    lines = [json.dumps(row) + "\n" for row in _texts()]
    (folder / "train-a.jsonl").write_text("".join(lines[:32]))
    (folder / "dev-a.jsonl").write_text("".join(lines[32:]))
    return folder


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tokenizer = train_tokenizer([r["prompt"] + r["response"] for r in _texts()] * 4, VOCAB, seed=0)
    assert len(tokenizer) == VOCAB
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.convert_tokens_to_ids(IM_END),
        initializer_range=0.2,  # a random target that is sure of itself: near-ties would make exact tests flaky
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def responses(tmp_path_factory, data, target_folder) -> Path:
    folder = tmp_path_factory.mktemp("responses")
    generate(data, target_folder, folder, GenerateConfig(max_new_tokens=24, shard_rows=20))
    return folder


# ---- responses


def test_batched_responses_equal_one_by_one_greedy(target_folder):
    """Left padding, the slab cache, folded attention and leaving rows do not change a greedy answer."""
    model, tokenizer = load_target(target_folder, torch.float32)
    prompts = tokenizer([r["prompt"] for r in _texts()[:7]])["input_ids"]
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


def _rows(count: int, seed: int = 0) -> list[Generation]:
    rng = random.Random(seed)
    make = lambda low, high: [rng.randrange(VOCAB) for _ in range(rng.randint(low, high))]  # noqa: E731
    return [Generation(make(1, 9), make(2, 14), "chat", True) for _ in range(count)]


def test_anchors_are_places_where_a_draft_can_begin():
    batch = collate(_rows(50))
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
    rows = _rows(40)
    one, two = generation_batches(rows, 4, 3), generation_batches(rows, 4, 3)
    for _ in range(25):
        assert torch.equal(next(one).tokens, next(two).tokens)


# ---- the drafters' attention, and inference without training masks


def test_draft_attention_equals_a_loop_over_queries():
    torch.manual_seed(0)
    B, A, S, T, J, h, k, D = 2, 3, 2, 7, 4, 4, 2, 8
    query = torch.randn(B, A, S, h, D)
    keys, values = torch.randn(B, T, k, D), torch.randn(B, T, k, D)
    own_keys, own_values = torch.randn(B, A, J, k, D), torch.randn(B, A, J, k, D)
    limits = torch.tensor([[0, 3, 7], [1, 1, 5]])
    got = draft_attention(query, (keys, values), limits, (own_keys, own_values)).view(B, A, S, h, D)
    for b in range(B):
        for a in range(A):
            k_all = torch.cat([keys[b, : limits[b, a]], own_keys[b, a]])
            v_all = torch.cat([values[b, : limits[b, a]], own_values[b, a]])
            for s in range(S):
                torch.testing.assert_close(got[b, a, s], _attend(query[b, a, s], k_all, v_all))


def _attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One query token [h, D] over keys and values [n, k, D]."""
    group = query.shape[0] // keys.shape[1]
    out = [
        ((keys[:, head // group] @ query[head]) / math.sqrt(query.shape[1])).softmax(0) @ values[:, head // group]
        for head in range(query.shape[0])
    ]
    return torch.stack(out)


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def _turn(x: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    """Rotate heads [n, D] by complex multiplication of the pairs (i, i + D / 2)."""
    half = x.shape[-1] // 2
    angle = position / theta ** (torch.arange(half) / half)
    z = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones(half), angle)
    return torch.cat([z.real, z.imag], dim=-1)


def _mlp(w: dict[str, torch.Tensor], prefix: str, x: torch.Tensor) -> torch.Tensor:
    gate, up = w[prefix + "mlp.gate_proj.weight"] @ x, w[prefix + "mlp.up_proj.weight"] @ x
    return w[prefix + "mlp.down_proj.weight"] @ (F.silu(gate) * up)


class _NaiveEagle3:
    """EAGLE-3 as an engine runs it: one token at a time over a growing cache, from a checkpoint's tensors."""

    def __init__(self, tensors: dict[str, torch.Tensor], embedding: torch.Tensor, theta: float):
        self.w, self.embedding, self.theta = tensors, embedding, theta
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def step(self, token: int, features: torch.Tensor, position: int) -> tuple[int, torch.Tensor]:
        """Take the entry (features, token) at ``position`` into the cache; give the drafted token and its state."""
        w, layer = self.w, "midlayer."
        x = torch.cat(
            [
                _norm(self.embedding[token], w[layer + "input_layernorm.weight"]),
                _norm(features, w[layer + "hidden_norm.weight"]),
            ]
        )
        q, k, v = ((w[f"{layer}self_attn.{n}_proj.weight"] @ x).view(-1, HEAD_DIM) for n in "qkv")
        self.keys.append(_turn(k, position, self.theta))
        self.values.append(v)
        seen = _attend(_turn(q, position, self.theta), torch.stack(self.keys), torch.stack(self.values))
        hidden = features + w[layer + "self_attn.o_proj.weight"] @ seen.flatten()
        hidden = hidden + _mlp(w, layer, _norm(hidden, w[layer + "post_attention_layernorm.weight"]))
        choice = (w["lm_head.weight"] @ _norm(hidden, w["norm.weight"])).argmax().item()
        return choice + w["d2t"][choice].item(), hidden


def _target(folder: Path, taps) -> FrozenTarget:
    return FrozenTarget(load_target(folder, torch.float32)[0], taps, bfloat16=False)


def _scramble(model: torch.nn.Module) -> None:
    """Random weights everywhere, the norms too, so that a forgotten norm shows."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if parameter.ndim == 1 else 0.3 * noise)


@torch.no_grad()
def test_eagle3_unrolled_for_training_equals_an_engines_chain(target_folder):
    target = _target(target_folder, default_target_layers(DEPTH))
    kept = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))[:96].sort().values
    model = Eagle3Drafter(EAGLE3, target.config, kept, seed=0)
    _scramble(model)
    tensors = eagle3.checkpoint(model, EAGLE3, target.config)[1]
    batch = collate(_rows(3, seed=5))
    states = target.states(batch.tokens)
    anchors = torch.stack([batch.starts - 1, batch.ends - 2], dim=1)
    steps = model.unroll(states, batch.tokens, target.embedding, anchors, 4, own_tokens=True)
    got = torch.stack([kept[logits.argmax(-1)] for logits in steps], dim=-1)
    for row in range(3):
        for column in range(2):
            place = anchors[row, column].item()
            tokens = batch.tokens[row, : place + 2]
            # The engine's target has seen no token after the one it has just emitted.
            hidden = target.model.model(input_ids=tokens[None], output_hidden_states=True).hidden_states
            taps = torch.cat([hidden[i][0] for i in (2, DEPTH // 2, DEPTH - 3)], dim=-1)
            naive = _NaiveEagle3(tensors, target.embedding, model.theta)
            for position in range(place + 1):
                features = tensors["fc.weight"] @ taps[position]
                token, state = naive.step(tokens[position + 1].item(), features, position)
            chain = [token]
            for step in range(1, 4):
                token, state = naive.step(token, state, place + step)
                chain.append(token)
            assert got[row, column].tolist() == chain


@torch.no_grad()
def test_dflash_blocks_of_training_equal_an_engines_block(target_folder):
    ids = dflash.target_layer_ids(DEPTH, DFLASH.num_target_layers)
    target = _target(target_folder, [i + 1 for i in ids])
    model = DFlashDrafter(DFLASH, target.config, seed=0)
    _scramble(model)
    w, mask_id = dict(model.state_dict()), 3
    batch = collate(_rows(3, seed=6))
    anchors = torch.stack([batch.starts, batch.ends - 2], dim=1)
    block = mask_blocks(batch.tokens, anchors, target.embedding, DFLASH.block_size, mask_id)
    got = F.linear(model(target.states(batch.tokens), block, anchors), target.head).argmax(-1)
    for row in range(3):
        for column in range(2):
            place = anchors[row, column].item()
            tokens = batch.tokens[row, : place + 1]
            hidden = target.model.model(input_ids=tokens[None, :-1], output_hidden_states=True).hidden_states
            taps = torch.cat([hidden[i + 1][0] for i in ids], dim=-1)
            assert got[row, column].tolist() == _naive_block(w, taps, tokens[-1].item(), mask_id, target, model.theta)


def _naive_block(w, taps, token: int, mask_id: int, target: FrozenTarget, theta: float) -> list[int]:
    """DFlash as an engine runs it: context keys and values from the features, then one two-way block."""
    place = len(taps)
    context = [_norm(w["fc.weight"] @ tap, w["hidden_norm.weight"]) for tap in taps]
    x = [target.embedding[token]] + [target.embedding[mask_id]] * (DFLASH.block_size - 1)
    for index in range(DFLASH.num_layers):
        p = f"layers.{index}."

        def heads(name, vector, position, p=p):
            out = (w[f"{p}self_attn.{name}_proj.weight"] @ vector).view(-1, HEAD_DIM)
            return out if name == "v" else _turn(_norm(out, w[f"{p}self_attn.{name}_norm.weight"]), position, theta)

        normed = [_norm(v, w[p + "input_layernorm.weight"]) for v in x]
        sources = list(enumerate(context)) + [(place + i, v) for i, v in enumerate(normed)]
        keys = torch.stack([heads("k", v, position) for position, v in sources])
        values = torch.stack([heads("v", v, position) for position, v in sources])
        for i, vector in enumerate(normed):
            seen = _attend(heads("q", vector, place + i), keys, values).flatten()
            hidden = x[i] + w[p + "self_attn.o_proj.weight"] @ seen
            x[i] = hidden + _mlp(w, p, _norm(hidden, w[p + "post_attention_layernorm.weight"]))
    return [(target.head @ _norm(v, w["norm.weight"])).argmax().item() for v in x[1:]]


def test_target_states_are_those_before_the_final_norm(target_folder):
    model = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
    with pytest.raises(ValueError, match="lie within 0..7"):
        FrozenTarget(model, [2, DEPTH], bfloat16=False)
    seen = []
    hook = model.model.layers[4].register_forward_hook(lambda _, __, out: seen.append(out))
    states = FrozenTarget(model, [2, 5], bfloat16=False).states(torch.arange(9)[None])
    hook.remove()
    assert torch.equal(states.taps[..., HIDDEN:], seen[0][0] if isinstance(seen[0], tuple) else seen[0])


# ---- acceptance


def test_acceptance_walks_the_rounds_of_greedy_decoding():
    rows = [Generation([1, 2], [10, 11, 12, 13, 14, 15, 16, 17], "chat", True)]

    def draft(batch, anchors):  # right for two tokens after an even one, wrong at once after an odd one
        token = batch.tokens.gather(1, anchors)
        right = token[..., None] + torch.arange(1, 4)
        right[..., 2] = 0
        return torch.where((token % 2 == 0)[..., None], right, 0)

    # rounds begin at 10 (2 accepted), 13 (0), 14 (2); 17 is past the last whole round
    figures = measure(rows, draft, 3)
    assert figures["dev_accept"] == pytest.approx(1 + 4 / 3)
    assert figures["accept_pos_1"] == pytest.approx(2 / 3)
    assert figures["accept_pos_3"] == 0


# ---- training


TRAINERS = {"eagle3": (train_eagle3, EAGLE3), "dflash": (train_dflash, DFLASH)}


@pytest.mark.parametrize("kind", TRAINERS)
def test_loss_falls_and_a_killed_run_resumes_bit_equal(tmp_path, kind, responses, target_folder, monkeypatch):
    train, config = TRAINERS[kind]
    figures = train(responses, target_folder, tmp_path / "whole", config, LOOP)
    assert figures == {} or figures["dev_accept"] >= 1
    losses = _losses(tmp_path / "whole")
    assert len(losses) == LOOP.steps
    assert sum(losses[-6:]) < 0.9 * sum(losses[:6])

    # The kill comes at step 9; the last state on disk is of step 6.
    step, calls = Trainer._train_step, []

    def dying(self):
        calls.append(1)
        if len(calls) == 10:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Trainer, "_train_step", dying)
    with pytest.raises(KeyboardInterrupt):
        train(responses, target_folder, tmp_path / "killed", config, LOOP)
    monkeypatch.setattr(Trainer, "_train_step", step)
    assert len(_losses(tmp_path / "killed")) == 6
    train(responses, target_folder, tmp_path / "killed", config, LOOP)
    assert _losses(tmp_path / "killed") == losses
    whole = load_file(tmp_path / "whole" / "model" / "model.safetensors")
    for name, tensor in load_file(tmp_path / "killed" / "model" / "model.safetensors").items():
        assert torch.equal(tensor, whole[name]), name
    assert (tmp_path / "whole" / "loss.png").stat().st_size > 1000


def _losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()]


def test_eagle3_checkpoint_is_safeailabs_format(tmp_path, responses, target_folder):
    train_eagle3(responses, target_folder, tmp_path, EAGLE3, LoopConfig(steps=1))
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    H, Q, KV, inner, DV = HIDDEN, HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, 48, 96
    assert {name: tuple(x.shape) for name, x in tensors.items()} == {
        "fc.weight": (H, 3 * H),
        "midlayer.hidden_norm.weight": (H,),
        "midlayer.input_layernorm.weight": (H,),
        "midlayer.post_attention_layernorm.weight": (H,),
        "midlayer.self_attn.q_proj.weight": (Q, 2 * H),
        "midlayer.self_attn.k_proj.weight": (KV, 2 * H),
        "midlayer.self_attn.v_proj.weight": (KV, 2 * H),
        "midlayer.self_attn.o_proj.weight": (H, Q),
        "midlayer.mlp.gate_proj.weight": (inner, H),
        "midlayer.mlp.up_proj.weight": (inner, H),
        "midlayer.mlp.down_proj.weight": (H, inner),
        "norm.weight": (H,),
        "lm_head.weight": (DV, H),
        "d2t": (DV,),
        "t2d": (VOCAB,),
    }
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], tensors["d2t"] + torch.arange(DV))
    assert {x.dtype for n, x in tensors.items() if "weight" in n} == {torch.bfloat16}
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama"
    assert (config["draft_vocab_size"], config["vocab_size"], config["num_hidden_layers"]) == (DV, VOCAB, 1)


def test_eagle3_with_the_whole_vocabulary_has_no_token_map(target_folder):
    config = _target(target_folder, [2, 4, 5]).config
    model = Eagle3Drafter(EAGLE3, config, torch.arange(VOCAB), seed=0)
    assert not {"d2t", "t2d"} & set(eagle3.checkpoint(model, EAGLE3, config)[1])


def test_dflash_checkpoint_is_z_labs_format(tmp_path, responses, target_folder):
    train_dflash(responses, target_folder, tmp_path, DFLASH, LoopConfig(steps=1))
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    H, Q, KV, inner = HIDDEN, HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, 48
    layer = {
        "input_layernorm.weight": (H,),
        "post_attention_layernorm.weight": (H,),
        "self_attn.q_proj.weight": (Q, H),
        "self_attn.k_proj.weight": (KV, H),
        "self_attn.v_proj.weight": (KV, H),
        "self_attn.o_proj.weight": (H, Q),
        "self_attn.q_norm.weight": (HEAD_DIM,),
        "self_attn.k_norm.weight": (HEAD_DIM,),
        "mlp.gate_proj.weight": (inner, H),
        "mlp.up_proj.weight": (inner, H),
        "mlp.down_proj.weight": (H, inner),
    }
    expected = {"fc.weight": (H, 3 * H), "hidden_norm.weight": (H,), "norm.weight": (H,)}
    expected |= {f"layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    assert {name: tuple(x.shape) for name, x in tensors.items()} == expected
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"] and config["model_type"] == "qwen3"
    assert config["dflash_config"] == {"mask_token_id": 3, "target_layer_ids": [1, 3, 5]}
    assert config["block_size"] == 5 and config["num_target_layers"] == DEPTH


def test_layer_ids_follow_z_lab():
    assert dflash.target_layer_ids(36, 5) == [1, 9, 17, 25, 33]
    assert dflash.target_layer_ids(8, 5) == [1, 2, 3, 4, 5]
    assert dflash.target_layer_ids(8, 1) == [4]
    with pytest.raises(ValueError, match=r"within 1\.\.5"):
        dflash.target_layer_ids(8, 6)


# ---- bad input: one sentence that names the option


def _raises(match: str):
    return pytest.raises(ValueError, match=match)


@pytest.mark.parametrize("train, config", TRAINERS.values(), ids=TRAINERS)
def test_bad_folders_are_one_sentence(tmp_path, train, config, responses, target_folder):
    empty = tmp_path / "empty"
    empty.mkdir()
    with _raises("has no config.json"):
        train(responses, empty, tmp_path / "out", config, LOOP)
    (empty / "config.json").write_text((target_folder / "config.json").read_text())
    with _raises("has no weights"):
        train(responses, empty, tmp_path / "out", config, LOOP)
    with _raises("crossspec train generate"):
        train(empty, target_folder, tmp_path / "out", config, LOOP)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    write_shard(foreign / "train-00000.jsonl.gz", [Generation([1], [VOCAB, 2], "chat", True)])
    with _raises(f"token {VOCAB}, but --target has {VOCAB} tokens"):
        train(foreign, target_folder, tmp_path / "out", config, LOOP)
    write_shard(foreign / "train-00000.jsonl.gz", [Generation([1], [5, 2], "chat", True)])
    with _raises("holds 1 rows; one step needs 4"):
        train(foreign, target_folder, tmp_path / "out", config, LOOP)
    shard = foreign / "train-00000.jsonl.gz"
    shard.write_bytes(shard.read_bytes()[:-12])
    with _raises("is damaged"):
        train(foreign, target_folder, tmp_path / "out", config, LOOP)


def test_bad_sizes_are_one_sentence(tmp_path, responses, target_folder):
    with _raises(r"--draft-vocab 999 must lie within 1\.\.288"):
        train_eagle3(responses, target_folder, tmp_path, Eagle3Config(draft_vocab_size=999), LOOP)
    with _raises("--target-layers 9"):
        train_dflash(responses, target_folder, tmp_path, DFlashConfig(num_target_layers=9), LOOP)


def test_other_settings_do_not_resume(tmp_path, responses, target_folder):
    train_eagle3(responses, target_folder, tmp_path, EAGLE3, LoopConfig(steps=1))
    with _raises("other steps"):
        train_eagle3(responses, target_folder, tmp_path, EAGLE3, LoopConfig(steps=2))


def test_text_without_rows_is_one_sentence(tmp_path, target_folder):
    with _raises("no file matches"):
        generate(tmp_path, target_folder, tmp_path / "out", GenerateConfig())
    (tmp_path / "train-a.jsonl").write_text("not json\n")
    with _raises("train-a.jsonl:1"):
        read_rows(tmp_path)


def _command(*words) -> Exception | None:
    result = CliRunner().invoke(train_app, [str(word) for word in words])
    return result.exception


def test_commands_refuse_before_they_work(tmp_path, data, responses, target_folder):
    nowhere = tmp_path / "nowhere"
    for kind in TRAINERS:
        error = _command(kind, "--data", nowhere, "--target", target_folder, "--out", tmp_path / "out")
        assert "--data" in str(error) and "crossspec train generate" in str(error)
        error = _command(kind, "--data", responses, "--target", tmp_path, "--out", tmp_path / "out")
        assert isinstance(error, ValueError) and "config.json" in str(error)
    error = _command("generate", "--data", data, "--target", target_folder, "--out", data)
    assert isinstance(error, ValueError) and "folder of their own" in str(error)
    error = _command("target", "--data", nowhere, "--out", tmp_path / "out")
    assert isinstance(error, ValueError) and "--data" in str(error)


@pytest.mark.parametrize("kind", ["", "target", "generate", "eagle3", "dflash"])
def test_help_teaches(kind):
    result = CliRunner().invoke(train_app, [*([kind] if kind else []), "--help"])
    assert result.exit_code == 0 and "--out" in result.output


def test_commands_train_resume_and_restart(tmp_path, responses, target_folder):
    words = ["--data", responses, "--target", target_folder, "--out", tmp_path, "--threads", 1, "--float32"]
    words += ["--rows-per-step", 4, "--anchors", 2, "--steps", 2]
    assert _command("dflash", *words, "--block-size", 3) is None
    assert "block_size" in str(_command("dflash", *words, "--block-size", 4))
    assert _command("dflash", *words, "--block-size", 4, "--restart") is None
    assert json.loads((tmp_path / "model" / "config.json").read_text())["block_size"] == 4
