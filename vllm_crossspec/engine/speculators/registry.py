"""Which speculator an engine has, by its settings."""

from vllm_crossspec.config import CrossSpecConfig
from vllm_crossspec.engine.speculators.base import Speculator
from vllm_crossspec.engine.speculators.recording import RecordingSpeculator
from vllm_crossspec.engine.speculators.routed import RoutedSpeculator
from vllm_crossspec.engine.speculators.single import SingleSpeculator


def speculator_class(settings: CrossSpecConfig) -> type[Speculator]:
    """The speculator for these settings."""
    if not settings.is_routed:
        return SingleSpeculator
    is_recording = settings.router is not None and settings.router.policy == "record"
    return RecordingSpeculator if is_recording else RoutedSpeculator
