"""Which speculator an engine has, by its settings."""

from vllm_crossspec.config import CrossSpecConfig
from vllm_crossspec.engine.speculators.base import ProposerHost
from vllm_crossspec.engine.speculators.recording import RecordingHost
from vllm_crossspec.engine.speculators.routed import RoutedHost


def speculator_class(settings: CrossSpecConfig) -> type[ProposerHost]:
    """The speculator for these settings."""
    if not settings.routes:
        return ProposerHost
    is_recording = settings.router is not None and settings.router.policy == "record"
    return RecordingHost if is_recording else RoutedHost
