"""`crossspec calibrate`, `oracle` and `trace`: what records say about routing, without an engine."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.table import Table
from typer import Option

from vllm_crossspec.cli import meta
from vllm_crossspec.cli.options import check_file, grouped, name_list, write_json
from vllm_crossspec.cli.stages import grid, wide_console
from vllm_crossspec.names import counted

if TYPE_CHECKING:  # torch takes seconds to import, and --help needs none of it
    from crossspec_tools.records.simulate import Rule, Signal, Value
    from crossspec_tools.train.calibration import Row
    from crossspec_tools.train.records import Records
    from vllm_crossspec.load.costs import RoundCosts
    from vllm_crossspec.routing.checkpoint import RouterCheckpoint

RecordsOption = Annotated[Path, Option(help="Folder that `crossspec collect` wrote, finished or not.")]
DraftersOption = Annotated[
    str | None, Option(help="Comma-separated names of the drafters to look at. Default: all that were recorded.")
]
RouterOption = Annotated[Path | None, Option(help="Folder of a router that `crossspec train router` wrote.")]
CorrectOption = Annotated[
    bool,
    Option(
        help="Correct what the router predicts by what a text's own rounds brought, as a server does unless its router "
        'has "correct": false.',
    ),
]
JsonOption = Annotated[Path | None, Option("--json", help="Write what was found as one JSON document.")]


class CostOptions(NamedTuple):
    """What a round costs, from a file or written down."""

    costs: Annotated[
        Path | None,
        Option(
            help="What a round costs, as `crossspec costs` measures it, or written by hand: JSON with `drafters` [N], "
            "`batch_sizes` [B] and `draft`, `verify`, `switch`, each [B][N] seconds. Methods are then judged by tokens "
            "a second, else by acceptance length."
        ),
    ] = None
    seconds: Annotated[
        str | None, Option(help="Instead of --costs: comma-separated seconds of a round with each drafter.")
    ] = None
    switch_seconds: Annotated[
        str | None, Option("--switch-seconds", help="With --seconds: seconds of a switch to each drafter. Default 0.")
    ] = None
    batch_size: Annotated[int, Option("--batch-size", min=1, help="Batch size of --costs to look at.")] = 1


class Loaded(NamedTuple):
    """What every command here begins with."""

    records: "Records"
    value: "Value"
    checkpoint: "RouterCheckpoint | None"
    correct: bool

    def signal(self, policy: str) -> "Signal":
        """What the policy goes by."""
        import torch

        from crossspec_tools.records.simulate import Signal
        from crossspec_tools.train.router import checkpoint_gains

        if policy == "entropy":
            return Signal(policy, self.records.entropy)
        assert self.checkpoint is not None
        usual = torch.tensor(self.checkpoint.facts.mean_lengths) if self.correct else None
        return Signal(policy, checkpoint_gains(self.records, self.checkpoint), usual)


@grouped
def calibrate(
    *,
    records: RecordsOption,
    policy: Annotated[str, Option(help="entropy or neural.")] = "entropy",
    router: RouterOption = None,
    drafters: DraftersOption = None,
    costs: CostOptions,
    correct: CorrectOption = True,
    points: Annotated[int, Option(min=3, help="Thresholds of the grid, at most.")] = 41,
    picture: Annotated[Path | None, Option(help="Draw the curves into this .png or .svg file.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Search the router's threshold on records, for each category and for all (32 to 64 prompts each are enough).

    The threshold that is best on the mean of the categories is what belongs into `router.threshold`; those of the
    single categories into `router.by_category`, for requests that name theirs.

    Example: crossspec calibrate --records work/dev --policy neural --router work/router --picture thresholds.png
    """
    if policy not in ("entropy", "neural"):
        raise ValueError(f"--policy {policy}: choose entropy or neural; only these have thresholds")
    if policy == "neural" and router is None:
        raise ValueError("--policy neural needs --router, a folder that `crossspec train router` wrote")
    _check_outputs(json_file, picture)
    loaded = load([records], drafters, router, costs, correct)
    from crossspec_tools.train import calibration
    from crossspec_tools.train.router import trajectories

    names = loaded.records.facts.drafters
    signal = loaded.signal(policy)
    found = calibration.calibrate(loaded.records, signal, loaded.value, points)
    rules = calibration.oracle_rules(loaded.records, loaded.value)
    paths, best_of_all = trajectories(loaded.records), found.overall.thresholds
    rules[f"{policy}, {_numbers(best_of_all)}"] = signal.rule(paths, best_of_all)
    rules[f"{policy}, by category"] = calibration.rule_by_category(loaded.records, signal, found)
    rows = calibration.table(loaded.records, rules, loaded.value)
    title = f"Best {policy} threshold of {', '.join(names[:-1])} against {names[-1]}"
    best = grid(title, ("category", "threshold", loaded.value.name), ["category"])
    for category, one in [*found.by_category.items(), ("all (mean of the categories)", found.overall)]:
        best.add_row(category, _numbers(one.thresholds), f"{one.value:.3f}")
    console = wide_console()
    console.print(best)
    console.print(_grid(rows, loaded))
    settings: dict[str, Any] = {
        "policy": policy,
        "threshold": _setting(found.overall.thresholds),
        "by_category": {category: _setting(one.thresholds) for category, one in found.by_category.items()},
    }
    if policy == "neural":
        settings |= {"model": str(router)} | ({} if correct else {"correct": False})
    typer.echo(f"use them in the configuration, beside its drafters, as\n{json.dumps({'router': settings})}")
    if picture is not None:
        from crossspec_tools.train.pictures import draw_calibration

        draw_calibration(found, names, policy, loaded.value.name, picture)
    content = {
        "policy": policy,
        **found._asdict(),
        "by_category": {name: one._asdict() for name, one in found.by_category.items()},
        "overall": found.overall._asdict(),
    }
    _write_json(json_file, loaded, rows, content)


@grouped
def oracle(
    *,
    records: RecordsOption,
    router: RouterOption = None,
    entropy_threshold: Annotated[
        str | None, Option(help="Show WhiFlash-Entropy at this threshold (one number for each drafter but one).")
    ] = None,
    neural_threshold: Annotated[
        str | None, Option(help="Show WhiFlash-Neural at this threshold, with --router. Default: 'auto'.")
    ] = None,
    correct: CorrectOption = True,
    drafters: DraftersOption = None,
    costs: CostOptions,
    json_file: JsonOption = None,
) -> None:
    """How far routing can get on these texts: single drafters, routers, and the three oracles of the WhiFlash paper.

    oracle-task: the best drafter of each category. oracle-prompt: of each text. oracle-token: at every round. The
    table's numbers are tokens a round; with costs tokens a second, and tokens a round beside their mean. `mean` is over
    the categories. With costs, goodput is the policy of that name without a model, over the texts one after another.

    Example: crossspec oracle --records work/dev --router work/router --costs costs.json
    """
    if neural_threshold is not None and router is None:
        raise ValueError("--neural-threshold needs --router, a folder that `crossspec train router` wrote")
    _check_outputs(json_file, None)
    loaded = load([records], drafters, router, costs, correct)
    from crossspec_tools.train import calibration

    rules = calibration.oracle_rules(loaded.records, loaded.value)
    if loaded.value.costs is not None:
        rules["goodput"] = calibration.goodput_rule(loaded.records, loaded.value)
    if entropy_threshold is not None or loaded.checkpoint is not None:
        rules |= [_rule(loaded, "entropy", entropy_threshold, "--entropy-threshold")]
    if loaded.checkpoint is not None:
        rules |= [_rule(loaded, "neural", neural_threshold, "--neural-threshold")]
    rows = calibration.table(loaded.records, rules, loaded.value)
    wide_console().print(_grid(rows, loaded))
    _write_json(json_file, loaded, rows, {})


def trace(
    records: RecordsOption,
    picture: Annotated[Path, Option(help="Draw into this .png or .svg file.")],
    text: Annotated[int | None, Option(min=0, help="Number of the text. Default: the first of --category.")] = None,
    category: Annotated[str | None, Option(help="Category to take the text from.")] = None,
    policy: Annotated[str, Option(help="Whose choices to show: entropy, neural or oracle.")] = "oracle",
    threshold: Annotated[str | None, Option(help="Of the policy. Default: 'auto'.")] = None,
    router: RouterOption = None,
    correct: CorrectOption = True,
    drafters: DraftersOption = None,
    json_file: JsonOption = None,
) -> None:
    """Draw the acceptance length at every token of one text, drafter by drafter, with a router's choices.

    As figure 2 of the WhiFlash paper. The JSON document has the numbers of the picture.

    Example: crossspec trace --records work/dev --category math --policy neural --router work/router --picture math.svg
    """
    if policy not in ("entropy", "neural", "oracle"):
        raise ValueError(f"--policy {policy}: choose entropy, neural or oracle")
    if policy == "neural" and router is None:
        raise ValueError("--policy neural needs --router, a folder that `crossspec train router` wrote")
    _check_outputs(json_file, picture)
    loaded = load([records], drafters, router, CostOptions(), correct)
    chosen = _text(loaded.records, text, category)
    from crossspec_tools.records.simulate import oracle_token, walk
    from crossspec_tools.train.pictures import draw_trace
    from crossspec_tools.train.router import trajectories

    paths, names = trajectories(loaded.records, [chosen]), loaded.records.facts.drafters
    name, rule = "oracle-token", oracle_token(paths, loaded.value)
    if policy != "oracle":
        name, rule = _rule(loaded, policy, threshold, "--threshold")
    rounds: list[tuple[int, int]] = []
    outcome = walk(paths, rule, lambda at, drafter: rounds.append((int(at[0]) - chosen.start, int(drafter[0]))))
    lengths, entropy = (of[chosen.start : chosen.end] for of in (loaded.records.lengths, loaded.records.entropy))
    title = f"text {chosen.number} ({chosen.category}), {name}: {outcome.acceptance_length:.2f} tokens a round"
    draw_trace(lengths, rounds, names, title, picture)
    switches = f"{counted(outcome.num_switches, 'switch')} in {counted(len(rounds), 'round')}"
    typer.echo(f"{title}; {switches}; picture in {picture}")
    content = {
        "text": chosen.number,
        "category": chosen.category,
        "policy": name,
        "drafters": names,
        "acceptance_length": outcome.acceptance_length,
        "lengths": lengths.tolist(),
        "entropy": entropy.tolist(),
        "rounds": [{"token": place, "drafter": names[drafter]} for place, drafter in rounds],
    }
    write_json(json_file, {**content, "meta": _meta(loaded)})


def show_oracles(records: Path, costs: Path | None) -> None:
    """The table of single drafters and oracles; by tokens a second, too, where costs are known."""
    loaded = load([records], None, None, CostOptions(costs=costs))
    from crossspec_tools.train import calibration

    rows = calibration.table(loaded.records, calibration.oracle_rules(loaded.records, loaded.value), loaded.value)
    wide_console().print(_grid(rows, loaded))


def _check_outputs(json_file: Path | None, picture: Path | None) -> None:
    check_file("--json", json_file)
    if picture is not None and picture.suffix not in (".png", ".svg"):
        raise ValueError(f"--picture {picture}: name a .png or .svg file")
    check_file("--picture", picture)


def load(
    folders: Sequence[Path], drafters: str | None, router: Path | None, flags: CostOptions, correct: bool = True
) -> Loaded:
    """Records, what is to be most, and the trained router. Raises ValueError where they do not fit each other."""
    from crossspec_tools.records.simulate import Value
    from crossspec_tools.train.records import choose_drafters, read_all_records
    from vllm_crossspec.routing.checkpoint import read_router

    records = read_all_records(folders)
    if drafters is not None:
        records = choose_drafters(records, name_list(drafters))
    facts = records.facts
    value = Value(round_costs(flags, facts.drafters), flags.batch_size)
    checkpoint = None
    if router is not None:
        checkpoint = read_router(router, hidden_size=facts.hidden_size, drafters=facts.drafters, key="--router")
    return Loaded(records, value, checkpoint, correct)


def round_costs(flags: CostOptions, drafters: Sequence[str]) -> "RoundCosts | None":
    """The costs that the flags give; None where they give none. Raises ValueError."""
    from vllm_crossspec.load.costs import parse_costs, read_costs

    if flags.costs is not None and flags.seconds is not None:
        raise ValueError("--costs and --seconds exclude each other: give one of them")
    if flags.costs is not None:
        return read_costs(flags.costs, drafters, "--costs")
    if flags.seconds is None:
        if flags.switch_seconds is not None:
            raise ValueError("--switch-seconds needs --seconds, the seconds of a round with each drafter")
        return None
    wanted = len(drafters)
    rounds = parse_numbers(flags.seconds, wanted, "--seconds")
    switches = parse_numbers(flags.switch_seconds or ",".join("0" * wanted), wanted, "--switch-seconds")
    tables = {"batch_sizes": [flags.batch_size], "draft": [rounds], "verify": [[0.0] * wanted], "switch": [switches]}
    return parse_costs(tables, drafters, "--seconds")


def parse_numbers(given: str, count: int, option: str) -> list[float]:
    """``count`` comma-separated finite numbers. Raises ValueError."""
    try:
        numbers = [float(part) for part in given.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != count or not all(map(math.isfinite, numbers)):
        raise ValueError(f"{option} {given}: give {counted(count, 'number')}, with commas between them")
    return numbers


def _rule(loaded: Loaded, policy: str, given: str | None, option: str) -> tuple[str, "Rule"]:
    """A policy at the given thresholds, or at "auto" ones; with the name of its row."""
    from crossspec_tools.train.router import trajectories

    names = loaded.records.facts.drafters
    if given is not None and given != "auto":
        thresholds: Sequence[float] = parse_numbers(given, len(names) - 1, option)
    else:
        facts = loaded.checkpoint.facts if loaded.checkpoint is not None else None
        thresholds = loaded.value.auto_thresholds(policy, facts, len(names))
    paths = trajectories(loaded.records)
    return f"{policy}, {_numbers(thresholds)}", loaded.signal(policy).rule(paths, thresholds)


def _text(records: "Records", number: int | None, category: str | None) -> Any:
    """The text that was asked for. Raises ValueError: the records have no such text."""
    if category is not None and category not in records.categories:
        raise ValueError(f"--category {category}: the records are of {', '.join(records.categories)}")
    texts = [t for t in records.texts if category in (None, t.category) and number in (None, t.number)]
    if not texts:
        first = ", ".join(str(text.number) for text in records.texts[:8])
        raise ValueError(f"--text {number}: no such text among the records; the first ones are {first}")
    return texts[0]


def _setting(thresholds: Sequence[float]) -> float | list[float]:
    """As a configuration has them."""
    return thresholds[0] if len(thresholds) == 1 else list(thresholds)


def _numbers(thresholds: Sequence[float]) -> str:
    return ", ".join(f"{threshold:g}" for threshold in thresholds)


def _grid(rows: "Sequence[Row]", loaded: Loaded) -> Table:
    """Rows of methods, columns of categories."""
    facts, has_costs = loaded.records.facts, loaded.value.costs is not None
    title = f"{loaded.value.name} on {counted(len(loaded.records.texts), 'text')} of {facts.model}"
    columns = ["method", *rows[0].values, *["tokens\na round"] * has_costs]
    columns += [f"% rounds by\n{' / '.join(facts.drafters)}", "switches\na round"]
    table = grid(title, columns, ["method"])
    for row in rows:
        shares = " / ".join(f"{100 * share:.0f}" for share in row.shares)
        worth = [f"{value:.2f}" for value in (*row.values.values(), *[row.lengths["mean"]] * has_costs)]
        table.add_row(row.method, *worth, shares, f"{row.switches:.2f}")
    return table


def _meta(loaded: Loaded) -> dict[str, Any]:
    facts = loaded.records.facts
    return {
        **meta.origin(),
        "target": facts.model,
        "num_texts": len(loaded.records.texts),
        "num_records": len(loaded.records.entropy),
    }


def _write_json(json_file: Path | None, loaded: Loaded, rows: "Sequence[Row]", content: dict[str, Any]) -> None:
    document = {
        "value": loaded.value.name,
        "drafters": loaded.records.facts.drafters,
        "rows": [row._asdict() for row in rows],
        **content,
        "meta": _meta(loaded),
    }
    write_json(json_file, document)
