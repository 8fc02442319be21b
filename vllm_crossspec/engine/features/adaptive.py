"""Steps in which each request brings its own number of draft nodes."""

import dataclasses
from collections.abc import Callable

from vllm.v1.core.sched.output import SchedulerOutput


def cut_drafts(planned: SchedulerOutput, width_of: Callable[[str], int | None]) -> SchedulerOutput:
    """The step with no more draft tokens of a request than its tree has.

    ``planned`` stays as it is: with engine and worker in one process the scheduler will read it again, to count what
    was cut as rejected.

    Args:
        planned: of the scheduler.
        width_of: takes a request's id; draft tokens that it may bring, or None for all that were planned.

    Returns:
        ``planned`` itself where nothing is to be cut.
    """
    drafts = planned.scheduled_spec_decode_tokens
    widths = {req_id: width_of(req_id) for req_id in drafts}
    excess = {
        req_id: len(drafts[req_id]) - width
        for req_id, width in widths.items()
        if width is not None and width < len(drafts[req_id])
    }
    if not excess:
        return planned
    return dataclasses.replace(
        planned,
        scheduled_spec_decode_tokens=drafts | {r: drafts[r][: len(drafts[r]) - n] for r, n in excess.items()},
        num_scheduled_tokens=planned.num_scheduled_tokens
        | {r: planned.num_scheduled_tokens[r] - n for r, n in excess.items()},
        total_num_scheduled_tokens=planned.total_num_scheduled_tokens - sum(excess.values()),
    )
