"""All features, in the order in which their hooks are called."""

from typing import Any

from vllm_crossspec.engine.features.adaptive import AdaptiveSizes
from vllm_crossspec.engine.features.base import Feature
from vllm_crossspec.engine.features.contemplate import Contemplate
from vllm_crossspec.engine.features.mrope import MRope
from vllm_crossspec.engine.features.rounds import RoundRecorder
from vllm_crossspec.engine.features.routing import Routing
from vllm_crossspec.engine.features.trees import Trees

FEATURES: tuple[type[Feature], ...] = (Routing, Contemplate, RoundRecorder, AdaptiveSizes, MRope, Trees)
"""Whoever looks at a verified step stands before the trees, which move the accepted paths in place (``sampled``)."""


def make_features(runner: Any) -> dict[str, Feature]:
    """The features that the engine of ``runner`` has, by name, in order."""
    found: dict[str, Feature] = {}
    for feature in FEATURES:
        if feature.is_wanted(runner):
            found[feature.name] = feature(runner)
        else:
            feature.left_out()
    return found
