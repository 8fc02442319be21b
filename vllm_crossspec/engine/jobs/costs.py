"""One engine that times its rounds and ends, in a process of its own: what `crossspec costs` runs.

Started as ``python -m vllm_crossspec.engine.jobs.costs JOB EVENTS``, as :mod:`vllm_crossspec.engine.jobs.offline` is.
The job has ``engine`` (arguments of vLLM's LLM).

Events, by their ``event``:
    costs: ``costs``, as :func:`vllm_crossspec.router.costs.as_json` has them, None where nothing was timed; with what
        runs.
    error: ``message`` says in a sentence what the user can mend; the process ends with status 1.
"""

import os
import sys
from typing import Any

from vllm_crossspec.engine.jobs.offline import Emit, environment, run_job, start_engine


def tell_costs(job: dict[str, Any], emit: Emit) -> None:
    """Start the engine, which times its rounds, and tell what it found."""
    os.environ.pop("CROSSSPEC_FIXED_WIDTHS", None)  # which forbids what this is for
    llm = start_engine(job["engine"])
    emit("costs", costs=llm.collective_rpc("crossspec_round_costs")[0], **environment())


if __name__ == "__main__":
    sys.exit(run_job(sys.argv[1:], tell_costs))
