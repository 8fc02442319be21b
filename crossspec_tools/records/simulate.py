"""Decoding with any routing rule, walked over records: no engine, and every rule sees the same texts.

A record (see ``train.records``) says what a round that begins at a token would yield with each drafter. A rule picks
a drafter, the walk jumps over the tokens of that round, and the rule picks again, to the end of the text. That is
exact, because no draft depends on how the text was reached: a drafter's cache holds the accepted tokens alone.

Tokens a round are counted over whole texts, the round that reaches the end with the tokens that were left.
Shape legend: T texts, M records, N drafters in routing order (the last is the reference).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from vllm_crossspec.load.costs import RoundCosts
from vllm_crossspec.routing.checkpoint import RouterFacts
from vllm_crossspec.routing.experience import probe_of
from vllm_crossspec.routing.kernels import OWN_MEMORY, PRIOR_OF_CORRECTION
from vllm_crossspec.routing.naive import Learned, Round, route_by_experience
from vllm_crossspec.routing.thresholds import auto_thresholds

Rule = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(records int64 [A], drafters of the rounds before int64 [A], -1 at the beginning) -> drafters int64 [A]."""


class Trajectories(NamedTuple):
    """What rules walk over."""

    lengths: torch.Tensor  # int64 [M, N] tokens that a round yields, the target's own included
    known: torch.Tensor  # int64 [M] tokens of the text after the record's; a round yields no more
    starts: torch.Tensor  # int64 [T] records of each text
    ends: torch.Tensor  # int64 [T] records of each text

    @property
    def steps(self) -> torch.Tensor:
        """int64 [M, N] tokens by which a round brings its text on: one at least, and no more than are left."""
        return torch.minimum(self.lengths, self.known[:, None]).clamp(min=1)

    @property
    def text_of(self) -> torch.Tensor:
        """int64 [M] the text of each record."""
        texts = torch.zeros(len(self.known), dtype=torch.int64)
        for text, (start, end) in enumerate(zip(self.starts.tolist(), self.ends.tolist(), strict=True)):
            texts[start:end] = text
        return texts


class Outcome(NamedTuple):
    """What a rule did, by text."""

    tokens: torch.Tensor  # int64 [T] generated after the first of each text, which its prompt's pass gives
    rounds: torch.Tensor  # int64 [T, N] by drafter
    # int64 [T, N, N] rounds whose drafter was not that of the round before, by that one and their own
    switches: torch.Tensor

    def of(self, texts: Sequence[int]) -> "Outcome":
        """The same of some texts."""
        return Outcome(*(part[list(texts)] for part in self))

    @property
    def acceptance_length(self) -> float:
        """Tokens a round over all texts; 0 where there was none."""
        return float(self.tokens.sum()) / max(int(self.rounds.sum()), 1)

    @property
    def shares(self) -> list[float]:
        """[N] share of the rounds that each drafter drafted."""
        total = max(int(self.rounds.sum()), 1)
        return [int(count) / total for count in self.rounds.sum(dim=0)]

    @property
    def num_switches(self) -> int:
        """Of all texts."""
        return int(self.switches.sum())

    def tokens_per_second(self, costs: RoundCosts, batch_size: int = 1) -> float:
        """Of one request in a batch of this size: its tokens over its rounds' drafts, verifications and switches."""
        seconds = float(self.seconds(costs, batch_size).sum())
        return float(self.tokens.sum()) / seconds if seconds > 0 else 0.0

    def seconds(self, costs: RoundCosts, batch_size: int = 1) -> torch.Tensor:
        """float64 [T] what the rounds and switches of each text take."""
        row = costs.row(batch_size)
        rounds = self.rounds.double() @ torch.tensor(costs.round_seconds(row), dtype=torch.float64)
        owners = torch.tensor(costs.owners or range(costs.num_drafters))  # a switch within one cache costs nothing
        switch = torch.tensor(costs.switch[row], dtype=torch.float64) * (owners[:, None] != owners)
        return rounds + (self.switches.double() * switch).sum(dim=(1, 2))


def walk(
    trajectories: Trajectories, rule: Rule, on_round: Callable[[torch.Tensor, torch.Tensor], None] | None = None
) -> Outcome:
    """Decode all texts side by side with a rule."""
    steps, starts, ends = trajectories.steps, trajectories.starts, trajectories.ends
    num_texts, num_drafters = starts.shape[0], steps.shape[1]
    rounds = torch.zeros(num_texts, num_drafters, dtype=torch.int64)
    switches = torch.zeros(num_texts, num_drafters, num_drafters, dtype=torch.int64)
    texts = (starts < ends).nonzero()[:, 0]
    at, before = starts[texts], torch.full_like(texts, -1)
    while len(texts):
        drafters = rule(at, before)
        if on_round is not None:
            on_round(at, drafters)
        rounds[texts, drafters] += 1
        switches[texts, before.clamp(min=0), drafters] += (before >= 0) & (before != drafters)
        at = at + steps[at, drafters]
        goes_on = at < ends[texts]
        texts, at, before = texts[goes_on], at[goes_on], drafters[goes_on]
    return Outcome(ends - starts, rounds, switches)


def by_record(routes: torch.Tensor) -> Rule:
    """A rule that was worked out beforehand: int64 [M] drafter of every record."""
    return lambda at, before: routes[at]


def always(drafter: int) -> Rule:
    """One drafter alone."""
    return lambda at, before: torch.full_like(at, drafter)


def by_entropy(entropy: torch.Tensor, thresholds: Sequence[float]) -> Rule:
    """WhiFlash-Entropy (section 3.3.1): the first drafter whose threshold the entropy exceeds, else the reference.

    Args:
        entropy: [M] nats.
        thresholds: [N - 1], falling.
    """
    always_true = torch.ones_like(entropy, dtype=torch.bool)
    exceeds = torch.stack([*(entropy > threshold for threshold in thresholds), always_true], dim=1)
    return by_record(exceeds.long().argmax(dim=1))  # of the first


def by_gain(gains: torch.Tensor, thresholds: Sequence[float]) -> Rule:
    """WhiFlash-Neural (section 3.3.2): the drafter whose gain most exceeds its threshold, else the reference.

    Args:
        gains: [M, N - 1] tokens, predicted or true.
        thresholds: [N - 1].
    """
    above = gains - torch.tensor(thresholds, dtype=gains.dtype)
    best = above.max(dim=1)
    return by_record(torch.where(best.values > 0, best.indices, gains.shape[1]))


def by_corrected_gain(
    trajectories: Trajectories, gains: torch.Tensor, thresholds: Sequence[float], usual: torch.Tensor
) -> Rule:
    """As :func:`by_gain`, the predictions corrected by what a text's own rounds have brought (``routing.kernels``).

    It serves for one walk over these trajectories: the rule notes what it has chosen. ``usual``: float [N], or [T, N]
    by text: tokens of a round with each drafter, see ``RouterFacts.mean_lengths``.
    """
    steps, text_of = trajectories.steps, trajectories.text_of
    usual = usual.float().expand(len(trajectories.starts), steps.shape[1])
    limits = torch.tensor([*thresholds, 0.0])
    tokens, rounds = torch.zeros_like(usual), torch.zeros_like(usual)

    def rule(at: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        own = text_of[at]
        count = rounds[own]
        above = (tokens[own] - count * usual[own]) / (count + PRIOR_OF_CORRECTION) - limits
        above[:, :-1] += gains[at]
        drafters = _last_argmax(above)
        tokens[own, drafters] = OWN_MEMORY * tokens[own, drafters] + steps[at, drafters]
        rounds[own, drafters] = OWN_MEMORY * count[torch.arange(len(at)), drafters] + 1
        return drafters

    return rule


class Signal(NamedTuple):
    """What a policy with thresholds goes by."""

    policy: str  # `entropy` or `neural`
    values: torch.Tensor  # [M] nats, or [M, N - 1] predicted gains
    usual: torch.Tensor | None = None  # as `by_corrected_gain` takes it; None: predictions are not corrected

    def rule(self, paths: Trajectories, thresholds: Sequence[float]) -> Rule:
        """The policy at some thresholds [N - 1], for one walk over these texts."""
        if self.policy == "entropy":
            return by_entropy(self.values, thresholds)
        if self.usual is None:
            return by_gain(self.values, thresholds)
        return by_corrected_gain(paths, self.values, thresholds, self.usual)


def by_experience(
    trajectories: Trajectories,
    forecasts: torch.Tensor,
    entropy: torch.Tensor,
    priors: Sequence[float],
    tried: Sequence[int],
    costs: RoundCosts,
    batch_size: int = 1,
) -> Rule:
    """Policy ``goodput`` without a model, one text after another: what earlier texts have shown is known to later ones.

    Args:
        trajectories: of the texts, in the order in which they are asked for.
        forecasts: [M, N] draft tokens that are expected to be accepted, negative where a drafter does not say.
        entropy: [M] of the target, nats.
        priors: [N] tokens of a round with each drafter before anything is known.
        tried: drafters that are tried every now and then, by turns.
        batch_size: whose costs to go by; a request is one of so many that do as it does.
    """
    num_drafters, row = costs.num_drafters, costs.row(batch_size)
    tables = [[float(cost) for cost in table[row]] for table in (costs.draft, costs.verify, costs.switch)]
    owners, singles = list(costs.owners or range(num_drafters)), [1 << drafter for drafter in range(num_drafters)]
    learned = Learned(list(priors))
    steps = trajectories.steps.tolist()
    said, uncertain = forecasts.tolist(), entropy.tolist()
    routes, num_rounds = torch.full((len(steps),), num_drafters - 1), 0
    for text, (at, end) in enumerate(zip(trajectories.starts.tolist(), trajectories.ends.tolist(), strict=True)):
        before = -1
        while at < end:
            num_rounds += 1
            probe, hope = probe_of(num_rounds, tried)
            expected = [learned.expected(text, said[at], uncertain[at])]
            hope = learned.hope(max(probe, 0), hope)
            before = route_by_experience(expected, tables, owners, [before], singles, probe, hope, 1)[0]
            routes[at] = before
            awaited = learned.of_all(before, said[at][before], uncertain[at])
            learned.learn([Round(text, before, steps[at][before], uncertain[at], *awaited)])
            at += steps[at][before]
    return by_record(routes)


class Value(NamedTuple):
    """By what an oracle or a threshold is judged: tokens a round, or tokens a second where costs are known."""

    costs: RoundCosts | None = None
    batch_size: int = 1

    def __call__(self, outcome: Outcome) -> float:
        if self.costs is None:
            return outcome.acceptance_length
        return outcome.tokens_per_second(self.costs, self.batch_size)

    def auto_thresholds(self, policy: str, facts: RouterFacts | None, num_drafters: int) -> tuple[float, ...]:
        """[N - 1] what "auto" means here: ``routing.thresholds.auto_thresholds`` at the batch size."""
        rows = auto_thresholds(policy, self.costs, facts, num_drafters)
        return rows[self.costs.row(self.batch_size)] if self.costs is not None else rows[0]

    @property
    def name(self) -> str:
        """In tables."""
        return "acceptance length" if self.costs is None else "tokens/s"


def oracle_token(trajectories: Trajectories, value: Value) -> Rule:
    """Oracle-Token (section 4): the drafter whose round is best, by tokens or tokens a second; ties: the reference."""
    gained = torch.minimum(trajectories.lengths, trajectories.known[:, None]).double()
    if value.costs is not None:
        seconds = value.costs.round_seconds(value.costs.row(value.batch_size))
        gained = gained / torch.tensor(seconds, dtype=torch.float64)
    return by_record(_last_argmax(gained))


def oracle_by_group(trajectories: Trajectories, groups: Sequence[Sequence[int]], value: Value) -> Rule:
    """The drafter that is best for each group of texts as a whole; ties go to the reference.

    ``groups``: text numbers; all texts of a category for Oracle-Task, one each for Oracle-Prompt (section 4).
    """
    num_texts, num_drafters = trajectories.starts.shape[0], trajectories.lengths.shape[1]
    alone = [walk(trajectories, always(drafter)) for drafter in range(num_drafters)]
    best = torch.full((num_texts,), num_drafters - 1, dtype=torch.int64)
    for texts in groups:
        worth = torch.tensor([[value(outcome.of(texts)) for outcome in alone]], dtype=torch.float64)
        best[list(texts)] = _last_argmax(worth)[0]
    return by_record(best[trajectories.text_of])


def _last_argmax(values: torch.Tensor) -> torch.Tensor:
    """int64 [M] last column with the most of [M, N]."""
    return values.shape[1] - 1 - values.flip(1).argmax(dim=1)


def visits(trajectories: Trajectories) -> torch.Tensor:
    """float64 [M] how likely a round begins at each record when every round's drafter is drawn with equal odds.

    Rounds begin where a draft has just failed, at harder places than the average token.
    """
    steps, starts, ends = trajectories.steps, trajectories.starts, trajectories.ends
    num_drafters = steps.shape[1]
    odds = torch.zeros(len(steps), dtype=torch.float64)
    texts = (starts < ends).nonzero()[:, 0]
    odds[starts[texts]] = 1.0
    for offset in range(int((ends - starts).max()) if len(starts) else 0):
        at = starts[texts] + offset
        texts, at = texts[at < ends[texts]], at[at < ends[texts]]
        for drafter in range(num_drafters):
            target = at + steps[at, drafter]
            inside = target < ends[texts]
            odds[target[inside]] += odds[at[inside]] / num_drafters
    return odds
