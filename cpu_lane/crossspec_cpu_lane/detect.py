"""Is there a GPU? Asked without torch, which may be in the middle of its own import when Triton asks."""

import ctypes
import glob

NVML_SUCCESS = 0


def has_gpu() -> bool:
    """Whether the machine has an NVIDIA or AMD GPU that its driver knows about.

    A GPU hidden from this process (`CUDA_VISIBLE_DEVICES=""`) counts: the machine has it.
    """
    return _nvml_device_count() > 0 or bool(glob.glob("/dev/nvidia[0-9]*")) or bool(glob.glob("/dev/kfd"))


def _nvml_device_count() -> int:
    """How many devices the NVIDIA management library lists (what `nvidia-smi -L` prints); 0 without it."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    if nvml.nvmlInit_v2() != NVML_SUCCESS:
        return 0
    count = ctypes.c_uint(0)
    status = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    nvml.nvmlShutdown()
    return count.value if status == NVML_SUCCESS else 0
