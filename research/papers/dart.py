"""DART (Liu et al. 2026): acceptance without an engine, on the target's own responses, computed in float32.

Tables 1 to 4 have tokens a round (tau) and how often a position's first choices have the text's token (alpha-k and
hit@10). Speedups need a GPU. A response is what the target itself said, greedily or sampled: whatever a tree has of
it would be accepted. Rounds that would reach past its end do not count.
"""

import json
import random
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import dart_offline
import numpy as np
import torch
from dart_offline import Places
from intervals import Interval, Walk, gain, rate
from rich.console import Console
from rich.progress import Progress
from texts import POCKET, add_target, by_category, open_target, read_texts, shortest_first

from crossspec_tools.ngram.build import build, make_plan
from crossspec_tools.ngram.lookup import look_up
from crossspec_tools.train.generations import Generation, read_generations, write_shard
from crossspec_tools.train.states import FrozenTarget, target_settings
from papers import lookup
from papers.base import Figures, PaperTable, numbers, read_recipe
from vllm_crossspec.ngram_store.store import NgramStore, open_store, tokenizer_hash

HIT = 10
"""Of hit@10."""
SEARCH = {"beam": 20, "backoff": None, "logit_decay": 0.9, "level_decay": 0.7}
TOP_K = 25
WEIGHT = 0.5
"""Of n-grams in the paper (appendix D)."""
LIGHTER = 0.1
"""Beside it, for n-grams of other text."""


# -- options and what they name -----------------------------------------------------------------------------------


def add_texts(parser: ArgumentParser) -> None:
    """Options of all tables: which responses."""
    add_target(parser)
    add = parser.add_argument
    add("--sampled", action="store_true", help="its sampled responses, not its greedy ones")
    add("--nodes", type=int, default=59, help="drafted nodes of a tree; the paper's 59")
    add("--store", type=Path, default=POCKET / "ngram" / "store.safetensors", help="n-gram store")
    parser.set_defaults(**SEARCH, top_k=TOP_K)


def add_drafter(parser: ArgumentParser) -> None:
    """Options of the tables about one drafter."""
    add_texts(parser)
    parser.add_argument("--drafter", type=Path, default=POCKET / "dart", help="folder of the DART drafter")


def add_runs(parser: ArgumentParser) -> None:
    """Options of the tables that compare trainings."""
    add_texts(parser)
    told = "folders that `crossspec train dart --out` wrote; for Table 3 drafters' own, too"
    parser.add_argument("--runs", type=Path, nargs="+", default=[POCKET / "dart"], help=told)


class Run(NamedTuple):
    """A training: the folder of its drafter, whether rows are shifted, gamma (None: it is not told) and seed."""

    drafter: Path
    is_shifted: bool
    gamma: float | None
    seed: int


def read_run(folder: Path) -> Run:
    """What ``crossspec train dart`` wrote to ``--out``, or a drafter alone. Raises ValueError."""
    if (folder / "config.json").is_file():
        return Run(folder, "draft_length" in json.loads((folder / "config.json").read_text()), None, 0)
    recipe = read_recipe(folder, "dart", "gamma")
    return Run(folder / "model", recipe["is_shifted"], recipe["gamma"], recipe["seed"])


class Texts(NamedTuple):
    """What is decoded, and by what."""

    target: FrozenTarget
    rows: list[Generation]
    store: NgramStore


def open_texts(given: Namespace, bfloat16: bool = False) -> Texts:
    """Responses of more than 8 tokens, the target and the store that options name. Raises ValueError."""
    digest = tokenizer_hash(given.target, "--target")
    store = open_store(given.store, key="--store", tokenizer=digest)
    # As `marginals` orders them, so that texts of all walks are the same ones.
    rows = shortest_first(read_texts(given, target_settings(given.target).vocab_size, 8, given.sampled))
    return Texts(open_target(given.target, bfloat16), rows, store)


def speak(folder: Path, texts: Texts, top_k: int = TOP_K, width: int = 0) -> Places:
    """Let a drafter speak at every place of the texts, and keep ``width`` tokens of context or those of the store."""
    model = dart_offline.load_drafter(folder, texts.target)
    with Progress(console=Console(stderr=True)) as progress:
        return dart_offline.marginals(model, texts.target, texts.rows, top_k, width or texts.store.order - 1, progress)


def opened(given: Namespace) -> tuple[Texts, Places]:
    """The texts, and what the drafter that options name says along them. Raises ValueError."""
    texts = open_texts(given)
    return texts, speak(given.drafter, texts)


def trees(
    places: Places, given: Namespace, store: NgramStore | None, kind: str = "continuity", weight: float = WEIGHT
) -> Walk:
    """Decode with the paper's search; the weight is of n-grams, where there are some."""
    return dart_offline.tree_walk(places, kind, 0.0 if store is None else weight, store, given)


def note(given: Namespace, texts: Texts) -> str:
    """What the figures are of."""
    kind = "sampled" if given.sampled else "greedy"
    return f"{len(texts.rows)} {kind} responses, {sum(len(row.response_ids) for row in texts.rows)} tokens."


# -- figures ------------------------------------------------------------------------------------------------------


def hits(places: Places, position: int, most: int) -> Walk:
    """How often the text's token is among the ``most`` likeliest of a position (from 0): hits and places by text."""
    found = (places.tokens[:, position, :most] == places.truth[:, position, None]).any(1)
    return _by_text(found, places)


def ngram_hits(places: Places, store: NgramStore, most: int) -> Walk:
    """The same of the n-grams after the tokens before: the first position is all that they can tell."""
    vocabulary = torch.arange(store.header.vocab_size)
    found = []
    for contexts, truth in zip(places.contexts.split(256), places.truth[:, 0].split(256), strict=True):
        said = look_up(store, contexts, vocabulary.expand(len(contexts), -1))
        _, best = dart_offline.likeliest(said.log_probs, most)
        is_known = said.matched.gather(1, best) > 0
        found.append(((best == truth[:, None]) & is_known).any(1))
    return _by_text(torch.cat(found), places)


def _by_text(found: torch.Tensor, places: Places) -> Walk:
    total = torch.zeros(len(places.count), dtype=torch.int64)
    total.index_add_(0, torch.arange(len(total)).repeat_interleave(places.count), found.long())
    return Walk(total.numpy(), places.count.numpy())


def pooled(walks: Sequence[Walk]) -> Walk:
    """Of several drafters over the same texts: an interval of it is over texts, the drafters as they are."""
    return Walk(sum(walk.tokens for walk in walks), sum(walk.rounds for walk in walks))  # type: ignore[arg-type]


def percent(walk: Walk) -> Interval:
    """A share of places, in percent."""
    return rate(walk).times(100)


# -- tables -------------------------------------------------------------------------------------------------------


def table_1(given: Namespace) -> list[Figures]:
    """Tokens a round beside prompt lookup, which drafts without weights."""
    texts, places = opened(given)
    depth = places.truth.shape[1]
    ours = partial(lookup.Ours, depth=depth, share=False)
    lookups = {
        f"prompt lookup, chain of {depth}": ours(0, search=lookup.NGRAM),
        f"`ngram`, tree of {given.nodes}": ours(given.nodes, search=lookup.NGRAM),
        f"`suffix`, tree of {given.nodes}": ours(given.nodes, search=lookup.SUFFIX),
    }
    walks = {name: Walk(*lookup.walk(one, texts.rows, depth)[:2]) for name, one in lookups.items()}
    walks["DART, first choices"] = dart_offline.chain_walk(places)
    walks[f"DART, tree of {given.nodes}"] = trees(places, given, None)
    walks[f"DART, tree of {given.nodes}, n-grams"] = trees(places, given, texts.store)
    return [rates("Table 1: tokens a round (tau)", walks, texts, note(given, texts))]


def table_2(given: Namespace) -> list[Figures]:
    """Trees without and with n-grams."""
    texts, places = opened(given)
    walks = {"without n-grams": trees(places, given, None), "with n-grams": trees(places, given, texts.store)}
    walks["with n-grams, softmax over the vocabulary"] = trees(places, given, texts.store, "continuity_whole")
    more = gain(walks["with n-grams"], walks["without n-grams"])
    whole = gain(walks["with n-grams, softmax over the vocabulary"], walks["with n-grams"])
    about = f"{note(given, texts)} N-grams: {more:+.1f} %. Softmax over the vocabulary beside that: {whole:+.1f} %."
    return [rates(f"Table 2: tokens a round (tau), trees of {given.nodes}", walks, texts, about)]


def rates(title: str, walks: Mapping[str, Walk], texts: Texts, about: str) -> Figures:
    """A row for every way to decode, a column for every category."""
    found = {name: by_category(walk, [row.category for row in texts.rows]) for name, walk in walks.items()}
    kinds = list(next(iter(found.values())))
    rows = [
        [name, f"{row['all']:.2f}", *(f"{row[kind].seen:.2f}" for kind in kinds[1:])] for name, row in found.items()
    ]
    return Figures(title, ["", *kinds], rows, [{"drafts": name, **row} for name, row in found.items()], about)


def table_3(given: Namespace) -> list[Figures]:
    """Accuracy of the first three positions, shifted and unshifted, and of the n-grams themselves."""
    runs = [read_run(folder) for folder in given.runs]
    texts = open_texts(given)
    groups: dict[str, list[Places]] = {}
    for run in runs:
        groups.setdefault("shifted" if run.is_shifted else "unshifted", []).append(speak(run.drafter, texts))
    rows, values = [], []
    for name in sorted(groups, reverse=True):
        for most in (1, HIT):
            cells = [percent(pooled([hits(places, k, most) for places in groups[name]])) for k in range(3)]
            label = name if most == 1 else f"{name}, hit@{HIT}"
            rows.append([label, str(len(groups[name])), *(f"{cell:.1f}" for cell in cells)])
            values.append({"logits": name, "most": most, "drafters": len(groups[name]), "alpha": cells})
    for most in (1, HIT):
        cell = percent(ngram_hits(next(iter(groups.values()))[0], texts.store, most))
        rows.append(["n-grams" if most == 1 else f"n-grams, hit@{HIT}", "", f"{cell:.1f}", "", ""])
        values.append({"logits": "n-grams", "most": most, "alpha": [cell]})
    header = ["", "drafters", *(f"alpha-{k + 1}" for k in range(3))]
    return [
        Figures("Table 3: the text's token among a position's likeliest, %", header, rows, values, note(given, texts))
    ]


def table_4(given: Namespace) -> list[Figures]:
    """Accuracy of six positions, and tokens a round, by the gamma of training."""
    runs = [read_run(folder) for folder in given.runs]
    if not all(run.is_shifted for run in runs):
        raise ValueError("--runs: Table 4 is of shifted drafters alone; leave out those of --unshifted")
    if any(run.gamma is None for run in runs):
        raise ValueError("--runs: Table 4 needs recipe.json, which says gamma; give an --out of `crossspec train dart`")
    texts = open_texts(given)
    groups: dict[float, list[tuple[Places, Walk, Walk]]] = {}
    for run in sorted(runs, key=lambda run: (run.gamma or 0.0, run.seed)):
        places = speak(run.drafter, texts)
        both = trees(places, given, None), trees(places, given, texts.store)
        groups.setdefault(run.gamma or 0.0, []).append((places, *both))
    rows, values = [], []
    for gamma, found in groups.items():
        cells = [percent(pooled([hits(places, k, 1) for places, _, _ in found])) for k in range(6)]
        tau = [rate(pooled(walks)) for walks in ([one[1] for one in found], [one[2] for one in found])]
        each = [[rate(one[i]).seen for one in found] for i in (1, 2)]
        shown = [f"{seen:.2f} [{', '.join(f'{x:.2f}' for x in one)}]" for seen, one in zip(tau, each, strict=True)]
        rows.append([f"{gamma:g}", *(f"{cell.seen:.1f}" for cell in cells), *shown])
        values.append({"gamma": gamma, "drafters": len(found), "alpha": cells, "tau": tau, "tau_of_each": each})
    header = ["gamma", *(f"alpha-{k + 1}" for k in range(6)), "tree [each seed]", "with n-grams [each seed]"]
    about = note(given, texts)
    best = max(groups, key=lambda gamma: rate(pooled([one[2] for one in groups[gamma]])).seen)
    for gamma, found in groups.items():
        if gamma != best:
            more = [gain(pooled([one[i] for one in groups[best]]), pooled([one[i] for one in found])) for i in (1, 2)]
            about += f" {best:g} over {gamma:g}: {more[0]:+.1f} %, with n-grams {more[1]:+.1f} %."
    return [Figures("Table 4: alpha-k, %, and tokens a round (tau)", header, rows, values, about)]


def counted(rows: Sequence[Generation], given: Namespace, order: int) -> NgramStore:
    """A store of these responses and their prompts."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_shard(folder / "rows.jsonl.gz", rows)
        build(make_plan([folder / "rows.jsonl.gz"], tokenizer=given.target, order=order), folder / "store")
        return open_store(folder / "store", key="--store")


def left_out(given: Namespace) -> list[Figures]:
    """Texts of each kind, with n-grams of all kinds and of all others."""
    texts, places = opened(given)
    counts = read_generations(given.responses, "train", texts.target.config.vocab_size, option="--responses")
    kinds = sorted({row.category for row in texts.rows})
    if missing := [kind for kind in kinds if not 0 < sum(row.category == kind for row in counts) < len(counts)]:
        raise ValueError(f"--responses {given.responses}: train-*.jsonl.gz needs {missing[0]} responses, and others")
    of_all = counted(counts, given, texts.store.order)
    walks: dict[str, dict[str, Walk]] = {}
    for kind in kinds:
        mine = torch.tensor([category == kind for category in places.categories])
        own = places._replace(first=places.first[mine], count=places.count[mine], categories=[kind] * int(mine.sum()))
        rows = [row for row in counts if row.category != kind]
        stores = {"all kinds": of_all, "the others": counted(rows, given, of_all.order)}
        as_many = counted(random.Random(0).sample(counts, len(rows)), given, of_all.order)
        walks[kind] = {"without n-grams": trees(own, given, None), "as many of all kinds": trees(own, given, as_many)}
        for weight in (WEIGHT, LIGHTER):
            walks[kind] |= {
                f"of {name}, weight {weight}": trees(own, given, store, weight=weight) for name, store in stores.items()
            }
    names = list(walks[kinds[0]])
    walks["all"] = {
        name: Walk(*(np.concatenate(part) for part in zip(*(walks[kind][name] for kind in kinds), strict=True)))
        for name in names
    }
    cells, values = [], []
    for kind, found in walks.items():
        more = [gain(found[name], found["without n-grams"]) for name in names[1:]]
        cells.append(
            [
                kind,
                f"{rate(found['without n-grams']):.2f}",
                *(f"{rate(found[name]).seen:.2f}: {x:+.1f}" for name, x in zip(names[1:], more, strict=True)),
            ]
        )
        values.append({"texts": kind, **{name: rate(walk) for name, walk in found.items()}, "gain, percent": more})
    about = (
        f"{note(given, texts)} {len(counts)} training responses are counted, with their prompts; changes in percent."
    )
    title = f"N-grams of kinds that the text is not of: tokens a round (tau), trees of {given.nodes}"
    return [Figures(title, ["texts", *names], cells, values, about)]


def add_ngrams(parser: ArgumentParser) -> None:
    """Options of the table of stores and weights."""
    add_target(parser)
    add = parser.add_argument
    add("--drafter", type=Path, default=POCKET / "dart", help="folder of the DART drafter")
    pocket = [POCKET / "ngram" / "store.safetensors"]
    add("--store", type=Path, nargs="+", default=pocket, help="n-gram stores. Default: the pocket's")
    add("--order", type=int, help="use n-grams of up to this length. Default: the store's")
    add("--backoff", type=float, help="stupid backoff by this factor. Default: the longest match, as in the paper")
    add("--trees", default="continuity,best_first", help="kinds of tree: " + ", ".join(dart_offline.TREES))
    add("--weights", default="0.25,0.5,1.0", help="of the n-gram term. The paper has 0.5")
    add("--nodes", type=int, default=60, help="nodes of a tree")
    add("--top-k", type=int, default=TOP_K, help="candidates at a position")
    add("--beam", type=int, default=SEARCH["beam"], help="beam width of `continuity`")
    add("--logit-decay", type=float, default=SEARCH["logit_decay"], help="of `continuity`, to the power of the level")
    add("--level-decay", type=float, default=SEARCH["level_decay"], help="of `continuity`: (level + 1) ** -level_decay")
    parser.set_defaults(sampled=False)


def ngrams(given: Namespace) -> list[Figures]:
    """Trees of every kind without n-grams, and with those of every store at every weight."""
    weights, kinds = numbers("--weights", given.weights, float), given.trees.split(",")
    if unknown := set(kinds) - set(dart_offline.TREES):
        raise ValueError(f"--trees {', '.join(sorted(unknown))}: choose of {', '.join(dart_offline.TREES)}")
    digest = tokenizer_hash(given.target, "--target")
    stores = {str(p): open_store(p, key="--store", order=given.order, tokenizer=digest) for p in given.store}
    texts = open_texts(Namespace(**{**vars(given), "store": given.store[0]}), bfloat16=True)
    places = speak(given.drafter, texts, given.top_k, max(store.order for store in stores.values()) - 1)
    found = [("chain", "", 0.0, dart_offline.chain_walk(places), None)]
    for kind in kinds:
        base = trees(places, given, None, kind)
        found.append((kind, "", 0.0, base, None))
        for path, store in stores.items():
            found += [(kind, path, weight, trees(places, given, store, kind, weight), base) for weight in weights]
    rows, values = [], []
    for kind, path, weight, walk, base in found:
        seen = {name: x.seen for name, x in by_category(walk, places.categories).items()}
        more = None if base is None else gain(walk, base)
        about = [kind, Path(path).stem, f"{weight:g}" if path else ""]
        rows.append([*about, *(f"{x:.2f}" for x in seen.values()), f"{more:+.1f}" if more else ""])
        values.append({"tree": kind, "store": path or None, "weight": weight, "tokens_per_round": seen})
        values[-1] |= {"rounds": int(walk.rounds.sum()), "gain_percent": more}
    header = ("tree", "store", "weight", *seen, "gain, %")
    about = f"{note(given, texts)} Gains are beside the same tree without n-grams."
    return [Figures("N-grams by store and weight: tokens a round", header, rows, values, about)]


TABLES: Mapping[str, PaperTable] = {
    "table-1": PaperTable("tokens a round of DART beside prompt lookup; speedups need a GPU", add_drafter, table_1),
    "table-2": PaperTable("what n-grams are worth to trees", add_drafter, table_2),
    "table-3": PaperTable("accuracy by position, shifted and unshifted logits, and of n-grams", add_runs, table_3),
    "table-4": PaperTable("accuracy by position and tokens a round, by the loss's decay gamma", add_runs, table_4),
    "left-out": PaperTable("n-grams of other kinds of text than are decoded", add_drafter, left_out),
    "ngrams": PaperTable("what n-grams are worth by store, weight and kind of tree", add_ngrams, ngrams),
}
