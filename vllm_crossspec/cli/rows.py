"""What engines did, and the rows of tables and documents that are made of it."""

import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

ALL, PLAIN = "all", "plain"
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
        groups: by category, the engine's ``group`` event (:mod:`vllm_crossspec.jobs.offline`).
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
    """One row of the table; the fields are those of the JSON document, and docs/use/benchmarking.md explains each.

    Counts are of the first repeat, times are medians of all of them. Rounds without drafts count in all that is said of
    rounds.

    Attributes:
        category: of the prompts, or `all`.
        num_verified_tokens: None where the engine did not say.
        acceptance_length: 1.0 for `plain`.
        accepted_per_position: [K] number of rounds in which the first, second, ... draft token was accepted.
        identical_to_plain: whether every prompt's tokens equal plain's of the same batch size, in every repeat; None
            where plain was not run.
        seconds: wall-clock of the generation, without starting the engine.
        acceptance_interval: None of fewer than two prompts, and without drafts.
        rounds_by_repeat: a router that learns needs other ones the next time.
        tokens_per_round: unlike the acceptance length it does not have what is accepted past the end of a text.
        num_draft_tokens: that vLLM's scheduler planned: of a tree all its nodes, and contemplate rows, too.
        speedup: tokens a second by plain's of the same repeat; None without plain.
        speedup_interval: None without plain, for batches, and for fewer than two prompts.
        ttft, tpot, itl: seconds.
        route_shares: of the rounds of all repeats, by drafter; None where nothing is routed.
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
    num_drafted_rounds: int
    rounds_by_repeat: list[int]
    tokens_per_call: float | None
    tokens_per_round: float | None
    num_draft_tokens: int
    acceptance_rate: float | None
    tokens_per_second: float | None
    tokens_per_second_range: list[float] | None
    speedup: float | None
    speedup_range: list[float] | None
    speedup_interval: list[float] | None
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
    known = [*runs, plain] if plain is not None else runs
    baselines = {(run.batch_size, run.repeat): run for run in known if run.method == PLAIN}
    settings: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        settings.setdefault((run.method, run.batch_size), []).append(run)
    found: list[Row] = []
    for setting, repeats in settings.items():
        found += _rows_of(repeats, baselines, (shares or {}).get(setting))
    return found


class _Part:
    """What one engine did with the prompts of some categories."""

    def __init__(self, run: Run, names: Sequence[str]) -> None:
        groups = [run.groups[name] for name in names]
        self.generations = [generation for group in groups for generation in group["generations"]]
        self.seconds = float(sum(group["seconds"] for group in groups))
        self.texts = [generation["token_ids"] for generation in self.generations]
        self.num_tokens = sum(map(len, self.texts))
        self.num_rounds = [generation["num_target_calls"] - 1 for generation in self.generations]
        self.speed = self.num_tokens / self.seconds if self.seconds else None
        # [prompts] from a request's arrival to its last token
        self.latencies = np.array(
            [g["ttft"] + g["times"][-1] - g["times"][0] for g in self.generations if g.get("times")]
        )


def _rows_of(
    repeats: list[Run], baselines: Mapping[tuple[int, int], Run], shares: dict[str, float] | None
) -> Iterator[Row]:
    run = repeats[0]
    for category in [*run.groups, ALL]:
        names = list(run.groups) if category == ALL else [category]
        parts = [_Part(one, names) for one in repeats]
        plains = [baselines.get((one.batch_size, one.repeat)) for one in repeats]
        pairs = [(mine, _Part(one, names)) for mine, one in zip(parts, plains, strict=True) if one is not None]
        first, num_texts = parts[0], len(parts[0].texts)
        histograms = [generation["accepted_histogram"] for generation in first.generations]
        accepted, num_rounds = accepted_per_position(histograms), sum(first.num_rounds)
        num_calls, num_accepted = num_rounds + num_texts, sum(accepted)
        num_planned = sum(generation.get("num_draft_tokens", 0) for generation in first.generations)
        verified = [run.groups[name].get("num_verified_tokens", -1) for name in names]
        seconds = [part.seconds for part in parts]
        speed, speed_range = _middle([part.speed for part in parts if part.speed is not None])
        speedup, speedup_range = _middle([a.speed / b.speed for a, b in pairs if a.speed and b.speed])
        timed = [generation for part in parts for generation in part.generations if "times" in generation]
        yield Row(
            method=run.method,
            category=category,
            num_prompts=num_texts,
            num_tokens=first.num_tokens,
            num_target_calls=num_calls,
            num_verified_tokens=None if -1 in verified else sum(verified),
            acceptance_length=1.0 + num_accepted / num_rounds if num_rounds else 1.0,
            acceptance_interval=acceptance_interval(histograms, first.num_rounds),
            accepted_per_position=accepted,
            identical_to_plain=all(mine.texts == plain.texts for mine, plain in pairs) if pairs else None,
            seconds=statistics.median(seconds),
            seconds_by_repeat=seconds,
            batch_size=run.batch_size,
            repeats=len(repeats),
            num_rounds=num_rounds,
            num_drafted_rounds=sum(map(sum, histograms)),
            rounds_by_repeat=[sum(part.num_rounds) for part in parts],
            tokens_per_call=first.num_tokens / num_calls if num_calls else None,
            tokens_per_round=(first.num_tokens - num_texts) / num_rounds if num_rounds else None,
            num_draft_tokens=num_planned,
            acceptance_rate=num_accepted / num_planned if num_planned else None,
            tokens_per_second=speed,
            tokens_per_second_range=speed_range,
            speedup=speedup,
            speedup_range=speedup_range,
            speedup_interval=speedup_interval(pairs) if run.batch_size == 1 else None,
            ttft=percentiles(g["ttft"] for g in timed),
            tpot=percentiles(
                (g["times"][-1] - g["times"][0]) / (len(g["token_ids"]) - 1) for g in timed if len(g["times"]) > 1
            ),
            itl=percentiles(b - a for g in timed for a, b in itertools.pairwise(g["times"])),
            route_shares=_route_shares([one.groups[name].get("routes", {}) for one in repeats for name in names]),
            round_shares=shares,
        )


def _middle(values: Sequence[float]) -> tuple[float, list[float]] | tuple[None, None]:
    """The median, and the least and the most."""
    return (statistics.median(values), [min(values), max(values)]) if values else (None, None)


def percentiles(values: Iterable[float]) -> Percentiles | None:
    """The 50th, 90th and 99th, interpolated between neighbours; None of nothing."""
    found = list(values)
    if not found:
        return None
    return {f"p{p}": float(value) for p, value in zip(PERCENTILES, np.percentile(found, PERCENTILES), strict=True)}


def acceptance_interval(histograms: Sequence[Sequence[int]], num_rounds: Sequence[int]) -> list[float] | None:
    """The bootstrap's 95 % interval of the acceptance length, over texts.

    Args:
        histograms: of each text, how many of its rounds accepted 0, 1, ... draft tokens; empty where none was drafted.
        num_rounds: of each text, with and without drafts; texts of one token have none and are left out.
    """
    texts = [(histogram, count) for histogram, count in zip(histograms, num_rounds, strict=True) if count]
    if len(texts) < 2 or not any(sum(histogram) for histogram, _ in texts):
        return None
    rounds = np.array([count for _, count in texts])
    accepted = np.array([sum(i * count for i, count in enumerate(histogram)) for histogram, _ in texts])
    picks = np.random.default_rng(0).integers(0, len(texts), (DRAWS, len(texts)))
    lengths = 1.0 + accepted[picks].sum(1) / rounds[picks].sum(1)
    return [float(bound) for bound in np.quantile(lengths, [0.025, 0.975])]


def speedup_interval(pairs: Sequence[tuple[_Part, _Part]]) -> list[float] | None:
    """The bootstrap's 95 % interval of the speedup at batch size 1, over texts; each counts with all its repeats.

    Args:
        pairs: of each repeat, what a method did and what plain did; of fewer than two texts, or without the times of
            each, there is no interval.
    """
    num_texts = len(pairs[0][0].texts) if pairs else 0
    if num_texts < 2 or any(len(part.latencies) != num_texts for pair in pairs for part in pair):
        return None
    picks = np.random.default_rng(0).integers(0, num_texts, (DRAWS, num_texts))

    def speeds(parts: Iterable[_Part]) -> Any:
        tokens, seconds = np.zeros(num_texts), np.zeros(num_texts)
        for part in parts:
            tokens += [len(text) for text in part.texts]
            seconds += part.latencies
        return tokens[picks].sum(1) / seconds[picks].sum(1)

    mine, plain = (speeds(parts) for parts in zip(*pairs, strict=True))
    return [float(bound) for bound in np.quantile(mine / plain, [0.025, 0.975])]


def accepted_per_position(histograms: Sequence[Sequence[int]]) -> list[int]:
    """From "how many rounds accepted j tokens" [K + 1] of each text to "how many accepted the i-th token" [K].

    It ends with the last position that was ever accepted: a tree of many nodes is not as deep.
    """
    total = [sum(column) for column in itertools.zip_longest(*histograms, fillvalue=0)]
    counts = [sum(total[i:]) for i in range(1, len(total))]
    return counts[: next((i for i in range(len(counts), 0, -1) if counts[i - 1]), 0)]


def _route_shares(groups: Sequence[Mapping[str, int]]) -> dict[str, float] | None:
    counts = {name: sum(group.get(name, 0) for group in groups) for group in groups for name in group}
    total = sum(counts.values())
    return {name: count / total for name, count in counts.items()} if total else None
