"""What engines did, and the rows of tables and documents that are made of it."""

import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

ALL = "all"
PLAIN = "plain"
PERCENTILES = (50, 90, 99)
DRAWS = 1000
"""Of the bootstrap."""
PARTS = ("target", "draft", "rest")
"""Of a round."""

Percentiles = dict[str, float]
"""Of seconds, by name: p50, p90, p99."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one engine did when it answered all prompts once.

    Attributes:
        method: `plain` or a method's name.
        environment: what ran.
        groups: by category, seconds, one record per generation and one of its times.
        batch_size: most requests at a time.
        repeat: how many times it had answered them before, counted runs only.
    """

    method: str
    environment: dict[str, Any]
    groups: dict[str, dict[str, Any]]
    batch_size: int = 0
    repeat: int = 0


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the table; the fields are those of the JSON document.

    Counts are of the first repeat, times of all of them.

    Attributes:
        method: `plain` or a method's name.
        category: of the prompts, or `all`.
        num_prompts: prompts answered; a row with several turns counts each.
        num_tokens: generated, without the prompts.
        num_target_calls: sum over requests of the target's passes that gave the request tokens: one for its
            prompt and one a round. Counted as they happen, for `plain` as for the others.
        num_verified_tokens: rows that the target computed in these rounds: draft tokens, and the token before them;
            prompts are left out. None where the engine did not say.
        acceptance_length: tokens a round, the target's own included: 1 + accepted / rounds; 1.0 for `plain`.
        accepted_per_position: [K] number of rounds in which the first, second, ... draft token was accepted.
        identical_to_plain: whether every prompt's tokens equal plain's of the same batch size, in every repeat; None
            where plain was not run.
        seconds: wall-clock of the generation, without starting the engine; the median of the repeats.
        seconds_by_repeat: that of each.
        batch_size: most requests at a time.
        repeats: how many times all prompts were answered.
        acceptance_interval: where 95 % of the acceptance lengths lie that drawing other prompts (bootstrap) would give;
            None of fewer than two prompts, and without drafts.
        num_rounds: target calls that verified a draft (or, for `plain`, decoded a token); of the first repeat, as all
            counts are.
        rounds_by_repeat: the same of each: a router that learns needs other ones the next time.
        tokens_per_call: tokens by target calls, the prompts' own among them.
        tokens_per_round: tokens by rounds, the prompts' own left out of both. Unlike the acceptance length it does not
            have what is accepted past the end of a text.
        num_draft_tokens: that vLLM's scheduler planned: of a tree all its nodes, of ConFu its contemplate rows, too.
        acceptance_rate: accepted by planned draft tokens, as vLLM's own; small for trees, of which one path can be
            accepted. None without drafts.
        tokens_per_second: of all requests together; the median of the repeats.
        tokens_per_second_range: the least and the most of them.
        speedup: median over the repeats of tokens a second by plain's of the same repeat; None without plain.
        speedup_range: the least and the most of them.
        ttft: seconds from a request's arrival to its first output.
        tpot: seconds a token after the first output, of every request that has more.
        itl: seconds between two outputs of a request; one output may bring several tokens.
        route_shares: part of the rounds of all repeats that each drafter was routed to; None where nothing is routed.
        round_shares: of a round of this batch size, over all categories: parts `target`, `draft` and `rest`, and its
            `seconds`; None where it was not measured.
    """

    method: str
    category: str
    num_prompts: int
    num_tokens: int
    num_target_calls: int
    num_verified_tokens: int | None = None
    acceptance_length: float
    accepted_per_position: list[int] = field(default_factory=list)
    identical_to_plain: bool | None
    seconds: float
    seconds_by_repeat: list[float]
    batch_size: int
    repeats: int
    acceptance_interval: list[float] | None
    num_rounds: int
    rounds_by_repeat: list[int]
    tokens_per_call: float | None
    tokens_per_round: float | None
    num_draft_tokens: int
    acceptance_rate: float | None
    tokens_per_second: float | None
    tokens_per_second_range: list[float] | None
    speedup: float | None
    speedup_range: list[float] | None
    ttft: Percentiles | None
    tpot: Percentiles | None
    itl: Percentiles | None
    route_shares: dict[str, float] | None
    round_shares: dict[str, float] | None


Shares = Mapping[tuple[str, int], dict[str, float] | None]
"""Whose a round is, by method and batch size."""


def rows(runs: Sequence[Run], plain: Run | None = None, shares: Shares | None = None) -> list[Row]:
    """A row per method, batch size and category, and one over all of a method's categories.

    Args:
        runs: at least one; those of one method and batch size are repeats.
        plain: what texts and times are compared with, too; runs of that name among the others are.
        shares: of the rounds.
    """
    baselines = {
        (run.batch_size, run.repeat): run for run in [*runs, *([plain] if plain else [])] if run.method == PLAIN
    }
    settings: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        settings.setdefault((run.method, run.batch_size), []).append(run)
    found: list[Row] = []
    for setting, repeats in settings.items():
        found += _rows_of(repeats, baselines, (shares or {}).get(setting))
    return found


def _rows_of(
    repeats: list[Run], baselines: Mapping[tuple[int, int], Run], shares: dict[str, float] | None
) -> Iterator[Row]:
    first = repeats[0]
    pairs = [(run, plain) for run in repeats if (plain := baselines.get((run.batch_size, run.repeat))) is not None]
    for category in [*first.groups, ALL]:
        names = list(first.groups) if category == ALL else [category]
        generations = list(_of(first, names, "generations"))
        counts = [first.groups[name].get("num_verified_tokens", -1) for name in names]
        accepted = accepted_per_position([g["accepted_histogram"] for g in generations])
        num_drafts = sum(sum(g["accepted_histogram"]) for g in generations)
        num_planned = sum(g.get("num_draft_tokens", 0) for g in generations)
        num_tokens = sum(len(g["token_ids"]) for g in generations)
        num_calls = sum(g["num_target_calls"] for g in generations)
        rounds = [sum(g["num_target_calls"] - 1 for g in _of(run, names, "generations")) for run in repeats]
        num_rounds = rounds[0]
        speeds = [speed for run in repeats if (speed := _speed(run, names)) is not None]
        ratios = [
            mine / theirs for run, plain in pairs if (mine := _speed(run, names)) and (theirs := _speed(plain, names))
        ]
        timings = [timing for run in repeats for timing in _of(run, names, "timings")]
        lengths = [len(g["token_ids"]) for run in repeats for g in _of(run, names, "generations")]
        yield Row(
            method=first.method,
            category=category,
            num_prompts=len(generations),
            num_tokens=num_tokens,
            num_target_calls=num_calls,
            num_verified_tokens=None if -1 in counts else sum(counts),
            acceptance_length=1.0 + sum(accepted) / num_drafts if num_drafts else 1.0,
            acceptance_interval=acceptance_interval([g["accepted_histogram"] for g in generations]),
            accepted_per_position=accepted,
            identical_to_plain=all(_identical(*pair, names) for pair in pairs) if pairs else None,
            seconds=statistics.median(seconds := [_seconds(run, names) for run in repeats]),
            seconds_by_repeat=seconds,
            batch_size=first.batch_size,
            repeats=len(repeats),
            num_rounds=num_rounds,
            rounds_by_repeat=rounds,
            tokens_per_call=num_tokens / num_calls if num_calls else None,
            tokens_per_round=(num_tokens - len(generations)) / num_rounds if num_rounds else None,
            num_draft_tokens=num_planned,
            acceptance_rate=sum(accepted) / num_planned if num_planned else None,
            tokens_per_second=statistics.median(speeds) if speeds else None,
            tokens_per_second_range=[min(speeds), max(speeds)] if speeds else None,
            speedup=statistics.median(ratios) if ratios else None,
            speedup_range=[min(ratios), max(ratios)] if ratios else None,
            ttft=percentiles(timing["ttft"] for timing in timings),
            tpot=percentiles(
                (timing["times"][-1] - timing["times"][0]) / (length - 1)
                for timing, length in zip(timings, lengths, strict=False)
                if len(timing["times"]) > 1
            ),
            itl=percentiles(gap for t in timings for gap in (b - a for a, b in itertools.pairwise(t["times"]))),
            route_shares=_route_shares([run.groups[name].get("routes", {}) for run in repeats for name in names]),
            round_shares=shares,
        )


def _of(run: Run, names: Sequence[str], what: str) -> Iterator[dict[str, Any]]:
    for name in names:
        yield from run.groups[name].get(what, [])


def _seconds(run: Run, names: Sequence[str]) -> float:
    return float(sum(run.groups[name]["seconds"] for name in names))


def _speed(run: Run, names: Sequence[str]) -> float | None:
    """Tokens a second."""
    seconds = _seconds(run, names)
    return sum(len(g["token_ids"]) for g in _of(run, names, "generations")) / seconds if seconds else None


def percentiles(values: Iterable[float]) -> Percentiles | None:
    """The 50th, 90th and 99th, interpolated between neighbours; None of nothing."""
    found = list(values)
    if not found:
        return None
    return {f"p{p}": float(value) for p, value in zip(PERCENTILES, np.percentile(found, PERCENTILES), strict=True)}


def acceptance_interval(histograms: Sequence[Sequence[int]], seed: int = 0) -> list[float] | None:
    """The bootstrap's 95 % interval of the acceptance length, over texts.

    Args:
        histograms: of each text, how many of its rounds accepted 0, 1, ... draft tokens; empty where none was drafted.
        seed: of the draws.
    """
    texts = [histogram for histogram in histograms if sum(histogram)]
    if len(texts) < 2:
        return None
    rounds = np.array([sum(histogram) for histogram in texts])
    accepted = np.array([sum(i * count for i, count in enumerate(histogram)) for histogram in texts])
    picks = np.random.default_rng(seed).integers(0, len(texts), (DRAWS, len(texts)))
    lengths = 1.0 + accepted[picks].sum(1) / rounds[picks].sum(1)
    return [float(bound) for bound in np.quantile(lengths, [0.025, 0.975])]


def accepted_per_position(histograms: Sequence[Sequence[int]]) -> list[int]:
    """From "how many rounds accepted j tokens" to "how many rounds accepted the i-th token".

    Args:
        histograms: one per generation, each [K + 1] or empty.

    Returns:
        [K] counts, up to the last position that was ever accepted (a tree of many nodes is not as deep); the first is
        never smaller than the second.
    """
    total = [sum(column) for column in itertools.zip_longest(*histograms, fillvalue=0)]
    counts = [sum(total[i:]) for i in range(1, len(total))]
    return counts[: next((i for i in range(len(counts), 0, -1) if counts[i - 1]), 0)]


def _route_shares(groups: Sequence[Mapping[str, int]]) -> dict[str, float] | None:
    counts = {name: sum(group.get(name, 0) for group in groups) for group in groups for name in group}
    total = sum(counts.values())
    return {name: count / total for name, count in counts.items()} if total else None


def _identical(run: Run, plain: Run, names: Sequence[str]) -> bool:
    mine, theirs = _of(run, names, "generations"), _of(plain, names, "generations")
    return [g["token_ids"] for g in mine] == [g["token_ids"] for g in theirs]
