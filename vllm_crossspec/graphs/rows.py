"""CUDA graphs of a drafter's passes over a fixed number of rows per request."""

from collections.abc import Callable
from typing import Any

from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.spec_decode.dflash.cudagraph import DFlashCudaGraphManager

from vllm_crossspec.vllm_api.speculative import without_schedule


class RowGraphManager(DFlashCudaGraphManager):
    """CUDA graphs of a pass whose attention metadata is the drafter's own.

    vLLM's first pass runs over the target's rows with the target's metadata. Here ``prepare`` runs before the pass and
    is captured too. It takes the number of requests and the attention metadata.
    """

    def __init__(
        self,
        proposer: Any,
        cudagraph_mode: CUDAGraphMode,
        rows_per_req: int,
        prepare: Callable[[int, dict[str, Any] | None], None] | None = None,
        causal: bool = True,
    ):
        full = cudagraph_mode.decode_mode() == CUDAGraphMode.FULL
        mode = CUDAGraphMode.FULL_DECODE_ONLY if full else CUDAGraphMode.NONE
        super().__init__(without_schedule(proposer.vllm_config), proposer.device, mode, decode_query_len=rows_per_req)
        self.proposer, self.causal = proposer, causal
        self.prepare = prepare or (lambda num_reqs, attn_metadata: None)

    def capture(self, forward_fn: Callable[..., None], *target: Any, progress_bar_desc: str = "") -> None:
        """Capture the pass with the drafter's state, buffers and attention groups instead of the target's."""
        own = self.proposer
        super().capture(
            forward_fn,
            own.input_buffers,
            own.block_tables,
            own.attn_groups,
            own.kv_cache_config,
            own.max_model_len,
            causal=self.causal,
            prepare_forward=self.prepare,
            progress_bar_desc=progress_bar_desc,
        )
