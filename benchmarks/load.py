"""Servers under load: latencies and tokens a second of each method while requests arrive by chance.

    python benchmarks/load.py --model MODEL --prompts PROMPTS.jsonl --spec eagle3.json --spec vllm-eagle3.json \\
        --out runs/load -- --dtype float32 --max-model-len 2048

A `vllm serve` for plain and each --spec in turn, with the options behind `--`; vLLM's own client, `vllm bench serve`,
sends the requests. First plain answers as many at a time as it takes: the requests a second are its capacity. Then the
same prompts arrive as a Poisson process at each of --loads, shares of that capacity; the times of arrival are the same
for every method. In --out: the client's own documents, the servers' logs, and `load.json`, `load.md` and `load.svg`.
What is there already is not measured again.
"""

import argparse
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import common

PLAIN = "plain"
START_SECONDS, END_SECONDS = 900, 60
VLLM = (sys.executable, "-m", "vllm.entrypoints.cli.main")
PERCENTILES = (50, 90, 99)
Document = Mapping[str, Any]


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's."""
    parser = common.make_parser(__doc__)
    add = parser.add_argument
    add("--model", required=True, help="folder or name of the target")
    add("--prompts", type=Path, required=True, help="JSON lines with a `prompt` each")
    add("--spec", type=Path, action="append", default=[], help="file with a --speculative-config; named by its stem")
    add("--out", type=Path, required=True, help="folder of the results")
    add("--loads", type=_shares, default=[0.5, 0.8, 1.0], help="shares of plain's capacity (default 0.5,0.8,1)")
    add("--requests", type=int, default=48, help="requests of a run; prompts are asked again if there are fewer")
    add("--tokens", type=int, default=64, help="most tokens of an answer")
    add("--repeats", type=int, default=1, help="turns of all methods")
    add("--max-num-seqs", type=int, default=16, help="requests that a server answers at a time")
    add("serve", nargs="*", metavar="-- OPTION", help="more options of `vllm serve`")
    return parser.parse_args(argv)


def check(options: argparse.Namespace) -> None:
    """Raises ValueError, a sentence, before any server starts."""
    for option, file in [("--prompts", options.prompts), *(("--spec", file) for file in options.spec)]:
        if not file.is_file():
            raise ValueError(f"{option}: there is no file {file}")
    names = [PLAIN, *(file.stem for file in options.spec)]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"--spec: two methods are called {min(twice)!r}; give the files other names")
    for file in options.spec:
        try:
            json.loads(file.read_text())
        except ValueError as problem:
            raise ValueError(f"--spec {file} is no JSON: {problem}") from problem


def _shares(text: str) -> list[float]:
    shares = [float(part) for part in text.split(",")]
    if not all(share > 0 for share in shares):
        raise argparse.ArgumentTypeError(f"shares of plain's capacity are above 0, unlike {text}")
    return shares


# -- servers ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def served(options: argparse.Namespace, spec: Path | None, log: Path) -> Iterator[int]:
    """A server's port, once it answers; ended afterwards. Raises RuntimeError if it does not start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*VLLM, "serve", options.model, "--port", str(port), "--served-model-name", "target"]
    command += ["--max-num-seqs", str(options.max_num_seqs), "--no-enable-prefix-caching", *options.serve]
    if spec is not None:
        command += ["--speculative-config", spec.read_text()]
    with log.open("w") as out:
        server = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            wait_for(port, server, log)
            yield port
        finally:
            server.terminate()
            try:
                server.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                server.kill()


def wait_for(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    """Until the server is healthy. Raises RuntimeError."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return
        time.sleep(0.5)
    raise RuntimeError(f"the server did not start; the end of {log}:\n" + "\n".join(log.read_text().splitlines()[-15:]))


def client(options: argparse.Namespace, port: int, rate: float, file: Path) -> Document:
    """What vLLM's client measured at a rate of requests a second (``inf``: all that the server takes at a time)."""
    sizes = {"num-prompts": options.requests, "custom-output-len": options.tokens, "temperature": 0, "seed": 0}
    dataset = {"dataset-name": "custom", "dataset-path": options.out / "prompts.jsonl"}
    wanted = {"percentile-metrics": "ttft,tpot,itl,e2el", "metric-percentiles": ",".join(map(str, PERCENTILES))}
    result = {"result-dir": file.parent, "result-filename": file.name}
    named = {"model": "target", "tokenizer": options.model, "port": port, "request-rate": rate}
    if rate == float("inf"):
        named["max-concurrency"] = options.max_num_seqs
    command = [*VLLM, "bench", "serve", "--disable-shuffle", "--disable-tqdm", "--save-result", "--save-detailed"]
    for name, value in {**named, **dataset, **sizes, **wanted, **result}.items():
        command += [f"--{name}", str(value)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or not file.is_file():
        raise RuntimeError(f"vLLM's client failed: {done.stderr[-2000:] or done.stdout[-2000:]}")
    return dict(json.loads(file.read_text()))


def measure(options: argparse.Namespace) -> None:
    """All runs that are not in the folder yet."""
    rows = [json.loads(line) for line in options.prompts.read_text().splitlines() if line.strip()]
    (options.out / "prompts.jsonl").write_text("".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in rows))
    capacity = options.out / "capacity.json"
    specs = {PLAIN: None, **{file.stem: file for file in options.spec}}
    for turn in range(options.repeats):
        for name, spec in specs.items():
            wanted = {load: run_file(options.out, name, load, turn) for load in options.loads}
            missing = {load: file for load, file in wanted.items() if not file.is_file()}
            if not missing:
                continue
            with served(options, spec, options.out / f"{name}.log") as port:
                client(options, port, float("inf"), options.out / "warm-up.json")
                if not capacity.is_file():
                    client(options, port, float("inf"), capacity)
                most = json.loads(capacity.read_text())["request_throughput"]
                for load, file in missing.items():
                    found = client(options, port, load * most, file)
                    times = f"{found['median_tpot_ms']:.1f} ms a token, {found['median_ttft_ms']:.0f} ms to the first"
                    print(f"{name} at {load:.0%} of {most:.2f} requests a second: {times}", flush=True)


def run_file(folder: Path, name: str, load: float, turn: int) -> Path:
    """Of one run's document."""
    return folder / f"{name}-{round(100 * load)}-{turn}.json"


# -- results ----------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A method at a load: medians over its turns."""

    method: str
    load: float
    tokens_per_second: float
    ttft: tuple[float, ...]  # ms, the percentiles
    tpot: tuple[float, ...]
    itl: tuple[float, ...]
    answer: float  # seconds from a request to its last token, median
    speedup: float | None  # of that, beside plain in the same turn; None for plain
    least: float | None  # likewise, in the worst turn
    acceptance_length: float | None
    identical: bool | None  # whether every text is plain's


def rows_of(folder: Path, methods: Sequence[str], loads: Sequence[float], repeats: int) -> list[Row]:
    """From the client's documents."""
    found = []
    for load in loads:
        plains = [json.loads(run_file(folder, PLAIN, load, turn).read_text()) for turn in range(repeats)]
        for method in methods:
            turns = [json.loads(run_file(folder, method, load, turn).read_text()) for turn in range(repeats)]

            def middle(key: str, turns: Sequence[Document] = turns) -> float:
                return statistics.median(turn[key] for turn in turns)

            ratios = [b["median_e2el_ms"] / a["median_e2el_ms"] for a, b in zip(turns, plains, strict=True)]
            is_plain = method == PLAIN
            found.append(
                Row(
                    method,
                    load,
                    middle("output_throughput"),
                    *(tuple(middle(f"p{p}_{what}_ms") for p in PERCENTILES) for what in ("ttft", "tpot", "itl")),
                    middle("median_e2el_ms") / 1e3,
                    None if is_plain else statistics.median(ratios),
                    None if is_plain else min(ratios),
                    turns[0].get("spec_decode_acceptance_length"),
                    None
                    if is_plain
                    else all(turn["generated_texts"] == plains[0]["generated_texts"] for turn in turns),
                )
            )
    return found


def table(rows: Sequence[Row]) -> list[str]:
    """In Markdown."""
    order = "/".join(map(str, PERCENTILES))
    head = ["load", "method", "times faster than plain (worst turn)", "an answer, s", "tokens a second"]
    head += [f"{name} ms {order}" for name in ("TTFT", "TPOT", "ITL")] + ["accepted", "texts"]
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    for row in rows:
        faster = "" if row.speedup is None else f"{row.speedup:.2f} ({row.least:.2f})"
        times = [" ".join(f"{value:.0f}" for value in values) for values in (row.ttft, row.tpot, row.itl)]
        accepted = "" if row.acceptance_length is None else f"{row.acceptance_length:.2f}"
        texts = {None: "", True: "plain's", False: "others"}[row.identical]
        cells = [f"{row.load:.0%}", row.method, faster, f"{row.answer:.2f}", f"{row.tokens_per_second:.1f}"]
        lines.append(f"| {' | '.join([*cells, *times, accepted, texts])} |")
    return lines


def draw(rows: Sequence[Row], file: Path) -> None:
    """Seconds of an answer, and milliseconds to its first token, by load."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style = {"svg.fonttype": "none", "svg.hashsalt": "crossspec", "font.size": 9}  # the same rows give the same file
    with plt.rc_context(style):
        figure, parts = plt.subplots(1, 2, figsize=(9.0, 3.6), layout="constrained")
        for axes, what in zip(parts, ("seconds of an answer (median)", "ms to the first token (p99)"), strict=True):
            for method in dict.fromkeys(row.method for row in rows):
                own = [row for row in rows if row.method == method]
                values = [row.answer if what.startswith("seconds") else row.ttft[-1] for row in own]
                style_of = "o--" if method == PLAIN else "o-"
                axes.plot([100 * row.load for row in own], values, style_of, label=method, markersize=4)
            axes.set(xlabel="arrivals, % of plain's capacity", ylabel=what)
            axes.set_ylim(bottom=0)
            axes.spines[["top", "right"]].set_visible(False)
        parts[0].legend(fontsize=8, frameon=False)
        figure.savefig(file, metadata={"Date": None})
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write the results; 2 for what cannot be measured."""
    options = arguments(argv)
    try:
        check(options)
        options.out.mkdir(parents=True, exist_ok=True)
        measure(options)
    except (ValueError, RuntimeError) as problem:
        print(problem, file=sys.stderr)
        return 2
    rows = rows_of(options.out, [PLAIN, *(file.stem for file in options.spec)], options.loads, options.repeats)
    lines = table(rows)
    (options.out / "load.md").write_text("\n".join(lines) + "\n")
    draw(rows, options.out / "load.svg")
    print("\n".join(lines))
    document = {"rows": [row._asdict() for row in rows], "meta": common.origin("load")}
    (options.out / "load.json").write_text(json.dumps(document, indent=1) + "\n")
    common.emit(document, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
