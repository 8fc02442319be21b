"""WhiFlash (Kwon et al. 2026): its tables and figure 2 on records of models that you have (``crossspec collect``).

A record says what a round would bring at a token of a text with each drafter, so that every router, threshold and
oracle goes over the same texts (``records.simulate``). Thresholds are judged on texts that did not choose them: of each
category every second text is one half, and each half goes by what is best on the other.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import torch
from intervals import Interval, Walk, gain_of_groups, rate, rate_of_groups
from shapes import NUM_DFLASH_TAPS, SHAPES, Shape

from crossspec_tools.records import simulate
from crossspec_tools.records.cli_router import parse_numbers
from crossspec_tools.records.simulate import Rule, Signal, Trajectories, Value
from crossspec_tools.train import calibration
from crossspec_tools.train.records import Records, read_records
from crossspec_tools.train.router import checkpoint_gains, trajectories
from papers.base import Figures, PaperTable
from vllm_crossspec.load.costs import read_costs
from vllm_crossspec.routing.checkpoint import RouterCheckpoint, read_router

GIB = 1 << 30


class Judge:
    """Routes over the records that options name, in tokens a round or, with costs, tokens a second of one request."""

    def __init__(self, options: Namespace):
        self.records = read_records(options.records)
        facts = self.records.facts
        if len(facts.drafters) != 2:
            raise ValueError(f"--records {options.records}: of {len(facts.drafters)} drafters; these tables are of two")
        self.router: RouterCheckpoint | None = None
        if options.router is not None:
            known = {"hidden_size": facts.hidden_size, "drafters": facts.drafters}
            self.router = read_router(options.router, key="--router", **known)
        costs = None if options.costs is None else read_costs(options.costs, facts.drafters, "--costs")
        self.value = Value(costs, options.batch_size)
        self.groups = calibration.groups_of(self.records)
        self.paths: Trajectories = trajectories(self.records)

    @property
    def unit(self) -> str:
        """Of all that is judged."""
        return "tokens a round" if self.value.costs is None else "tokens a second"

    def walk(self, rule: Rule) -> Walk:
        """Tokens and rounds (or seconds) of every text."""
        outcome, costs = simulate.walk(self.paths, rule), self.value.costs
        spent = outcome.rounds.sum(1) if costs is None else outcome.seconds(costs, self.value.batch_size)
        return Walk(outcome.tokens.numpy(), spent.numpy())

    def signal(self, policy: str, corrects: bool = True) -> Signal:
        """What ``entropy`` or ``neural`` goes by; ``corrects`` as ``router.correct``."""
        if policy == "entropy":
            return Signal(policy, self.records.entropy)
        assert self.router is not None
        usual = torch.tensor(self.router.facts.mean_lengths) if corrects else None
        return Signal(policy, checkpoint_gains(self.records, self.router), usual)

    def at_thresholds(self, signal: Signal, thresholds: Sequence[float]) -> dict[float, Walk]:
        """The policy at each threshold."""
        return {threshold: self.walk(signal.rule(self.paths, (threshold,))) for threshold in thresholds}

    def cells(self, walk: Walk) -> tuple[list[Interval], Interval]:
        """By category, and the mean of the categories."""
        parts = [walk.of(texts) for texts in self.groups.values()]
        return [rate(part) for part in parts], rate_of_groups(parts)

    def row(self, name: str, walk: Walk, *more: str) -> tuple[list[str], dict[str, Any]]:
        """Of a table, and its numbers."""
        by_category, overall = self.cells(walk)
        values = {"row": name, **dict(zip(self.groups, by_category, strict=True)), "mean": overall}
        return [name, *(f"{cell.seen:.2f}" for cell in by_category), f"{overall:.2f}", *more], values

    @property
    def note(self) -> str:
        """Of every table."""
        facts, texts = self.records.facts, {name: len(texts) for name, texts in self.groups.items()}
        counts = ", ".join(f"{count} {name}" for name, count in texts.items())
        return f"{counts} texts of {Path(facts.model).name}; drafters {' and '.join(facts.drafters)}; 95 % intervals."


def chosen(at: Mapping[float, Walk], choices: Sequence[tuple[Sequence[Sequence[int]], Sequence[int]]]) -> Walk:
    """What thresholds are worth that other texts choose, of those in ``at``.

    A choice is the groups of texts on whose mean a threshold is the best, and the texts that go by it.
    """
    first = next(iter(at.values()))
    tokens, rounds = np.zeros_like(first.tokens), np.zeros_like(first.rounds)
    for fitted, judged in choices:
        best = max(at, key=lambda t: mean(rate(at[t].of(texts)).seen for texts in fitted))
        tokens[judged], rounds[judged] = at[best].tokens[judged], at[best].rounds[judged]
    return Walk(tokens, rounds)


def crossed(at: Mapping[float, Walk], groups: Mapping[str, Sequence[int]], by_category: bool) -> Walk:
    """Every text with the threshold that is best on the other half of the texts.

    Every second text of a category is a half. Each category has a threshold of its own ``by_category``, or all have
    the one that is best on their mean.
    """
    parts = [[texts] for texts in groups.values()] if by_category else [list(groups.values())]
    halves = [([texts[1 - half :: 2] for texts in part], part, half) for half in (0, 1) for part in parts]
    return chosen(at, [(fitted, [i for texts in part for i in texts[half::2]]) for fitted, part, half in halves])


def of_others(at: Mapping[float, Walk], groups: Mapping[str, Sequence[int]]) -> Walk:
    """Every text with the threshold that is best on the mean of the other categories; see :func:`chosen`."""
    others = {name: [texts for other, texts in groups.items() if other != name] for name in groups}
    return chosen(at, [(others[name], list(judged)) for name, judged in groups.items()])


# -- tables 1 and 2 -------------------------------------------------------------------------------------------


def main_table(options: Namespace) -> list[Figures]:
    """Table 1: each drafter alone, the oracles, and the routers with crossed thresholds."""
    judge = Judge(options)
    walks = {name: judge.walk(rule) for name, rule in calibration.oracle_rules(judge.records, judge.value).items()}
    for name, at in _at_all(judge, options.points).items():
        walks[f"{name}, one threshold"] = crossed(at, judge.groups, False)
        walks[f"{name}, one a category"] = crossed(at, judge.groups, True)
    return [_over_the_best(judge, walks, "Each half of the texts goes by thresholds of the other.")]


def left_out(options: Namespace) -> list[Figures]:
    """The routers in categories whose texts did not choose the threshold."""
    judge = Judge(options)
    if len(judge.groups) < 2:
        raise ValueError(f"--records {options.records}: texts of two categories are needed")
    rules = calibration.oracle_rules(judge.records, judge.value)
    walks = {name: judge.walk(rules[name]) for name in judge.records.facts.drafters}
    walks |= {name: of_others(at, judge.groups) for name, at in _at_all(judge, options.points).items()}
    return [_over_the_best(judge, walks, "Each category goes by the threshold that is best on the others.")]


def _at_all(judge: Judge, points: int) -> dict[str, dict[float, Walk]]:
    """Both routers at thresholds over the whole range of what they go by."""
    signals = {"entropy": judge.signal("entropy")}
    if judge.router is not None:
        signals |= {"neural, as predicted": judge.signal("neural", False), "neural": judge.signal("neural")}
    return {
        name: judge.at_thresholds(one, calibration.grid_of(one.values.flatten(), points))
        for name, one in signals.items()
    }


def _over_the_best(judge: Judge, walks: Mapping[str, Walk], note: str) -> Figures:
    """Walks beside the best drafter alone."""
    alone = {name: walks[name] for name in judge.records.facts.drafters}
    best = max(alone, key=lambda name: judge.cells(alone[name])[1].seen)
    rows = []
    for name, walk in walks.items():
        over = gain_of_groups(*([w.of(texts) for texts in judge.groups.values()] for w in (walk, alone[best])))
        rows.append(judge.row(name, walk, "" if name == best else f"{over:+.1f}"))
        rows[-1][1]["gain_percent"] = over
    header = ("", *judge.groups, "mean", f"% above {best}")
    return Figures(judge.unit, header, *zip(*rows, strict=True), f"{judge.note} {note}")


def thresholds_table(options: Namespace) -> list[Figures]:
    """Table 2: the neural policy at thresholds, by category."""
    judge = Judge(options)
    thresholds = parse_numbers(options.thresholds, options.thresholds.count(",") + 1, "--thresholds")
    signal = judge.signal("neural", options.correct)
    walks = {f"{t:g}": walk for t, walk in judge.at_thresholds(signal, thresholds).items()}
    fine = judge.at_thresholds(signal, calibration.grid_of(signal.values.flatten(), options.points))
    walks |= {
        f"crossed, {name}": crossed(fine, judge.groups, own) for name, own in (("one", False), ("each its", True))
    }
    rows = [judge.row(name, walk) for name, walk in walks.items()]
    title = f"{judge.unit} by threshold, tokens"
    return [Figures(title, ("threshold", *judge.groups, "mean"), *zip(*rows, strict=True), judge.note)]


# -- figure 2, backlogs ---------------------------------------------------------------------------------------


class Fluctuation(NamedTuple):
    """Of one category, figure 2's message in numbers.

    Attributes:
        better: share of places where each drafter is better than the other.
        swing: mean over texts of the deviation of a drafter's acceptance length within a text, tokens.
        turns: how often in 100 tokens the better one changes.
    """

    better: tuple[float, float]
    swing: tuple[float, float]
    turns: float


def fluctuation(records: Records, texts: Sequence[int]) -> Fluctuation:
    """How much acceptance lengths change within a text; places near the end, where they are not certain, left out."""
    better, swings, turns, places = np.zeros(2), [], 0, 0
    for text in (records.texts[index] for index in texts):
        lengths = records.lengths[text.start : text.end][records.is_complete[text.start : text.end]].double()
        if len(lengths) < 2:
            continue
        sign = torch.sign(lengths[:, 0] - lengths[:, 1])
        better += [int((sign > 0).sum()), int((sign < 0).sum())]
        decided = sign[sign != 0]
        turns += int((decided[1:] != decided[:-1]).sum())
        swings.append(lengths.std(dim=0).tolist())
        places += len(lengths)
    return Fluctuation(tuple(better / places), tuple(np.mean(swings, axis=0)), 100 * turns / places)


def fluctuation_table(options: Namespace) -> list[Figures]:
    """Figure 2 in numbers."""
    judge = Judge(options)
    found = {name: fluctuation(judge.records, texts) for name, texts in judge.groups.items()}
    first, second = judge.records.facts.drafters
    rows = [
        [name, *(f"{100 * s:.0f} %" for s in f.better), *(f"{s:.2f}" for s in f.swing), f"{f.turns:.0f}"]
        for name, f in found.items()
    ]
    values = [{"row": name, **found[name]._asdict()} for name in found]
    header = ("", f"{first} better", f"{second} better", f"{first} deviates", f"{second} deviates", "turns in 100")
    title = "places where each drafter is better, and how much its acceptance length changes within a text, tokens"
    return [Figures(title, header, rows, values, judge.note.replace("; 95 % intervals", ""))]


def backlogs(paths: Trajectories, rule: Rule) -> np.ndarray:
    """Tokens that the drafter of a round had missed where it was not the last one's: int64 [switches], of all texts.

    Before its first round a drafter has missed what others have had accepted; the prompt is everybody's.
    """
    text_of = torch.zeros(len(paths.lengths), dtype=torch.int64)
    for text, (start, end) in enumerate(zip(paths.starts.tolist(), paths.ends.tolist(), strict=True)):
        text_of[start:end] = text
    known_to = paths.starts[:, None].repeat(1, paths.lengths.shape[1])
    before = torch.full((len(paths.starts),), -1)
    missed = []

    def note(at: torch.Tensor, drafters: torch.Tensor) -> None:
        texts = text_of[at]
        switched = (before[texts] >= 0) & (before[texts] != drafters)
        missed.append((at - known_to[texts, drafters])[switched])
        known_to[texts, drafters] = at
        before[texts] = drafters

    simulate.walk(paths, rule, note)
    return torch.cat(missed).numpy()


def backlog_table(options: Namespace) -> list[Figures]:
    """Section 6's backlog lengths: what a drafter has missed when a round switches to it."""
    judge = Judge(options)
    signals = {"entropy": judge.signal("entropy")} | ({"neural": judge.signal("neural")} if judge.router else {})
    rows, values = [], []
    for name, signal in signals.items():
        facts = None if judge.router is None else judge.router.facts
        (threshold,) = judge.value.auto_thresholds(signal.policy, facts, 2)
        for category, texts in judge.groups.items():
            paths = trajectories(judge.records, [judge.records.texts[text] for text in texts])
            found = backlogs(paths, signal.rule(paths, (threshold,)))
            tokens = int((paths.ends - paths.starts).sum())
            median, p90 = np.percentile(found, (50, 90))
            shown = (f"{len(found)}", f"{100 * len(found) / tokens:.1f}", f"{found.mean():.1f}", f"{median:.0f}")
            rows.append([f"{name}, {threshold:.2f}", category, *shown, f"{p90:.0f}"])
            figures = {"mean": float(found.mean()), "median": float(median), "p90": float(p90)}
            values.append(
                {"row": name, "threshold": threshold, "category": category, "switches": len(found), **figures}
            )
    header = ("policy, threshold", "", "switches", "in 100 tokens", "missed, mean", "median", "90th percentile")
    note = f'{judge.note.replace("; 95 % intervals", "")} Thresholds are "auto".'
    return [Figures("tokens missed at a switch", header, rows, values, note)]


# -- tables 5 and 13 ------------------------------------------------------------------------------------------

PEAKS = {
    "4b": {"target": 7.55, "eagle3": 8.34, "dflash": 8.96, "whiflash": 9.38},
    "8b": {"target": 15.26, "eagle3": 16.39, "dflash": 17.62, "whiflash": 18.41},
}
"""The paper's, GB, of Qwen3 targets."""
HELD = {
    "target": ("target",),
    "eagle3": ("target", "eagle3"),
    "dflash": ("target", "dflash"),
    "whiflash": ("target", "eagle3", "dflash", "router"),
}


def parameters(shape: Shape) -> dict[str, int]:
    """Weights of a Qwen3 target of this shape and of what drafts for it; what a drafter shares is the target's."""
    h, queries, keys = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention, mlp = 2 * h * (queries + keys), 3 * h * shape.intermediate_size
    layer = attention + mlp + 2 * h + 2 * shape.head_dim
    # One layer that reads embedding beside state: projections into attention are twice as wide; heads have no norms.
    eagle3 = attention + h * (queries + 2 * keys) + mlp + 4 * h + 3 * h * h + shape.draft_vocab_size * h
    return {
        "target": shape.num_layers * layer + h + shape.vocab_size * h * (1 if shape.tied else 2),
        "eagle3": eagle3,
        "dflash": shape.dflash_layers * layer + 2 * h + NUM_DFLASH_TAPS * h * h,
        "router": (h + 2) * (h // 8) + 1,
    }


def memory_table(options: Namespace) -> list[Figures]:
    """Tables 5 and 13: weights in bfloat16, and what routing holds beside."""
    rows, values = [], []
    for name in options.shapes.split(","):
        if name not in PEAKS:
            raise ValueError(f"--shapes {name}: choose from {', '.join(PEAKS)}")
        shape = SHAPES[name]
        count, peaks = parameters(shape), PEAKS[name]
        waits = 2 * 2 * options.requests * options.max_backlog * shape.hidden_size / GIB
        for method, parts in HELD.items():
            gib = 2 * sum(count[part] for part in parts) / GIB
            over = gib / (2 * count["target"] / GIB), peaks[method] / peaks["target"]
            ours, theirs = ("" if method == "target" else f"{100 * (ratio - 1):.1f} %" for ratio in over)
            waiting = waits if method == "whiflash" else 0.0
            shown = f"{waiting:.2f}" if waiting else ""
            rows.append([f"Qwen3-{name.upper()}", method, f"{gib:.2f}", ours, shown, f"{peaks[method]:.2f}", theirs])
            values.append({"row": name, "method": method, "weights_gib": gib, "waiting_gib": waiting})
    header = ("", "", "weights, GiB", "above the target", "features that wait, GiB", "the paper's peak, GB", "above")
    note = (
        "Counted from the shapes of public checkpoints, in bfloat16; not measured. Features that wait: "
        f"{options.requests} requests, `max_backlog` {options.max_backlog}, two drafters."
    )
    return [Figures("memory of a target and its drafters", header, rows, values, note)]


# -- the command ----------------------------------------------------------------------------------------------


def _records_options(needs_router: bool, points: bool = True) -> Callable[[ArgumentParser], None]:
    def add(parser: ArgumentParser) -> None:
        parser.add_argument("--records", type=Path, required=True, help="folder of `crossspec collect`, two drafters")
        parser.add_argument("--router", type=Path, required=needs_router, help="folder of `crossspec train router`")
        parser.add_argument("--costs", type=Path, help="file of `crossspec costs`: judge by tokens a second")
        parser.add_argument("--batch-size", type=int, default=1, help="whose costs count")
        if points:
            parser.add_argument("--points", type=int, default=41, help="thresholds that are tried, at most")

    return add


def _thresholds_options(parser: ArgumentParser) -> None:
    _records_options(needs_router=True)(parser)
    parser.add_argument("--thresholds", default="-1,-0.5,0,0.5,1,1.5,2", help="tokens; the paper's")
    parser.add_argument("--correct", action="store_true", help="correct predictions by a request's own rounds, as ours")


def _memory_options(parser: ArgumentParser) -> None:
    parser.add_argument("--shapes", default="4b,8b", help=f"of {', '.join(PEAKS)}")
    parser.add_argument("--requests", type=int, default=32, help="that run at most (max_num_seqs)")
    parser.add_argument("--max-backlog", type=int, default=512, help="as router.max_backlog")


TABLES: Mapping[str, PaperTable] = {
    "table-1": PaperTable(
        "acceptance length by category: each drafter alone, three oracles, both routers",
        _records_options(False),
        main_table,
    ),
    "table-2": PaperTable("the neural router at thresholds, by category", _thresholds_options, thresholds_table),
    "left-out": PaperTable(
        "both routers in categories that did not choose their thresholds", _records_options(False), left_out
    ),
    "table-13": PaperTable("memory of target, drafters and router; table 5 is its 8B", _memory_options, memory_table),
    "figure-2": PaperTable(
        "how acceptance lengths change within a text, in numbers",
        _records_options(False, points=False),
        fluctuation_table,
    ),
    "backlogs": PaperTable(
        "section 6: tokens that a drafter missed at a switch", _records_options(False), backlog_table
    ),
}
