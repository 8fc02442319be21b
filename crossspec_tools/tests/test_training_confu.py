"""ConFu as training runs it: futures, who sees what, the paper's loss, and drafts as an engine makes them."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from test_training_drafters import NaiveEagle3, scramble
from tiny_training import (
    CONFU,
    DEPTH,
    EAGLE3,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LOOP,
    VOCAB,
    frozen_target,
    random_rows,
)  # fmt: skip
from torch.nn.attention.flex_attention import flex_attention
from transformers import DynamicCache

from crossspec_tools.train import confu
from crossspec_tools.train.blocks import rotate
from crossspec_tools.train.confu import ConfuDrafter, Mixture, confu_loss, contemplation_mask, replicate
from crossspec_tools.train.generations import Batch, collate, sample_anchors
from crossspec_tools.train.loop import make_optimizers
from crossspec_tools.train.recipes import CONFU_PAPER
from crossspec_tools.train.states import States
from vllm_crossspec.drafters.eagle3.checkpoint import default_target_layers

# The form without compilation is meant to be slow.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
KEPT = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))[:96].sort().values
PROMPTS = CONFU.num_soft_prompts


@pytest.fixture(scope="module")
def target(target_folder):
    return frozen_target(target_folder, default_target_layers(DEPTH))


def make_drafter(target, config=CONFU):
    """A drafter whose every weight is random and loud, so that a forgotten part shows."""
    model = ConfuDrafter(config, target.config, KEPT, seed=0)
    scramble(model)
    return model


# ---- futures, and who sees what


def whole_pass(target, model, tokens, gates, anchors, allow=lambda mask: None):
    """Text and contemplate tokens in one pass of the target behind the soft prompts, as the paper has it.

    Args:
        allow: may change the mask, bool [B, T + A, s + T + A]: row, key.

    Returns:
        States of the text [B, T, H] and futures [B, A, H].
    """
    rows, length = tokens.shape
    count, prompts = anchors.shape[1], model.soft_prompts
    mask = torch.zeros(rows, length + count, PROMPTS + length + count, dtype=torch.bool)
    for b in range(rows):
        for t in range(length):
            mask[b, t, PROMPTS : PROMPTS + t + 1] = True
        for a, anchor in enumerate(anchors[b].tolist()):
            mask[b, length + a, : PROMPTS + anchor + 1] = True
            mask[b, length + a, PROMPTS + length + a] = True
    allow(mask)
    soft = [
        (k.expand(rows, -1, -1, -1), v.expand(rows, -1, -1, -1))
        for k, v in zip(prompts.keys, prompts.values, strict=True)
    ]
    positions = torch.cat([torch.arange(length).expand(rows, -1), anchors + 1], dim=1)
    states = target.model.model(
        inputs_embeds=torch.cat([target.embedding[tokens], model.contemplate_embed(gates)], dim=1),
        position_ids=positions,
        attention_mask=mask[:, None],
        past_key_values=DynamicCache(soft),
        use_cache=True,
    ).last_hidden_state
    return states[:, :length], states[:, length:]


def some_anchors(target, seed=5):
    """A batch, its states and cache, anchors near both ends of the responses, and gates three places before."""
    batch = collate(random_rows(3, seed=seed))
    anchors = torch.stack([batch.starts - 1, batch.starts, batch.ends - 2], dim=1)
    states, cache = target.states_and_cache(batch.tokens)
    gates = states.taps[torch.arange(3)[:, None], (anchors - 3).clamp(min=0)]
    return batch, states, cache, anchors, gates


@torch.no_grad()
def test_the_split_pass_equals_one_over_text_and_contemplate_tokens(target):
    model = make_drafter(target)
    batch, states, cache, anchors, gates = some_anchors(target)
    text, futures = whole_pass(target, model, batch.tokens, gates, anchors)
    # Sums over other numbers of keys are cut into other pieces: float32 rounding through eight layers.
    torch.testing.assert_close(model.futures(target, cache, gates, anchors), futures, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(text, states.last, rtol=1e-4, atol=1e-4)
    assert torch.equal(text.argmax(-1), states.last.argmax(-1))
    model.soft_prompts.values.mul_(-1)
    other = model.futures(target, cache, gates, anchors)
    assert ((other - futures).abs().amax(-1) > 0.01).all()  # every future reads the soft prompts


def _text_sees_soft_prompts(mask):
    mask[:, :-3, :PROMPTS] = True


def _text_sees_contemplate_tokens(mask):
    mask[:, :-3, -3:] = True


@torch.no_grad()
@pytest.mark.parametrize("allow", [_text_sees_soft_prompts, _text_sees_contemplate_tokens])
def test_text_that_sees_more_is_another_text(target, allow):
    model = make_drafter(target)
    batch, states, _, anchors, gates = some_anchors(target)
    text, _ = whole_pass(target, model, batch.tokens, gates, anchors, allow)
    assert (text - states.last).abs().amax(-1).min() > 0.01


def _they_see_each_other(mask):
    mask[:, -3:, -3:] = True


def _they_see_later_text(mask):
    mask[:, -3:, PROMPTS:-3] = True


def _they_see_no_text(mask):
    mask[:, -3:, PROMPTS:-3] = False


@torch.no_grad()
@pytest.mark.parametrize("allow", [_they_see_each_other, _they_see_later_text, _they_see_no_text])
def test_contemplate_tokens_that_see_else_have_other_futures(target, allow):
    model = make_drafter(target)
    batch, _, cache, anchors, gates = some_anchors(target)
    _, futures = whole_pass(target, model, batch.tokens, gates, anchors, allow)
    assert (futures - model.futures(target, cache, gates, anchors)).abs().max() > 0.01


@torch.no_grad()
@pytest.mark.parametrize("rows, count, prompts, length", [(1, 1, 1, 2), (2, 5, 3, 131), (3, 17, 16, 250)])
def test_the_block_mask_is_the_bool_mask(rows, count, prompts, length):
    """In FlexAttention, whose forward pass a CPU has, against plain attention; blocks are 128 keys wide."""
    generator = torch.Generator().manual_seed(0)
    anchors = torch.randint(0, length, (rows, count), generator=generator)
    keys = prompts + length + count
    query, key, value = (torch.randn(rows, 2, n, 16, generator=generator) for n in (count, keys, keys))
    blocks = contemplation_mask(anchors, prompts, length, as_blocks=True)
    bools = contemplation_mask(anchors, prompts, length, as_blocks=False)
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=bools)
    torch.testing.assert_close(flex_attention(query, key, value, block_mask=blocks), expected)
    shifted = contemplation_mask((anchors + 1) % length, prompts, length, as_blocks=True)
    assert (flex_attention(query, key, value, block_mask=shifted) - expected).abs().max() > 1e-3


@torch.no_grad()
def test_a_target_with_flex_attention_has_the_same_futures(target_folder, target):
    """What a GPU runs, but for the compilation: transformers takes the block mask as it is."""
    model = make_drafter(target)
    _, _, cache, anchors, gates = some_anchors(target)
    flex = frozen_target(target_folder, default_target_layers(DEPTH))
    flex.model.set_attn_implementation("flex_attention")
    assert flex.reads_block_masks and not target.reads_block_masks
    with torch.compiler.set_stance("force_eager"):
        futures = model.futures(flex, cache, gates, anchors)
    torch.testing.assert_close(futures, model.futures(target, cache, gates, anchors), rtol=1e-4, atol=1e-4)


# ---- mixtures and gradients


@torch.no_grad()
def test_a_mixture_is_of_its_best_experts():
    torch.manual_seed(0)
    mixture = Mixture(6, 4, num_experts=5, top=2)
    mixture.router.normal_()
    mixture.experts.normal_()
    states = torch.randn(7, 6) * 100
    for state, embedding in zip(states, mixture(states), strict=True):
        normed = state / state.pow(2).mean().sqrt()
        shares = torch.tensor([(row * normed).sum() for row in mixture.router]).softmax(0)
        first, second = shares.sort(descending=True).indices[:2].tolist()
        mixed = shares[first] * mixture.experts[first] + shares[second] * mixture.experts[second]
        torch.testing.assert_close(embedding, mixed / (shares[first] + shares[second]))
    alone = Mixture(6, 4, num_experts=1, top=1)
    alone.experts.normal_()
    assert torch.equal(alone(states), alone.experts.expand(7, -1))


def _gradients(target, config):
    model = make_drafter(target, config)
    loss, _ = confu_loss(model, target, collate(random_rows(8, seed=9)), config, torch.Generator().manual_seed(0))
    loss.backward()
    return {name: 0.0 if p.grad is None else p.grad.abs().max().item() for name, p in model.named_parameters()}


def test_gradients_reach_the_drafter_and_not_the_target(target):
    gradients = _gradients(target, replace(CONFU, no_future=0.5))
    assert min(gradients.values()) > 0, gradients
    assert {name.split(".")[0] for name in gradients} >= {
        "soft_prompts", "contemplate_embed", "future_embed", "future_skip", "no_future_embed",
        "midlayer",
    }  # fmt: skip
    assert not any(p.requires_grad or p.grad is not None for p in target.model.parameters())
    assert not target.embedding.requires_grad and not target.head.requires_grad


def test_without_futures_nothing_contemplates(target):
    gradients = _gradients(target, replace(CONFU, no_future=1.0, future_loss=0.0))
    contemplating = [name for name in gradients if name.startswith(("soft_prompts", "contemplate_embed"))]
    assert len(contemplating) == 4 and not any(gradients[name] for name in contemplating)
    assert gradients["no_future_embed"] > 0 and gradients["future_embed.experts"] > 0
    # Their own loss asks them to foretell a token, whoever reads it.
    foretelling = _gradients(target, replace(CONFU, no_future=1.0))
    assert all(foretelling[name] > 0 for name in contemplating)
    assert _gradients(target, replace(CONFU, no_future=0.0))["no_future_embed"] == 0


PAPER = replace(CONFU, **CONFU_PAPER)


def test_the_papers_recipe_has_no_gradient_but_the_drafters(target):
    """No skip to learn, and futures are told what they are for by the drafts alone."""
    gradients = _gradients(target, replace(PAPER, no_future=0.5))
    assert [name for name, x in gradients.items() if not x] == ["future_skip.weight"]
    unread = _gradients(target, replace(PAPER, no_future=1.0))
    contemplating = [name for name in unread if name.startswith(("soft_prompts", "contemplate_embed"))]
    assert len(contemplating) == 4 and not any(unread[name] for name in contemplating)


def test_the_papers_recipe_begins_and_steps_as_eagle3_does(target):
    """Experts begin alike where they are aimed, and as unlike as tokens where not; one rate for all."""
    tokens = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(0))
    alike, rates = [], []
    for config in (CONFU, PAPER):
        model = ConfuDrafter(config, target.config, KEPT, seed=0)
        model.set_up(target, tokens, 0, config.aimed)
        experts = F.normalize(model.future_embed.experts.detach() - target.embedding.mean(0))
        alike.append((experts @ experts.T)[0, 1:].abs().max().item())
        groups = [group for made in make_optimizers(model, LOOP) for group in made.param_groups]
        rates.append({group.get("scale", 1.0) for group in groups})
    assert alike[0] > 0.8 > 0.6 > alike[1]
    assert rates == [{1.0, 2.0}, {1.0}]


# ---- the loss


def test_gradients_are_those_of_the_kl_divergence(target, monkeypatch):
    """Of the paper's loss, which is less by the entropy of the target's distribution."""
    config, found = replace(CONFU, no_future=0.5), []

    def divergence(logits, said, reduction="batchmean"):
        return F.kl_div(logits.log_softmax(-1), said, reduction=reduction)

    for function in (F.cross_entropy, divergence):
        monkeypatch.setattr(F, "cross_entropy", function)
        model, batch = make_drafter(target, config), collate(random_rows(8, seed=9))
        loss, _ = confu_loss(model, target, batch, config, torch.Generator().manual_seed(0))
        loss.backward()
        found.append((loss.item(), {name: x.grad for name, x in model.named_parameters()}))
    (ours, gradients), (papers, expected) = found
    assert ours > papers + 0.01
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)
        assert gradient.abs().max() > 1e-4, name


def test_replicas_are_the_places_of_equation_3():
    tokens = torch.zeros(2, 12, dtype=torch.int64)
    batch = Batch(tokens, torch.tensor([1, 1]), torch.tensor([12, 7]))
    anchors = torch.tensor([[0, 2, 9], [1, 4, 0]])
    real = torch.tensor([[True, True, True], [True, True, False]])
    places, counts = replicate(anchors, real, batch, 3)
    assert places.shape == counts.shape == (2, 12) and places.max() <= 10
    chosen = [
        [(i // 4, p) for i, (p, c) in enumerate(zip(*row, strict=True)) if c]
        for row in zip(places.tolist(), counts.tolist(), strict=True)
    ]
    # By hand: anchors keep their own futures, 3 is near two anchors, and a place is followed by a token.
    assert chosen[0] == [(0, 0), (0, 1), (0, 3), (1, 2), (1, 3), (1, 4), (1, 5), (2, 9), (2, 10)]
    assert chosen[1] == [(0, 1), (0, 2), (0, 3), (1, 4), (1, 5)]
    places, counts = replicate(anchors, real, batch, 0)
    assert torch.equal(places, anchors) and torch.equal(counts, real)


def by_hand(target, model, batch, config, seed):
    """Equation 3 place by place: mean over the places of every step, steps weighing ``step_decay ** s``."""
    generator = torch.Generator().manual_seed(seed)
    states, cache = target.states_and_cache(batch.tokens)
    anchors, real = sample_anchors(batch, -1, config.anchors_per_row, generator)
    lag = torch.randint(1, config.max_lag + 2, anchors.shape, generator=generator)
    absent = torch.rand(anchors.shape, generator=generator) < config.no_future
    losses = [[] for _ in range(config.num_steps)]
    for row, end in enumerate(batch.ends.tolist()):
        one = [(k[row : row + 1], v[row : row + 1]) for k, v in cache]
        tokens = batch.tokens[row : row + 1]
        own = {a.item() for a, r in zip(anchors[row], real[row], strict=True) if r}
        teacher = target.model(input_ids=tokens[:, :end]).logits[0]
        for column, anchor in enumerate(anchors[row].tolist()):
            gate = states.taps[row, max(anchor - lag[row, column].item(), 0)]
            future = model.futures(target, one, gate[None, None], torch.tensor([[anchor]]))
            future = model.no_future_embed[None, None] if absent[row, column] else future
            for place in range(anchor, anchor + config.replicas + 1):
                if not real[row, column] or place + 1 >= end or (place != anchor and place in own):
                    continue
                alone = States(states.taps[row : row + 1], states.last[row : row + 1])
                at = torch.tensor([[place]])
                entry = model.future_entries(alone, future, at if config.replicas_choose else torch.tensor([[anchor]]))
                more = {"last_entry": entry, "skip": model.future_skip(future)}
                steps = model.unroll(alone, tokens, target.embedding, at, config.num_steps, **more)
                for step, logits in enumerate(steps):
                    if place + 2 + step < end and teacher[place + 1 + step].argmax() in model.kept:
                        said = teacher[place + 1 + step][model.kept].softmax(-1)
                        losses[step].append(-(said * logits[0, 0].log_softmax(-1)).sum().item())
    weights = [config.step_decay**step for step in range(config.num_steps)]
    means = [sum(x) / max(len(x), 1) for x in losses]
    return sum(w * m for w, m in zip(weights, means, strict=True)) / sum(weights), sum(map(len, losses))


@torch.no_grad()
@pytest.mark.parametrize(
    "changes", [{}, {"replicas": 0}, {"no_future": 1.0}, {"replicas_choose": False, "step_decay": 1.0}]
)
def test_the_loss_is_equation_3(target, changes):
    config = replace(CONFU, **({"no_future": 0.3, "future_loss": 0.0} | changes))
    model, batch = make_drafter(target, config), collate(random_rows(10, seed=8))
    loss, shares = confu_loss(model, target, batch, config, torch.Generator().manual_seed(0))
    expected, count = by_hand(target, model, batch, config, seed=0)
    assert count > 20
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert 0 <= shares["hit_1"] <= 1 and f"hit_{config.num_steps}" in shares
    others = [({"replicas": 1}, 1e-3), ({"no_future": 0.6}, 1e-3), ({"step_decay": 0.9}, 1e-4)]
    others += [({"replicas_choose": not config.replicas_choose}, 1e-4)] if config.replicas else []
    for other, least in others:  # the same draws, read otherwise
        loss, _ = confu_loss(model, target, batch, replace(config, **other), torch.Generator().manual_seed(0))
        assert loss.item() != pytest.approx(expected, rel=least)


@torch.no_grad()
def test_the_futures_own_loss_is_about_the_token_after_the_next(target):
    """Anchor p: the target's head on the future, against what the target says of p + 2 when it knows p + 1."""
    model, batch = make_drafter(target, CONFU), collate(random_rows(6, seed=3))
    states, cache = target.states_and_cache(batch.tokens)
    anchors, real = sample_anchors(batch, -1, 5, torch.Generator().manual_seed(1))
    gates = states.taps[torch.arange(len(anchors))[:, None], anchors - 1]
    futures = model.futures(target, cache, gates, anchors)
    losses = []
    for row, end in enumerate(batch.ends.tolist()):
        said = target.model(input_ids=batch.tokens[row : row + 1, :end]).logits[0].softmax(-1)
        for column, anchor in enumerate(anchors[row].tolist()):
            if real[row, column] and anchor + 2 < end:
                logits = target.head @ futures[row, column]
                losses.append(-(said[anchor + 1] * logits.log_softmax(-1)).sum().item())
    loss, hits = confu.future_loss(futures, target, states, batch, (anchors, real))
    assert len(losses) > 10 and loss.item() == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    assert 0 <= hits <= 1


# ---- drafts, as an engine makes them


class NaiveConfu(NaiveEagle3):
    """EAGLE-3 one token at a time, whose drafts see one entry more, always at the place after the newest.

    They start from states to which a projection of the future is added; what is in the cache of the text has none.
    """

    future: tuple[torch.Tensor, torch.Tensor] | None = None
    skip: torch.Tensor | None = None
    has_root = hides_newest = False

    def think(self, features: torch.Tensor, future: torch.Tensor) -> None:
        """What is drafted from now on sees ``future``; its embedding is chosen by ``features`` of the last token."""
        w = self.w
        normed = features / features.pow(2).mean().sqrt()
        shares = (w["future_embed.router"] @ normed).softmax(0)
        best = shares.topk(CONFU.top_experts)
        embedding = (best.values[:, None] * w["future_embed.experts"][best.indices]).sum(0) / best.values.sum()
        parts = []
        for x, name in ((embedding, "input_layernorm"), (future, "hidden_norm")):
            parts.append(x * torch.rsqrt(x.pow(2).mean() + 1e-6) * w[f"midlayer.{name}.weight"])
        entry = torch.cat(parts)
        key, value = (w[f"midlayer.self_attn.{n}_proj.weight"] @ entry for n in "kv")
        self.future = key.view(-1, HEAD_DIM), value.view(-1, HEAD_DIM)
        self.skip = w["future_skip.weight"] @ future

    def step(self, token, features, position):
        if self.skip is None:
            return super().step(token, features, position)
        if self.has_root:
            return super().step(token, features + self.skip, position)
        super().step(token, features, position)
        self.hides_newest = self.has_root = True
        drafted = super().step(token, features + self.skip, position)
        self.hides_newest = False
        self.keys.pop(), self.values.pop()
        return drafted

    def cache(self, position):
        keys, values = super().cache(position)
        if self.hides_newest:
            keys, values = keys[:-1], values[:-1]
        if self.future is None:
            return keys, values
        key = rotate(self.future[0], torch.tensor(position + 1), self.theta)
        return torch.cat([keys, key[None]]), torch.cat([values, self.future[1][None]])


def naive_chain(target, model, tokens, place, gate_place, count):
    """``count`` drafts at ``place``, which knows ``tokens`` [place + 2] and no more, from the checkpoint's tensors."""
    tensors = confu.checkpoint(model, CONFU, target.config, confu.Identity("target", "", None))[1]
    tensors = {name.replace("layers.0.", "midlayer."): x for name, x in tensors.items()}
    hidden = target.model.model(input_ids=tokens[None, : place + 1], output_hidden_states=True).hidden_states
    taps = torch.cat([hidden[i][0] for i in (2, DEPTH // 2, DEPTH - 3)], dim=-1)
    anchor = torch.tensor([[place]])
    future = whole_pass(target, model, tokens[None, : place + 1], taps[gate_place][None, None], anchor)[1][0, 0]
    naive = NaiveConfu(tensors, target.embedding, model.theta)
    for position in range(place + 1):
        features = tensors["fc.weight"] @ taps[position]
        if position == place:
            naive.think(features, future)
        token, state = naive.step(tokens[position + 1].item(), features, position)
    chain = [token]
    for step in range(1, count):
        token, state = naive.step(token, state, place + step)
        chain.append(token)
    return chain


@torch.no_grad()
def test_offline_drafts_are_an_engines_chains(target):
    """The draft at a token reads the entry before it, its future, and nothing later; the gate is half a chain back."""
    model, batch, count = make_drafter(target), collate(random_rows(3, seed=5)), CONFU.num_steps
    places = torch.stack([batch.starts, batch.ends - 1], dim=1)
    got = confu.drafts(model, target, batch, places, CONFU)
    assert got.shape == (3, 2, count)
    chains = []
    for row in range(3):
        for column in range(2):
            place = places[row, column].item() - 1
            gate = max(place - (1 + CONFU.max_lag) // 2, 0)
            chains.append(naive_chain(target, model, batch.tokens[row], place, gate, count))
            assert got[row, column].tolist() == chains[-1]
    model.soft_prompts.values.mul_(-3)
    other = confu.drafts(model, target, batch, places, CONFU)
    assert other.flatten(0, 1).tolist() != chains  # what the future is does change drafts


# ---- the checkpoint's tensors


def test_checkpoint_has_the_documented_tensors(target):
    model = make_drafter(target)
    settings, tensors = confu.checkpoint(model, CONFU, target.config, confu.Identity("target", "c", "w"))
    H, Q, KV, inner, experts = HIDDEN, HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, CONFU.intermediate_size, 4
    assert {name: tuple(x.shape) for name, x in tensors.items()} == {
        "fc.weight": (H, 3 * H),
        "layers.0.hidden_norm.weight": (H,),
        "layers.0.input_layernorm.weight": (H,),
        "layers.0.post_attention_layernorm.weight": (H,),
        "layers.0.self_attn.q_proj.weight": (Q, 2 * H),
        "layers.0.self_attn.k_proj.weight": (KV, 2 * H),
        "layers.0.self_attn.v_proj.weight": (KV, 2 * H),
        "layers.0.self_attn.o_proj.weight": (H, Q),
        "layers.0.mlp.gate_proj.weight": (inner, H),
        "layers.0.mlp.up_proj.weight": (inner, H),
        "layers.0.mlp.down_proj.weight": (H, inner),
        "norm.weight": (H,),
        "lm_head.weight": (EAGLE3.draft_vocab_size, H),
        "d2t": (EAGLE3.draft_vocab_size,),
        "t2d": (VOCAB,),
        "soft_prompts.keys": (DEPTH, KV_HEADS, PROMPTS, HEAD_DIM),
        "soft_prompts.values": (DEPTH, KV_HEADS, PROMPTS, HEAD_DIM),
        "contemplate_embed.router": (experts, 3 * H),
        "contemplate_embed.experts": (experts, H),
        "future_embed.router": (experts, H),
        "future_embed.experts": (experts, H),
        "future_skip.weight": (H, H),
        "no_future_embed": (H,),
    }
    assert settings["target"] == {
        "name": "target",
        "config": "c",
        "weights": "w",
        "num_hidden_layers": DEPTH,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
    }
