"""The kernels' twins in plain PyTorch, which tests compare them with."""

import torch

from vllm_crossspec.budget.kernels import MEMORY, MOST_LOGIT, PRIOR, Estimates, Shares, Verified
from vllm_crossspec.types import TokenTree


def estimate(tree: TokenTree, idx_mapping: torch.Tensor, estimates: Estimates) -> None:
    """As `kernels.estimate`."""
    for row, slot in enumerate(idx_mapping.tolist()):
        if slot < 0:
            continue
        estimates.worth[slot], estimates.odds[slot], depths = 0, 0, [0]
        for node in range(min(int(tree.sizes[row]), estimates.worth.shape[1])):
            parent = int(tree.parents[row, node])
            depths.append(depths[parent] + 1)
            given, worth = float(tree.log_probs[row, node]), 1.0
            if parent > 0:
                given -= float(tree.log_probs[row, parent - 1])
                worth = float(estimates.worth[slot, parent - 1])
            chance = torch.tensor(given, dtype=torch.float64).exp().clamp(max=1.0 - 1e-6)
            odds = chance.logit().clamp(-MOST_LOGIT, MOST_LOGIT)
            offset, slope = estimates.logistics[depths[-1] - 1].double()
            estimates.worth[slot, node] = worth * (offset + slope * odds).sigmoid()
            estimates.odds[slot, node] = odds


def learn(verified: Verified, estimates: Estimates) -> None:
    """As `kernels.learn`."""
    max_depth = len(estimates.logistics)
    gradient, hessian = torch.zeros(max_depth, 2).double(), torch.zeros(max_depth, 2, 2).double()
    for row, slot in enumerate(verified.idx_mapping.tolist()):
        path = verified.path[row, : int(verified.num_sampled[row])].tolist()
        for node in range(int(verified.num_live[row]) if slot >= 0 else 0):
            parent = int(verified.parents[slot, node])
            if parent not in path or path.index(parent) >= max_depth:
                continue
            level = path.index(parent)
            x = torch.tensor([1.0, float(estimates.odds[slot, node])], dtype=torch.float64)
            chance = (estimates.logistics[level].double() @ x).sigmoid()
            gradient[level] += (float(node + 1 in path) - chance) * x
            hessian[level] += chance * (1 - chance) * x.outer(x)
    packed = estimates.curvature.double() * MEMORY + hessian.flatten(1)[:, [0, 1, 3]]
    estimates.curvature.copy_(packed)
    whole = packed[:, [0, 1, 1, 2]].view(-1, 2, 2) + PRIOR * torch.eye(2).double()
    moved = estimates.logistics.double() + torch.linalg.solve(whole, gradient)
    estimates.logistics[:, 0], estimates.logistics[:, 1] = moved[:, 0].clamp(-7, 7), moved[:, 1].clamp(0, 3)


def admit(shares: Shares, worth: torch.Tensor, budget: int) -> None:
    """As `kernels.admit`."""
    found = [
        (-float(worth[slot, node]), row, node)
        for row, (slot, planned) in enumerate(zip(shares.idx_mapping.tolist(), shares.planned.tolist(), strict=True))
        for node in range(planned)
    ]
    shares.admitted.zero_()
    for _, row, _ in sorted(found)[:budget]:
        shares.admitted[row] += 1
    num_reqs = len(shares.planned)
    shares.cu_num_logits[1 : num_reqs + 1] = (shares.admitted + 1).cumsum(0)
    shares.query_start_loc[1 : num_reqs + 1] = (shares.admitted + shares.others).cumsum(0)
