"""Routers to test with, and what their kernels should decide."""

import torch
from steps import DEVICE

from vllm_crossspec.kinds.policy import KINDS, policy_kind
from vllm_crossspec.load.costs import RoundCosts
from vllm_crossspec.routing import kernels, naive
from vllm_crossspec.routing.base import Router, RouterSettings
from vllm_crossspec.routing.checkpoint import RouterCheckpoint, RouterFacts

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
POISON = -7777
DTYPES = [torch.float32, torch.bfloat16]
POLICIES = [name for name, kind in KINDS.items() if kind.decider]
NAMES = ("eagle3", "medusa", "ngram", "dflash")


def floats(values):
    return torch.tensor(values, dtype=torch.float32, device=DEVICE)


def poisoned(*shape, dtype=torch.float32):
    return torch.full(shape, POISON, dtype=dtype, device=DEVICE)


def random_batch(seed, num_rows, num_drafters):
    """Slots with a past and wishes, rows of which some are padding or inside a prompt."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    mapping = torch.randperm(num_rows + 4, generator=generator)[:num_rows].to(torch.int32)
    mapping[draw(0, 8, num_rows) == 0] = -1
    sampled = draw(0, 9, num_rows)
    previous = draw(-1, num_drafters, num_rows + 4)
    return draw, [t.to(DEVICE) for t in (mapping, sampled, previous)]


def expected_routes(policy, out, batch, thresholds, costs, mean_lengths):
    """What the naive twin makes of the kernel's own entropies and gains, so that ties are ties in both.

    ``mean_lengths`` is the reference's, or one for each row where what it brings was corrected.
    """
    mapping, sampled, previous = batch
    tau, rounds, switches = thresholds.tolist(), *costs.tolist()
    wanted, lengths = [], torch.as_tensor(mean_lengths).expand(len(mapping)).tolist()
    for row, slot in enumerate(mapping.tolist()):
        gains, last = out.gains[row].tolist(), int(previous[slot])
        if policy == kernels.ENTROPY:
            wanted.append(naive.route_by_entropy(float(out.entropy[row]), tau))
        elif policy == kernels.NEURAL:
            wanted.append(naive.route_by_gain(gains, tau))
        elif policy == kernels.GOODPUT:
            wanted.append(naive.route_by_goodput(gains, rounds, switches, lengths[row], last))
        else:
            wanted.append(1)
    for row, slot in enumerate(mapping.tolist()):
        if slot < 0 or sampled[row] == 0:
            wanted[row] = -1
        else:
            previous[slot] = wanted[row]
    return wanted


def make_facts(num_drafters, hidden_size=256, fit=None):
    lengths = (3.5, 3.0, 2.5, 4.0)
    return RouterFacts(hidden_size, NAMES[-num_drafters:], "pocket", lengths[-num_drafters:], fit, {"epochs": 1})


def make_checkpoint(num_drafters=2, hidden_size=256, dtype=torch.float32, fit=None):
    facts, generator = make_facts(num_drafters, hidden_size, fit), torch.Generator().manual_seed(5)
    return RouterCheckpoint(facts, *(torch.randn(s, generator=generator).to(dtype) / 4 for s in facts.shapes.values()))


def make_router(policy, num_drafters=2, dtype=torch.float32, **settings):
    checkpoint = make_checkpoint(num_drafters) if policy_kind(policy, "policy").needs_hidden else None
    return Router(
        RouterSettings(policy, NAMES[-num_drafters:], **{"checkpoint": checkpoint, **settings}),
        hidden_size=256,
        vocab_size=5000,
        max_num_reqs=12,
        dtype=dtype,
        device=torch.device(DEVICE),
    )


COSTS = RoundCosts((1, 8), ((1.0, 2.0), (3.0, 2.0)), ((1.0, 2.0), (4.0, 2.0)), ((0.25, 0.5), (0.5, 1.0)))
