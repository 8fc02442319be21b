"""Calibrations on disk: one JSON file with the bins of Phi that HeteroSpec's trees are sized by.

A calibration belongs to one target, one drafter and one tree. Phi sums that drafter's entropies over the levels of that
tree (HeteroSpec, section 4.1), and the bins are cut by the ranks of the target's choices (section 4.2). The file names
all three, and :func:`check_calibration` refuses others.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from vllm_crossspec.config.schema import AdaptivePolicy, DrafterConfig
from vllm_crossspec.files import read_versioned, write_json
from vllm_crossspec.heterospec.heterospec import MAX_THRESHOLDS, OURS, Reading, flat_policy, make_policy
from vllm_crossspec.kinds.identity import Identity, known_model
from vllm_crossspec.names import counted

FORMAT_VERSION = 1
REMEDY = "make one with `crossspec calibrate heterospec`"


class TreeShape(NamedTuple):
    """The tree that the bins were found with: levels, children of a node, draft nodes, and how they were ranked."""

    depth: int
    top_k: int
    num_nodes: int
    sharpness: float = 1.0

    def __str__(self) -> str:
        return f"depth {self.depth}, top_k {self.top_k}, num_nodes {self.num_nodes}, sharpness {self.sharpness:g}"


class BinFacts(NamedTuple):
    """What the calibration saw of one bin."""

    mean_rank: float  # mean terminal confidence rank of its fully accepted paths
    num_paths: int  # fully accepted paths, which the thresholds were fitted to
    num_rounds: int
    mean_accepted: float  # accepted draft tokens of all its rounds


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What ``crossspec calibrate heterospec`` found; see :func:`make_policy`."""

    thresholds: tuple[float, ...]  # at most 7, rising, nats: a tree at or below the first is in bin 0, and so on
    bins: tuple[BinFacts, ...]  # one more than thresholds
    gammas: tuple[float, ...]  # fewer than the bins
    alpha: int
    tree: TreeShape  # of the rounds
    target: Identity
    drafter: Identity
    made: dict[str, Any] = field(default_factory=dict)  # command, seed, counts, versions; free-form
    reading: Reading = OURS

    def policy(self, max_extension: int | None = None) -> AdaptivePolicy:
        """What each bin's trees are given; see :func:`make_policy`."""
        return make_policy(
            thresholds=self.thresholds,
            num_nodes=self.tree.num_nodes,
            alpha=self.alpha,
            gammas=self.gammas,
            max_extension=max_extension,
            reading=self.reading,
        )


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Write the file whole or not at all; the same calibration gives the same bytes."""
    policy = calibration.policy()
    content = {
        "format_version": FORMAT_VERSION,
        "thresholds": list(calibration.thresholds),
        # Extension and width follow from the rest; they are for human readers.
        "bins": [
            {**facts._asdict(), "extension": extension, "width": width}
            for facts, extension, width in zip(calibration.bins, policy.extensions, policy.widths, strict=True)
        ],
        "gammas": list(calibration.gammas),
        "alpha": calibration.alpha,
        # Left out if it is ours, as in older files.
        **({} if calibration.reading == OURS else {"reading": calibration.reading._asdict()}),
        "tree": calibration.tree._asdict(),
        "target": calibration.target._asdict(),
        "drafter": calibration.drafter._asdict(),
        "made": calibration.made,
    }
    write_json(path, content)


def read_calibration(path: str | Path, key: str) -> Calibration:
    """Read a file that :func:`write_calibration` wrote.

    Raises ValueError: no such file, not JSON, another version, missing or inconsistent entries; one sentence naming
    ``key`` (the setting that names the file), what is wrong and the command that makes a calibration.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise ValueError(f"{key}: there is no file {str(path)!r}; {REMEDY}, or give the file of one")
    return read_versioned(path, FORMAT_VERSION, where=key, remedy=REMEDY, parse=_parse, disagreement=_disagreement)


def _parse(content: dict[str, Any]) -> Calibration:
    tree, bins = {"sharpness": 1.0, **content["tree"]}, content["bins"]  # older files have no sharpness
    return Calibration(
        thresholds=tuple(map(float, content["thresholds"])),
        bins=tuple(BinFacts(*(kind(b[key]) for key, kind in BinFacts.__annotations__.items())) for b in bins),
        gammas=tuple(map(float, content["gammas"])),
        alpha=int(content["alpha"]),
        tree=TreeShape(*(kind(tree[key]) for key, kind in TreeShape.__annotations__.items())),
        target=_identity(content["target"]),
        drafter=_identity(content["drafter"]),
        made=dict(content["made"]),
        reading=Reading(**content.get("reading", {})),
    )


def _identity(content: Mapping[str, Any]) -> Identity:
    weights = content["weights"]
    return Identity(str(content["name"]), str(content["config"]), None if weights is None else str(weights))


def _disagreement(found: Calibration) -> str | None:
    """What is inconsistent, if anything."""
    thresholds = found.thresholds
    if len(thresholds) > MAX_THRESHOLDS or not all(map(math.isfinite, thresholds)):
        return f"thresholds must be at most {MAX_THRESHOLDS} numbers"
    if any(not before < after for before, after in pairwise(thresholds)):
        return f"thresholds must rise (they are {list(thresholds)})"
    if len(found.bins) != len(thresholds) + 1:
        return f"bins must be {len(thresholds) + 1}, one more than thresholds"
    if len(found.gammas) >= len(found.bins) or not all(0 < gamma <= 1 for gamma in found.gammas):
        return f"gammas must be fewer than the {counted(len(found.bins), 'bin')}, each above 0 and at most 1"
    if found.alpha < 0 or min(found.tree[:3]) < 1:
        return "alpha must be 0 or more, and the tree's sizes 1 or more"
    if found.reading.first_bin not in (0, 1) or not isinstance(found.reading.is_capped, bool):
        return f"reading must have first_bin 0 or 1, and is_capped true or false (it is {found.reading._asdict()})"
    return None


def check_calibration(
    calibration: Calibration, *, target: Identity | None, drafter: Identity | None, tree: TreeShape, key: str
) -> None:
    """Check that a calibration belongs to these models (None: unknown) and this tree.

    Raises ValueError: one sentence naming ``key``, what differs and the command that makes a calibration.
    """
    for what, found, wanted in (("target", calibration.target, target), ("drafter", calibration.drafter, drafter)):
        if wanted is not None and not found.is_same(wanted):
            raise ValueError(
                f"{key}: this calibration was made for another {what} ({found.name}; here {wanted.name} with other "
                f"config or weights); {REMEDY} for this {what}"
            )
    if calibration.tree != tree:
        raise ValueError(
            f"{key}: this calibration was made for trees of {calibration.tree}, and these are of {tree}; give the "
            f"tree those sizes, or {REMEDY} for these"
        )


def drafter_policy(
    drafter: DrafterConfig, config: Mapping[str, Any], target: Identity | None, key: str
) -> AdaptivePolicy:
    """What an adaptive drafter's trees are given, by the calibration that ``adaptive.model`` (``key``) names.

    ``config``: the drafter's config.json. Raises as :func:`read_calibration` and :func:`check_calibration`.
    """
    adaptive, tree = drafter.adaptive, drafter.tree
    assert adaptive is not None
    assert tree.depth is not None and tree.top_k is not None and tree.num_nodes is not None
    if adaptive.model is None:
        return flat_policy(tree.num_nodes)
    calibration = read_calibration(adaptive.model, key)
    check_calibration(
        calibration,
        target=target,
        drafter=known_model(drafter.model, drafter.native.get("revision"), config),
        tree=TreeShape(tree.depth, tree.top_k, tree.num_nodes, tree.sharpness or 1.0),
        key=key,
    )
    return calibration.policy(adaptive.max_extension)
