"""HeteroSpec (Liu et al. 2026): its tables from records of held-out texts (``heterospec_offline.py``), without a model.

A method is what it drafts at every place of every text; a walk then adds up the rounds that it takes. Bins are fitted
to one half of the texts and judged on the other, and the other way round, so that no text has chosen its own bins.

Shape legend: P places, B texts, D levels, M rounds.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import heterospec_offline as offline
import numpy as np
import torch
from heterospec_offline import Records
from intervals import Interval, Walk, gain, rate

from crossspec_tools.records import cart
from crossspec_tools.records.rounds import Rounds, RoundsFacts
from papers.base import Figures, PaperTable
from vllm_crossspec.config.schema import AdaptivePolicy
from vllm_crossspec.heterospec.calibration import Calibration
from vllm_crossspec.heterospec.heterospec import LEAF_SHARE, Reading, default_alpha, make_policy

PAPERS = Reading(first_bin=1, is_capped=False)
ENTROPY_SCALE = 0.2
"""Gamma of AdaEDL's bound on the acceptance, 1 - sqrt(gamma * entropy), as its authors have it."""
BOUNDS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
"""Lambda, the bound below which AdaEDL stops."""
CONFIDENCES = (0.2, 0.4, 0.6)
"""Of a choice, below which a chain ends behind it."""
LIKELIHOODS = (0.1, 0.2, 0.4)
"""Of a chain, below which it ends."""
SHARES = (0.003, 0.01, 0.03)
"""Of a path, below which a tree does not have its last node."""
SAMPLES = 200
"""Of the bootstrap where every draw is fitted anew."""


class Drafts(NamedTuple):
    """What a method drafts at every place, int64 [P] each.

    ``accepted`` tokens are the text's; ``rows`` the target verifies, the root's included; ``passes`` are the drafter's.
    """

    accepted: np.ndarray
    rows: np.ndarray
    passes: np.ndarray


class Counts(NamedTuple):
    """What decoding took, int64 [B] each: tokens after a text's first, target calls, verified tokens, passes."""

    tokens: np.ndarray
    calls: np.ndarray
    rows: np.ndarray
    passes: np.ndarray

    def of(self, texts: np.ndarray) -> "Counts":
        """Of some texts, bool [B]."""
        return Counts(*(part[texts] for part in self))

    @property
    def tokens_per_round(self) -> Interval:
        """Over the texts."""
        return rate(Walk(self.tokens, self.calls))


# -- methods --------------------------------------------------------------------------------------------------


def trees(records: Records, depth: int | np.ndarray, nodes: int | np.ndarray) -> Drafts:
    """Trees of these levels and nodes, one number or one for each place."""
    depths, widths = (np.broadcast_to(np.asarray(part), len(records.phi)) for part in (depth, nodes))
    top_k = records.facts.tree.top_k
    ranks = records.ranks[np.arange(len(depths)), :, depths - 1]
    accepted = ((ranks > 0) & (ranks <= widths[:, None])).sum(1)
    return Drafts(accepted, np.minimum(widths, top_k + (depths - 1) * top_k**2) + 1, depths)


def fixed(records: Records) -> Drafts:
    """The base method's trees."""
    return trees(records, records.facts.tree.depth, records.facts.tree.num_nodes)


def sized(records: Records, policy: AdaptivePolicy) -> Drafts:
    """HeteroSpec's trees."""
    bins = cart.bins_of(torch.from_numpy(records.phi), policy.thresholds).numpy()
    depths = records.facts.tree.depth + np.array(policy.extensions)[bins]
    return trees(records, depths, np.array(policy.widths)[bins])


def chains(records: Records, lengths: int | np.ndarray) -> Drafts:
    """First choices, so many of them."""
    lengths = np.broadcast_to(np.asarray(lengths), len(records.chain))
    return Drafts(np.minimum(records.chain, lengths), lengths + 1, lengths)


def stopped(is_unsure: np.ndarray) -> np.ndarray:
    """Levels that are drafted, int64 [P], up to and with the first unsure distribution, bool [P, longest draft]."""
    return np.where(is_unsure.any(1), is_unsure.argmax(1) + 1, is_unsure.shape[1])


def adaedl(entropies: np.ndarray, bound: float, most: int) -> np.ndarray:
    """Levels that AdaEDL drafts, int64 [P], of at most ``most``."""
    return stopped(1 - np.sqrt(ENTROPY_SCALE * entropies[:, :most]) < bound)


def confident(confidences: np.ndarray, bound: float) -> np.ndarray:
    """Levels that a chain has which ends with the first choice of a probability below ``bound``, int64 [P]."""
    return stopped(confidences < bound)


def likely(confidences: np.ndarray, bound: float) -> np.ndarray:
    """Levels that a chain has which ends where it is less likely than ``bound`` as a whole, int64 [P]."""
    return stopped(confidences.cumprod(1) < bound)


def likely_nodes(records: Records, bound: float) -> Drafts:
    """The base method's trees without the nodes whose paths are less probable than ``bound``."""
    widths = (records.log_probs >= np.log(bound)).sum(1)
    return trees(records, records.facts.tree.depth, np.maximum(widths, 1))


def paced(records: Records, most: int) -> Counts:
    """What chains take that are two tokens longer after a whole one was accepted, and else one shorter."""
    at, length = np.zeros_like(records.counts), np.full_like(records.counts, most // 2)
    spent = np.zeros((3, len(at)), dtype=np.int64)
    while len(active := np.flatnonzero(at < records.counts)):
        drafted = length[active]
        accepted = np.minimum(records.chain[records.firsts[active] + at[active]], drafted)
        spent[:, active] += np.stack([np.ones_like(drafted), drafted + 1, drafted])
        at[active] += accepted + 1
        length[active] = np.where(accepted == drafted, np.minimum(drafted + 2, most), np.maximum(drafted - 1, 1))
    return Counts(records.counts, *spent)


def walk(records: Records, drafts: Drafts) -> tuple[Counts, np.ndarray]:
    """Decode all texts to their ends; what it took, and the places of the rounds, int64 [M]."""
    at, places = np.zeros_like(records.counts), []
    spent = np.zeros((3, len(at)), dtype=np.int64)
    while len(active := np.flatnonzero(at < records.counts)):
        place = records.firsts[active] + at[active]
        spent[:, active] += np.stack([np.ones_like(place), drafts.rows[place], drafts.passes[place]])
        at[active] += drafts.accepted[place] + 1
        places.append(place)
    return Counts(records.counts, *spent), np.concatenate(places)


# -- bins -----------------------------------------------------------------------------------------------------


def base_rounds(records: Records, texts: np.ndarray) -> Rounds:
    """The rounds that trees of one size take in ``texts``, bool [B], as `crossspec calibrate heterospec` records them.

    A round that reaches past the end of its text is left out.
    """
    tree, drafts = records.facts.tree, fixed(records)
    _, places = walk(records, drafts)
    text = np.searchsorted(records.firsts, places, side="right") - 1
    left = (records.firsts + records.counts)[text] - places
    places, text = (part[texts[text] & (drafts.accepted[places] + 1 <= left)] for part in (places, text))
    ranks = records.ranks[places, : tree.depth, tree.depth - 1]
    path = torch.from_numpy(np.where(ranks <= tree.num_nodes, ranks, 0).astype(np.uint8))
    sizes = torch.full((len(places),), tree.num_nodes, dtype=torch.int16)
    return Rounds(
        torch.from_numpy(records.phi[places]),
        path,
        torch.full_like(sizes, tree.depth),
        sizes,
        torch.from_numpy(text.astype(np.int32)),
        dict(enumerate(records.categories)),
        RoundsFacts(records.facts.target, records.facts.drafter, tree),
    )


def fit(records: Records, texts: np.ndarray, **options: Any) -> Calibration:
    """The calibration of some texts, bool [B]; ``options`` are those of ``cart.calibrate``."""
    return cart.calibrate(base_rounds(records, texts), **options)


def halves(records: Records) -> np.ndarray:
    """bool [B]: every second text of each kind, in the order of their lengths."""
    names, seen = np.array(records.categories), np.zeros(len(records.counts), dtype=bool)
    for name in set(records.categories):
        seen[np.flatnonzero(names == name)[::2]] = True
    return seen


PolicyOf = Callable[[np.ndarray], AdaptivePolicy]
"""A policy that is fitted to some texts, bool [B]."""


def judged(records: Records, policy_of: PolicyOf, parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> Drafts:
    """What a policy drafts that is fitted to texts and judged on others, by ``parts``; the rest has fixed trees."""
    found = fixed(records)
    for fitted, others in parts:
        assert not (fitted & others).any()
        mine = np.repeat(others, records.counts)
        drafts = sized(records, policy_of(fitted))
        found = Drafts(*(np.where(mine, new, old) for new, old in zip(drafts, found, strict=True)))
    return found


def by_halves(records: Records, policy_of: PolicyOf) -> Drafts:
    """See :func:`judged`: one half fits what the other is judged on, both ways."""
    one = halves(records)
    return judged(records, policy_of, [(one, ~one), (~one, one)])


def plain_policy(records: Records, texts: np.ndarray, **options: Any) -> AdaptivePolicy:
    """The policy of the calibration of ``texts``."""
    return fit(records, texts, **options).policy()


# -- tables ---------------------------------------------------------------------------------------------------

COST_NAMES = ("target calls", "verified tokens", "drafter passes")


def change(new: np.ndarray, base: np.ndarray) -> Interval:
    """By how many percent a sum over texts is above another's, the texts of both drawn together."""
    one = np.ones(len(new))
    return gain(Walk(new, one), Walk(base, one))


def percent(interval: Interval) -> str:
    """For a table; what may be nothing is called so."""
    return f"{interval:+.1f}" + (", none" if interval.is_none else "")


def costs(counts: Counts, base: Counts | None) -> tuple[list[str], dict[str, Any]]:
    """Cells and values of tokens a round and the three costs, beside a base method's over the same texts."""
    cells = [f"{counts.tokens_per_round:.2f}"]
    values: dict[str, Any] = {"tokens_per_round": counts.tokens_per_round}
    for name, now, before in zip(COST_NAMES, counts[1:], counts[1:] if base is None else base[1:], strict=True):
        values[name] = int(now.sum())
        if base is None:
            cells.append(f"{now.sum():,}")
        else:
            values[f"{name}, percent"] = change(now, before)
            cells.append(f"{now.sum():,}: {percent(values[f'{name}, percent'])}")
    return cells, values


def beside(title: str, what: str, rows: Sequence[tuple[str, Counts, Counts | None]], note: str) -> Figures:
    """A table of methods, each beside its base."""
    cells, values = [], []
    for name, counts, base in rows:
        mine, numbers = costs(counts, base)
        cells.append([name, *mine])
        values.append({what: name, **numbers})
    return Figures(title, (what, "tokens a round", *COST_NAMES), cells, values, note)


def about(records: Records) -> str:
    """The texts, for a note."""
    tree, names = records.facts.tree, sorted(set(records.categories))
    kinds = ", ".join(f"{name} {records.categories.count(name)}" for name in names)
    return (
        f"{len(records.counts)} {'sampled' if records.facts.sampled else 'greedy'} texts ({kinds}), "
        f"{records.counts.sum():,} tokens; fixed trees are of {tree}. Changes are in percent of the fixed trees', "
        "with the 95 % interval of drawing other texts."
    )


BY_HALVES = "Bins are fitted to one half of the texts and judged on the other, both ways."


def by_kind(options: Namespace) -> list[Figures]:
    """Fixed trees beside HeteroSpec's, by kind of text."""
    records = of_options(options)
    base, _ = walk(records, fixed(records))
    mine, _ = walk(records, by_halves(records, partial(plain_policy, records)))
    names, rows = np.array(records.categories), []
    for name in (*sorted(set(records.categories)), "all"):
        texts = names == name if name != "all" else np.ones(len(names), dtype=bool)
        rows += [(f"{name}, fixed", base.of(texts), None), (f"{name}, HeteroSpec", mine.of(texts), base.of(texts))]
    return [beside("HeteroSpec by kind of text", "texts", rows, f"{about(records)} {BY_HALVES}")]


def policies_table(
    options: Namespace, title: str, what: str, policies: Callable[[Records], Mapping[str, PolicyOf]]
) -> list[Figures]:
    """Policies beside fixed trees."""
    records = of_options(options)
    base, _ = walk(records, fixed(records))
    rows: list[tuple[str, Counts, Counts | None]] = [("fixed trees", base, None)]
    rows += [(name, walk(records, by_halves(records, one))[0], base) for name, one in policies(records).items()]
    return [beside(title, what, rows, f"{about(records)} {BY_HALVES}")]


def ablation(records: Records) -> dict[str, PolicyOf]:
    """Levels alone, pruning alone, both."""

    def deeper(texts: np.ndarray) -> AdaptivePolicy:
        policy = plain_policy(records, texts)
        return policy._replace(widths=(records.facts.tree.num_nodes,) * len(policy.widths))

    def narrower(texts: np.ndarray) -> AdaptivePolicy:
        return fit(records, texts).policy(max_extension=0)

    return {"levels alone": deeper, "pruning alone": narrower, "both": partial(plain_policy, records)}


def alphas(records: Records) -> dict[str, PolicyOf]:
    """Levels that the surest bin adds."""
    half, most = default_alpha(records.facts.tree.depth), records.facts.levels - records.facts.tree.depth
    names = {alpha: f"alpha {alpha}" + (" (half the depth)" if alpha == half else "") for alpha in range(most + 1)}
    return {names[a]: partial(plain_policy, records, alpha=a) for a in sorted({0, *range(half - 1, most + 1)})}


READINGS: Mapping[str, dict[str, Any]] = {
    "ours": {},
    "bins counted from 1": {"reading": Reading(first_bin=1)},
    "nodes not capped": {"reading": Reading(is_capped=False)},
    "a bin of one path": {"leaf_share": 0.0},
    "all three": {"reading": PAPERS, "leaf_share": 0.0},
}


def readings(records: Records) -> dict[str, PolicyOf]:
    """The paper read in other ways."""

    def other_rounds(texts: np.ndarray, shortest: int) -> AdaptivePolicy:
        rounds, tree = base_rounds(records, texts), records.facts.tree
        kept = (rounds.accepted >= shortest).numpy()
        thresholds = cart.fit_thresholds(rounds.phi.numpy()[kept], rounds.rank.numpy()[kept])
        gammas = fit(records, texts).gammas[: cart.low_bins(len(thresholds) + 1)]
        alpha = default_alpha(tree.depth)
        return make_policy(thresholds=thresholds, num_nodes=tree.num_nodes, alpha=alpha, gammas=gammas)

    return {
        **{name: partial(plain_policy, records, **given) for name, given in READINGS.items()},
        "ours, fitted to paths of any length from 1": partial(other_rounds, shortest=1),
        "ours, fitted to all rounds": partial(other_rounds, shortest=0),
    }


def other_kinds(options: Namespace) -> list[Figures]:
    """Bins of one kind of text on the others, and of all others on one."""
    records = of_options(options)
    names = np.array(records.categories)
    kinds = sorted(set(records.categories))
    if len(kinds) < 2:
        raise ValueError(f"--records {options.records}: texts of two kinds are needed, and these are all {kinds[0]}")
    base, _ = walk(records, fixed(records))
    pairs = [(f"{kind}: the others", names == kind) for kind in kinds]
    pairs += [(f"all but {kind}: {kind}", names != kind) for kind in kinds]
    rows: list[tuple[str, Counts, Counts | None]] = []
    for name, fitted in pairs:
        counts, _ = walk(records, judged(records, partial(plain_policy, records), [(fitted, ~fitted)]))
        rows.append((name, counts.of(~fitted), base.of(~fitted)))
    note = f"{about(records)} No kind that is judged on has been fitted to."
    return [beside("Bins on other kinds of text", "fitted to: judged on", rows, note)]


def granularity(options: Namespace) -> list[Figures]:
    """How much regression trees of 4, 5 and 6 layers agree with 3 on what is of low entropy."""
    records = of_options(options)
    rounds = base_rounds(records, np.ones(len(records.counts), dtype=bool))
    full = (rounds.accepted >= records.facts.tree.depth).numpy()
    phi, rank, text = (part.numpy()[full] for part in (rounds.phi, rounds.rank, rounds.text))
    draws = np.random.default_rng(0).integers(0, len(records.counts), (SAMPLES, len(records.counts)))
    of_text = [np.flatnonzero(text == number) for number in range(len(records.counts))]
    rows, values = [], []
    for leaf_share, name in ((LEAF_SHARE, f"{100 * LEAF_SHARE:.0f} % of the paths"), (0.0, "one path")):
        seen = np.array(overlaps(phi, rank, leaf_share))
        picks = (np.concatenate([of_text[number] for number in draw]) for draw in draws)
        drawn = np.array([overlaps(phi[picked], rank[picked], leaf_share) for picked in picks])
        low, high = np.quantile(drawn, [0.025, 0.975], axis=0)
        found = [Interval(*map(float, part)) for part in zip(seen, low, high, strict=True)]
        rows.append([name, *(f"{interval:.2f}" for interval in found)])
        values.append({"leaf": name, **{f"3 and {layers}": x for layers, x in zip((4, 5, 6), found, strict=True)}})
    title = "Agreement on what is of low entropy (Jaccard), by layers of the regression tree"
    note = (
        f"{len(phi)} fully accepted paths of {len(records.counts)} texts; 95 % intervals of drawing other texts, "
        f"fitted anew {SAMPLES} times."
    )
    return [Figures(title, ("a bin holds at least", "3 and 4", "3 and 5", "3 and 6"), rows, values, note)]


def overlaps(phi: np.ndarray, rank: np.ndarray, leaf_share: float) -> list[float]:
    """Jaccard coefficients of the low bins of 3 layers and of 4, 5 and 6, in the same share of all bins."""
    low = []
    for layers in (3, 4, 5, 6):
        thresholds = cart.fit_thresholds(phi, rank, leaf_share, layers)
        num_bins = len(thresholds) + 1
        if layers == 3:
            share = cart.low_bins(num_bins) / num_bins
        low.append(phi <= thresholds[max(1, round(share * num_bins)) - 1])
    return [float((low[0] & other).sum() / (low[0] | other).sum()) for other in low[1:]]


EDGES = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
"""Of terminal confidence ranks, as shares of the nodes."""


def ranks(options: Namespace) -> list[Figures]:
    """Where terminal confidence ranks lie."""
    records = of_options(options)
    rounds = base_rounds(records, np.ones(len(records.counts), dtype=bool))
    nodes, names = records.facts.tree.num_nodes, np.array(records.categories)
    rank = rounds.rank.numpy()
    kind_of, rows, values = names[rounds.text.numpy()], [], []
    for kind in (*sorted(set(records.categories)), "all"):
        mine = (rank > 0) & ((kind_of == kind) | (kind == "all"))
        share = _share(rounds, mine, rank <= nodes / 4)
        quantiles = [int(np.quantile(rank[mine], q, method="inverted_cdf")) for q in (0.5, 0.75, 0.9)]
        rows.append([kind, f"{mine.sum():,}", f"{share:.0f}", *map(str, quantiles)])
        values.append({"texts": kind, "rounds": int(mine.sum()), "first quarter, percent": share, "ranks": quantiles})
    header = ("texts", "rounds", f"ranks 1 to {nodes // 4}, % of them", "median rank", "75 %", "90 %")
    return [Figures("Where terminal confidence ranks lie", header, rows, values, _about_ranks(records))]


def by_rank(options: Namespace) -> list[Figures]:
    """What is accepted, and how high Phi is, at each terminal confidence rank."""
    records = of_options(options)
    rounds = base_rounds(records, np.ones(len(records.counts), dtype=bool))
    nodes, rows, values = records.facts.tree.num_nodes, [], []
    rank, accepted, phi = (part.numpy() for part in (rounds.rank, rounds.accepted, rounds.phi))
    for low, high in pairwise(EDGES):
        mine = (rank > low * nodes) & (rank <= high * nodes)
        if mine.any():
            numbers = [float(x) for x in (accepted[mine].mean(), accepted[mine].std(), phi[mine].mean())]
            name = f"{int(low * nodes) + 1} to {int(high * nodes)}"
            rows.append([name, f"{mine.sum():,}", *(f"{x:.2f}" for x in numbers)])
            values.append({"ranks": name, "rounds": int(mine.sum()), "accepted": numbers[:2], "phi": numbers[2]})
    header = ("rank", "rounds", "accepted tokens", "their deviation", "Phi (nats)")
    return [Figures("What is accepted, by terminal confidence rank", header, rows, values, _about_ranks(records))]


def _about_ranks(records: Records) -> str:
    return f"Fixed trees of {records.facts.tree}, {len(records.counts)} texts; rounds that accepted a token."


def _share(rounds: Rounds, of: np.ndarray, are: np.ndarray) -> Interval:
    """Percent of some rounds, bool [M], that are others; the texts are drawn."""
    texts = np.unique(rounds.text.numpy()[of], return_inverse=True)[1]
    counts = np.bincount(texts)
    return rate(Walk(np.bincount(texts, are[of]), counts)).times(100)


def baselines(options: Namespace) -> list[Figures]:
    """Chains, AdaEDL's chains and trees, fixed trees of other sizes, and HeteroSpec's."""
    records = of_options(options)
    tree, levels = records.facts.tree, records.facts.levels
    mine, places = walk(records, drafts := by_halves(records, partial(plain_policy, records)))
    base, _ = walk(records, fixed(records))
    depth, width = drafts.passes[places].mean(), round(drafts.rows[places].mean()) - 1
    methods = {f"chain of {length}": chains(records, length) for length in (3, 5, 8, levels)}
    for bound in BOUNDS:
        methods[f"AdaEDL's chains, {bound}"] = chains(records, adaedl(records.chain_entropies, bound, levels))
    for bound in CONFIDENCES:
        methods[f"chains of sure tokens, {bound}"] = chains(records, confident(records.chain_confidences, bound))
    likely_chains = {
        f"chains that are likely, {bound}": chains(records, likely(records.chain_confidences, bound))
        for bound in LIKELIHOODS
    }
    likely_trees = {f"trees of likely nodes, {bound}": likely_nodes(records, bound) for bound in SHARES}
    methods |= likely_chains
    for bound in BOUNDS[:4]:
        depths = adaedl(records.entropies, bound, tree.depth)
        methods[f"AdaEDL on trees, {bound}"] = trees(records, depths, tree.num_nodes)
    alike = {
        f"fixed trees, depth {other}, {width} nodes": trees(records, other, width)
        for other in dict.fromkeys((int(depth), int(np.ceil(depth))))
    }
    methods |= likely_trees | alike
    name = f"fixed trees, depth {tree.depth}, {tree.num_nodes} nodes"
    rows: list[tuple[str, Counts, Counts | None]] = [(name, base, None)]
    rows += [(name, walk(records, found)[0], base) for name, found in methods.items()]
    rows += [("chains by the last round", paced(records, levels), base), ("HeteroSpec", mine, base)]
    note = (
        f"{about(records)} {BY_HALVES} HeteroSpec's trees have {depth:.2f} levels and {width} nodes on average, and "
        f"the fixed trees before them are of that size. AdaEDL stops where 1 - sqrt({ENTROPY_SCALE} H) falls below the "
        "number beside it, chains of sure tokens behind a choice less probable than it, and likely chains where they "
        "are less probable than it as a whole, as trees of likely nodes have no path that is; who takes the best "
        "number has chosen it on these texts. Chains by the last round are two tokens longer after one that was "
        "accepted to its end, and else one shorter."
    )
    against = [(f"HeteroSpec beside {name}", mine, walk(records, found)[0]) for name, found in alike.items()]
    for name, found in likely_chains.items():
        counts, places = walk(records, found)
        length = int(found.passes[places].mean())
        against.append((f"{name}, beside chains of {length}", counts, walk(records, chains(records, length))[0]))
    for name, found in likely_trees.items():
        counts, places = walk(records, found)
        nodes = int(found.rows[places].mean()) - 1
        same, _ = walk(records, trees(records, tree.depth, nodes))
        against.append((f"{name}, beside fixed trees of {nodes} nodes", counts, same))
    return [
        beside("HeteroSpec beside AdaEDL, chains and fixed trees", "drafts", rows, note),
        beside(
            "Drafts of their own size beside fixed ones of its mean",
            "drafts",
            against,
            f"The mean is rounded down, but for HeteroSpec's trees. {BY_HALVES} The same texts.",
        ),
    ]


def of_options(options: Namespace) -> Records:
    """The records that are asked for. Raises ValueError where they are of texts of the other kind."""
    records = offline.read(options.records)
    if records.facts.sampled != options.wants_sampled:
        wanted = "sampled at temperature 1 (--sampled)" if options.wants_sampled else "greedy"
        raise ValueError(f"--records {options.records}: this table is of texts that are {wanted}, and these are not")
    return records


def _options(parser: ArgumentParser, wants_sampled: bool = False) -> None:
    parser.add_argument("--records", type=Path, required=True, help="the --out of research/heterospec_offline.py")
    parser.set_defaults(wants_sampled=wants_sampled)


TABLES: Mapping[str, PaperTable] = {
    "table-1": PaperTable("fixed trees and HeteroSpec's, by kind of text", _options, by_kind),
    "table-2": PaperTable(
        "levels alone, pruning alone, both",
        _options,
        partial(policies_table, title="What levels and pruning bring, each alone", what="trees", policies=ablation),
    ),
    "table-3": PaperTable(
        "other alphas",
        _options,
        partial(policies_table, title="Levels that the surest bin adds", what="trees", policies=alphas),
    ),
    "table-4": PaperTable("agreement of deeper regression trees on what is of low entropy", _options, granularity),
    "table-5": PaperTable("bins on kinds of text that they were not fitted to", _options, other_kinds),
    "table-9": PaperTable("table 1 at temperature 1", partial(_options, wants_sampled=True), by_kind),
    "table-11": PaperTable(
        "beside AdaEDL, chains by confidence, and fixed trees of the same mean size", _options, baselines
    ),
    "figure-1": PaperTable("where terminal confidence ranks lie, by kind of text as figure 3, too", _options, ranks),
    "figure-4": PaperTable("accepted tokens and Phi by terminal confidence rank", _options, by_rank),
    "readings": PaperTable(
        "the paper read in other ways: bins from 1, no cap, leaves, other paths",
        _options,
        partial(policies_table, title="The paper, read in other ways", what="reading", policies=readings),
    ),
}
