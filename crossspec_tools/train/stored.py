"""The target's hidden states of a shard of responses: computed once, read by every training.

``train-00000.states.safetensors`` stands beside ``train-00000.jsonl.gz``. A row of that shard has a state for every
token of prompt and response but the last. N such tokens of all rows, n tapped layers, H hidden size:

    taps     bfloat16 [N, n * H], the residual stream after the tapped layers, in rising order
    last     bfloat16 [N, H], the final state, normed
    top      int32 [N], the target's most likely next token; -1 where the engine computed no logits
    offsets  int64 [rows + 1], where each row's tokens begin

Its metadata say in JSON which ``layers`` these are, whose states (``target``), and their ``dtype``.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import SafetensorError, safe_open

from vllm_crossspec.files import replacing, write_tensors
from vllm_crossspec.kinds.identity import Identity

AGAIN = "generate again with --states, or run the target in every step with --no-states"
ReadStates = Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""Reads one response's states, as :meth:`StateFile.read`."""


class Wanted(NamedTuple):
    """Which states a training reads."""

    layers: tuple[int, ...]  # taps as `FrozenTarget` counts them, rising
    target: Identity


def states_path(shard: Path) -> Path:
    """The file of a shard's states."""
    return shard.with_name(shard.name.removesuffix(".jsonl.gz") + ".states.safetensors")


def write_states(path: Path, tensors: dict[str, torch.Tensor], wanted: Wanted) -> None:
    """Write ``taps``, ``last``, ``top`` and ``offsets`` whole or not at all."""
    facts = {
        "layers": wanted.layers,
        "target": wanted.target._asdict(),
        "dtype": str(tensors["last"].dtype).removeprefix("torch."),
    }
    with replacing(path) as partial:
        write_tensors(partial, tensors, {name: json.dumps(fact) for name, fact in facts.items()})


class StateFile:
    """One shard's states, memory-mapped: a row is read when it is asked for.

    Raises ValueError: the file is damaged, of another target or of other responses, or it lacks a wanted layer.
    ``lengths``: of the shard's rows, prompt and response.
    """

    def __init__(self, path: Path, wanted: Wanted, lengths: Sequence[int]):
        try:
            self._file = cast(Any, safe_open(path, "pt"))
            facts = {name: json.loads(fact) for name, fact in (self._file.metadata() or {}).items()}
            layers, target = list(facts["layers"]), Identity(**facts["target"])
            self._offsets: list[int] = self._file.get_tensor("offsets").tolist()
            self._slices = [self._file.get_slice(name) for name in ("taps", "last", "top")]
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as problem:
            raise ValueError(f"{path} is damaged ({problem}); delete it and its .jsonl.gz and {AGAIN}") from None
        if not wanted.target.is_same(target):
            raise ValueError(f"{path} has states of {target.name}, which is not --target as it is now; {AGAIN}")
        if missing := sorted(set(wanted.layers) - set(layers)):
            asked = ",".join(map(str, sorted({*layers, *missing})))
            raise ValueError(
                f"{path} has states of layers {layers}, not of {missing}; generate again with --states "
                f"--state-layers {asked}, or run the target in every step with --no-states"
            )
        if [b - a for a, b in zip(self._offsets, self._offsets[1:], strict=False)] != [n - 1 for n in lengths]:
            raise ValueError(f"{path} has states of other responses than the shard beside it; delete both and {AGAIN}")
        self._columns = [layers.index(layer) for layer in wanted.layers]

    def read(self, row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The wanted taps, last states and most likely tokens of one row, as the file has them."""
        taps, last, top = self._slices
        start, end = self._offsets[row : row + 2]
        final = last[start:end]
        width = final.shape[1]
        chosen = [taps[start:end, i * width : (i + 1) * width] for i in self._columns]
        return torch.cat(chosen, dim=1) if chosen else final[:, :0], final, top[start:end]
