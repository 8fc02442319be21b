"""Steps of a batch as the kernels of verification see them: random trees, and every kind of request beside them."""

import random
from types import SimpleNamespace
from typing import NamedTuple

import torch

from vllm_crossspec.trees.verify.rows import StepRows
from vllm_crossspec.types import StepInputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POISON = -7777


def int32(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def poisoned(*shape, dtype=torch.int32):
    return torch.full(shape, POISON, dtype=dtype, device=DEVICE)


def random_parents(rng, num_nodes, max_depth):
    """Parent rows of a random tree whose rows are in an order in which parents come first."""
    parents, depths = [], [0]
    for _ in range(num_nodes):
        # Late rows are preferred, or deep trees would never be drawn.
        candidates = [row for row, depth in enumerate(depths) if depth < max_depth]
        parent = rng.choice(candidates[-4:] if rng.random() < 0.6 else candidates)
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return parents


class Step(NamedTuple):
    """One step of a batch; see the kernels' docstrings for the shapes."""

    idx_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    cu_num_logits: torch.Tensor
    seq_lens: torch.Tensor
    prefill_len: torch.Tensor
    parents: torch.Tensor
    sizes: torch.Tensor
    positions: torch.Tensor


# Drafts that the scheduler kept, nodes of the tree (both as a share of N), and how the request begins.
KINDS = {
    "whole": (1.0, 1.0, "decode"),
    "truncated": (0.5, 1.0, "decode"),
    "small": (1.0, 0.4, "decode"),
    "empty": (1.0, 0.0, "decode"),
    "placeholder": (1.0, 1.0, "prompt"),
    "plain": (0.0, 1.0, "decode"),
    "chunk": (0.0, 1.0, "chunk"),
    "padding": (0.0, 1.0, "padding"),
}


def make_step(seed, num_nodes, max_depth, kinds=tuple(KINDS), index_dtype=torch.int64, prefix=None, contemplates=False):
    """A step with one request of each kind in random order; ``prefix`` tokens before each, or a random number.

    With ``contemplates`` the drafts are ``num_nodes`` nodes and a contemplate row for each of them and for the root.
    """
    rng = random.Random(seed)
    kinds = rng.sample(kinds, len(kinds))
    num_slots = len(kinds) + 3
    slots = rng.sample(range(num_slots), len(kinds))
    parents = [random_parents(rng, num_nodes, max_depth) for _ in range(num_slots)]
    sizes, prefill = [num_nodes] * num_slots, [0] * num_slots
    query, logits, seq_lens, mapping, positions = [0], [0], [], [], []
    for slot, kind in zip(slots, kinds, strict=True):
        kept, live, begin = KINDS[kind]
        num_drafts = -int(-kept * (2 * num_nodes + 1 if contemplates else num_nodes) // 1)
        before = rng.randrange(1, 200) if prefix is None else prefix
        num_rows = {"chunk": 9, "padding": 0}.get(begin, num_drafts + 1)
        sizes[slot] = int(live * num_nodes)
        # The root of a decoding request is past its prompt; a placeholder's is the prompt's last token.
        prefill[slot] = {"prompt": before + 1, "chunk": before + 500}.get(begin, rng.randrange(before + 1))
        mapping.append(-1 if begin == "padding" else slot)
        query.append(query[-1] + num_rows)
        logits.append(logits[-1] + (0 if begin == "padding" else num_drafts + 1))
        seq_lens.append(before + num_rows if num_rows else 0)
        positions += range(before, before + num_rows)
    return Step(
        torch.tensor(mapping, dtype=index_dtype, device=DEVICE),
        int32(query),
        int32(logits),
        int32(seq_lens),
        int32(prefill),
        int32(parents),
        int32(sizes),
        torch.tensor(positions, dtype=torch.int64, device=DEVICE),
    )


def prepare(implementation, step, max_depth, num_soft=0, **options):
    """What ``prepare_rows`` of a module makes of the step; outputs that it leaves alone are poison."""
    num_reqs, num_words = step.idx_mapping.shape[0], int(step.cu_num_logits.diff().max() - 1) // 32 + 1
    outputs = {
        "positions": step.positions.clone(),
        "row_mask": poisoned(step.positions.shape[0] + 5, num_words + -(-num_soft // 32)),
        "prefix_len": poisoned(num_reqs + 2),
        "num_live": poisoned(num_reqs + 2),
    }
    inputs = step._asdict()
    inputs["cu_rows"] = inputs.pop("cu_num_logits")
    implementation.prepare_rows(StepRows(**{**inputs, **outputs}, max_depth=max_depth, num_soft=num_soft, **options))
    return outputs


def step_inputs(*, input_ids, positions, query_start_loc, idx_mapping, next_prefill_tokens=None, **verdict):
    """A :class:`StepInputs` of what drafters' first rows are made of; ``verdict`` are fields of its own."""
    verdict = {name: given.to(DEVICE) for name, given in verdict.items()}
    if next_prefill_tokens is not None:
        next_prefill_tokens = next_prefill_tokens.to(DEVICE)
    batch = SimpleNamespace(
        max_query_len=None,
        input_ids=input_ids.to(DEVICE),
        positions=positions.to(DEVICE),
        query_start_loc=query_start_loc.to(DEVICE),
        idx_mapping=idx_mapping.to(DEVICE),
        num_reqs=len(idx_mapping),
        num_scheduled_tokens=query_start_loc.diff(),
    )
    unread = dict.fromkeys(("attn_metadata", "slot_mappings", "last_hidden_states", "tapped_hidden_states"))
    return StepInputs(batch, **unread, next_prefill_tokens=next_prefill_tokens, **verdict)
