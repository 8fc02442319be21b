"""Triton's IR to C."""

from crossspec_cpu_lane.translate.module import Translation, translate

__all__ = ["Translation", "translate"]
