"""What waits for a GPU, as three flights of twelve minutes: slots with a clock, and one archive of what was measured.

    python benchmarks/flight.py 1 --out runs/flight              # fly; the same command resumes
    python benchmarks/flight.py 1 --out runs/flight --list       # the slots, their seconds, and how they went
    python benchmarks/flight.py --tables docs/results/gpu.md --archives runs/flight/flight-1.tar.xz

Flight 1 tests our kernels and shows where the milliseconds go. Flight 2 compares every method's text with plain's in
float32 and times host waits. Flight 3 measures speed under load, compiled, and at long contexts.

A slot ends when its share of the flight is over; what it measured is kept. Seconds that it leaves go to the next ones.
A slot that passed at this commit is not flown again, in this folder or in one of `--flown`'s archives.

`--rehearse` flies on small models with few tokens, to see that everything runs; it measures nothing. `--stretch` gives
slots more time where the host is slow.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import flight_tables
import round_time
from methods import model_folders
from shapes import SHAPES

from vllm_crossspec.cli.demo import METHODS
from vllm_crossspec.cli.models import located
from vllm_crossspec.pocket_models import find_pocket

HERE = Path(__file__).resolve().parent
END_SECONDS = 10.0
"""For a slot that is ended to end its processes."""
LEAST_SECONDS = 15.0
"""A slot is not begun with less."""
LOG_BYTES = 200_000
"""Of a log's end that go into the archive."""
WHOLE = {"CROSSSPEC_FIXED_WIDTHS": "1"}
"""Environment in which whole trees are verified: a small target's drafts cost more than they bring."""

KERNEL_TESTS = (
    "verify_kernels", "commit_kernels", "contemplate_kernels", "tail_attention", "exact_attention", "tree_builders",
    "heterospec", "continuity", "dart_inputs", "flashhead", "flashhead_noise", "router_kernels", "router",
    "experience", "lookup",
)  # fmt: skip
"""Files of tests that put their tensors on the GPU where there is one: our kernels against plain loops."""

NATIVE: dict[str, dict[str, Any]] = {
    # Without a key of ours a config is vLLM's own proposer.
    "native-eagle3": {"method": "eagle3", "model": "{pocket}/eagle3", "num_speculative_tokens": 5},
    "native-dflash": {"method": "dflash", "model": "{pocket}/dflash", "num_speculative_tokens": 7},
}
EVERY = (
    "eagle3", "eagle3-tree", "dflash", "dflash-tree", "dart", "confu", "confu-tree", "eagle3-heterospec",
    "draft-model-tree", "flashhead", "suffix", "whiflash-neural",
)  # fmt: skip
"""Methods of ours whose texts are compared."""
ROUNDS = (
    ("plain", "none", ""),
    ("eagle3-tree-60", "eagle3-tree", "--nodes 60"),
    ("native-eagle3-3", "native-eagle3", "--tokens 3"),
    ("eagle3-7", "eagle3", "--tokens 7"),
    ("native-eagle3-7", "native-eagle3", "--tokens 7"),
    ("eagle3-tree-15", "eagle3-tree", "--nodes 15"),
    ("eagle3-tree-8", "eagle3-tree", "--nodes 8"),
    ("dflash-tree-60", "dflash-tree", "--nodes 60"),
    ("dart-60", "dart-nongram", "--nodes 60"),
    ("native-dflash-7", "native-dflash", "--tokens 7"),
)
"""Engines whose rounds are timed: a name, a method of ``round_time.py`` and its options."""
WAITS = (
    ("eagle3-tree", "eagle3-tree", ""),
    ("heterospec", "eagle3-heterospec", ""),
    ("routed-to-eagle3", "whiflash-entropy", "--threshold 20"),
    ("routed-to-dflash", "whiflash-entropy", "--threshold 1"),
    ("neural", "whiflash-neural", "--threshold 0"),
    ("confu-tree", "confu-tree", ""),
)
"""The same of rounds with host waits, at batch sizes where a wait is a part of the round that matters."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One part of a flight, with its share of the clock.

    Attributes:
        command: with ``{json}`` for its document; None where ``engines`` are started.
        engines: entries of a plan of ``flight_engines.py``.
        env: added to the environment.
        pocket: whether the pocket models must be there.
        needs: a slot that must have passed before.
    """

    name: str
    seconds: float
    command: Sequence[str] | None = None
    engines: Sequence[dict[str, Any]] = ()
    env: dict[str, str] = field(default_factory=dict)
    pocket: bool = False
    needs: str | None = None


# -- what is flown ---------------------------------------------------------------------------------------------------


class Slots:
    """Makes the slots of the flights; ``folder`` gets the models, prompts and configs that slots write."""

    def __init__(self, options: argparse.Namespace, folder: Path):
        self.options, self.folder, self.rehearse = options, folder, options.rehearse
        self.shape = options.shape or ("0.6b" if options.rehearse else "8b")
        self.sizes = [1, 8] if self.rehearse else [1, 8, 32]

    def flight(self, number: int) -> list[Slot]:
        """The slots of a flight in their order."""
        return [self._one, self._two, self._three][number - 1]()

    def _one(self) -> list[Slot]:
        found = [self._check()] if self.options.check else []
        return [
            *found,
            self._kernels(90),
            Slot(name="steps", seconds=170, engines=[self._curve(), *self._mixed()]),
            Slot(name="rounds", seconds=150, engines=[self._round(*one) for one in ROUNDS]),
            self._inflate(45),
            self._identity("identity", ("eagle3-tree", "dflash-tree", "dart"), 60),
            self._speed("speed", 165, ("native-eagle3", "eagle3-tree", "dart", "eagle3"), "piecewise", self.sizes),
        ]

    def _two(self) -> list[Slot]:
        waits = [self._round(name, method, f"--batch-sizes 1,8 {words}") for name, method, words in WAITS]
        return [
            self._sanitizer(120),
            Slot(name="waits", seconds=100, engines=waits),
            Slot(name="windows", seconds=75, engines=[*self._windows()]),
            self._identity("identity-eager", EVERY, 130, graphs=False),
            self._identity("identity-graphs", EVERY, 190),
            self._identity("identity-invariant", ("eagle3-tree", "dflash-tree"), 60, dtype="bfloat16"),
            Slot(name="publishing", seconds=40, engines=[self._publishing()], pocket=True),
        ]

    def _three(self) -> list[Slot]:
        widths = [({"by_batch_size": {"1": width}}, f"-w{width}") for width in (3, 5, 8, 15)]
        return [
            Slot(name="long", seconds=140, engines=[self._round(*one) for one in self._long_methods()]),
            self._inflate(45),
            self._arrivals(200),
            self._speed("compiled", 170, ("native-eagle3", "eagle3-tree"), "default", [8]),
            self._speed("widths", 160, ("eagle3-tree",), "piecewise", [1, 8] if self.rehearse else [32, 64], widths),
        ]

    # -- commands

    def _check(self) -> Slot:
        return Slot(name="check", seconds=30, command=shlex.split(self.options.check))

    def _kernels(self, seconds: float) -> Slot:
        files = [str(HERE.parent / "tests" / f"test_{name}.py") for name in KERNEL_TESTS]
        command = [sys.executable, "-m", "pytest", "-q", "-x", *files, "-k", "not hopper"]
        # Kernels that do nothing give no values: a rehearsal collects the tests.
        command += ["--collect-only"] if self.rehearse else ["-n", str(min(8, os.cpu_count() or 1))]
        return Slot(name="kernels", seconds=seconds, command=command)

    def _sanitizer(self, seconds: float) -> Slot:
        command = ["bash", str(HERE / "sanitize.sh"), str(self.folder / "sanitizer"), str(int(seconds / 2 - 5))]
        return Slot(name="sanitizer", seconds=seconds, command=["true"] if self.rehearse else command)

    def _inflate(self, seconds: float) -> Slot:
        out = self.folder / "inflated"
        command = [sys.executable, "-m", "vllm_crossspec.cli.app", "inflate", "--shape", self.shape, "--out", str(out)]
        command += ["--dtype", "bfloat16", "--device", "cuda", "--overwrite", "--no-check"]
        return Slot(name="inflate", seconds=seconds, command=command, pocket=True)

    # -- engines with dummy weights

    def _options(self, *words: str) -> list[str]:
        return ["--shape", self.shape, "--graphs", "piecewise", *words, *(("--rounds", "2") if self.rehearse else ())]

    def _dummy(self, method: str, words: list[str], seconds: float, **settings: Any) -> dict[str, Any]:
        """An engine of ``round_time.py``'s with made-up weights, without jobs."""
        options = round_time.arguments([*words, "--methods", method])
        models = model_folders(options, self.folder / "dummies")
        engine = round_time.engine_settings(method, models, options)
        engine["attention_config"] = {"flash_attn_max_num_splits_for_cuda_graph": 8}
        # No share of the GPU: an engine takes what its batch needs, whatever the last one left.
        del engine["gpu_memory_utilization"]
        tokens = max(options.batch_sizes) * engine["max_model_len"]
        engine["kv_cache_memory_bytes"] = int(1.3 * tokens * _kv_bytes(SHAPES[self.shape])) + (1 << 30)
        env = dict(round_time.BREAKABLE) if options.graphs == "piecewise" else {}
        return {"engine": engine | settings, "seconds": seconds, "env": env, "jobs": []}

    def _curve(self) -> dict[str, Any]:
        per_request = (1, 4, 9) if self.rehearse else (1, 2, 3, 4, 5, 6, 9, 16, 31, 61)
        sizes = self.sizes if self.rehearse else [1, 8, 32, 64]
        points = [(n, rows) for n in sizes for rows in per_request if n * rows <= 2048]
        words = self._options("--batch-sizes", ",".join(map(str, sizes)), "--context", "512")
        entry = self._dummy("none", words, 50)
        # A lookup has no weights: what is timed is the target, with our verification and a graph for every width.
        widths = sorted((rows - 1 for rows in per_request), reverse=True)
        tree = {"num_nodes": widths[0], "by_batch_size": {str(i + 1): width for i, width in enumerate(widths)}}
        entry["engine"]["speculative_config"] = {"method": "suffix", "tree": tree}
        entry["engine"]["compilation_config"]["cudagraph_capture_sizes"] = sorted({n * rows for n, rows in points})
        entry["engine"]["max_num_batched_tokens"] = 8192
        return entry | {"name": "curve", "jobs": [{"kind": "curve", "points": points, "context": 512}]}

    def _mixed(self) -> Iterator[dict[str, Any]]:
        """Plain and EAGLE-3's tree: kernels of a round, and steps in which prompts arrive, in two modes of graphs."""
        sizes = ",".join(map(str, self.sizes))
        for method, graphs in (("none", "piecewise"), ("eagle3-tree", "piecewise"), ("eagle3-tree", "full")):
            words = [*self._options("--batch-sizes", sizes, "--context", "512"), "--graphs", graphs]
            entry = self._dummy(method, words, 35)
            # Prompts of a step come on top of 8 requests' rows; room for the rounds of a whole run.
            entry["engine"] |= {"max_model_len": 2048, "max_num_batched_tokens": 8192, "async_scheduling": False}
            jobs: list[dict[str, Any]] = [{"kind": "mixed", "decoding": 7, "prompts": [64, 256, 1024]}]
            if graphs == "piecewise":
                jobs.append({"kind": "profile", "options": words})
            yield entry | {"name": f"{method}-{graphs}", "jobs": jobs}

    def _round(self, name: str, method: str, more: str) -> dict[str, Any]:
        sizes = ",".join(map(str, self.sizes))
        words = self._options("--batch-sizes", sizes, "--context", "512", "--rounds", "16", *more.split())
        return self._dummy(method, words, 15) | {"name": name, "jobs": [{"kind": "rounds", "options": words}]}

    def _long_methods(self) -> Iterator[tuple[str, str, str]]:
        for context in (256, 512) if self.rehearse else (8192, 32768):
            sizes = "1" if context > 8192 else "1,8"
            for method in ("none", "native-eagle3", "eagle3-tree"):
                yield f"{method}-{context}", method, f"--context {context} --batch-sizes {sizes} --rounds 8"

    def _windows(self) -> Iterator[dict[str, Any]]:
        """Whether sliding windows and fp8 KV caches run under graphs at all: both are new to a GPU."""
        words = self._options("--batch-sizes", "1,8", "--context", "700", "--rounds", "4", "--nodes", "60")
        fp8, mistral = {"kv_cache_dtype": "fp8"}, {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
        for name, window, settings in (("window", 256, {}), ("fp8", None, fp8), ("window-fp8", 256, fp8)):
            entry = self._dummy("eagle3-tree", words, 20, **settings)
            if window:
                entry["engine"]["hf_overrides"] = mistral | {"sliding_window": window}
            yield entry | {"name": name, "jobs": [{"kind": "rounds", "options": words}]}

    # -- engines with real weights

    def _config(self, name: str, models: Path, changes: dict[str, Any] | None = None) -> Any:
        config = located((NATIVE | METHODS)[name], models)
        if config is not None and changes:
            config = {**config, "tree": {**config.get("tree", {}), **changes}}
        return config

    def _answering(
        self, method: str, models: Path, job: dict[str, Any], changes: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        most = max(job.get("batch_sizes", [64]))
        engine = {
            "model": str(models / "target"),
            "dtype": "bfloat16",
            "max_model_len": 1024,
            "max_num_seqs": most,
            "max_num_batched_tokens": 4096,
            "kv_cache_memory_bytes": 4 << 30,
            "speculative_config": self._config(method, models, changes),
            "attention_config": {"flash_attn_max_num_splits_for_cuda_graph": 8},
        }
        return {"engine": engine, "jobs": [job]}

    def _answers(self, sizes: Sequence[int], limit: int, max_tokens: int) -> dict[str, Any]:
        if self.rehearse:
            limit, max_tokens = 4, 6
        sampling = {"temperature": 0.0, "max_tokens": max_tokens}
        prompts = str(_write_prompts(self.folder / "prompts.jsonl"))
        return {"kind": "answers", "batch_sizes": list(sizes), "sampling": sampling, "prompts": prompts, "limit": limit}

    def _identity(
        self, name: str, methods: Sequence[str], seconds: float, graphs: bool = True, dtype: str = "float32"
    ) -> Slot:
        """Texts of the pocket models beside plain's, batch 8; in bfloat16 where vLLM's products do not depend on it."""
        env = dict(WHOLE)
        if dtype == "bfloat16":
            env["VLLM_BATCH_INVARIANT"] = "1"
        entries = []
        for method in ("plain", *methods):
            entry = self._answering(method, find_pocket_or_none(), self._answers([8], 24, 48))
            entry["engine"] |= {"dtype": dtype, "enforce_eager": not graphs}
            if graphs:
                compilation = dict(round_time.GRAPHS["piecewise"])
                per_request = _rows_of(entry["engine"]["speculative_config"])
                sizes = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, *(8 * rows for rows in per_request)}
                entry["engine"]["compilation_config"] = {**compilation, "cudagraph_capture_sizes": sorted(sizes)}
            entry |= {"name": method, "seconds": 10, "env": round_time.BREAKABLE if graphs else {}}
            entries.append(entry)
        return Slot(name=name, seconds=seconds, engines=entries, env=env, pocket=True)

    def _speed(
        self,
        name: str,
        seconds: float,
        methods: Sequence[str],
        graphs: str,
        sizes: Sequence[int],
        changes: Sequence[tuple[dict[str, Any], str]] = (({}, ""),),
    ) -> Slot:
        """Tokens a second of texts that end by themselves, plain first."""
        models, entries = self.folder / "inflated", []
        if changes[0][0]:
            changes = [({}, ""), *changes]
        for method in ("plain", *methods):
            for change, suffix in changes if method != "plain" else (({}, ""),):
                entry = self._answering(method, models, self._answers(sizes, 96, 64), change)
                entry["jobs"][0]["waves"] = 3
                compilation = dict(round_time.GRAPHS[graphs])
                entry["engine"]["compilation_config"] = compilation | {"cudagraph_capture_sizes": self._graphs(sizes)}
                env = round_time.BREAKABLE if graphs == "piecewise" else {}
                entries.append(entry | {"name": method + suffix, "seconds": 30, "env": env})
        return Slot(name=name, seconds=seconds, engines=entries, pocket=True, needs="inflate")

    def _graphs(self, sizes: Sequence[int]) -> list[int]:
        """Capture sizes: those of steps with prompts, and of requests with each width that ``auto`` may choose."""
        found = {n * rows for n in sizes for rows in (1, 6, 9, 16, 31, 61) if n * rows <= 2048}
        return sorted(found | set(round_time.PIECEWISE_SIZES))

    def _arrivals(self, seconds: float) -> Slot:
        models, prompts = self.folder / "inflated", str(_write_prompts(self.folder / "prompts.jsonl"))
        length, rates = (2.0, [4.0]) if self.rehearse else (12.0, self.options.rates)
        entries = []
        for method in ("plain", "native-eagle3", "eagle3-tree", "dart"):
            job = {"kind": "arrivals", "prompts": prompts, "rates": rates, "seconds": length}
            entry = self._answering(method, models, job | {"max_tokens": 6 if self.rehearse else 64})
            compilation = round_time.GRAPHS["piecewise"] | {"cudagraph_capture_sizes": self._graphs([1, 8, 32, 64])}
            entry["engine"] |= {"compilation_config": compilation, "max_num_seqs": 64}
            entries.append(entry | {"name": method, "seconds": 40, "env": round_time.BREAKABLE})
        return Slot(name="arrivals", seconds=seconds, engines=entries, pocket=True, needs="inflate")

    def _publishing(self) -> dict[str, Any]:
        entry = self._answering("suffix", find_pocket_or_none(), self._answers([8], 24, 64))
        entry["engine"]["speculative_config"] |= {"lookup": {"share": True}}
        entry["engine"]["enforce_eager"] = True
        entry["jobs"][0]["kind"] = "publishing"
        return entry | {"name": "suffix-share", "seconds": 20}


def find_pocket_or_none() -> Path:
    """The pocket models' folder; one that is not there where they are not."""
    try:
        return find_pocket()
    except ValueError:
        return HERE / "no-pocket"


def _rows_of(config: dict[str, Any] | None) -> set[int]:
    """Rows of a request that a whole draft of this config has, contemplate rows among them."""
    if config is None:
        return {1}
    nodes = config.get("tree", {}).get("num_nodes", 60)
    return {1, config.get("num_speculative_tokens", 7) + 1, nodes + 1, 2 * nodes + 2}


def _kv_bytes(shape: Any) -> int:
    """Bytes of a token's keys and values, target and a drafter of a few layers."""
    return 2 * 2 * (shape.num_layers + 6) * shape.num_kv_heads * shape.head_dim


def _write_prompts(file: Path) -> Path:
    """The demo's prompts, three times over: more than the most requests at a time."""
    source = find_pocket_or_none() / "prompts.jsonl"
    if source.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(3 * source.read_text())
    return file


# -- a flight --------------------------------------------------------------------------------------------------------


class Flight:
    """A flight's folder: how each slot went, with the commit that flew, its log and its document."""

    def __init__(self, out: Path, commit: str):
        self.out, self.commit = out, commit
        self._file = out / "flown.json"
        out.mkdir(parents=True, exist_ok=True)
        self.state: dict[str, dict[str, Any]] = json.loads(self._file.read_text()) if self._file.is_file() else {}

    def remember(self, archive: Path) -> None:
        """Take over what an earlier flight's archive says has passed at this commit, with its documents."""
        with tarfile.open(archive) as tar:
            members = {member.name: member for member in tar.getmembers()}
            state = json.load(tar.extractfile("flown.json"))  # type: ignore[arg-type]
            for name, one in state.items():
                if one["status"] == "passed" and one["commit"] == self.commit and name not in self.state:
                    self.state[name] = one
                    if (file := members.get(f"{name}.json")) and (document := tar.extractfile(file)):
                        (self.out / Path(file.name).name).write_bytes(document.read())

    def is_flown(self, name: str) -> bool:
        """Whether a slot has passed at this commit."""
        state = self.state.get(name, {})
        return state.get("status") == "passed" and state["commit"] == self.commit

    def fly(self, slots: Sequence[Slot], stretch: float) -> None:
        """Run what has not passed, each slot until its share of the clock is over."""
        slots = [slot for slot in slots if not self.is_flown(slot.name)]
        end = time.time()
        for slot in slots:
            why = self._missing(slot)
            if why:
                self._write(slot.name, {"status": "skipped", "why": why, "seconds": 0.0})
                continue
            end += stretch * slot.seconds
            if end - time.time() < LEAST_SECONDS:
                self._write(slot.name, {"status": "skipped", "why": "no time left", "seconds": 0.0})
                continue
            self._run(slot, end)

    def _missing(self, slot: Slot) -> str:
        if slot.pocket and not (find_pocket_or_none() / "target" / "config.json").is_file():
            return "the pocket models are not here"
        if slot.needs and not self.is_flown(slot.needs):
            return f"needs {slot.needs}"
        return ""

    def _run(self, slot: Slot, end: float) -> None:
        started, document = time.time(), self.out / f"{slot.name}.json"
        print(f"{slot.name}: until {end - started:.0f} s from now", flush=True)
        if self.state.get(slot.name, {}).get("commit") != self.commit:
            document.unlink(missing_ok=True)
        if slot.engines:
            status, why = self._engines(slot, document, end)
        else:
            assert slot.command is not None
            code = self._command(slot, [word.replace("{json}", str(document)) for word in slot.command], end, "w")
            status, why = ("passed", "") if code == 0 else ("failed", _reason(code, self._log(slot)))
        self._write(slot.name, {"status": status, "why": why, "seconds": round(time.time() - started, 1)})

    def _engines(self, slot: Slot, document: Path, end: float) -> tuple[str, str]:
        """A process after the other until every engine has a record: one that crashes costs itself alone."""
        plan = self.out / f"{slot.name}.plan"
        plan.write_text(json.dumps({"until": end, "engines": list(slot.engines)}, indent=1) + "\n")
        command = [sys.executable, str(HERE / "flight_engines.py"), str(plan), "--json", str(document)]
        mode, code = "w", None
        for _ in slot.engines:
            code = self._command(slot, command, end, mode)
            records = _records(document)
            if code in (0, None) or not any(record["status"] == "begun" for record in records.values()):
                break
            for name, record in records.items():
                if record["status"] == "begun":
                    records[name] = {"status": "failed", "why": _reason(code, self._log(slot))}
            document.write_text(json.dumps({"engines": records}, indent=1) + "\n")
            mode = "a"
        records = _records(document)
        bad = [f"{name}: {_words(record)}" for name, record in records.items() if record["status"] != "passed"]
        bad += [f"{entry['name']}: not begun" for entry in slot.engines if entry["name"] not in records]
        return ("failed", "; ".join(bad)) if bad else ("passed", "")

    def _log(self, slot: Slot) -> Path:
        return self.out / f"{slot.name}.log"

    def _command(self, slot: Slot, command: Sequence[str], end: float, mode: str) -> int | None:
        """How a command ended; None where the clock ended it."""
        with self._log(slot).open(mode) as output:
            print(shlex.join(command), file=output, flush=True)
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **slot.env}, start_new_session=True
            )
            try:
                return process.wait(max(end - time.time(), 1.0))
            except subprocess.TimeoutExpired:
                return None
            finally:  # whatever ends this, no engine stays behind
                _end_group(process)

    def _write(self, name: str, state: dict[str, Any]) -> None:
        self.state[name] = {**state, "commit": self.commit}
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(self.state, indent=1) + "\n")
        new.replace(self._file)
        why = f": {state['why']}" if state["why"] else ""
        print(f"  {name} {state['status']} after {state['seconds']:.0f} s{why}", flush=True)

    def archive(self, file: Path, names: Sequence[str]) -> None:
        """Pack the state, the documents and the ends of the logs of these slots."""
        with tarfile.open(file, "w:xz") as tar:
            for path in [self._file, *(self.out / f"{name}{kind}" for name in names for kind in (".json", ".log"))]:
                if path.is_file():
                    data = path.read_bytes()
                    data = data[-LOG_BYTES:] if path.suffix == ".log" else data
                    info = tarfile.TarInfo(path.name)
                    info.size, info.mtime = len(data), int(time.time())
                    tar.addfile(info, io.BytesIO(data))


def _records(document: Path) -> dict[str, dict[str, Any]]:
    return json.loads(document.read_text())["engines"] if document.is_file() else {}


def _words(record: dict[str, Any]) -> str:
    return record["status"] + (f", {record['why']}" if record.get("why") else "")


def _reason(code: int | None, log: Path) -> str:
    if code is None:
        return "ended by the clock"
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    # Libraries print warnings while a process ends; the error stands before them.
    errors = [line for line in lines[-40:] if "Error" in line]
    last = (errors or lines or ["no output"])[-1]
    return f"exit code {code}: {last.replace('[rank0]: ', '')[:300]}"


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """End a slot's processes, all of them."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
    process.wait()


def commit_of(root: Path) -> str:
    """HEAD, with ``-dirty`` where the tree differs; outside a repository a hash of the sources."""
    describe = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]  # results are no change
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
    digest = hashlib.sha256()
    for file in sorted(root.glob("vllm_crossspec/**/*.py")) + sorted(root.glob("benchmarks/*.py")):
        digest.update(file.read_bytes())
    return f"sources-{digest.hexdigest()[:12]}"


def listed(flight: Flight, slots: Sequence[Slot]) -> str:
    """A line for each slot."""
    lines = []
    for slot in slots:
        state = flight.state.get(slot.name, {})
        how = f"{state['status']} at {state['commit']}, {state['seconds']:.0f} s" if state else "not flown"
        engines = f", {len(slot.engines)} engines" if slot.engines else ""
        why = flight._missing(slot)
        lines.append(f"{slot.name:20} {slot.seconds:4.0f} s{engines}  {how}" + (f"  ({why})" if why else ""))
    return "\n".join([*lines, f"{sum(slot.seconds for slot in slots) / 60:.1f} minutes in all"])


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("flight", type=int, nargs="?", choices=(1, 2, 3), help="which one")
    add("--out", type=Path, default=Path("runs/flight"), help="folder of logs, documents and models")
    add("--archive", type=Path, help="where the results go (default: OUT/flight-N.tar.xz)")
    add("--flown", type=Path, nargs="+", default=[], help="archives of earlier flights, whose slots are not repeated")
    add("--only", default="", help="these slots alone, comma-separated")
    add("--shape", choices=sorted(set(SHAPES) - {"pocket"}), help="of dummy and inflated models (default: 8b)")
    add("--rates", type=_rates, default=[4.0, 8.0], help="requests a second that arrive in flight 3, comma-separated")
    add("--check", help="a command to run before all else, such as a check of vLLM's own kernels")
    add("--rehearse", action="store_true", help="small models, few tokens: see that everything runs")
    add("--stretch", type=float, default=1.0, help="times the slots' seconds")
    add("--list", action="store_true", help="print the slots and how they went, and fly none")
    add("--tables", type=Path, help="write the tables of --archives into this page")
    add("--archives", type=Path, nargs="+", default=[], help="of flights, for --tables")
    options = parser.parse_args(argv)
    if options.flight is None and not options.tables:
        parser.error("name a flight (1, 2 or 3), or a page for --tables")
    if options.tables and not options.archives:
        parser.error("--tables needs --archives of flights")
    return options


def _rates(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main(argv: Sequence[str] | None = None) -> int:
    """Fly, or write tables; 1 where a slot failed."""
    options = arguments(argv)
    if options.tables:
        flight_tables.write(options.tables, options.archives)
        return 0
    # A slot must not outlive this process: what runs it ends it where an exception passes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    out = options.out.resolve() / ("rehearsal" if options.rehearse else "")
    flight = Flight(out, commit_of(HERE.parent))
    for archive in options.flown:
        flight.remember(archive)
    slots = Slots(options, out / "models").flight(options.flight)
    if options.list:
        print(listed(flight, slots))
        return 0
    only = [name for name in options.only.split(",") if name]
    chosen = [slot for slot in slots if not only or slot.name in only]
    try:
        flight.fly(chosen, options.stretch)
    finally:
        flight.archive(options.archive or out / f"flight-{options.flight}.tar.xz", [slot.name for slot in slots])
    print(listed(flight, slots))
    return int(any(flight.state.get(slot.name, {}).get("status") == "failed" for slot in chosen))


if __name__ == "__main__":
    sys.exit(main())
