"""Everything that waits for a GPU, in one command: correctness first, then speed, the most important first.

    python benchmarks/campaign.py --out runs/h100                  # goes on where an earlier call stopped
    python benchmarks/campaign.py --out runs/h100 --list           # the steps, what each needs, and how it went
    python benchmarks/campaign.py --out runs/h100 --tables runs/h100/tables.md --no-run

Each step is a command of its own with a log and a JSON document in the folder, and ends within nine minutes (a
rehearsal's within 20, for the host does all of it: ``--step-minutes``). A step that fails stops the steps that stand on
it and nothing else: a method whose texts differ from plain generation's is not timed. The same command again skips what
has passed and tries the rest once more. On another machine choose smaller models: ``--large 0.6b --small 0.2b``.

``--rehearse`` is to see that all of it runs, and measures nothing: every step with few tokens, prompts and batch sizes,
in OUT/rehearsal. It is for a simulated GPU, too, where nothing computes: a method passes an identity step by having
answered, whatever it says there, and the kernels' tests by being collected.
"""

import argparse
import contextlib
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm_crossspec.cli.demo import METHODS, located
from vllm_crossspec.cli.rows import PLAIN
from vllm_crossspec.pocket_models import find_pocket

POCKET = find_pocket()
HERE = Path(__file__).resolve().parent
STEP_MINUTES, REHEARSED_STEP_MINUTES = 9.0, 20.0
"""The longest that a step may run, on a GPU and in a rehearsal."""

KERNEL_TESTS = (
    "verify_kernels",
    "commit_kernels",
    "contemplate_kernels",
    "tail_attention",
    "exact_attention",
    "tree_builders",
    "heterospec",
    "continuity",
    "dart_inputs",
    "flashhead",
    "flashhead_noise",
    "router_kernels",
    "router",
    "experience",
    "lookup",
)
"""Files of tests that put their tensors on the GPU where there is one: our kernels against plain loops."""

END_SECONDS = 30.0
"""For a step that is ended to end its engines and write what it has measured."""

CAMPAIGN_MINUTES, REHEARSAL_MINUTES = 40.0, 100.0

REHEARSED: dict[str, tuple[str, ...]] = {
    "kernels": ("--collect-only",),
    "inflate": (),
    "eager-identity": ("--limit", "12", "--max-tokens", "6"),
    "identity": ("--limit", "12", "--max-tokens", "6"),
    "bench": ("--batch-sizes", "1,8", "--waves", "2", "--max-tokens", "6"),
    "rounds": ("--batch-sizes", "1,8", "--context", "64", "--rounds", "2"),
    "switch-cost": ("--contexts", "512", "--backlogs", "1,64", "--repeats", "1"),
    "kernels-trees": ("--runs", "1"),
    "kernels-flashhead": ("--runs", "1"),
    "kernels-search": ("--runs", "1"),
    "ngrams": ("--nodes", "0.1", "--rows", "200", "--runs", "1"),
    "bfloat16": ("--limit", "1", "--max-tokens", "6"),
}
"""What follows the commands of a rehearsal's steps, by how their names begin: the last of an option counts."""

NATIVE: dict[str, dict[str, Any]] = {
    # Without a key of ours a config is vLLM's own proposer.
    "native-eagle3": {"method": "eagle3", "model": "{pocket}/eagle3", "num_speculative_tokens": 3},
    "native-dflash": {"method": "dflash", "model": "{pocket}/dflash", "num_speculative_tokens": 7},
    "native-draft-model": {"method": "draft_model", "model": "{pocket}/draft-model", "num_speculative_tokens": 5},
}
TIMED = (
    "eagle3-tree",
    "eagle3",
    "dflash-tree",
    "whiflash-neural",
    "dart",
    "confu-tree",
    "eagle3-heterospec",
    "flashhead",
    "dflash",
    "confu",
    "draft-model",
    "draft-model-tree",
)
"""Our methods in the order in which their speed is wanted."""

GROUP = 3
"""Methods of one step. With plain's four engines of the 8B shape fit beside each other into 80 GB; five do not."""

IDENTITY_GROUPS = tuple(TIMED[start : start + GROUP] for start in range(0, len(TIMED), GROUP))
"""Methods that are compared, and timed, in one step: plain runs once for all of them."""

COMPILED = ("native-eagle3", "eagle3-tree", "dflash-tree")
"""Timed with vLLM's own compilation, too, which takes a minute a method to start."""

SMALLER_STEPS: dict[str, Any] = {"max_num_batched_tokens": 4096}
"""Engine arguments: enough for the prompts of a batch. vLLM's own 16384 keep 2 GiB more from the KV cache at 8B."""

GRAPHS: dict[str, Any] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
"""vLLM's compilation config: CUDA graphs of decode batches, without compilation."""

ROUND_METHODS = "none,native-eagle3,eagle3,eagle3-tree,native-dflash,dflash,dflash-tree,dart,confu-tree"


@dataclass(frozen=True)
class Step:
    """One command of the campaign.

    Attributes:
        name: of its files in the folder.
        command: with ``{json}`` for the file of its document.
        needs: steps that must have passed; ``step/part`` for one part of a step whose document is of several.
        choices: (need, words) whose words follow the command where the need has passed; one of them must have.
        minutes: about how long it takes on an H100; it is not begun where fewer are left.
        parts: what its document says of each part, by name: None where it passed, else a sentence. A step with parts
            goes by its document alone.
        env: added to the environment.
    """

    name: str
    command: Sequence[str]
    needs: tuple[str, ...] = ()
    minutes: float = 2.0
    parts: Callable[[dict[str, Any]], dict[str, str | None]] | None = None
    env: dict[str, str] = field(default_factory=dict)
    choices: tuple[tuple[str, tuple[str, ...]], ...] = ()


def steps(out: Path, options: argparse.Namespace) -> list[Step]:
    """All steps, the most important first."""
    python = sys.executable
    crossspec = [python, "-m", "vllm_crossspec.cli.app"]

    def benchmark(name: str, *more: str) -> list[str]:
        return [python, str(HERE / f"{name}.py"), *more, "--json", "{json}"]

    found = []
    first: tuple[str, ...] = ()
    if options.check:
        found.append(Step("check", shlex.split(options.check), minutes=1))
        first = ("check",)
    files = [str(HERE.parent / "tests" / f"test_{name}.py") for name in KERNEL_TESTS]
    # What a test compiles for a GPU without one is compiled here by all the others.
    found.append(Step("kernels", [python, "-m", "pytest", "-q", *files, "-k", "not hopper"], first, 6))
    prompts = _write_prompts(out / "prompts.jsonl")
    for shape in (options.large, options.small):
        models = out / "models" / shape
        build = [
            "inflate",
            "--shape",
            shape,
            "--out",
            str(models),
            "--dtype",
            options.dtype,
            "--device",
            options.device,
        ]
        inflate = Step(f"inflate-{shape}", [*crossspec, *build, "--overwrite", "--no-check"], first, 2)
        bench = [*crossspec, "bench", "--model", str(models / "target"), "--dtype", options.dtype, "--json", "{json}"]
        # One request at a time 72 prompts would take four minutes of a group's five, at 7 ms a token.
        bench += ["--batch-sizes", options.batch_sizes, "--waves", "16", "--repeats", "2", "--max-tokens", "128"]
        bench += ["--prompts", str(prompts), "--gpu-memory-utilization", str(options.memory)]
        minutes = 5 if shape == options.large else 3
        timed: dict[str, tuple[str, tuple[str, ...]]] = {}
        for number, group in enumerate((tuple(NATIVE), *IDENTITY_GROUPS)):
            if not number:
                found.append(inflate)
            elif shape == options.large:
                found += _identity_steps(number, group, [*crossspec, "bench"], out, first)
            for name in group:
                spec = _write_spec(out / "specs" / shape / f"{name}.json", (NATIVE | METHODS)[name], models)
                timed[name] = (f"identity-{number}/{name}" if number else inflate.name, ("--spec", str(spec)))
            command = [*bench, "--engine-args", json.dumps({**SMALLER_STEPS, "compilation_config": GRAPHS})]
            choices = tuple(timed[name] for name in group)
            found.append(Step(f"bench-{shape}-{number}", command, (inflate.name,), minutes, choices=choices))
        choices = tuple(timed[name] for name in COMPILED)
        bench += ["--engine-args", json.dumps(SMALLER_STEPS)]
        found.append(Step(f"bench-{shape}-compiled", bench, (inflate.name,), 6, choices=choices))
        rounds = benchmark("round_time", "--shape", shape, "--methods", ROUND_METHODS, "--batch-sizes", "1,8,32")
        if shape in options.dummy_shapes:
            found.append(Step(f"rounds-{shape}", rounds, ("kernels",), 8))
    large = options.large if options.large in options.dummy_shapes else options.dummy_shapes[0]
    found += [
        Step("switch-cost", benchmark("switch_cost", "--shape", large), ("kernels",), 4),
        Step("kernels-trees", benchmark("tree_kernels", "--shape", large), ("kernels",), 4),
        Step("kernels-flashhead", benchmark("flashhead_gpu"), ("kernels",), 2),
        Step("kernels-search", [python, str(HERE / "tree_search.py"), "--json", "{json}"], ("kernels",), 3),
        Step("ngrams", benchmark("ngram_lookup"), first, 3),
    ]
    for invariant in (0, 1):
        name = "bfloat16" + "-invariant" * invariant
        models = out / "models" / options.small
        bench = ["bench", "--model", str(models / "target"), "--dtype", "bfloat16", "--batch-size", "8", "--limit", "4"]
        specs = [str(out / "specs" / options.small / f"{method}.json") for method in TIMED[:3]]
        spec_options = [word for spec in specs for word in ("--spec", spec)]
        environment = {"VLLM_BATCH_INVARIANT": str(invariant)}
        needs = (f"inflate-{options.small}",)
        found.append(Step(name, [*crossspec, *bench, *spec_options, "--json", "{json}"], needs, 5, env=environment))
    return [_rehearsed(step) for step in found] if options.rehearse else found


def _rehearsed(step: Step) -> Step:
    """The same step with little to do, begun while a minute is left."""
    if step.name == "check":
        return step
    words = REHEARSED[max((name for name in REHEARSED if step.name.startswith(name)), key=len)]
    return replace(step, command=[*step.command, *words], minutes=1.0, parts=step.parts and _answered)


def _identity_steps(
    number: int, group: Sequence[str], bench: Sequence[str], out: Path, needs: tuple[str, ...]
) -> Iterator[Step]:
    """The texts of a group at pocket size in float32, without CUDA graphs and with them, which stand on the first."""
    command = [*bench, "--model", str(POCKET / "target"), "--dtype", "float32", "--json", "{json}"]
    command += ["--prompts", str(out / "prompts.jsonl"), "--batch-sizes", "8", "--limit", "24", "--max-tokens", "48"]
    command += ["--gpu-memory-utilization", "0.1"]
    words = {}
    for name in group:
        words[name] = ("--spec", str(_write_spec(out / "specs" / "pocket" / f"{name}.json", METHODS[name], POCKET)))
    eager = [*command, "--enforce-eager", *(word for pair in words.values() for word in pair)]
    # A small target's drafts cost more than they bring: "auto" would leave nothing to verify.
    whole = {"CROSSSPEC_FIXED_WIDTHS": "1"}
    yield Step(f"eager-identity-{number}", eager, needs, 1.5, _identical, whole)
    choices = tuple((f"eager-identity-{number}/{name}", pair) for name, pair in words.items())
    compilation = GRAPHS | {"max_cudagraph_capture_size": 1024}  # 8 of ConFu's trees
    graphs = [*command, "--engine-args", json.dumps({"compilation_config": compilation})]
    yield Step(f"identity-{number}", graphs, (), 1.5, _identical, whole, choices)


def _identical(document: dict[str, Any]) -> dict[str, str | None]:
    """By method, one sentence where a text is not plain generation's."""
    found: dict[str, str | None] = {}
    for row in document["rows"]:
        differs = row.get("identical_to_plain") is False
        found[row["method"]] = "a text is not plain generation's" if differs else found.get(row["method"])
    return found


def _answered(document: dict[str, Any]) -> dict[str, str | None]:
    """By method, that it came to its end."""
    return {row["method"]: None for row in document["rows"]}


def _write_prompts(file: Path) -> Path:
    """The demo's prompts, three times over in one category: more than the most requests at a time."""
    rows = [json.loads(line) for line in (HERE.parent / "vllm_crossspec/pocket/prompts.jsonl").read_text().splitlines()]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({**row, "category": "mixed"}) + "\n" for row in 3 * rows))
    return file


def _write_spec(file: Path, config: Any, models: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(located(config, models), indent=1) + "\n")
    return file


class Campaign:
    """The folder of a campaign: a document of how each step went, its log, and what it wrote.

    Args:
        out: the folder.
        minutes: of all steps together, those of earlier calls among them.
        step_minutes: of one step.
    """

    def __init__(self, out: Path, minutes: float, step_minutes: float = STEP_MINUTES):
        self.out, self.minutes, self.step_minutes = out, minutes, step_minutes
        self._file = out / "campaign.json"
        out.mkdir(parents=True, exist_ok=True)
        self.state: dict[str, dict[str, Any]] = json.loads(self._file.read_text()) if self._file.is_file() else {}

    @property
    def spent(self) -> float:
        """Minutes that all steps have taken so far."""
        return sum(state.get("seconds", 0.0) for state in self.state.values()) / 60

    def run(self, all_steps: Sequence[Step], only: Sequence[str] = ()) -> None:
        """Run what has not passed yet, in order, as far as the minutes go."""
        for step in all_steps:
            if self.is_done(step) or (only and not any(step.name.startswith(name) for name in only)):
                continue
            missing = [name for name in step.needs if not self._has_passed(name)]
            if step.choices and not any(self._has_passed(need) for need, _ in step.choices):
                missing += [need for need, _ in step.choices]
            if missing:
                self._skip(step, f"needs {', '.join(missing)}")
            elif self.spent + step.minutes > self.minutes:
                self._skip(step, f"needs {step.minutes:g} minutes, {self.minutes - self.spent:.1f} are left")
            else:
                self._run(step)

    def plan(self, all_steps: Sequence[Step]) -> dict[str, float]:
        """The minute at which each step is begun that is still to run, were all to take as long as they say.

        One that is not in it does not fit any more.
        """
        spent, found = self.spent, {}
        for step in all_steps:
            if not self.is_done(step) and spent + step.minutes <= self.minutes:
                found[step.name] = spent
                spent += step.minutes
        return found

    def is_done(self, step: Step) -> bool:
        """Whether it has passed with all that it can have: what was mended since is not left out."""
        return self._has_passed(step.name) and self.state[step.name].get("chosen", []) == self._chosen(step)

    def _chosen(self, step: Step) -> list[str]:
        """What is appended to the step's command."""
        return [word for need, words in step.choices if self._has_passed(need) for word in words]

    def _has_passed(self, name: str) -> bool:
        step, _, part = name.partition("/")
        state = self.state.get(step, {})
        return part in state.get("passed_parts", ()) if part else state.get("status") == "passed"

    def _run(self, step: Step) -> None:
        document, log = self.out / f"{step.name}.json", self.out / f"{step.name}.log"
        document.unlink(missing_ok=True)
        chosen = self._chosen(step)
        command = [word.replace("{json}", str(document)) for word in [*step.command, *chosen]]
        limit = 60 * min(self.step_minutes, self.minutes - self.spent)
        earlier = self.state.get(step.name, {}).get("seconds", 0.0)
        print(f"{step.name}: {shlex.join(command)}", flush=True)
        start = time.perf_counter()
        with log.open("w") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **step.env}, start_new_session=True
            )
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:  # whatever ends this, no engine stays behind
                _end_group(process)
        seconds = earlier + time.perf_counter() - start
        parts: dict[str, str | None] = {}
        if step.parts and document.is_file():
            parts = step.parts(json.loads(document.read_text()))
        wrong = "; ".join(f"{name}: {why}" for name, why in parts.items() if why)
        if code is None:
            wrong = f"ended after {limit / 60:.1f} minutes"
        elif code and not wrong:
            wrong = f"exit code {code}: {_last_line(log)}"
        passed = [name for name, why in parts.items() if not why]
        state = {"status": "failed" if wrong else "passed", "why": wrong, "seconds": round(seconds, 3)}
        self._write(step, {**state, "passed_parts": passed, "chosen": chosen})

    def _skip(self, step: Step, why: str) -> None:
        """Keep what an earlier call has seen of the step."""
        self._write(step, {**self.state.get(step.name, {}), "status": "skipped", "why": why})

    def _write(self, step: Step, state: dict[str, Any]) -> None:
        self.state[step.name] = {**state, "command": list(step.command)}
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(self.state, indent=1) + "\n")
        new.replace(self._file)
        why = f": {state['why']}" if state["why"] else ""
        print(f"  {step.name} {state['status']}{why}; {self.spent:.1f} of {self.minutes:g} minutes", flush=True)


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """End a step's processes, all of them."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        if sign == signal.SIGTERM:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
            time.sleep(1.0)
    process.wait()


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"


def listed(campaign: Campaign, all_steps: Sequence[Step]) -> str:
    """A line for each step: how it went, how long it takes, whether the minutes reach so far, and what it needs."""
    plan, lines = campaign.plan(all_steps), []
    for step in all_steps:
        state = campaign.state.get(step.name, {})
        when = f"from minute {plan[step.name]:.0f}" if step.name in plan else "does not fit"
        needs = ", ".join(dict.fromkeys([*step.needs, *(need for need, _ in step.choices)]))
        lines.append(
            f"{step.name:24} {state.get('status', 'not run'):8} {step.minutes:g} min, "
            f"{'done' if campaign.is_done(step) else when:15}  needs {needs or 'nothing'}"
        )
    total = sum(step.minutes for step in all_steps)
    return "\n".join([*lines, f"{total:g} minutes in all, {campaign.minutes:g} are given"])


def tables(campaign: Campaign, options: argparse.Namespace) -> str:
    """The page of results, from the documents that there are."""
    lines = ["# Results on a GPU", "", f"Made by `benchmarks/campaign.py` from {len(campaign.state)} steps."]
    if options.rehearse:
        lines += ["", "**A rehearsal**: no number here is a measurement, and no text was compared."]
    groups = [str(number) for number in range(1 + len(IDENTITY_GROUPS))]
    for shape, how in itertools.product((options.large, options.small), ("CUDA graphs", "compiled")):
        rows = list(_bench_rows(campaign.out, shape, groups if how == "CUDA graphs" else [how]))
        if rows:
            sizes = sorted({row["batch_size"] for _, row in rows})
            lines += ["", f"## {shape}, {how}: tokens a second, and times plain", ""]
            lines += ["| method | " + " | ".join(f"batch {size}" for size in sizes) + " | identical |"]
            lines += ["|---" * (len(sizes) + 2) + "|"]
            for name in dict.fromkeys(name for name, _ in rows):
                # Plain runs in every group: its first one is shown, and a speedup is beside its own group's.
                own = {row["batch_size"]: row for other, row in reversed(rows) if other == name}
                lines.append(
                    f"| {name} | " + " | ".join(_speed(own.get(size)) for size in sizes) + f" | {_same(own)} |"
                )
    for shape in (options.large, options.small):
        lines += _round_times(campaign.out / f"rounds-{shape}.json", shape)
    lines += _bfloat16(campaign.out)
    lines += ["", "## Steps", "", "| step | how it went | seconds |", "|---|---|---|"]
    for name, state in campaign.state.items():
        why = f": {state['why']}" if state["why"] else ""
        lines.append(f"| {name} | {state['status']}{why} | {state.get('seconds', 0.0):.0f} |")
    return "\n".join(lines) + "\n"


def _speed(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    speedup = "" if row["method"] == PLAIN else f" ({row['speedup']:.2f}x)"
    return f"{row['tokens_per_second']:.0f}{speedup}"


def _same(rows: dict[int, dict[str, Any]]) -> str:
    """Whether every text is plain's; nothing for plain's own."""
    if any(row["method"] == PLAIN for row in rows.values()):
        return ""
    return "no" if any(row["identical_to_plain"] is False for row in rows.values()) else "yes"


def _round_times(file: Path, shape: str) -> list[str]:
    """Medians of a round on the GPU's clock, with what the target and the drafter take of it."""
    if not file.is_file():
        return []
    rows = json.loads(file.read_text())["rows"]
    sizes = sorted({row["batch_size"] for row in rows})
    lines = ["", f"## {shape}, random weights: ms a round (target, draft)", ""]
    lines += ["| method | " + " | ".join(f"batch {size}" for size in sizes) + " |", "|---" * (len(sizes) + 1) + "|"]
    found: dict[str, dict[int, str]] = {}
    for row in rows:
        times = row["device_ms"] or {}
        if times:
            whole, target, draft = (times[part]["median"] for part in ("round", "target", "draft"))
            found.setdefault(row["method"], {})[row["batch_size"]] = f"{whole:.2f} ({target:.2f}, {draft:.2f})"
    return lines + [
        f"| {name} | " + " | ".join(own.get(size, "") for size in sizes) + " |" for name, own in found.items()
    ]


def _bfloat16(out: Path) -> list[str]:
    """Whether texts in bfloat16 are plain's, where vLLM's products depend on the batch and where they do not."""
    files = {how: out / f"bfloat16{how}.json" for how in ("", "-invariant")}
    found = {how: json.loads(file.read_text())["rows"] for how, file in files.items() if file.is_file()}
    if not found:
        return []
    lines = ["", "## bfloat16, batch 8: texts beside plain's", "", "| method | batch-invariant | identical |"]
    lines.append("|---|---|---|")
    for how, rows in found.items():
        for row in rows:
            if row["category"] == "all" and row["method"] != PLAIN:
                lines.append(f"| {row['method']} | {'yes' if how else 'no'} | {_same({0: row})} |")
    return lines


def _bench_rows(out: Path, shape: str, numbers: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows over all categories of a shape's documents."""
    for number in numbers:
        file = out / f"bench-{shape}-{number}.json"
        if file.is_file():
            for row in json.loads(file.read_text())["rows"]:
                if row["category"] == "all":
                    yield row["method"], row


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of logs, documents and models")
    ours = f"default: {CAMPAIGN_MINUTES:g}, a rehearsal's {REHEARSAL_MINUTES:g}"
    add("--minutes", type=float, help=f"of all steps together, earlier calls among them ({ours})")
    ours = f"default: {STEP_MINUTES:g}, a rehearsal's {REHEARSED_STEP_MINUTES:g}"
    add("--step-minutes", type=float, help=f"a step that runs for longer is ended ({ours})")
    add("--large", default="8b", help="shape that matters most (crossspec inflate --shape)")
    add("--small", default="0.6b", help="the other shape")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of the inflated models")
    add("--device", default="cuda", help="where they are made")
    add("--batch-sizes", default="1,8,32,64", help="requests at a time, comma-separated")
    add("--memory", type=float, default=0.23, help="share of the GPU for each of at most four engines")
    add("--check", help="a command to run before all others, such as a check of vLLM's own kernels")
    add("--rehearse", action="store_true", help="see that every step runs, and measure nothing")
    add("--only", default="", help="only steps whose names begin so, comma-separated")
    add("--list", action="store_true", help="print the steps and how they went, and run none")
    add("--no-run", action="store_true", help="run none")
    add("--tables", type=Path, help="write the page of results to this file")
    options = parser.parse_args(argv)
    options.out = options.out / "rehearsal" if options.rehearse else options.out
    options.minutes = options.minutes or (REHEARSAL_MINUTES if options.rehearse else CAMPAIGN_MINUTES)
    options.step_minutes = options.step_minutes or (REHEARSED_STEP_MINUTES if options.rehearse else STEP_MINUTES)
    options.dummy_shapes = [shape for shape in (options.large, options.small) if shape in ("8b", "0.6b")] or ["0.6b"]
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run; 1 where a step has failed."""
    options = arguments(argv)
    # A step must not outlive this process: what runs it ends it where an exception passes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    campaign = Campaign(options.out, options.minutes, options.step_minutes)
    all_steps = steps(options.out.resolve(), options)
    if options.list:
        print(listed(campaign, all_steps))
        return 0
    if not options.no_run:
        campaign.run(all_steps, [name for name in options.only.split(",") if name])
    if options.tables:
        options.tables.parent.mkdir(parents=True, exist_ok=True)
        options.tables.write_text(tables(campaign, options))
    return int(any(state["status"] == "failed" for state in campaign.state.values()))


if __name__ == "__main__":
    sys.exit(main())
