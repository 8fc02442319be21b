"""The drafters as training runs them: the same as an engine does, which knows no training masks."""

import math

import pytest
import torch
import torch.nn.functional as F
from tiny_training import (
    DEPTH,
    DFLASH,
    EAGLE3,
    HEAD_DIM,
    HIDDEN,
    VOCAB,
    frozen_target,
    random_rows,
)
from transformers import AutoModelForCausalLM

from crossspec_tools.train import dflash, eagle3
from crossspec_tools.train.acceptance import measure
from crossspec_tools.train.blocks import draft_attention
from crossspec_tools.train.dflash import DFlashDrafter
from crossspec_tools.train.eagle3 import Eagle3Drafter
from crossspec_tools.train.generations import Generation, collate
from crossspec_tools.train.states import FrozenTarget
from vllm_crossspec.drafters.eagle3.checkpoint import default_target_layers


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


class NaiveEagle3:
    """EAGLE-3 as an engine runs it: one token at a time over a growing cache, from a checkpoint's tensors."""

    def __init__(self, tensors: dict[str, torch.Tensor], embedding: torch.Tensor, theta: float):
        self.w, self.embedding, self.theta = tensors, embedding, theta
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def cache(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values [n, k, D] that the entry at ``position``, the newest, sees."""
        return torch.stack(self.keys), torch.stack(self.values)

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
        seen = _attend(_turn(q, position, self.theta), *self.cache(position))
        hidden = features + w[layer + "self_attn.o_proj.weight"] @ seen.flatten()
        hidden = hidden + _mlp(w, layer, _norm(hidden, w[layer + "post_attention_layernorm.weight"]))
        choice = (w["lm_head.weight"] @ _norm(hidden, w["norm.weight"])).argmax().item()
        return choice + w["d2t"][choice].item(), hidden


def scramble(model: torch.nn.Module) -> None:
    """Random weights everywhere, the norms too, so that a forgotten norm shows."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if parameter.ndim == 1 else 0.3 * noise)


@torch.no_grad()
def test_eagle3_unrolled_for_training_equals_an_engines_chain(target_folder):
    target = frozen_target(target_folder, default_target_layers(DEPTH))
    kept = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))[:96].sort().values
    model = Eagle3Drafter(EAGLE3, target.config, kept, seed=0)
    scramble(model)
    tensors = eagle3.checkpoint(model, target.config)[1]
    batch = collate(random_rows(3, seed=5))
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
            naive = NaiveEagle3(tensors, target.embedding, model.theta)
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
    target = frozen_target(target_folder, [i + 1 for i in ids])
    mask_id = 3
    model = DFlashDrafter(DFLASH, target.config, mask_id, seed=0)
    scramble(model)
    w = dict(model.state_dict())
    batch = collate(random_rows(3, seed=6))
    anchors = torch.stack([batch.starts, batch.ends - 2], dim=1)
    states = target.states(batch.tokens)
    got = F.linear(model(states, batch.tokens, target.embedding, anchors), target.head).argmax(-1)
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
