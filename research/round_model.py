"""What the product's model of a round says, beside rounds that engines ran: numbers of requests and of draft tokens.

    python research/round_model.py --widths 0,3,8,20,60 --batches 1,2,4,8,16,32,64,128 --json work/round-model.json

The model is `load/rows.py` with what an engine with ``"auto"`` timed when it started; 20 draft tokens, batches that are
no powers of two and steps of many rows it did not time. Rounds are those of an EAGLE-3 tree that always has as many
nodes, by an engine for each number; requests are the demo's prompts. A round has parts that the model leaves out, since
all widths have them: the host's, and the trees' rows. So widths are compared with none: how much longer a round takes.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from common import emit, make_parser, numbers, origin
from hunt_cases import POCKET, chat, engine_here, questions

from vllm_crossspec.load.rows import RowCosts

ROUNDS = 12
PROMPT_ROOM = 40
"""Steps in which all requests have begun."""
Seconds = dict[tuple[int, int], float]
"""By draft tokens of a request and requests."""


def spec_of(drafter: Path, schedule: Any) -> dict[str, Any]:
    """EAGLE-3's tree of 60 nodes, as many of them as the schedule says."""
    tree = {"num_nodes": 60, "depth": 8, "top_k": 10, "by_batch_size": schedule}
    return {"method": "eagle3", "model": str(drafter), "tree": tree}


def points_of(widths: list[int], batches: list[int], most_rows: int) -> list[tuple[int, int]]:
    """Widths and batches whose steps have no more rows."""
    return [(width, batch) for width in widths for batch in batches if batch * (width + 1) <= most_rows]


def modelled(given: argparse.Namespace, points: list[tuple[int, int]], settings: dict[str, Any]) -> Seconds:
    """What the model says."""
    with engine_here(given.model, spec_of(given.drafter, "auto"), **settings) as llm:
        costs = RowCosts(llm.collective_rpc("crossspec_step_costs")[0])
    return {
        (width, batch): float(costs.step(batch, np.array([batch * (width + 1)]))[0])
        + (costs.draft(batch, width) if width else 0.0)
        for width, batch in points
    }


def measured(given: argparse.Namespace, points: list[tuple[int, int]], settings: dict[str, Any]) -> Seconds:
    """What rounds took."""
    found = {}
    for width in track(sorted({width for width, _ in points}), "engines"):
        with engine_here(given.model, spec_of(given.drafter, {"1": width}), **settings) as llm:
            for batch in sorted((batch for own, batch in points if own == width), reverse=True):
                found[width, batch] = round_of(llm, batch)
    return found


def round_of(llm: Any, batch: int) -> float:
    """Seconds of a round of so many requests that all decode: the mean of :data:`ROUNDS`."""
    from vllm import SamplingParams

    engine, names = llm.llm_engine, [f"{batch}-{number}" for number in range(batch)]
    endless = SamplingParams(temperature=0.0, max_tokens=PROMPT_ROOM * 12, ignore_eos=True)
    for number, name in enumerate(names):
        engine.add_request(name, chat(questions()[number % len(questions())]), endless)
    waiting = set(names)
    while waiting:
        waiting -= {output.request_id for output in engine.step() if output.outputs[0].token_ids}
    llm.collective_rpc("crossspec_begin_shares")
    for _ in range(ROUNDS + 3):
        engine.step()
    shares = llm.collective_rpc("crossspec_end_shares")[0]
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    return float(shares["seconds"])


def compared(model: Seconds, rounds: Seconds) -> list[dict[str, Any]]:
    """A row a point: milliseconds, and how much longer than without drafts, by the model and as it was."""
    return [
        {
            "batch": batch,
            "width": width,
            "model_ms": round(1e3 * model[width, batch], 2),
            "round_ms": round(1e3 * rounds[width, batch], 2),
            "model_times": round(model[width, batch] / model[0, batch], 3),
            "round_times": round(rounds[width, batch] / rounds[0, batch], 3),
        }
        for width, batch in sorted(rounds, key=lambda point: (point[1], point[0]))
    ]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", type=Path, default=POCKET / "target", help="target (default: the pocket one)")
    parser.add_argument("--drafter", type=Path, default=POCKET / "eagle3", help="an EAGLE-3 checkpoint for it")
    parser.add_argument(
        "--widths", type=numbers, default=[0, 3, 8, 20, 60], help="draft tokens; 0 is always among them"
    )
    parser.add_argument("--batches", type=numbers, default=[1, 2, 4, 8, 16, 32, 64, 128], help="requests")
    parser.add_argument("--most-rows", type=int, default=1024, help="of a step that is looked at (default: 1024)")
    parser.add_argument("--dtype", default="float32", help="of target and drafter (default: float32)")
    given = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    points = points_of(sorted({0, *given.widths}), given.batches, given.most_rows)
    settings = {
        "dtype": given.dtype,
        "max_model_len": 1024,
        "max_num_seqs": max(given.batches),
        "max_num_batched_tokens": max(2048, given.most_rows),
        "kv_cache_memory_bytes": 1 << 30,
        "disable_log_stats": True,
    }
    rows = compared(modelled(given, points, settings), measured(given, points, settings))
    emit({"meta": origin("round_model"), "rows": rows}, given.json)


if __name__ == "__main__":
    main()
