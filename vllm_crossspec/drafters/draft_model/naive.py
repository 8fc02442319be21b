"""The plain twin of the kernel: one request after the other."""

import torch

from vllm_crossspec.drafters.draft_model.inputs import NOBODY, NUM_ROWS, PairRows


def prepare_pairs(
    *,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    query_start_loc: torch.Tensor,
    idx_mapping: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    last_sampled: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    max_model_len: int,
    writes: bool,
    out: PairRows,
) -> None:
    """See :func:`vllm_crossspec.drafters.draft_model.inputs.prepare_pairs`."""
    for buffer in (out.input_ids, out.positions, out.seq_lens, out.bonus_positions):
        buffer[: NUM_ROWS * len(out.seq_lens)].zero_()
    out.request_slots.fill_(NOBODY)
    for request, slot in enumerate(idx_mapping.tolist()):
        last = int(query_start_loc[request + 1] - num_rejected[request]) - 1
        has_bonus = int(num_sampled[request]) > 0
        position = int(positions[last]) if has_bonus else 0
        following = min(position + 1, max_model_len - 1)
        tokens = [int(input_ids[last]), int(last_sampled[slot] if has_bonus else input_ids[last])]
        for row, (token, place) in enumerate(zip(tokens, (position, following), strict=True), start=NUM_ROWS * request):
            if row < len(out.input_ids):
                out.input_ids[row], out.positions[row] = token, place
        out.query_start_loc[request] = NUM_ROWS * request
        out.seq_lens[request], out.bonus_positions[request] = following + 1, following
        out.request_slots[request] = slot if has_bonus and writes else NOBODY
        out.temperature[slot], out.seeds[slot] = temperature[slot], seeds[slot]
    out.query_start_loc[len(idx_mapping) :] = NUM_ROWS * len(idx_mapping)
