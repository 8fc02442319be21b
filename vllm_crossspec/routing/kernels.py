"""The router's decision in at most three launches: the target's entropy, predicted gains, and the choice.

Shape legend: R requests of the batch, S request slots, L logits rows, V vocabulary, T target tokens of the step, H
hidden size, m middle size of the router (H // 8), N drafters (the last one is the reference), C categories of requests.

No launch writes data of the vocabulary's size: each part of a row is reduced to three numbers in registers. No launch
uses atomics, so the same inputs give the same bits.
"""

# mypy: disable-error-code="no-untyped-def"
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_crossspec.kernel_args import operand_type

ENTROPY, NEURAL, GOODPUT, OTHER = 0, 1, 2, 3
"""The rules of :func:`decide`; OTHER is for policies with their own decider."""
ENTROPY_BLOCK = 4096
"""Logits per program: 32 per thread."""
OWN_MEMORY = 0.95
"""Decay of a request's statistics with a drafter per round with that drafter."""
PRIOR_OF_CORRECTION = 4.0
"""Weight of a drafter's mean length, in rounds, when a request's rounds correct predictions."""

_ENTROPY, _NEURAL, _GOODPUT = (tl.constexpr(policy) for policy in (ENTROPY, NEURAL, GOODPUT))
_MATRIX_ROWS = 5  # from this many requests, tensor cores beat reading the weights once per request
_WIDE_ROWS = 65  # from this many requests, wide tiles beat reading the weights once per 16 requests
_VECTOR_MIDDLE = 4  # middle units per program for few requests, so that all processors have work
_DECIDE_ROWS = 16
_OWN_MEMORY, _PRIOR = tl.constexpr(OWN_MEMORY), tl.constexpr(PRIOR_OF_CORRECTION)


# One variant for every batch, so that no request waits for a compilation.
@triton.jit(do_not_specialize=["num_logits", "num_rows"])
def _entropy_parts_kernel(
    logits_ptr,  # float [L, V] in any precision; -inf forbids a token
    logits_stride,
    num_logits,
    vocab_size,
    rows_ptr,  # int64 [R] the logits row of each request; values outside 0..L-1 are padding
    num_rows,
    scales_ptr,  # float32 [S] factor of each slot's logits: 1 / temperature
    idx_mapping_ptr,  # int [R] slot of each request; negative for padding
    parts_ptr,  # float32 [at least R, splits, 3], its first R are written; (-inf, 0, 0) for padding
    parts_stride,
    SCALES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    split = tl.program_id(1)
    v = split * BLOCK_V + tl.arange(0, BLOCK_V)
    row = tl.load(rows_ptr + r, mask=r < num_rows, other=-1).to(tl.int64)
    # Dummy replays of a captured graph have stale rows, so rows are checked before they become addresses.
    wanted = (row >= 0) & (row < num_logits)
    element = wanted[:, None] & (v < vocab_size)[None, :]
    x = tl.load(logits_ptr + (row * logits_stride)[:, None] + v[None, :], mask=element, other=float("-inf"))
    x = x.to(tl.float32)
    if SCALES:
        slot = tl.load(idx_mapping_ptr + r, mask=wanted, other=-1).to(tl.int64)
        x *= tl.load(scales_ptr + slot, mask=slot >= 0, other=1.0)[:, None]
    # A grammar may forbid all tokens of this part (-inf): -inf - -inf and 0 * -inf would be NaN. NaN counts as -inf.
    possible = x > float("-inf")
    maximum = tl.max(tl.where(possible, x, float("-inf")), axis=1)
    shift = tl.where(maximum == float("-inf"), 0.0, maximum)
    x = tl.where(possible, x, shift[:, None]) - shift[:, None]
    weight = tl.where(possible, tl.exp(x), 0.0)
    out = parts_ptr + r.to(tl.int64) * parts_stride + split * 3
    inside = r < num_rows
    tl.store(out, maximum, mask=inside)
    tl.store(out + 1, tl.sum(weight, axis=1), mask=inside)
    tl.store(out + 2, tl.sum(x * weight, axis=1), mask=inside)


def entropy_splits(vocab_size: int) -> int:
    """Parts of a row of logits in :func:`entropy_parts`."""
    return -(-vocab_size // ENTROPY_BLOCK)


def entropy_parts(
    *,
    logits: torch.Tensor,
    rows: torch.Tensor,
    parts: torch.Tensor,
    idx_mapping: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> None:
    """Reduce chosen rows of logits to parts of their entropy; one launch.

    For a part with the largest logit M these are M, Z = sum of exp(x - M), and T = sum of (x - M) exp(x - M). A row's
    entropy is ln Z - T / Z over all parts, converted to one M. Shapes as in the kernel; ``scales`` None: 1.
    """
    num_rows, splits = rows.shape[0], parts.shape[1]
    assert logits.stride(1) == 1 and parts.is_contiguous() and parts.shape[0] >= num_rows
    assert splits == entropy_splits(logits.shape[1]) and parts.shape[2] == 3
    _entropy_parts_kernel[(num_rows, splits)](
        logits, logits.stride(0), *logits.shape, rows, num_rows, parts if scales is None else scales, idx_mapping,
        parts, parts.stride(0), SCALES=scales is not None, BLOCK_R=1, BLOCK_V=ENTROPY_BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_hidden", "num_rows"])
def _gain_parts_kernel(
    hidden_ptr,  # float [T, H] final states of the target
    hidden_stride,
    num_hidden,
    rows_ptr,  # int64 [R] the row of each request; values outside 0..T-1 are padding, with state 0
    num_rows,
    w1_ptr,  # [m, H] contiguous, of the hidden states' type
    b1_ptr,  # float32 [m]
    w2_ptr,  # float32 [N - 1, m] contiguous
    parts_ptr,  # float32 [R, blocks, N - 1], written, of a buffer of R * max_gain_blocks(m) * (N - 1)
    parts_stride,
    middle,
    HIDDEN: tl.constexpr,
    GAINS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PRECISION: tl.constexpr,
    OPERAND: tl.constexpr,
):
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    block = tl.program_id(1)
    j = block * BLOCK_M + tl.arange(0, BLOCK_M)
    is_middle = j < middle
    row = tl.load(rows_ptr + r, mask=r < num_rows, other=-1).to(tl.int64)
    wanted = (row >= 0) & (row < num_hidden)
    hidden_row = hidden_ptr + tl.where(wanted, row, 0) * hidden_stride
    w1_row = w1_ptr + j.to(tl.int64) * HIDDEN
    h = tl.arange(0, BLOCK_H)
    total = tl.zeros([BLOCK_M, BLOCK_H], tl.float32) if BLOCK_R == 1 else tl.zeros([BLOCK_R, BLOCK_M], tl.float32)
    for start in range(0, HIDDEN, BLOCK_H):
        column = start + h
        inside = column < HIDDEN
        states = tl.load(hidden_row[:, None] + column[None, :], mask=wanted[:, None] & inside[None, :], other=0.0)
        element = is_middle[:, None] & inside[None, :]
        weights = tl.load(w1_row[:, None] + column[None, :], mask=element, other=0.0)
        if BLOCK_R == 1:
            total += weights.to(tl.float32) * states.to(tl.float32)
        else:
            total += tl.dot(states.to(OPERAND), tl.trans(weights.to(OPERAND)), input_precision=PRECISION)
    if BLOCK_R == 1:
        total = tl.sum(total, axis=1)[None, :]

    total += tl.load(b1_ptr + j, mask=is_middle, other=0.0)[None, :]
    active = 0.5 * total * (1.0 + tl.erf(total * 0.7071067811865476))
    out = parts_ptr + r.to(tl.int64) * parts_stride + block * GAINS
    for gain in tl.static_range(GAINS):
        w2 = tl.load(w2_ptr + gain * middle + j, mask=is_middle, other=0.0)
        tl.store(out + gain, tl.sum(active * w2[None, :], axis=1), mask=r < num_rows)


class GainTiles(NamedTuple):
    """Sizes of :func:`gain_parts`."""

    rows: int  # requests of a program; 1 is a matrix-vector product without tensor cores
    middle: int  # middle units of a program
    hidden: int  # hidden units of a step


def gain_tiles(num_rows: int, is_exact: bool) -> GainTiles:
    """The tiles for ``num_rows`` requests; ``is_exact`` for float32, which needs registers, not tensor cores."""
    if num_rows < _MATRIX_ROWS:
        return GainTiles(1, _VECTOR_MIDDLE, 1024)
    return GainTiles(16 if num_rows < _WIDE_ROWS or is_exact else 64, 16, 64 if is_exact else 128)


def batch_variants(max_num_reqs: int) -> list[int]:
    """One batch size for each kernel variant of batches of up to ``max_num_reqs`` requests."""
    return [num_reqs for num_reqs in (1, _MATRIX_ROWS, _WIDE_ROWS) if num_reqs <= max_num_reqs]


def max_gain_blocks(middle: int) -> int:
    """Most parts of a request in :func:`gain_parts` with any tiles."""
    return -(-middle // _VECTOR_MIDDLE)


def gain_parts(
    *,
    hidden_states: torch.Tensor,
    rows: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor,
    w2: torch.Tensor,
    parts: torch.Tensor,
    tiles: GainTiles | None = None,
) -> int:
    """The router's network up to the last sum: GELU(h W1' + b1) W2', by parts of the middle layer; one launch.

    It is WhiFlash's neural policy (Kwon et al. 2026, section 3.3.2 and appendix A), with one output for each drafter
    except the reference. The GELU is exact (erf); sums are in float32. Shapes as in the kernel; ``tiles`` None: chosen
    by R.

    Returns:
        Number of parts of a request.
    """
    num_rows, (middle, hidden_size), num_gains = rows.shape[0], w1.shape, w2.shape[0]
    is_exact = hidden_states.dtype == torch.float32
    tiles = tiles or gain_tiles(num_rows, is_exact)
    blocks: int = -(-middle // tiles.middle)
    assert hidden_states.stride(1) == 1 and w1.is_contiguous() and w2.is_contiguous() and parts.is_contiguous()
    assert hidden_states.shape[1] == hidden_size and hidden_states.dtype == w1.dtype
    assert parts.numel() >= num_rows * blocks * num_gains
    _gain_parts_kernel[(triton.cdiv(num_rows, tiles.rows), blocks)](
        hidden_states, hidden_states.stride(0), hidden_states.shape[0], rows, num_rows,
        w1, b1, w2, parts, blocks * num_gains, middle, HIDDEN=hidden_size, GAINS=num_gains,
        BLOCK_R=tiles.rows, BLOCK_M=tiles.middle, BLOCK_H=tiles.hidden,
        PRECISION="ieee" if is_exact else "tf32", OPERAND=operand_type(hidden_states.dtype),
    )  # fmt: skip
    return blocks


class Rule(NamedTuple):
    """The rule of a decision; its tensors are on the device, so a captured graph sees changes."""

    policy: int  # ENTROPY, NEURAL or GOODPUT
    thresholds: torch.Tensor  # float32 [C, N - 1] of ENTROPY (nats) and NEURAL (tokens), by category of request
    costs: torch.Tensor  # float32 [2, N] of GOODPUT at this batch size: seconds of a round and of a switch to a drafter
    mean_lengths: torch.Tensor  # float32 [N] mean acceptance length of each drafter, tokens
    corrects: bool = False  # whether NEURAL and GOODPUT correct predictions by a request's own rounds


class Decision(NamedTuple):
    """Outputs of a decision, at least R rows each."""

    routes: torch.Tensor  # int32 [R] drafter of each request; -1 for padding and inside a prompt
    entropy: torch.Tensor  # float32 [R] nats, written under ENTROPY; 0 without a route
    gains: torch.Tensor  # float32 [R, N - 1] tokens over the reference, written otherwise; 0 without a route


@triton.jit
def merged_entropy(parts, split, is_part):
    """Entropy [BLOCK_R] of rows whose parts begin at ``parts`` [BLOCK_R, 1]."""
    at = parts + (split * 3)[None, :]
    maxima = tl.load(at, mask=is_part, other=float("-inf"))
    sums = tl.load(at + 1, mask=is_part, other=0.0)
    moments = tl.load(at + 2, mask=is_part, other=0.0)
    maximum = tl.max(maxima, axis=1)
    shift = tl.where(maximum == float("-inf"), 0.0, maximum)[:, None]
    distance = tl.where(maxima > float("-inf"), maxima, shift) - shift
    weight = tl.exp(distance)
    total = tl.sum(sums * weight, axis=1)
    moment = tl.sum((moments + sums * distance) * weight, axis=1)
    total = tl.where(total > 0, total, 1.0)
    # Rounding may give a slightly negative entropy.
    return tl.maximum(tl.log(total) - moment / total, 0.0)


@triton.jit
def _correction(own_ptr, mean_lengths_ptr, slot, previous, sampled, decides, drafter, DRAFTERS: tl.constexpr):
    """Tokens per round beyond the drafter's mean in a request's own rounds with it; also adds the last round."""
    at = own_ptr + (slot * DRAFTERS + drafter) * 2
    tokens = tl.load(at, mask=decides, other=0.0)
    rounds = tl.load(at + 1, mask=decides, other=0.0)
    mine = decides & (previous == drafter)
    tokens = tl.where(mine, tokens * _OWN_MEMORY + sampled.to(tl.float32), tokens)
    rounds = tl.where(mine, rounds * _OWN_MEMORY + 1.0, rounds)
    tl.store(at, tokens, mask=mine)
    tl.store(at + 1, rounds, mask=mine)
    return tl.div_rn(tokens - rounds * tl.load(mean_lengths_ptr + drafter), rounds + _PRIOR)


# Thresholds and costs are rows of small tables with different alignments.
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["thresholds_ptr", "costs_ptr"])
def _decide_kernel(
    entropy_parts_ptr,  # float32 [R, splits, 3], read under ENTROPY
    gain_parts_ptr,  # float32 [R, blocks, N - 1], read under NEURAL and GOODPUT
    b2_ptr,  # float32 [N - 1] the router's last bias
    thresholds_ptr,  # float32 [C, N - 1]
    categories_ptr,  # int32 [S] row of thresholds of every slot's request
    costs_ptr,  # float32 [2, N]
    mean_lengths_ptr,  # float32 [N]
    own_ptr,  # float32 [S, N, 2] tokens and rounds by slot and drafter, if CORRECTS; takes in the last round
    idx_mapping_ptr,  # int [R] slot of each request; negative for padding
    num_sampled_ptr,  # int32 [R] accepted tokens; 0 inside a prompt
    num_rows,
    previous_ptr,  # int32 [S] last drafter of every slot, -1 for none; takes the new one
    routes_ptr,  # int32 [R]
    entropy_ptr,  # float32 [R]
    gains_ptr,  # float32 [R, N - 1]
    POLICY: tl.constexpr,
    CORRECTS: tl.constexpr,
    GAINS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = r < num_rows
    slot = tl.load(idx_mapping_ptr + r, mask=inside, other=-1).to(tl.int64)
    sampled = tl.load(num_sampled_ptr + r, mask=inside, other=0)
    decides = (slot >= 0) & (sampled > 0)
    slot = tl.where(decides, slot, 0)
    previous = tl.load(previous_ptr + slot, mask=decides, other=-1)
    thresholds_ptr += tl.load(categories_ptr + slot, mask=decides, other=0).to(tl.int64) * GAINS
    r = r.to(tl.int64)

    # The reference is the last drafter, and every rule begins with it.
    route = tl.full([BLOCK_R], GAINS, tl.int32)
    if POLICY == _ENTROPY:
        split = tl.arange(0, BLOCK_S)
        is_part = decides[:, None] & (split < SPLITS)[None, :]
        entropy = merged_entropy(entropy_parts_ptr + (r * SPLITS * 3)[:, None], split, is_part)
        entropy = tl.where(decides, entropy, 0.0)
        tl.store(entropy_ptr + r, entropy, mask=inside)
        for i in tl.static_range(GAINS):
            drafter = GAINS - 1 - i
            route = tl.where(entropy > tl.load(thresholds_ptr + drafter), drafter, route)
    else:
        block = tl.arange(0, BLOCK_B)
        is_part = decides[:, None] & (block < BLOCKS)[None, :]
        parts = gain_parts_ptr + (r * BLOCKS * GAINS)[:, None] + (block * GAINS)[None, :]
        best = tl.zeros([BLOCK_R], tl.float32)
        mean_length = tl.zeros([BLOCK_R], tl.float32) + tl.load(mean_lengths_ptr + GAINS)
        correction = tl.zeros([BLOCK_R], tl.float32)
        if CORRECTS:
            correction = _correction(
                own_ptr, mean_lengths_ptr, slot, previous, sampled, decides, GAINS, DRAFTERS=GAINS + 1
            )
            mean_length += correction
        if POLICY == _GOODPUT:
            is_switch = (previous >= 0) & (previous != GAINS)
            switch = tl.where(is_switch, tl.load(costs_ptr + GAINS + 1 + GAINS), 0.0)
            best = tl.div_rn(tl.maximum(mean_length, 1.0), tl.load(costs_ptr + GAINS) + switch)
        for drafter in tl.static_range(GAINS):
            gain = tl.sum(tl.load(parts + drafter, mask=is_part, other=0.0), axis=1) + tl.load(b2_ptr + drafter)
            if CORRECTS:
                own = _correction(
                    own_ptr, mean_lengths_ptr, slot, previous, sampled, decides, drafter, DRAFTERS=GAINS + 1
                )
                gain += own - correction
            gain = tl.where(decides, gain, 0.0)
            tl.store(gains_ptr + r * GAINS + drafter, gain, mask=inside)
            if POLICY == _NEURAL:
                value = gain - tl.load(thresholds_ptr + drafter)
                is_better = value > best
            else:
                is_switch = (previous >= 0) & (previous != drafter)
                switch = tl.where(is_switch, tl.load(costs_ptr + GAINS + 1 + drafter), 0.0)
                # A round yields the target's own token at least.
                value = tl.div_rn(tl.maximum(mean_length + gain, 1.0), tl.load(costs_ptr + drafter) + switch)
                is_better = (value > best) | ((value == best) & (previous == drafter))
            best = tl.where(is_better, value, best)
            route = tl.where(is_better, drafter, route)

    tl.store(routes_ptr + r, tl.where(decides, route, -1), mask=inside)
    tl.store(previous_ptr + slot, route, mask=decides)


def decide(
    *,
    rule: Rule,
    entropy_parts: torch.Tensor,
    gain_parts: torch.Tensor,
    num_blocks: int,
    b2: torch.Tensor,
    idx_mapping: torch.Tensor,
    num_sampled: torch.Tensor,
    previous: torch.Tensor,
    categories: torch.Tensor,
    own: torch.Tensor,
    out: Decision,
) -> None:
    """Choose a drafter for every request; one launch, 16 requests per program.

    - ENTROPY: the first drafter i with entropy > threshold i, else the reference (WhiFlash, section 3.3.1).
    - NEURAL: the drafter with the largest gain - threshold if that is above 0, else the reference (section 3.3.2).
    - GOODPUT: the drafter with the largest (mean length + gain) / (round + switch if it did not draft last): tokens per
      second, at least one token per round. The last drafter wins ties.

    The reference wins other ties, then the smaller number. A rule with ``corrects`` adds to every prediction
    (tokens - rounds * mean length) / (rounds + PRIOR_OF_CORRECTION) of the request's own rounds with the drafter. Older
    rounds count less. The paper's routers do not correct.

    ``num_blocks`` is the result of :func:`gain_parts`, or 1. Shapes as in the kernel.
    """
    num_rows, num_gains = idx_mapping.shape[0], rule.thresholds.shape[1]
    splits = entropy_parts.shape[1]
    assert rule.costs.shape == (2, num_gains + 1) and rule.costs.is_contiguous() and rule.thresholds.is_contiguous()
    assert rule.mean_lengths.shape == (num_gains + 1,) and own.is_contiguous()
    assert not rule.corrects or own.shape == (previous.shape[0], num_gains + 1, 2)
    assert out.gains.shape[1] == num_gains and out.gains.is_contiguous() and out.routes.shape[0] >= num_rows
    # One warp: a second one could read `own` after the first has written it.
    _decide_kernel[(triton.cdiv(num_rows, _DECIDE_ROWS),)](
        entropy_parts, gain_parts, b2, rule.thresholds, categories, rule.costs, rule.mean_lengths, own,
        idx_mapping, num_sampled, num_rows, previous, out.routes, out.entropy, out.gains,
        POLICY=rule.policy, CORRECTS=rule.corrects, GAINS=num_gains, SPLITS=splits, BLOCKS=num_blocks,
        BLOCK_R=_DECIDE_ROWS, BLOCK_S=triton.next_power_of_2(splits), BLOCK_B=triton.next_power_of_2(num_blocks),
        num_warps=1,
    )  # fmt: skip
