"""vLLM's ``propose``: its long list of arguments, to and from our tuple."""

import inspect
from typing import Any

from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from vllm_crossspec.types import StepInputs

_OURS = {
    "input_batch": "batch",
    "aux_hidden_states": "tapped_hidden_states",
    "dummy_run": "is_dummy",
    "skip_attn_for_dummy_run": "skips_attention",
    "dp_sync_state": "dp_sync",
}
_VLLMS = {ours: vllms for vllms, ours in _OURS.items()}
_ORDER = tuple(inspect.signature(BaseSpeculator.propose).parameters)[1:]


def step_inputs(*arguments: Any, **options: Any) -> StepInputs:
    """What vLLM hands to ``propose``, all tapped states among it."""
    given = {**dict(zip(_ORDER, arguments, strict=False)), **options}
    scheduled = given.pop("num_speculative_tokens", None)
    return StepInputs(num_scheduled=scheduled, **{_OURS.get(name, name): value for name, value in given.items()})


def native_arguments(step: StepInputs) -> dict[str, Any]:
    """The keyword arguments of vLLM's ``propose`` for this step."""
    given = step._asdict()
    del given["num_scheduled"]  # of the engine, where a drafter has a length of its own
    given["num_speculative_tokens"] = given.pop("num_drafts")
    return {_VLLMS.get(name, name): value for name, value in given.items()}
