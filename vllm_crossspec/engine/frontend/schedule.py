"""Draft lengths by running requests: what the settings say, and whether it is measured."""

import os
from typing import Any

from vllm_crossspec.config import CrossSpecConfig
from vllm_crossspec.drafters.base import drafter_kind
from vllm_crossspec.ranks import step_together
from vllm_crossspec.twins import runs_kernels


def can_measure(parallel_config: Any) -> bool:
    """Whether start-up can time steps: not where ranks step together, which would choose apart, nor in an interpreter.

    ``CROSSSPEC_FIXED_WIDTHS=1`` keeps trees whole: what is counted is then the same from run to run.
    """
    from vllm.platforms import current_platform

    if os.environ.get("CROSSSPEC_FIXED_WIDTHS") == "1" or step_together(parallel_config):
        return False
    return not current_platform.is_cpu() or runs_kernels()


def resolve_schedules(settings: CrossSpecConfig, can_measure: bool) -> CrossSpecConfig:
    """Trees without a schedule get "auto"; none stays "auto" where nothing is measured or a drafter has its own.

    What drafts nothing is planned nothing.
    A router that weighs a round's tokens against its cost, and may choose not to draft, takes the place of a schedule.
    """
    given = [d.tree.by_batch_size for d in settings.drafters.values()]
    trees_recorded = any(d.adaptive is not None and d.adaptive.type == "record" for d in settings.drafters.values())
    is_auto = can_measure and not trees_recorded and not any(isinstance(schedule, dict) for schedule in given)
    records = settings.router is not None and settings.router.policy == "record"
    drafts_none = all(drafter_kind(d.kind, "").supplies == "none" for d in settings.drafters.values())
    drafters = {}
    for name, drafter in settings.drafters.items():
        schedule: Any = drafter.tree.by_batch_size
        if records or drafts_none:
            schedule = {1: 0}  # a recording keeps drafts, and has none verified
        elif schedule == "auto" or (schedule is None and not drafter.tree.is_chain and not settings.routes_load):
            schedule = "auto" if is_auto else None
        tree = drafter.tree.model_copy(update={"by_batch_size": schedule})
        drafters[name] = drafter.model_copy(update={"tree": tree})
    return settings.model_copy(update={"drafters": drafters})
