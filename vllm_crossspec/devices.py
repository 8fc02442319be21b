"""Features of the processor, and threads that use a GPU beside the decoding thread."""

import ctypes

import torch


def has_avx512() -> bool:
    """Whether the processor has AVX-512, which vLLM's CPU kernels for a float8 KV cache need."""
    return bool(torch.cpu._is_avx512_supported())


def thread_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream for the calling thread, which may then use CUDA while another thread captures; None without a GPU."""
    if device.type != "cuda":
        return None
    leave_captures_alone()
    return torch.cuda.Stream(device)


def leave_captures_alone() -> None:
    """Let the calling thread use CUDA during another thread's graph capture, which the driver would otherwise abort.

    This matters for a second engine in the process, which captures after the first engine's threads have started.
    """
    relaxed = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED; receives the old mode
    exchange = getattr(ctypes.CDLL("libcuda.so.1"), "cuThreadExchangeStreamCaptureMode", None)
    if exchange is not None:  # drivers have it since CUDA 10.1
        exchange(ctypes.byref(relaxed))
