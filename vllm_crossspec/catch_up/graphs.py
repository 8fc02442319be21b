"""CUDA graphs of catching up, for a drafter that is chosen often and takes in a few tokens each round."""

from collections.abc import Callable

import torch
from vllm.compilation.cudagraph_pool import capture_pool
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import graph_capture
from vllm.platforms import current_platform
from vllm.utils.torch_utils import async_tensor_h2d, current_stream

from vllm_crossspec.arrays import Array

NO_SLOT = -1  # the request slot of a padding token
SIZES = (8, 32, 128, 512, 1024)
"""Tokens of the graphs. A drafter misses 80 to 90 tokens on average before it is chosen (WhiFlash, section 6)."""


class ContextGraphs:
    """CUDA graphs of one drafter's catch-up, by number of tokens; other numbers are padded.

    ``write`` catches up int64 [3, n] tokens (slots, positions, rows of the buffer) and skips those of ``NO_SLOT``. It
    reads and writes persistent buffers only.
    """

    def __init__(self, write: Callable[[torch.Tensor], None], vllm_config: VllmConfig, device: torch.device):
        self._write, self._vllm_config, self._device = write, vllm_config, device
        self._tokens = {size: _padded(size).to(device) for size in SIZES}
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture all graphs, the largest first, over padding tokens, which write nothing."""
        with graph_capture(device=self._device):
            for size in reversed(SIZES):
                self._write(self._tokens[size])  # kernels are compiled here
                graph = torch.cuda.CUDAGraph()
                shared = current_platform.get_global_graph_pool()
                with (
                    capture_pool(shared, self._vllm_config) as pool,
                    torch.cuda.graph(graph, pool, stream=current_stream()),
                ):
                    self._write(self._tokens[size])
                self._graphs[size] = graph

    def replay(self, tokens: Array) -> None:
        """Catch up int64 [3, n] tokens, in parts if they exceed the largest graph."""
        for first in range(0, tokens.shape[1], SIZES[-1]):
            part = tokens[:, first : first + SIZES[-1]]
            size = next(size for size in SIZES if size >= part.shape[1])
            padded = _padded(size)
            padded.numpy()[:, : part.shape[1]] = part
            async_tensor_h2d(padded, out=self._tokens[size])
            self._graphs[size].replay()


def _padded(size: int) -> torch.Tensor:
    """int64 [3, size] padding tokens."""
    padded = torch.zeros(3, size, dtype=torch.int64)
    padded[0] = NO_SLOT
    return padded
