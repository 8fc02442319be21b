"""vLLM's ``propose``: its long list of arguments, to and from our tuple."""

from typing import Any

import torch

from vllm_crossspec.types import StepInputs


def step_inputs(
    input_batch: Any,
    attn_metadata: dict[str, Any] | None,
    slot_mappings: dict[str, torch.Tensor] | None,
    last_hidden_states: torch.Tensor,
    aux_hidden_states: list[torch.Tensor] | None,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    last_sampled: torch.Tensor,
    next_prefill_tokens: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    dp_sync_state: Any = None,
    dummy_run: bool = False,
    skip_attn_for_dummy_run: bool = False,
    mm_inputs: Any = None,
    is_profile: bool = False,
    num_speculative_tokens: int | None = None,
) -> StepInputs:
    """What vLLM hands to ``propose``, all tapped states among it."""
    return StepInputs(
        batch=input_batch,
        attn_metadata=attn_metadata,
        slot_mappings=slot_mappings,
        last_hidden_states=last_hidden_states,
        tapped_hidden_states=aux_hidden_states,
        num_sampled=num_sampled,
        num_rejected=num_rejected,
        last_sampled=last_sampled,
        next_prefill_tokens=next_prefill_tokens,
        temperature=temperature,
        seeds=seeds,
        options={
            "dp_sync_state": dp_sync_state,
            "dummy_run": dummy_run,
            "skip_attn_for_dummy_run": skip_attn_for_dummy_run,
            "mm_inputs": mm_inputs,
            "is_profile": is_profile,
        },
        num_scheduled=num_speculative_tokens,
    )


def native_arguments(step: StepInputs) -> dict[str, Any]:
    """The keyword arguments of vLLM's ``propose`` for this step."""
    given, vllms_names = step._asdict(), {"batch": "input_batch", "tapped_hidden_states": "aux_hidden_states"}
    options = given.pop("options")
    del given["num_scheduled"]  # of the engine; a drafter's own is among its options
    return {vllms_names.get(name, name): value for name, value in given.items()} | options
