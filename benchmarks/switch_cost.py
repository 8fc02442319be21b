"""What switching between drafters and routing cost beside a decoding round (WhiFlash, tables 4, 6 and 12).

Loads a target with both drafters and draft trees, with dummy weights at real shapes. It times dummy rounds of each
drafter, catching up with missed tokens, and the routers. The last line is one JSON document:

    python benchmarks/switch_cost.py --shape 8b --batch-sizes 1,8 --contexts 512,1024,2048,4096,8192

Times mean something on a GPU only. benchmarks/README.md describes the figures.
"""

import argparse
import functools
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
import round_time
from common import emit, make_parser, numbers
from methods import model_folders
from shapes import random_router

METHOD = "whiflash-neural"
POLICIES = ("entropy", "neural", "goodput")
NUM_WARM_UPS = 3


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; what ``round_time`` asks for besides gets its defaults."""
    parser = make_parser(__doc__)
    add = parser.add_argument
    round_time.add_engine(parser)
    add("--batch-sizes", type=numbers, default=[1, 8], help="requests of the rounds, comma-separated")
    add("--contexts", type=numbers, default=[512, 1024, 2048, 4096, 8192], help="tokens before the drafts")
    add("--backlogs", type=numbers, default=[1, 64, 90, 128, 512, 1024], help="missed tokens of the one that switches")
    add("--nodes", type=int, default=60, help="draft tokens of a round")
    add("--repeats", type=int, default=20, help="how often each is timed")
    options = parser.parse_args(argv)
    others = round_time.arguments(["--methods", METHOD, "--threshold", "0"])
    options.context, options.rounds, options.tree_sizes = max(options.contexts), 1, [options.nodes]
    return argparse.Namespace(**vars(others) | vars(options))


def time_calls(call: Any, device: torch.device, repeats: int) -> float:
    """Median milliseconds of ``call()``: on a GPU of its stream, as the host feeds it."""
    from vllm_crossspec.load.clock import StepClock

    for _ in range(NUM_WARM_UPS):
        call()
    clock = StepClock(device)
    for _ in range(repeats):
        clock.mark()
        call()
        clock.mark()
    return 1e3 * statistics.median(clock.spans())


def router_call(host: Any, policy: str, num_reqs: int) -> Any:
    """One decision of a router of the target's size over a batch, as a function without arguments."""
    from vllm_crossspec.routing.base import Router, RouterSettings

    config = host.vllm_config.model_config
    hidden_size, vocab_size = config.get_hidden_size(), config.get_vocab_size()
    router = Router(
        RouterSettings(policy, host.order, (0.0,), random_router(hidden_size)),
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        max_num_reqs=num_reqs,
        dtype=config.dtype,
        device=host.device,
    )
    like = {"device": host.device, "dtype": config.dtype}
    logits, states = torch.zeros(num_reqs, vocab_size, **like), torch.zeros(num_reqs, hidden_size, **like)
    rows = torch.arange(num_reqs, device=host.device)
    slots, routes = rows.int(), rows.int()
    sampled = torch.ones_like(slots)

    def decide() -> None:
        router.observe_logits(logits, rows, slots)
        router.decide(states, rows, slots, sampled, routes)

    return decide


@torch.inference_mode()
def measure(worker: Any, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs in the worker: the rows of the document."""
    from vllm_crossspec.load import measure as load

    runner, repeats = worker.model_runner, job["repeats"]
    host, device = runner.speculator, runner.device
    rows = []
    for num_reqs in job["batch_sizes"]:
        calls = {name: functools.partial(host.backlogs.catch_up_on_nothing, name) for name in host.order}
        switches = {
            name: {n: time_calls(functools.partial(call, n), device, repeats) for n in job["backlogs"]}
            for name, call in calls.items()
        }
        routers = {p: time_calls(router_call(host, p, num_reqs), device, repeats) for p in POLICIES}
        for context in job["contexts"]:
            for name in host.order:
                with host.drafting_alone(name):
                    point = num_reqs, runner.num_speculative_steps
                    cost = load.time_steps(runner, [point], context)[point]
                rows.append(
                    {"batch_size": num_reqs, "context": context, "drafter": name}
                    | describe(1e3 * cost.step, 1e3 * cost.draft, switches[name], routers)
                )
    return rows


def describe(step: float, draft: float, switches: dict[int, float], routers: dict[str, float]) -> dict[str, Any]:
    """One row's figures from milliseconds: of the target's step, the draft, each backlog and each policy."""
    whole = step + draft

    def beside_round(milliseconds: float) -> dict[str, float]:
        return {"ms": round(milliseconds, 4), "percent_of_round": round(100 * milliseconds / whole, 2)}

    return {
        "round_ms": round(whole, 4),
        "draft_ms": round(draft, 4),
        "switch": {str(n): beside_round(milliseconds) for n, milliseconds in switches.items()},
        "router": {policy: beside_round(milliseconds) for policy, milliseconds in routers.items()},
    }


def main(argv: list[str] | None = None) -> None:
    """Start the engine, measure in its worker, print."""
    options = arguments(argv)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    folder = Path(tempfile.mkdtemp(prefix="switch-cost-"))
    import probe
    from vllm import LLM
    from vllm.platforms import current_platform

    from vllm_crossspec.jobs.offline import keep_to_one_process

    settings = round_time.engine_settings(METHOD, model_folders(options, folder), options)
    if current_platform.is_cpu():
        keep_to_one_process(settings)
    # No prompt is computed: the dummy rounds' rows are all that must fit.
    settings["max_num_batched_tokens"] = max(8192, max(options.batch_sizes) * (options.nodes + 1))
    llm = LLM(**settings)
    job = {name: getattr(options, name) for name in ("batch_sizes", "contexts", "backlogs", "repeats")}
    rows = llm.collective_rpc(measure, args=(job,))[0]
    engine = llm.collective_rpc(probe.describe)[0]
    meta = round_time.meta({METHOD: {"engine": engine}}, options) | {"benchmark": "switch_cost", "engine": engine}
    emit({"meta": meta, "rows": rows}, options.json)


if __name__ == "__main__":
    main()
