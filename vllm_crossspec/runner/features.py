"""All features, in the order in which their hooks are called."""

from typing import Any

from vllm_crossspec.budget.feature import JointBudget
from vllm_crossspec.drafters.confu.feature import Contemplate
from vllm_crossspec.heterospec.feature import AdaptiveSizes
from vllm_crossspec.heterospec.recorder import RoundRecorder
from vllm_crossspec.routing.feature import Routing
from vllm_crossspec.step.feature import Feature
from vllm_crossspec.trees.feature import Trees
from vllm_crossspec.trees.mrope import MRope

FEATURES: tuple[type[Feature], ...] = (Routing, Contemplate, RoundRecorder, AdaptiveSizes, JointBudget, MRope, Trees)
"""Trees come last: their ``sampled`` moves the accepted paths in place, so features that read a step come before."""


def make_features(runner: Any) -> dict[str, Feature]:
    """The features of the engine of ``runner``, by name, in order."""
    found: dict[str, Feature] = {}
    for feature in FEATURES:
        if feature.is_wanted(runner):
            found[feature.name] = feature(runner)
        else:
            feature.left_out()
    return found
