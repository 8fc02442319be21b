"""`crossspec calibrate`: numbers that a method needs and that only runs can tell, for routers and for trees."""

import json
import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from typer import Option

from crossspec_tools.records import cli_router as router
from crossspec_tools.records.cli_collect import check_job, describe, interleaved, make_job, make_shards
from crossspec_tools.records.sharded import Work, run_missing
from vllm_crossspec.cli import options
from vllm_crossspec.cli.demo import METHODS
from vllm_crossspec.cli.models import located
from vllm_crossspec.cli.stages import grid, wide_console
from vllm_crossspec.cli.usage import App, Group
from vllm_crossspec.heterospec.heterospec import LEAF_SHARE, MAX_THRESHOLDS, Reading, default_alpha, make_policy
from vllm_crossspec.kinds.tree import tree_kind
from vllm_crossspec.names import counted
from vllm_crossspec.pocket_models import find_pocket

if TYPE_CHECKING:  # torch takes seconds to import, and --help needs none of it
    from crossspec_tools.records.cart import BinReport
    from vllm_crossspec.heterospec.calibration import Calibration

ROUNDS = Work("calibrate heterospec", "crossspec_tools.records.job_rounds", "rounds")
DEFAULT_METHOD = "eagle3-tree"


class _RouterByDefault(Group):
    """`crossspec calibrate --records ...` is the router's, as it was when there was nothing else to calibrate."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0].startswith("-") and args[0] not in ctx.help_option_names:
            args = ["router", *args]
        return super().parse_args(ctx, args)


app = App(
    name="calibrate",
    cls=_RouterByDefault,
    help="Find the thresholds of a router (the default: `crossspec calibrate --records ...`) or of HeteroSpec's trees.",
)
app.command("router")(router.calibrate)


@app.command(
    "heterospec",
    epilog="Example: crossspec calibrate heterospec --model Qwen/Qwen3-8B --spec eagle3-tree.json "
    "--prompts chats.jsonl --limit 100 --out calibration.json",
)
@options.grouped
def heterospec(
    *,
    out: Annotated[Path, Option(help="File of the calibration, for `adaptive.model`.")],
    answers: options.Answers,
    spec: Annotated[
        str | None,
        Option(
            "--spec",
            "--speculative-config",
            help="What --speculative-config takes, or a file with it: one drafter with a `dynamic` tree, without "
            f"`adaptive`. Default: the demo's {DEFAULT_METHOD}.",
        ),
    ] = None,
    records: Annotated[
        Path | None,
        Option(help="Fit to what was collected in this folder before, without an engine; the rest is not used."),
    ] = None,
    alpha: Annotated[
        int | None, Option(min=0, max=32, help="Levels that the surest trees grow. Default: half the depth.")
    ] = None,
    first_bin: Annotated[
        int,
        Option(
            min=0,
            max=1,
            help="Number of the surest bin in alpha - i, the levels that a bin adds: 0 adds alpha levels there, 1 one "
            "less. The paper numbers its bins from 0 and their gammas from 1.",
        ),
    ] = 0,
    cap: Annotated[
        bool,
        Option(
            help="No bin is given more nodes than num_nodes. The paper adds a bin's levels to its nodes, so that its "
            "third bin has more: buffers then are for those.",
        ),
    ] = True,
    leaf_share: Annotated[
        float,
        Option(
            min=0.0,
            max=0.5,
            help="Share of the fully accepted paths that a bin must hold, and 10 paths at least. 0: one path is enough "
            "(scikit-learn's default); the paper does not say.",
        ),
    ] = LEAF_SHARE,
    temperature: Annotated[float, Option(min=0.0, help="0 is greedy, as in the paper.")] = 0.0,
    batch_size: options.EngineBatch = 16,
    engines: Annotated[
        int, Option("--engines", "--workers", min=1, help="Engines side by side; more than one run on Ray.")
    ] = 1,
    engine: options.EngineOptions,
    picture: Annotated[bool, Option("--picture", help="Draw the bins into a .png beside the file.")] = False,
) -> None:
    """Cut the drafter's uncertainty into bins, by which HeteroSpec makes trees deeper or narrower.

    1. The target answers the prompts with the drafter's whole trees, of one size. Of every round is kept: Phi, the
    entropy of the drafter's candidates summed along its surest path; the ranks of the nodes that were accepted; the
    depth of the tree. They go into the folder OUT.rounds, where a stopped run goes on.

    2. A regression tree of depth 3 cuts Phi where it best tells the ranks of fully accepted paths apart: at most 8
    bins. That takes a second, and alone: --records OUT.rounds.

    3. The table says what each bin is worth: its rounds, how many paths were accepted to the last level, and at which
    rank. It also has the levels that its trees will grow, the nodes that will be verified, and what that costs.

    Then: add "adaptive": "OUT" beside "tree" in the speculative config. The file is for this target, this drafter
    and this tree; others are refused.

    Where the paper can be read in two ways, --first-bin, --no-cap and --leaf-share read it the other way. They are
    about the fit alone: with --records they cost a second. research/notes/heterospec.md says what each is worth.

    A few thousand rounds are enough, as of 100 prompts of the kind that will be served. It takes as long as answering
    them does.
    """
    options.check_file("--out", out)
    if picture and out.suffix == ".png":
        raise ValueError(f"--out {out}: the picture would have this name; call the calibration .json")
    reading = Reading(first_bin, cap)
    if records is None:
        speculative = _speculative(spec)
        check_job(answers.model, spec, speculative)
        _check_nodes(speculative["tree"], alpha, reading)
        records = out.with_name(out.name + ".rounds")
        sampling: dict[str, Any] = {"temperature": temperature, "max_tokens": answers.max_tokens}
        sampling |= {"seed": answers.seed} if temperature > 0 else {}
        job = make_job(records, answers.model, speculative, engine, batch_size) | {"sampling": sampling}
        _collect(job, answers, _command(answers, spec, sampling), engines)
    from crossspec_tools.records.cart import calibrate, report
    from crossspec_tools.records.rounds import INDEX_FILE, read_rounds
    from vllm_crossspec.heterospec.calibration import write_calibration

    rounds, collected = read_rounds(records), json.loads((records / INDEX_FILE).read_text())
    about = {key: collected[key] for key in ("command", "sampling", "seed", "prompts")}
    about["texts"] = len(rounds.categories)
    calibration = calibrate(rounds, alpha, reading=reading, leaf_share=leaf_share, **about)
    write_calibration(out, calibration)
    wide_console().print(table(report(rounds, calibration), calibration))
    if picture:
        from crossspec_tools.train.pictures import draw_bins

        draw_bins(rounds, calibration, out.with_suffix(".png"))
    typer.echo(f"calibration in {out}; serve it with\n{json.dumps(_served(collected['speculative_config'], out))}")


def _collect(job: dict[str, Any], answers: options.Answers, command: str, engines: int) -> None:
    """Let engines record the rounds that are missing in the job's folder."""
    from crossspec_tools.records.rounds import INDEX_FILE
    from crossspec_tools.train.records import claim

    job["max_prompt_tokens"] = answers.max_prompt_tokens
    prompts, size = interleaved(answers.prompts, answers.limit), answers.shard_prompts
    facts = {"seed": answers.seed, "command": command, "speculative_config": job["engine"]["speculative_config"]}
    claim(Path(job["out"]), {**describe(job, prompts, size), **facts}, INDEX_FILE, "the folder")
    run_missing(ROUNDS, job, make_shards(prompts, size), answers.max_tokens, engines)


def _served(recorded: dict[str, Any], out: Path) -> dict[str, Any]:
    """The config whose trees were recorded, with the calibration in place of the recording."""
    tree = {key: value for key, value in recorded["tree"].items() if key != "by_batch_size"}
    return {**recorded, "tree": tree, "adaptive": str(out)}


def _speculative(spec: str | None) -> dict[str, Any]:
    """The config whose trees are recorded, all of them whole. Raises ValueError where it has none."""
    if spec is None:
        given = located(METHODS[DEFAULT_METHOD], find_pocket())
    else:
        text = spec if spec.lstrip().startswith("{") else Path(spec).read_text()
        given = options.parse_json("--spec", spec, text)
    tree = given.get("tree") if isinstance(given, dict) else None
    if not isinstance(tree, dict) or tree.get("type", "dynamic") != "dynamic":
        raise ValueError(
            '--spec must be one drafter with a dynamic tree, as {"method": "eagle3", "model": "FOLDER", "tree": '
            '{"type": "dynamic", "depth": 8}}'
        )
    if "adaptive" in given:
        raise ValueError("--spec has `adaptive`, which is what this command finds: leave it out")
    if "by_batch_size" in tree:
        raise ValueError("--spec has tree.by_batch_size, and whole trees are needed here: leave it out")
    # A schedule of one entry: without any, a GPU would choose one by what steps cost there.
    nodes = tree.get("num_nodes") or tree_kind("dynamic", "tree.type").defaults["num_nodes"]
    return {**given, "tree": {"type": "dynamic", **tree, "by_batch_size": {"1": nodes}}, "adaptive": {"type": "record"}}


def _check_nodes(tree: dict[str, Any], alpha: int | None, reading: Reading) -> None:
    """Refuse, before the rounds are collected, bins of more nodes than a tree can have."""
    sizes = {**tree_kind("dynamic", "tree.type").defaults, **tree}
    alpha = default_alpha(sizes["depth"]) if alpha is None else alpha
    make_policy(thresholds=range(MAX_THRESHOLDS), num_nodes=sizes["num_nodes"], alpha=alpha, reading=reading)


def _command(answers: options.Answers, spec: str | None, sampling: dict[str, Any]) -> str:
    """The command as the file says it: what decides the rounds, and of local files the names alone."""
    model, limit = answers.model, answers.limit
    words = ["crossspec", "calibrate", "heterospec"]
    words += ["--model", Path(model).name if Path(model).is_dir() else model] if model else []
    if spec is not None:
        is_inline = spec.lstrip().startswith("{")
        words += ["--spec", json.dumps(json.loads(spec, object_hook=_bare)) if is_inline else Path(spec).name]
    for file in answers.prompts or []:
        words += ["--prompts", file.name]
    words += ["--limit", str(limit)] if limit else []
    for name, value in sampling.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)


def _bare(config: dict[str, Any]) -> dict[str, Any]:
    """The same with the names alone of local folders and files."""
    return {k: Path(v).name if isinstance(v, str) and Path(v).exists() else v for k, v in config.items()}


def table(rows: list["BinReport"], calibration: "Calibration") -> Table:
    """The bins, and what the recorded rounds would have been with their widths."""
    tree, total = calibration.tree, sum(row.num_rounds for row in rows)
    shares = ("fully\naccepted", "their mean\nrank", "mean\naccepted")
    found = grid(
        f"Phi of {counted(total, 'round')}, trees of {tree}",
        ("bin", "Phi up to\n(nats)", "rounds", *shares, "width\nalone", "added\nlevels", "width"),
        caption=f"width alone: draft tokens a round that are left of those that all {tree.num_nodes} nodes had "
        "accepted. What the added levels gain cannot be told from these rounds.",
        caption_justify="left",
    )
    for number, row in enumerate(rows):
        high = "-" if math.isinf(row.high) else f"{row.high:.3f}"
        worth = f"{100 * row.full_share:.0f}%", f"{row.mean_rank:.1f}", f"{row.mean_accepted:.2f}"
        sizes = f"{row.mean_within:.2f}", f"+{row.extension}", str(row.width)
        found.add_row(str(number), high, str(row.num_rounds), *worth, *sizes)
    found.add_section()

    def mean(name: str) -> float:
        return float(sum(row.num_rounds * getattr(row, name) for row in rows)) / max(total, 1)

    worth = f"{100 * mean('full_share'):.0f}%", "", f"{mean('mean_accepted'):.2f}"
    sizes = f"{mean('mean_within'):.2f}", f"+{mean('extension'):.1f}", f"{mean('width'):.1f}"
    found.add_row("all", "", str(total), *worth, *sizes, style="bold")
    return found
