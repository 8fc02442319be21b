"""The plain twin of the kernel: one request after the other."""

from vllm_crossspec.drafters.draft_model.inputs import NOBODY, NUM_ROWS, PairRows
from vllm_crossspec.types import StepInputs


def prepare_pairs(step: StepInputs, num_reqs: int, *, max_model_len: int, writes: bool, out: PairRows) -> None:
    """See :func:`vllm_crossspec.drafters.draft_model.inputs.prepare_pairs`."""
    for buffer in (out.input_ids, out.positions, out.seq_lens, out.bonus_positions):
        buffer[: NUM_ROWS * len(out.seq_lens)].zero_()
    out.request_slots.fill_(NOBODY)
    batch = step.batch
    for request, slot in enumerate(batch.idx_mapping[:num_reqs].tolist()):
        last = int(batch.query_start_loc[request + 1] - step.num_rejected[request]) - 1
        has_bonus = int(step.num_sampled[request]) > 0
        position = int(batch.positions[last]) if has_bonus else 0
        following = min(position + 1, max_model_len - 1)
        accepted = int(batch.input_ids[last])
        tokens = [accepted, int(step.last_sampled[slot]) if has_bonus else accepted]
        for row, (token, place) in enumerate(zip(tokens, (position, following), strict=True), start=NUM_ROWS * request):
            if row < len(out.input_ids):
                out.input_ids[row], out.positions[row] = token, place
        out.query_start_loc[request] = NUM_ROWS * request
        out.seq_lens[request], out.bonus_positions[request] = following + 1, following
        out.request_slots[request] = slot if has_bonus and writes else NOBODY
        out.temperature[slot], out.seeds[slot] = step.temperature[slot], step.seeds[slot]
    out.query_start_loc[num_reqs:] = NUM_ROWS * num_reqs
