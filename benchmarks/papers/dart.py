"""DART (Liu et al. 2026): acceptance without an engine, on the target's own responses, computed in float32.

Tables 1 to 4 have tokens a round (tau) and how often a position's first choices have the text's token (alpha-k and
hit@10). Speedups need a GPU. A response is what the target itself said, greedily or sampled: whatever a tree has of
it would be accepted. Rounds that would reach past its end do not count.
"""

import argparse
import json
import random
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import dart_offline
import lookup_offline
import numpy as np
import torch
from dart_offline import POCKET, Places
from intervals import Interval, Walk, gain, rate
from rich.console import Console
from rich.progress import Progress

from papers.base import Figures, PaperTable
from vllm_crossspec.ngram.build import build, make_plan
from vllm_crossspec.ngram.lookup import look_up
from vllm_crossspec.ngram.store import NgramStore, open_store, tokenizer_hash
from vllm_crossspec.training.generations import Generation, read_generations, write_shard
from vllm_crossspec.training.states import FrozenTarget, target_settings

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
    add = parser.add_argument
    add("--responses", type=Path, required=True, help="folder that `crossspec train generate` wrote for this target")
    add("--split", default="dev", help="its shards SPLIT-*.jsonl.gz")
    add("--sampled", action="store_true", help="its sampled responses, not its greedy ones")
    add("--target", type=Path, default=POCKET / "target", help="folder of the target")
    add("--rows", type=int, help="at most so many responses")
    add("--nodes", type=int, default=59, help="drafted nodes of a tree; the paper's 59")
    add("--store", type=Path, default=POCKET / "ngram" / "store.safetensors", help="n-gram store")


def add_drafter(parser: ArgumentParser) -> None:
    """Options of the tables about one drafter."""
    add_texts(parser)
    parser.add_argument("--drafter", type=Path, default=POCKET / "dart", help="folder of the DART drafter")


def check_drafter(folder: Path) -> Path:
    """See that a folder is a drafter's, before anything is loaded. Raises ValueError."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"--drafter {folder} has no config.json; give the folder of a DART drafter")
    return folder


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
    if not ((folder / "recipe.json").is_file() and (folder / "model" / "config.json").is_file()):
        raise ValueError(f"--runs {folder} is no finished --out of `crossspec train dart`: recipe.json and model/")
    recipe = json.loads((folder / "recipe.json").read_text())
    if "gamma" not in recipe:
        raise ValueError(f"--runs {folder} is of another drafter; give an --out of `crossspec train dart`")
    return Run(folder / "model", recipe["is_shifted"], recipe["gamma"], recipe["seed"])


class Texts(NamedTuple):
    """What is decoded, and by what."""

    target: FrozenTarget
    rows: list[Generation]
    store: NgramStore


def open_texts(given: Namespace, least: int = 8) -> Texts:
    """Responses of more than ``least`` tokens, the target and the store that options name. Raises ValueError."""
    digest = tokenizer_hash(given.target, "--target")
    store = open_store(given.store, key="--store", tokenizer=digest)
    vocab_size = target_settings(given.target).vocab_size
    rows = read_generations(given.responses, given.split, vocab_size, option="--responses")
    rows = [row for row in rows if row.greedy != given.sampled and len(row.response_ids) > least][: given.rows]
    if not rows:
        kind = "sampled" if given.sampled else "greedy"
        raise ValueError(f"--responses {given.responses}: no {kind} response of {given.split} has over {least} tokens")
    # As `marginals` orders them, so that texts of all walks are the same ones.
    rows.sort(key=lambda row: len(row.prompt_ids) + len(row.response_ids))
    return Texts(dart_offline.open_target(given.target, bfloat16=False), rows, store)


def speak(folder: Path, texts: Texts) -> Places:
    """Let a drafter speak at every place of the texts."""
    model = dart_offline.load_drafter(folder, texts.target)
    with Progress(console=Console(stderr=True)) as progress:
        return dart_offline.marginals(model, texts.target, texts.rows, TOP_K, texts.store.order - 1, progress)


def trees(
    places: Places, given: Namespace, store: NgramStore | None, kind: str = "continuity", weight: float = WEIGHT
) -> Walk:
    """Decode with the paper's search; the weight is of n-grams, where there are some."""
    search = argparse.Namespace(nodes=given.nodes, **SEARCH)
    return dart_offline.tree_walk(places, kind, 0.0 if store is None else weight, store, search)


def note(given: Namespace, texts: Texts) -> str:
    """What the figures are of."""
    kind = "sampled" if given.sampled else "greedy"
    return f"{len(texts.rows)} {kind} responses, {sum(len(row.response_ids) for row in texts.rows)} tokens."


# -- figures ------------------------------------------------------------------------------------------------------


def by_kind(walk: Walk, texts: Texts) -> dict[str, Interval]:
    """Tokens a round over all texts, then over those of each category."""
    kinds = np.array([row.category for row in texts.rows])
    found = {"all": rate(walk)}
    for kind in sorted(set(kinds)):
        found[kind] = rate(Walk(walk.tokens[kinds == kind], walk.rounds[kinds == kind]))
    return found


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
    return Interval(*(100 * number for number in rate(walk)))


# -- tables -------------------------------------------------------------------------------------------------------


def lookup_walk(drafter: Any, texts: Texts, depth: int) -> Walk:
    """Decode with a drafter without weights, in the rounds that a drafter of ``depth`` tokens would count."""
    found = []
    for row in texts.rows:
        at = rounds = 0
        while at < len(row.response_ids) - depth:
            paths = set(drafter.draft([*row.prompt_ids, *row.response_ids[: at + 1]]))
            ahead, accepted = tuple(row.response_ids[at + 1 :]), 0
            while accepted < depth and ahead[: accepted + 1] in paths:
                accepted += 1
            at, rounds = at + accepted + 1, rounds + 1
        drafter.end(row.response_ids)
        found.append((at, rounds))
    return Walk(*np.array(found, dtype=np.int64).T)


def table_1(given: Namespace) -> list[Figures]:
    """Tokens a round beside prompt lookup, which drafts without weights."""
    drafter, texts = check_drafter(given.drafter), open_texts(given)
    places = speak(drafter, texts)
    depth = places.truth.shape[1]
    chain, tree = {"num_nodes": 0}, {"num_nodes": given.nodes}
    lookups: dict[str, Callable[[], Any]] = {
        f"prompt lookup, chain of {depth}": lambda: lookup_offline.Ours(
            **chain, depth=depth, share=False, search=lookup_offline.NGRAM
        ),
        f"`ngram`, tree of {given.nodes}": lambda: lookup_offline.Ours(
            **tree, depth=depth, share=False, search=lookup_offline.NGRAM
        ),
        f"`suffix`, tree of {given.nodes}": lambda: lookup_offline.Ours(
            **tree, depth=depth, share=False, search=lookup_offline.SUFFIX
        ),
    }
    walks = {name: lookup_walk(make(), texts, depth) for name, make in lookups.items()}
    walks["DART, first choices"] = dart_offline.chain_walk(places)
    walks[f"DART, tree of {given.nodes}"] = trees(places, given, None)
    walks[f"DART, tree of {given.nodes}, n-grams"] = trees(places, given, texts.store)
    return [rates("Table 1: tokens a round (tau)", walks, texts, note(given, texts))]


def table_2(given: Namespace) -> list[Figures]:
    """Trees without and with n-grams."""
    drafter, texts = check_drafter(given.drafter), open_texts(given)
    places = speak(drafter, texts)
    walks = {"without n-grams": trees(places, given, None), "with n-grams": trees(places, given, texts.store)}
    walks["with n-grams, softmax over the vocabulary"] = trees(places, given, texts.store, "continuity_whole")
    more = gain(walks["with n-grams"], walks["without n-grams"])
    whole = gain(walks["with n-grams, softmax over the vocabulary"], walks["with n-grams"])
    about = f"{note(given, texts)} N-grams: {more:+.1f} %. Softmax over the vocabulary beside that: {whole:+.1f} %."
    return [rates(f"Table 2: tokens a round (tau), trees of {given.nodes}", walks, texts, about)]


def rates(title: str, walks: Mapping[str, Walk], texts: Texts, about: str) -> Figures:
    """A row for every way to decode, a column for every category."""
    found = {name: by_kind(walk, texts) for name, walk in walks.items()}
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
    drafter, texts = check_drafter(given.drafter), open_texts(given)
    counts = read_generations(given.responses, "train", texts.target.config.vocab_size, option="--responses")
    kinds = sorted({row.category for row in texts.rows})
    if missing := [kind for kind in kinds if not 0 < sum(row.category == kind for row in counts) < len(counts)]:
        raise ValueError(f"--responses {given.responses}: train-*.jsonl.gz needs {missing[0]} responses, and others")
    places = speak(drafter, texts)
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


TABLES: Mapping[str, PaperTable] = {
    "table-1": PaperTable("tokens a round of DART beside prompt lookup; speedups need a GPU", add_drafter, table_1),
    "table-2": PaperTable("what n-grams are worth to trees", add_drafter, table_2),
    "table-3": PaperTable("accuracy by position, shifted and unshifted logits, and of n-grams", add_runs, table_3),
    "table-4": PaperTable("accuracy by position and tokens a round, by the loss's decay gamma", add_runs, table_4),
    "left-out": PaperTable("n-grams of other kinds of text than are decoded", add_drafter, left_out),
}
