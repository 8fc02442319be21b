"""Products in float32 for the rows of a decoding round, as fast as memory gives what they read: see `products.cpp`.

oneDNN, which vLLM takes for linear layers, needs half as long again for 16 rows as for one; this needs a quarter more,
and less for one. Beside that a row's results are the same bits whatever rows stand beside it.
"""

import functools
import hashlib
from pathlib import Path

import torch
from triton.runtime.cache import get_cache_manager

from crossspec_cpu_lane import toolchain

_FOLDER = Path(torch.__file__).parent
# Tuned for no processor: for a Zen 3 GCC takes fused sums apart, and in one row's code alone.
_FLAGS = ("-O3", "-mtune=generic", "-ffp-contract=fast", "-std=c++20", f"-I{_FOLDER / 'include'}")
_LIBRARIES = (f"-L{_FOLDER / 'lib'}", "-ltorch_cpu", "-lc10", "-lstdc++")


@functools.cache
def load() -> None:
    """Make `torch.ops.crossspec_cpu_lane` ready, compiled where Triton's cache does not have it.

    `pack(weight)`: weights of [outputs, inputs] as `linear` reads them, 1D. `linear(x, packed, outputs, bias)`: x of
    [..., inputs] times the transposed weights plus the bias, of [..., outputs]. `attend(query, kv_cache, blocks,
    num_keys, hidden, scale, soft_cap, sinks, output)`: rows of a draft tree over the paged cache; `attend_level`: those
    of a level of a drafter's trees, whose earlier rows lie in a scratch. `top(logits, k)`: the largest of each row, as
    log-probabilities, and where they are. All in float32; `products.cpp` has the shapes.

    Raises:
        RuntimeError: no C++ compiler, or one that fails.
        OSError: the code cannot be loaded: no OpenMP runtime with GNU's interface is in the process.
    """
    code = Path(__file__).with_suffix(".cpp").read_text()
    key = hashlib.sha256("\n".join([code, *_FLAGS, torch.__version__, toolchain.fingerprint()]).encode()).hexdigest()
    cache = get_cache_manager(key)
    path = cache.get_file("products.so")
    if path is None:
        path = cache.put(toolchain.compile_cpp(code, "products", _FLAGS, _LIBRARIES), "products.so")
    torch.ops.load_library(path)
    torch.library.register_fake("crossspec_cpu_lane::linear", _linear_shape)


def _linear_shape(x: torch.Tensor, packed: torch.Tensor, outputs: int, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], outputs)
