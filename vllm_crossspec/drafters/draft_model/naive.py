"""The kernel in plain PyTorch, one request at a time."""

from vllm_crossspec.drafters.draft_model.inputs import NO_SLOT, RoundRows
from vllm_crossspec.types import StepInputs


def prepare_rows(
    step: StepInputs, num_reqs: int, *, num_rows: int, max_model_len: int, writes: bool, out: RoundRows
) -> None:
    """As ``prepare_rows``."""
    num_slots = len(out.seq_lens)
    for buffer in (out.seq_lens, out.bonus_rows, out.bonus_positions):
        buffer.zero_()
    for buffer in (out.input_ids, out.positions):
        buffer[: num_rows * num_slots].zero_()
    out.row_slots[: num_rows * num_slots].fill_(NO_SLOT)
    out.request_slots.fill_(NO_SLOT)
    batch = step.batch
    for request, slot in enumerate(batch.idx_mapping[:num_reqs].tolist()):
        start = int(batch.query_start_loc[request])
        last = int(batch.query_start_loc[request + 1] - step.num_rejected[request]) - 1
        has_bonus = int(step.num_sampled[request]) > 0
        position = int(batch.positions[last]) if has_bonus else 0
        following = min(position + 1, max_model_len - 1)
        known = (
            batch.input_ids[start : last + 1].tolist()[1 - num_rows :] if has_bonus else [int(batch.input_ids[last])]
        )
        first = position + 1 - len(known)
        by_place = dict(enumerate(known, start=first))
        by_place[following] = int(step.last_sampled[slot]) if has_bonus else known[-1]
        base = min(first, max_model_len - num_rows)
        for row, place in enumerate(range(base, base + num_rows), start=num_rows * request):
            if row >= len(out.input_ids):
                break
            out.input_ids[row] = by_place[min(max(place, first), following)]
            out.positions[row] = place
            out.row_slots[row] = slot if has_bonus and writes and place in by_place else NO_SLOT
        out.query_start_loc[request] = num_rows * request
        out.seq_lens[request], out.bonus_positions[request] = base + num_rows, following
        out.bonus_rows[request] = num_rows * request + following - base
        out.request_slots[request] = slot if has_bonus and writes else NO_SLOT
        out.temperature[slot], out.seeds[slot] = step.temperature[slot], step.seeds[slot]
    out.query_start_loc[num_reqs:] = num_rows * num_reqs
