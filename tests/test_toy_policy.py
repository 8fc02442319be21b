"""A routing policy that another package brings: its keys are checked, and the router decides by it."""

import pytest
import torch
from other_packages import package
from routers import DEVICE, make_router, poisoned

from vllm_crossspec.config.parse import parse
from vllm_crossspec.kinds.policy import REGISTRY

TURNS = """
import torch
from vllm_crossspec.api import PolicyKind

KIND = PolicyKind("turns", "each drafter after the other", decider="turners:decide")


def decide(*, idx_mapping, num_sampled, previous, out, rule, **unread):
    slots = idx_mapping.clamp(min=0).long()
    decides = (idx_mapping >= 0) & (num_sampled[: len(slots)] > 0)
    route = (previous[slots] + 1) % len(rule.mean_lengths)
    out.routes[: len(slots)] = torch.where(decides, route, -1).int()
    previous[slots[decides]] = route[decides].int()
"""
TWO = {"method": "whiflash", "drafters": {"eagle3": {"model": "a"}, "dflash": {"model": "b"}}}


@pytest.fixture(scope="module", autouse=True)
def turns(tmp_path_factory):
    with package(tmp_path_factory.mktemp("site") / "turners", TURNS, registry=REGISTRY, turns="turners:KIND"):
        yield


def test_a_router_decides_by_it():
    router, routes = make_router("turns"), poisoned(4, dtype=torch.int32)
    slots = torch.tensor([5, -1, 2], dtype=torch.int32, device=DEVICE)
    sampled = torch.tensor([1, 1, 0], dtype=torch.int32, device=DEVICE)
    seen = []
    for _ in range(3):
        router.decide(None, slots.long(), slots, sampled, routes)
        seen.append(routes[:3].tolist())
    assert seen == [[0, -1, -1], [1, -1, -1], [0, -1, -1]] and router.previous[[5, 2]].tolist() == [0, -1]


@pytest.mark.parametrize(
    ("router", "sentence"),
    [
        ({"policy": "turns", "threshold": 1}, "router.threshold: policy 'turns' takes no thresholds; leave it out"),
        ({"policy": "turns", "explore": False}, "router.explore is for policy 'goodput' without a model; leave it out"),
        ({"policy": "turns", "entropy_of": "sampling"}, "router.entropy_of is for policy 'entropy', or 'goodput'"),
        ({"policy": "turn"}, "input should be 'fixed', 'entropy', 'neural', 'goodput', 'record' or 'turns'"),
    ],
)
def test_what_it_does_not_take_is_refused(router, sentence):
    with pytest.raises(ValueError, match=sentence):
        parse({**TWO, "router": router}, ["model"])


def test_what_it_takes_is_read():
    assert parse({**TWO, "router": {"policy": "turns", "lazy": False}}, ["model"]).router.policy == "turns"
