"""The start-up check of the touch points on a platform that is not this one."""

from vllm.version import __version__

from vllm_crossspec.platform import CPU_MODULES, Platform
from vllm_crossspec.vllm_api import check as compat
from vllm_crossspec.vllm_api.points import inventory_of


def test_on_a_gpu_no_module_of_the_cpu_is_imported(monkeypatch):
    looked_at = []
    monkeypatch.setattr(compat, "platform", Platform)
    monkeypatch.setattr(compat, "problem", lambda point, release: looked_at.append(point.module))
    assert compat.check() == []
    assert looked_at and not [module for module in looked_at if "cpu" in module]
    assert {point.module for point in inventory_of(__version__).touch_points} - set(looked_at) == set(CPU_MODULES)
