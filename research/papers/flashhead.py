"""FlashHead (Tranheden et al. 2026) and the thesis on its draft heads (Ma and Wang 2026), on the pocket models.

Only drafts behind the text's own tokens can be accepted, so one pass of a drafter over a text has the states of every
draft that counts. Each head then gives its tokens from the same states. Sampled texts
are drawn with the noise that the engine's sampler would use, and drafts are coupled with it as they are there.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from confu_offline import load_control
from intervals import Interval, Walk, gain, rate
from shapes import CLUSTER_SIZE, SHAPES, Shape
from texts import POCKET, open_target, read_texts
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

from crossspec_tools.flashhead.files import read_output_embedding, read_target_ids
from crossspec_tools.flashhead.quality import rank_clusters
from crossspec_tools.train.generations import Generation
from crossspec_tools.train.states import FrozenTarget, target_settings
from papers.base import Figures, PaperTable, numbers
from vllm_crossspec.drafting.flashhead.assets import Assets, default_probes, read_assets
from vllm_crossspec.drafting.flashhead.check import check_fingerprint
from vllm_crossspec.drafting.flashhead.head import FlashHead, Noise, check_probes
from vllm_crossspec.drafting.noise import NoiseKeys, add_candidate_noise, add_cluster_noise, gumbel_noise_naive

DRAFTERS = {"draft-model": "flashhead-draft-model", "eagle3": "flashhead-eagle3"}
"""Pocket drafters, and their clusters."""
MARGINS = (0.05, 0.1, 0.15, 0.2, 0.3)
DRAFT_SHAPE = SHAPES["0.6b"]
TARGET_SHAPES = {
    "Qwen3-32B-AWQ": (Shape(5120, 25600, 64, 64, 8, tied=False), 0.5),
    **{f"Qwen3-{name.upper()}": (SHAPES[name], 2.0) for name in ("14b", "8b", "4b")},
}
"""Targets of the thesis and of configs/, and the bytes of a weight outside of the output layer, which has 2."""


class Text(NamedTuple):
    """What a drafter's output layer sees along a text. A places where a round may begin, K drafts behind each.

    ``states`` float32 [A * K, D]; ``truth`` int64 [A * K], the text's own tokens there; ``positions`` int64 [A * K] of
    the tokens before those; ``seed`` of the noise that the text was drawn with.
    """

    states: torch.Tensor
    truth: torch.Tensor
    positions: torch.Tensor
    seed: int


class Drafter(NamedTuple):
    """One drafter along all texts that are longer than a draft of K tokens.

    ``weight`` float32 [V, D] is its output layer, clustered in ``assets``; ``kept`` int64 [V] are the target's ids.
    """

    texts: Sequence[Text]
    weight: torch.Tensor
    kept: torch.Tensor
    assets: Assets
    num_drafts: int


NOTE = "{}, drafts of {} tokens; 95 % intervals."

Choose = Callable[[Text], torch.Tensor]
"""Rows of the output layer int64 [A * K] that a head chooses."""


# -- texts and states ---------------------------------------------------------------------------------------------


def add_options(parser: ArgumentParser) -> None:
    """Of all tables of texts."""
    add = parser.add_argument
    add("--responses", type=Path, required=True, help="folder of `crossspec train generate` for the pocket target")
    add("--rows", type=int, default=1000, help="at most so many of its dev-*.jsonl.gz, of the whole list")
    add("--tokens", type=int, default=6, help="tokens of a draft (K); the thesis has 6")


def add_sampled_options(parser: ArgumentParser) -> None:
    """Of tables of sampled texts."""
    add_options(parser)
    add = parser.add_argument
    add("--temperature", type=float, default=0.8, help="of texts and drafts")
    add("--new-tokens", type=int, default=64, help="most tokens of a text, which is drawn anew from the prompt")
    add("--probes", default="32,67,140", help="numbers of clusters that are looked into, with commas between them")
    parser.set_defaults(rows=60)


def load(options: Namespace, names: Sequence[str], temperature: float = 0.0) -> dict[str, Drafter]:
    """The drafters along greedy responses, or along texts that are drawn at a temperature."""
    if options.tokens < 1 or options.rows < 1:
        raise ValueError(f"--tokens {options.tokens} and --rows {options.rows} are at least 1")
    given = Namespace(responses=options.responses, split="dev", rows=None)
    rows = read_texts(given, target_settings(POCKET / "target").vocab_size)
    rows = rows[:: max(1, len(rows) // options.rows)][: options.rows]
    target = open_target(POCKET / "target")
    if temperature:
        rows = [draw(target.model, row, seed, temperature, options.new_tokens) for seed, row in enumerate(rows)]
    if not any(len(row.response_ids) > options.tokens for row in rows):
        raise ValueError(f"--responses {options.responses}: no greedy response is longer than {options.tokens} tokens")
    return {name: drafter(name, target, rows, options.tokens) for name in names}


class _Draws(LogitsProcessor):
    """Makes the likeliest token the one that the engine's sampler would draw."""

    def __init__(self, temperature: float, seed: int):
        self.temperature, self.seed = temperature, seed

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.float() / self.temperature + noise_at(
            self.seed, torch.tensor([input_ids.shape[1] - 1]), torch.arange(scores.shape[1])
        )


def noise_at(seed: int, positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """float32 [n, V] the sampler's noise behind positions [n]."""
    return gumbel_noise_naive(torch.full_like(positions, seed), positions, tokens)


def draw(model: Any, row: Generation, seed: int, temperature: float, new_tokens: int) -> Generation:
    """A text of the target from the prompt of ``row``."""
    prompt = torch.tensor([row.prompt_ids])
    tokens = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new_tokens,
        do_sample=False,
        logits_processor=LogitsProcessorList([_Draws(temperature, seed)]),
    )
    return row._replace(response_ids=tokens[0, prompt.shape[1] :].tolist(), greedy=False)


@torch.no_grad()
def drafter(name: str, target: FrozenTarget, rows: Sequence[Generation], num_drafts: int) -> Drafter:
    """One of the pocket drafters along the texts of ``rows``."""
    folder = POCKET / name
    weight, kept = read_output_embedding(folder).float(), read_target_ids(folder)
    assets = read_assets(POCKET / DRAFTERS[name])
    check_fingerprint(assets, weight, name)
    states_of = _eagle3_states(folder, target) if name == "eagle3" else _model_states(folder)
    texts = []
    for seed, row in enumerate(rows):
        count = len(row.response_ids) - num_drafts
        if count < 1:
            continue
        tokens = torch.tensor(row.prompt_ids + row.response_ids)
        places = (len(row.prompt_ids) + torch.arange(count))[:, None] + torch.arange(num_drafts)
        states = states_of(tokens, places).flatten(0, 1)
        texts.append(Text(states, tokens[places + 1].flatten(), places.flatten(), seed))
    return Drafter(texts, weight, torch.arange(len(weight)) if kept is None else kept, assets, num_drafts)


def _model_states(folder: Path) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """[A, K, D] of a draft model: behind the text's own tokens it sees nothing but the text."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()
    return lambda tokens, places: model.model(input_ids=tokens[None], use_cache=False).last_hidden_state[0][places]


def _eagle3_states(folder: Path, target: FrozenTarget) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """[A, K, D] of an EAGLE-3 drafter; each step starts from the state of the step before."""
    model, seen = load_control(folder, target), []
    model.lm_head.register_forward_pre_hook(lambda _, given: seen.append(given[0][0]))

    def states(tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        seen.clear()
        known = target.states(tokens[None])
        list(model.unroll(known, tokens[None], target.embedding, places[None, :, 0] - 1, places.shape[1]))
        return torch.stack(seen, 1)

    return states


# -- heads --------------------------------------------------------------------------------------------------------


def dense(made: Drafter, temperature: float = 0.0) -> Choose:
    """The whole output layer."""

    def choose(text: Text) -> torch.Tensor:
        logits = text.states @ made.weight.t()
        if temperature:
            logits = logits / temperature + noise_at(text.seed, text.positions, made.kept)
        return logits.argmax(1)

    return choose


def flashhead(made: Drafter, num_probes: int, temperature: float = 0.0, clusters: str = "nearest") -> Choose:
    """The head; ``clusters`` "drawn" with the target's noise, as the engine does, or "independent" with another."""
    most = max(len(text.states) for text in made.texts)
    head = FlashHead(
        made.weight, made.assets, num_probes=num_probes, max_rows=most, draws=clusters != "nearest", is_coupled=True
    )
    generator = torch.Generator().manual_seed(0)

    def choose(text: Text) -> torch.Tensor:
        if not temperature:
            return head.best_token(text.states)
        slots, offsets = torch.zeros(len(text.states), dtype=torch.int64), made.kept - torch.arange(len(made.kept))
        of_requests = torch.tensor([temperature]), torch.tensor([text.seed])
        keys = NoiseKeys(slots, text.positions, *of_requests, offsets=offsets)

        def independent(scores: torch.Tensor, lengths: torch.Tensor, *_: Any) -> None:
            uniform = torch.rand(scores.shape, generator=generator).clamp_(1e-9, 1 - 1e-7)
            scores.mul_(lengths / temperature).sub_(torch.log(-torch.log(uniform)))

        of_clusters = independent if clusters == "independent" else partial(add_cluster_noise, keys)
        return head.best_token(text.states, Noise(partial(add_candidate_noise, keys), of_clusters))

    return choose


def walk(made: Drafter, choose: Choose) -> Walk:
    """Decode all texts round by round with chains of what a head chooses."""
    return walk_hits(made, [made.kept[choose(text)] == text.truth for text in made.texts])


def walk_hits(made: Drafter, hits: Sequence[torch.Tensor]) -> Walk:
    """As :func:`walk`, of bool [A * K] a text: which drafts are the text's own tokens."""
    tokens, rounds = [], []
    for hit in hits:
        accepted = hit.view(-1, made.num_drafts).long().cumprod(1).sum(1).tolist()
        place = count = 0
        while place < len(accepted):
            place, count = place + accepted[place] + 1, count + 1
        tokens.append(place)
        rounds.append(count)
    return Walk(np.array(tokens), np.array(rounds))


# -- the tables ---------------------------------------------------------------------------------------------------


def acceptance(options: Namespace) -> list[Figures]:
    """Tables 4.5, 4.9: acceptance and tokens a round with the dense head and with FlashHead."""
    rows, values = [], []
    for name, made in load(options, tuple(DRAFTERS)).items():
        base = walk(made, dense(made))
        for label, probes in (("dense", None), (f"FlashHead, {made.assets.num_probes} probes", made.assets.num_probes)):
            found = base if probes is None else walk(made, flashhead(made, probes))
            share = _accepted(found, options.tokens)
            emitted, more = rate(found), gain(found, base)
            cells = [name, label, f"{share:.3f}", f"{emitted:.3f}", "" if probes is None else f"{more:+.2f}"]
            rows.append([*cells, f"{int(found.rounds.sum())}"])
            values.append({"drafter": name, "head": label, "acceptance": share, "emitted": emitted})
            values[-1] |= {"gain_percent": more, "rounds": int(found.rounds.sum())}
    header = ("drafter", "head", "acceptance", "tokens a round", "% beside dense", "rounds")
    note = NOTE.format(f"{len(made.texts)} greedy texts of the pocket target", options.tokens)
    return [Figures("acceptance with either head", header, rows, values, note)]


def _accepted(found: Walk, num_drafts: int) -> Interval:
    """Share of the drafted tokens that are accepted."""
    seen = rate(found)
    return Interval(*((number - 1) / num_drafts for number in seen))


def sampling(options: Namespace) -> list[Figures]:
    """Section 2.5: for sampled requests the nearest clusters beside drawn ones."""
    if not 0 < options.temperature <= 10:
        raise ValueError(f"--temperature {options.temperature} is above 0 and at most 10")
    most = min(len(read_assets(POCKET / clusters).members) for clusters in DRAFTERS.values())
    given = numbers("--probes", options.probes, int, "whole numbers")
    checked = [check_probes(number, most, "--probes") for number in given]
    rows, values = [], []
    for name, made in load(options, tuple(DRAFTERS), options.temperature).items():
        base = walk(made, dense(made, options.temperature))
        for probes in (n for n in checked if n < len(made.assets.members)):
            walks = {
                kind: walk(made, flashhead(made, probes, options.temperature, kind))
                for kind in ("nearest", "drawn", "independent")
            }
            against = {kind: gain(found, walks["nearest"]) for kind, found in walks.items() if kind != "nearest"}
            beside = gain(walks["nearest"], base)
            cells = [f"{rate(base):.2f}", f"{beside:+.1f}", *(f"{more:+.1f}" for more in against.values())]
            rows.append([name, str(probes), *cells])
            found = {"dense": rate(base), "nearest_percent": beside, **against}
            values.append({"drafter": name, "probes": probes, **found})
    header = ("drafter", "probes", "dense, tokens a round", "nearest, % beside dense", "drawn with the target's noise, "
              "% beside nearest", "drawn with other noise, % beside nearest")  # fmt: skip
    note = NOTE.format(f"{len(made.texts)} texts drawn at temperature {options.temperature:g}", options.tokens)
    return [Figures("sampled requests: which clusters are probed", header, rows, values, note)]


def adaptive_probes(options: Namespace) -> list[Figures]:
    """Section 5.3: fewer probes where the best cluster stands out, beside fixed ones of the same mean number."""
    rows, values = [], []
    for name, made in load(options, tuple(DRAFTERS)).items():
        states = torch.cat([text.states for text in made.texts])
        ranks = rank_clusters(made.weight, made.assets, states)
        centroids = F.normalize(made.assets.centroids.float(), dim=1)
        cosines = torch.cat([F.normalize(part, dim=1) @ centroids.t() for part in states.split(4096)])
        below = cosines.amax(1, keepdim=True) - cosines
        right = torch.cat([made.kept[dense(made)(text)] == text.truth for text in made.texts])
        sizes = [len(text.states) for text in made.texts]
        chance = torch.rand(len(ranks), generator=torch.Generator().manual_seed(0))
        for margin in MARGINS:
            probed = (below <= margin).sum(1)
            mean = probed.float().mean().item()
            # As many on average: the whole number below, or one more in so many of the states.
            fixed = int(mean) + (chance < mean % 1).long()
            walks = [walk_hits(made, (right & (ranks < n)).split(sizes)) for n in (probed, fixed)]
            found = [_recall(ranks < n, sizes) for n in (probed, fixed)]
            more = gain(*walks)
            rows.append([name, f"{margin:g}", f"{mean:.1f}", *(f"{share:.1f}" for share in found), f"{more:+.1f}"])
            shares = dict(zip(("recall_percent", "recall_fixed_percent"), found, strict=True))
            values.append({"drafter": name, "margin": margin, "mean_probes": mean, **shares, "gain_percent": more})
    header = ("drafter", "margin of cosine", "probes on average", "found, %", "found by fixed probes, %",
              "tokens a round, % beside fixed probes")  # fmt: skip
    note = NOTE.format(f"{len(made.texts)} greedy texts of the pocket target", options.tokens)
    return [Figures("adaptive probes beside fixed ones of the same mean number", header, rows, values, note)]


def _recall(is_found: torch.Tensor, sizes: Sequence[int]) -> Interval:
    """Percent of the states, over texts."""
    count = np.array([int(part.sum()) for part in is_found.split(list(sizes))])
    return rate(Walk(count, np.array(sizes))).times(100)


# -- by bytes -----------------------------------------------------------------------------------------------------


def add_ceiling_options(parser: ArgumentParser) -> None:
    """Of the ceiling."""
    parser.add_argument("--tokens", default="6,5", help="tokens of a draft (K), with commas between them")


def weights(shape: Shape) -> tuple[int, int]:
    """Numbers in the layers of a Qwen3 model, and in its output layer."""
    attention = 2 * shape.hidden_size * shape.head_dim * (shape.num_heads + shape.num_kv_heads)
    mlp = 3 * shape.hidden_size * shape.intermediate_size
    return shape.num_layers * (attention + mlp), shape.vocab_size * shape.hidden_size


def ceiling(options: Namespace) -> list[Figures]:
    """Tables 4.7, 4.8: phase shares and the head-only ceiling, by what a round reads."""
    lengths = numbers("--tokens", options.tokens, int, "whole numbers")
    layers, head = weights(DRAFT_SHAPE)
    num_clusters = DRAFT_SHAPE.vocab_size // CLUSTER_SIZE
    probed = (num_clusters + default_probes(num_clusters) * CLUSTER_SIZE) * DRAFT_SHAPE.hidden_size
    rows, values = [], []
    for name, (shape, width) in TARGET_SHAPES.items():
        body, last = weights(shape)
        for length in lengths:
            verified = width * body + 2 * last
            total = verified + 2 * length * (layers + head)
            shares = [100 * part / total for part in (verified, 2 * length * layers, 2 * length * head)]
            bounds = [total / (total - 2 * length * saved) for saved in (head, head - probed)]
            cells = [*(f"{share:.1f}" for share in shares), *(f"{bound:.3f}" for bound in bounds)]
            rows.append([name, str(length), f"{total / 1e9:.1f}", *cells])
            names = ("verify_percent", "draft_body_percent", "head_percent", "ceiling", "flashhead")
            values.append(
                {"target": name, "tokens": length, "bytes": total, **dict(zip(names, shares + bounds, strict=True))}
            )
    header = ("target", "K", "GB a round", "verification, %", "the draft model's layers, %", "its head, %",
              "ceiling: a head for nothing", "FlashHead, 593 probes")  # fmt: skip
    note = "Calculated: one request, every weight read once a pass, all else for nothing. Drafts of Qwen3-0.6B."
    return [Figures("what a round reads, and how much faster a cheaper head could make it", header, rows, values, note)]


TABLES: Mapping[str, PaperTable] = {
    "table-4-8": PaperTable(
        "thesis tables 4.7 and 4.8, phase shares and the head-only ceiling: calculated from what a round reads",
        add_ceiling_options,
        ceiling,
    ),
    "table-4-9": PaperTable(
        "thesis tables 4.5 and 4.9, acceptance and tokens a round with the dense head and with FlashHead",
        add_options,
        acceptance,
    ),
    "section-2-5": PaperTable(
        "thesis section 2.5, clusters drawn without replacement for sampled requests, beside the nearest",
        add_sampled_options,
        sampling,
    ),
    "section-5-3": PaperTable(
        "thesis section 5.3, an adaptive number of probes, beside a fixed one of the same mean",
        add_options,
        adaptive_probes,
    ),
}
