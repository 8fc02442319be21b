"""Trained routers on disk: a folder with ``router.json`` (facts) and ``model.safetensors`` (four tensors).

Shape legend: H hidden size of the target, m = H // 8, N drafters (the last one is the reference), B entropy bins.
"""

import math
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from vllm_crossspec.files import open_tensors, read_versioned, write_json, write_tensors
from vllm_crossspec.names import counted

FORMAT_VERSION = 1
FACTS_FILE, TENSORS_FILE = "router.json", "model.safetensors"
_REMEDY = "train one with `crossspec train router`"


class EntropyGain(NamedTuple):
    """Mean gain of each drafter over the reference by the target's entropy."""

    entropy: tuple[float, ...]  # [B] lower edges of the bins, nats, ascending from 0; the last bin is open
    gain: tuple[tuple[float, ...], ...]  # [N - 1][B] tokens


@dataclass(frozen=True)
class RouterFacts:
    """Facts of a trained router."""

    hidden_size: int
    drafters: tuple[str, ...]  # [N] names in routing order
    target: str  # its name, for messages
    mean_lengths: tuple[float, ...]  # [N] mean acceptance length of each drafter on the training records, tokens
    entropy_gain: EntropyGain | None = None  # the fit that turns costs into an entropy threshold
    train: dict[str, Any] = field(default_factory=dict)  # how it was trained; free-form
    margins: tuple[float, ...] | None = None  # [N - 1] tokens that "auto" thresholds of gains add to break-even

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors by name."""
        middle, gains = middle_size(self.hidden_size), len(self.drafters) - 1
        return {
            "hidden.weight": (middle, self.hidden_size),
            "hidden.bias": (middle,),
            "gain.weight": (gains, middle),
            "gain.bias": (gains,),
        }


class RouterCheckpoint(NamedTuple):
    """A trained router (Kwon et al. 2026, appendix A): tokens over the reference = gain(GELU(hidden(h)))."""

    facts: RouterFacts
    hidden_weight: torch.Tensor  # [m, H]
    hidden_bias: torch.Tensor  # [m]
    gain_weight: torch.Tensor  # [N - 1, m]
    gain_bias: torch.Tensor  # [N - 1]


def middle_size(hidden_size: int) -> int:
    """m of a router for states of width ``hidden_size``."""
    return max(hidden_size // 8, 1)


def save_router(folder: str | Path, checkpoint: RouterCheckpoint) -> None:
    """Write both files; the facts last, so a folder with facts is complete."""
    facts, tensors = checkpoint.facts, dict(zip(checkpoint.facts.shapes, checkpoint[1:], strict=True))
    for name, shape in facts.shapes.items():
        assert tensors[name].shape == shape, (name, tensors[name].shape, shape)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / TENSORS_FILE, {name: x.detach().cpu().contiguous() for name, x in tensors.items()})
    content = {"format_version": FORMAT_VERSION, **asdict(facts)}
    if facts.entropy_gain is not None:
        content["entropy_gain"] = facts.entropy_gain._asdict()
    write_json(folder / FACTS_FILE, content)


def read_router(folder: str | Path, *, hidden_size: int, drafters: tuple[str, ...], key: str) -> RouterCheckpoint:
    """Read a trained router of :func:`save_router` to the CPU, in its own precision; raises as :func:`check_router`.

    Its tensors are copies, because a memory-mapped file changes when it is overwritten.
    """
    return load_router(folder, check_router(folder, hidden_size=hidden_size, drafters=drafters, key=key), key)


def load_router(folder: str | Path, facts: RouterFacts, key: str) -> RouterCheckpoint:
    """Read the tensors that belong to the ``facts`` of :func:`check_router`; see :func:`read_router`."""
    tensors = load_file(Path(folder).expanduser() / TENSORS_FILE)
    checkpoint = RouterCheckpoint(facts, *(tensors[name].clone() for name in facts.shapes))
    for name in facts.shapes:
        if not tensors[name].isfinite().all():
            raise ValueError(f"{key}: {name} of {folder} holds values that are no numbers; {_REMEDY} again")
    return checkpoint


def check_router(folder: str | Path, *, hidden_size: int, drafters: tuple[str, ...], key: str) -> RouterFacts:
    """Check a trained router without loading its tensors: the shapes come from the file's header.

    Args:
        folder: of :func:`save_router`.
        hidden_size: of the target.
        drafters: names in routing order.
        key: of the setting that names the folder, for messages.

    Raises:
        ValueError: names ``key`` and the problem: a missing or damaged file, another format, or a router for another
            hidden size or other drafters.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise ValueError(f"{key}: there is no folder {str(folder)!r}; {_REMEDY}, or give the folder of one")
    for name in (FACTS_FILE, TENSORS_FILE):
        if not (folder / name).is_file():
            raise ValueError(f"{key}: {folder} has no {name}; it is not a trained router: {_REMEDY}")
    facts = read_versioned(
        folder / FACTS_FILE, FORMAT_VERSION, where=key, remedy=_REMEDY, parse=_parse, disagreement=_disagreement
    )
    if facts.hidden_size != hidden_size:
        raise ValueError(
            f"{key}: this router reads states of width {facts.hidden_size} (of {facts.target}), but the target has "
            f"hidden size {hidden_size}; {_REMEDY} for this target"
        )
    if facts.drafters != drafters:
        raise ValueError(
            f"{key}: this router was trained for the drafters {', '.join(facts.drafters)} (in this order), not for "
            f"{', '.join(drafters)}; name them so in drafters, or {_REMEDY} for these"
        )
    _check_shapes(folder / TENSORS_FILE, facts, key)
    return facts


def _parse(content: dict[str, Any]) -> RouterFacts:
    def numbers(values: Any) -> tuple[float, ...]:
        return tuple(map(float, values))

    fit = content["entropy_gain"]
    return RouterFacts(
        hidden_size=int(content["hidden_size"]),
        drafters=tuple(map(str, content["drafters"])),
        target=str(content["target"]),
        mean_lengths=numbers(content["mean_lengths"]),
        entropy_gain=EntropyGain(numbers(fit["entropy"]), tuple(map(numbers, fit["gain"]))) if fit else None,
        margins=numbers(content["margins"]) if content.get("margins") else None,
        train=dict(content["train"]),
    )


def _disagreement(facts: RouterFacts) -> str | None:
    """The inconsistency in the facts, if any."""
    num_drafters, fit = len(facts.drafters), facts.entropy_gain
    if num_drafters < 2 or len(set(facts.drafters)) < num_drafters:
        return "drafters must be two or more different names"
    if len(facts.mean_lengths) != num_drafters or not all(1 <= length < math.inf for length in facts.mean_lengths):
        return f"mean_lengths must be {num_drafters} lengths of 1 or more"
    margins = (0.0,) * (num_drafters - 1) if facts.margins is None else facts.margins
    if len(margins) != num_drafters - 1 or not all(map(math.isfinite, margins)):
        return f"margins must be {counted(num_drafters - 1, 'number')}"
    if fit is None:
        return None
    edges = fit.entropy
    if not edges or edges[0] != 0 or not all(a < b < math.inf for a, b in pairwise(edges)):
        return "entropy_gain.entropy must ascend from 0"
    shaped = len(fit.gain) == num_drafters - 1 and all(len(row) == len(edges) for row in fit.gain)
    if not shaped or not all(math.isfinite(gain) for row in fit.gain for gain in row):
        return f"entropy_gain.gain must be {counted(num_drafters - 1, 'row')} of {counted(len(edges), 'number')}"
    return None


def _check_shapes(file: Path, facts: RouterFacts, key: str) -> None:
    with open_tensors(file, f"{key}: {file}") as opened:
        found = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    for name, shape in facts.shapes.items():
        if found.get(name) != shape:
            seen = f"is {list(found[name])}" if name in found else "is missing"
            raise ValueError(f"{key}: {name} of {file} {seen}, expected {list(shape)}; {_REMEDY} again")
