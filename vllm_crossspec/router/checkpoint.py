"""Trained routers on disk: a folder with ``router.json`` (facts) and ``model.safetensors`` (four tensors).

Shape legend: H hidden size of the target, m = H // 8 middle size, N drafters in routing order, the last of which is
the reference, B bins of entropy.
"""

import math
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from vllm_crossspec.files import open_tensors, read_versioned, write_json, write_tensors

FORMAT_VERSION = 1
FACTS_FILE, TENSORS_FILE = "router.json", "model.safetensors"
_REMEDY = "train one with `crossspec train router`"


class EntropyGain(NamedTuple):
    """Mean gain of each drafter against the reference by the target's entropy, as fitted to the training records.

    Attributes:
        entropy: [B] lower edges of the bins, nats, ascending from 0; the last bin is open.
        gain: [N - 1][B] tokens; non-decreasing where it comes from a monotone fit.
    """

    entropy: tuple[float, ...]
    gain: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class RouterFacts:
    """What a trained router says of itself.

    Attributes:
        hidden_size: H.
        drafters: [N] names in routing order.
        target: name of its target, for messages.
        mean_lengths: [N] mean acceptance length of each drafter on the training records, tokens.
        entropy_gain: the fit that turns costs into an entropy threshold; None where there is none.
        train: how it was trained; free-form.
        margins: [N - 1] tokens by which "auto" thresholds of predicted gains are above what costs ask for; None: 0.
    """

    hidden_size: int
    drafters: tuple[str, ...]
    target: str
    mean_lengths: tuple[float, ...]
    entropy_gain: EntropyGain | None = None
    train: dict[str, Any] = field(default_factory=dict)
    margins: tuple[float, ...] | None = None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors that go with it."""
        middle, gains = middle_size(self.hidden_size), len(self.drafters) - 1
        return {
            "hidden.weight": (middle, self.hidden_size),
            "hidden.bias": (middle,),
            "gain.weight": (gains, middle),
            "gain.bias": (gains,),
        }


class RouterCheckpoint(NamedTuple):
    """A trained router (Kwon et al. 2026, appendix A): gains = gain(GELU(hidden(h))).

    Attributes:
        facts: what it says of itself.
        hidden_weight: [m, H].
        hidden_bias: [m].
        gain_weight: [N - 1, m].
        gain_bias: [N - 1], tokens by which each drafter beats the reference.
    """

    facts: RouterFacts
    hidden_weight: torch.Tensor
    hidden_bias: torch.Tensor
    gain_weight: torch.Tensor
    gain_bias: torch.Tensor


def middle_size(hidden_size: int) -> int:
    """m of a router for states of width ``hidden_size``."""
    return max(hidden_size // 8, 1)


def save_router(folder: str | Path, checkpoint: RouterCheckpoint) -> None:
    """Write both files; the facts last, so that a folder with facts is whole."""
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
    """Read a trained router and see that it fits.

    Args:
        folder: that :func:`save_router` wrote.
        hidden_size: of the target.
        drafters: names in routing order.
        key: of the setting that named the folder, for messages.

    Returns:
        The router, on the CPU, in the precision that it was saved in; its own copy, for a mapped file changes what is
        read of it when somebody writes another over it.

    Raises:
        ValueError: one sentence naming ``key`` and what is wrong; see :func:`check_router`.
    """
    facts = check_router(folder, hidden_size=hidden_size, drafters=drafters, key=key)
    tensors = load_file(Path(folder).expanduser() / TENSORS_FILE)
    checkpoint = RouterCheckpoint(facts, *(tensors[name].clone() for name in facts.shapes))
    for name in facts.shapes:
        if not tensors[name].isfinite().all():
            raise ValueError(f"{key}: {name} of {folder} holds values that are no numbers; {_REMEDY} again")
    return checkpoint


def check_router(folder: str | Path, *, hidden_size: int, drafters: tuple[str, ...], key: str) -> RouterFacts:
    """As :func:`read_router`, but no tensor is loaded: the shapes come from the file's header.

    Raises:
        ValueError: one sentence naming ``key`` and what is wrong: a missing folder or file, damaged files, a router of
            another format, for another hidden size or other drafters, tensors of other shapes.
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
    fit = content["entropy_gain"]
    return RouterFacts(
        hidden_size=int(content["hidden_size"]),
        drafters=tuple(str(name) for name in content["drafters"]),
        target=str(content["target"]),
        mean_lengths=_numbers(content["mean_lengths"]),
        entropy_gain=EntropyGain(_numbers(fit["entropy"]), tuple(map(_numbers, fit["gain"]))) if fit else None,
        margins=_numbers(content["margins"]) if content.get("margins") else None,
        train=dict(content["train"]),
    )


def _numbers(values: Any) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


def _disagreement(facts: RouterFacts) -> str | None:
    """What in the facts does not hang together, if anything."""
    num_drafters, fit = len(facts.drafters), facts.entropy_gain
    if num_drafters < 2 or len(set(facts.drafters)) < num_drafters:
        return "drafters must be two or more different names"
    if len(facts.mean_lengths) != num_drafters or not all(1 <= length < math.inf for length in facts.mean_lengths):
        return f"mean_lengths must be {num_drafters} lengths of 1 or more"
    if facts.margins is not None and (
        len(facts.margins) != num_drafters - 1 or not all(map(math.isfinite, facts.margins))
    ):
        return f"margins must be {num_drafters - 1} numbers"
    if fit is None:
        return None
    edges = fit.entropy
    if not edges or edges[0] != 0 or not all(a < b < math.inf for a, b in pairwise(edges)):
        return "entropy_gain.entropy must ascend from 0"
    shaped = len(fit.gain) == num_drafters - 1 and all(len(row) == len(edges) for row in fit.gain)
    if not shaped or not all(math.isfinite(gain) for row in fit.gain for gain in row):
        return f"entropy_gain.gain must be {num_drafters - 1} rows of {len(edges)} numbers"
    return None


def _check_shapes(file: Path, facts: RouterFacts, key: str) -> None:
    with open_tensors(file, f"{key}: {file}") as opened:
        found = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    for name, shape in facts.shapes.items():
        if found.get(name) != shape:
            seen = f"is {list(found[name])}" if name in found else "is missing"
            raise ValueError(f"{key}: {name} of {file} {seen}, expected {list(shape)}; {_REMEDY} again")
