"""The stable names on which other packages build drafters, trees and routing policies.

Each is imported on first use, because registries are read before vLLM, whose import takes seconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_crossspec.drafting.level_trees import LevelTrees
    from vllm_crossspec.drafting.marginals import MarginalTreeProposer
    from vllm_crossspec.drafting.proposer import HeadSampling, Proposer
    from vllm_crossspec.drafting.stateless import StatelessProposer
    from vllm_crossspec.kinds.checkpoint import require
    from vllm_crossspec.kinds.drafter import DrafterKind
    from vllm_crossspec.kinds.policy import PolicyKind
    from vllm_crossspec.kinds.tree import TreeConfig, TreeKind
    from vllm_crossspec.step.feature import Feature
    from vllm_crossspec.types import Candidates, DrafterFacts, StepInputs, TargetFacts, TokenTree

_MODULES = {
    "LevelTrees": "drafting.level_trees",
    "MarginalTreeProposer": "drafting.marginals",
    "HeadSampling": "drafting.proposer",
    "Proposer": "drafting.proposer",
    "StatelessProposer": "drafting.stateless",
    "require": "kinds.checkpoint",
    "DrafterKind": "kinds.drafter",
    "PolicyKind": "kinds.policy",
    "TreeConfig": "kinds.tree",
    "TreeKind": "kinds.tree",
    "Feature": "step.feature",
    "Candidates": "types",
    "DrafterFacts": "types",
    "StepInputs": "types",
    "TargetFacts": "types",
    "TokenTree": "types",
}

__all__ = [
    "Candidates",
    "DrafterFacts",
    "DrafterKind",
    "Feature",
    "HeadSampling",
    "LevelTrees",
    "MarginalTreeProposer",
    "PolicyKind",
    "Proposer",
    "StatelessProposer",
    "StepInputs",
    "TargetFacts",
    "TokenTree",
    "TreeConfig",
    "TreeKind",
    "require",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"vllm_crossspec.{_MODULES[name]}"), name)
