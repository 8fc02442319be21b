"""Calibrations on disk: one JSON file with the bins of Phi that HeteroSpec's trees are sized by, and what it is for.

A calibration belongs to one target, one drafter and one tree, since Phi is a sum over the levels of that tree of that
drafter's entropies (HeteroSpec, section 4.1), and the ranks that the bins are cut by are this target's choices among
its nodes (section 4.2). Each is written into the file, and :func:`check_calibration` refuses any other.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from vllm_crossspec.adaptive.heterospec import MAX_THRESHOLDS, OURS, AdaptivePolicy, Reading, flat_policy, make_policy
from vllm_crossspec.config import AdaptiveConfig, CrossSpecConfig, DrafterConfig
from vllm_crossspec.drafters.identity import Identity, known_model
from vllm_crossspec.files import read_versioned, write_json

FORMAT_VERSION = 1
REMEDY = "make one with `crossspec calibrate heterospec`"


class TreeShape(NamedTuple):
    """Of the tree that the bins were found with: levels, children of a node, draft nodes, and how they were ranked."""

    depth: int
    top_k: int
    num_nodes: int
    sharpness: float = 1.0

    def __str__(self) -> str:
        return f"depth {self.depth}, top_k {self.top_k}, num_nodes {self.num_nodes}, sharpness {self.sharpness:g}"


class BinFacts(NamedTuple):
    """What the calibration saw of one bin.

    Attributes:
        mean_rank: mean terminal confidence rank of its fully accepted paths.
        num_paths: fully accepted paths, which the thresholds were fitted to.
        num_rounds: all rounds.
        mean_accepted: mean accepted draft tokens of all its rounds.
    """

    mean_rank: float
    num_paths: int
    num_rounds: int
    mean_accepted: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What ``crossspec calibrate heterospec`` found.

    Attributes:
        thresholds: at most 7 rising values of Phi, nats: a tree at or below the first is in bin 0, and so on.
        bins: what was seen of each, one more than thresholds.
        gammas: share of the nodes that the low bins keep; fewer than the bins (section 4.3).
        alpha: levels that the surest bin adds, less its number (section 4.3).
        tree: that the rounds were drafted with.
        target, drafter: the models.
        made: how it was made (command, seed, counts, versions); free-form.
        reading: of section 4.3.
    """

    thresholds: tuple[float, ...]
    bins: tuple[BinFacts, ...]
    gammas: tuple[float, ...]
    alpha: int
    tree: TreeShape
    target: Identity
    drafter: Identity
    made: dict[str, Any] = field(default_factory=dict)
    reading: Reading = OURS

    def policy(self, max_extension: int | None = None) -> AdaptivePolicy:
        """What each bin's trees are given.

        Args:
            max_extension: most levels that a tree may grow; None: ``alpha``.
        """
        return make_policy(
            thresholds=self.thresholds,
            num_nodes=self.tree.num_nodes,
            alpha=self.alpha,
            gammas=self.gammas,
            max_extension=max_extension,
            reading=self.reading,
        )


# -- the file -------------------------------------------------------------------------------------------------


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Write the file whole or not at all; the same calibration gives the same bytes."""
    policy = calibration.policy()
    content = {
        "format_version": FORMAT_VERSION,
        "thresholds": list(calibration.thresholds),
        # Extension and width follow from the rest; they are there for readers.
        "bins": [
            {**facts._asdict(), "extension": extension, "width": width}
            for facts, extension, width in zip(calibration.bins, policy.extensions, policy.widths, strict=True)
        ],
        "gammas": list(calibration.gammas),
        "alpha": calibration.alpha,
        # Left out where it is ours, as in the files of before there was another.
        **({} if calibration.reading == OURS else {"reading": calibration.reading._asdict()}),
        "tree": calibration.tree._asdict(),
        "target": calibration.target._asdict(),
        "drafter": calibration.drafter._asdict(),
        "made": calibration.made,
    }
    write_json(path, content)


def read_calibration(path: str | Path, key: str) -> Calibration:
    """Read the file of a calibration.

    Args:
        path: that :func:`write_calibration` wrote.
        key: of the setting that named it, for messages.

    Raises:
        ValueError: one sentence naming ``key``, what is wrong and the command that makes a calibration: no such file,
            no JSON, another version, a missing entry, or entries that do not hang together.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise ValueError(f"{key}: there is no file {str(path)!r}; {REMEDY}, or give the file of one")
    return read_versioned(path, FORMAT_VERSION, where=key, remedy=REMEDY, parse=_parse, disagreement=_disagreement)


def _parse(content: dict[str, Any]) -> Calibration:
    tree, bins = content["tree"], content["bins"]
    return Calibration(
        thresholds=tuple(float(value) for value in content["thresholds"]),
        bins=tuple(
            BinFacts(float(b["mean_rank"]), int(b["num_paths"]), int(b["num_rounds"]), float(b["mean_accepted"]))
            for b in bins
        ),
        gammas=tuple(float(value) for value in content["gammas"]),
        alpha=int(content["alpha"]),
        # A file of before trees were sharpened has none.
        tree=TreeShape(
            int(tree["depth"]), int(tree["top_k"]), int(tree["num_nodes"]), float(tree.get("sharpness", 1.0))
        ),
        target=_identity(content["target"]),
        drafter=_identity(content["drafter"]),
        made=dict(content["made"]),
        reading=Reading(**content.get("reading", {})),
    )


def _identity(content: Mapping[str, Any]) -> Identity:
    weights = content["weights"]
    return Identity(str(content["name"]), str(content["config"]), None if weights is None else str(weights))


def _disagreement(found: Calibration) -> str | None:
    """What does not hang together, if anything."""
    thresholds = found.thresholds
    if len(thresholds) > MAX_THRESHOLDS or not all(map(math.isfinite, thresholds)):
        return f"thresholds must be at most {MAX_THRESHOLDS} numbers"
    if any(not before < after for before, after in pairwise(thresholds)):
        return f"thresholds must rise (they are {list(thresholds)})"
    if len(found.bins) != len(thresholds) + 1:
        return f"bins must be {len(thresholds) + 1}, one more than thresholds"
    if len(found.gammas) >= len(found.bins) or not all(0 < gamma <= 1 for gamma in found.gammas):
        return f"gammas must be fewer than the {len(found.bins)} bins, each above 0 and at most 1"
    if found.alpha < 0 or min(found.tree[:3]) < 1:
        return "alpha must be 0 or more, and the tree's sizes 1 or more"
    if found.reading.first_bin not in (0, 1) or not isinstance(found.reading.is_capped, bool):
        return f"reading must have first_bin 0 or 1, and is_capped true or false (it is {found.reading._asdict()})"
    return None


def check_calibration(
    calibration: Calibration, *, target: Identity | None, drafter: Identity | None, tree: TreeShape, key: str
) -> None:
    """See that a calibration is of these models and this tree.

    Args:
        calibration: as read.
        target, drafter: what they are to be; None where nothing is known of one.
        tree: what the trees are to be.
        key: of the setting that named the calibration, for messages.

    Raises:
        ValueError: one sentence naming ``key``, what differs and the command that makes a calibration.
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


def check_drafter_calibration(drafter: DrafterConfig, target: Identity | None, key: str) -> None:
    """See that what ``adaptive.model`` names is there, whole, and made for this drafter, its tree and this target.

    Args:
        drafter: whose tree has all its sizes; nothing is looked at where it has no calibration.
        target: None where nothing is known of it.
        key: of ``adaptive.model``, for messages.

    Raises:
        ValueError: see :func:`read_calibration` and :func:`check_calibration`.
    """
    if drafter.adaptive is None or drafter.adaptive.model is None:
        return
    tree = drafter.tree
    assert tree.depth is not None and tree.top_k is not None and tree.num_nodes is not None
    check_calibration(
        read_calibration(drafter.adaptive.model, key),
        target=target,
        drafter=known_model(drafter.model, drafter.native.get("revision")),
        tree=TreeShape(tree.depth, tree.top_k, tree.num_nodes, tree.sharpness or 1.0),
        key=key,
    )


def load_policy(adaptive: AdaptiveConfig, num_nodes: int, key: str = "speculative_config.adaptive") -> AdaptivePolicy:
    """The policy that these settings ask for.

    Args:
        adaptive: the settings; where ``model`` names a calibration, it is read.
        num_nodes: N of the drafter's tree.
        key: of the settings, for messages.

    Raises:
        ValueError: one sentence, where there is no such file, or it is no calibration.
    """
    if adaptive.type == "record":
        return flat_policy(num_nodes)
    if adaptive.model is None:
        raise ValueError(f"{key}.model must name a calibration; make one with `crossspec calibrate heterospec`")
    return read_calibration(adaptive.model, f"{key}.model").policy(adaptive.max_extension)


def policies(settings: CrossSpecConfig) -> dict[str, AdaptivePolicy]:
    """How each drafter's trees are sized, by name; those whose trees are all the same are left out."""
    found = {}
    for name, drafter in settings.drafters.items():
        if drafter.adaptive is not None and drafter.adaptive.type != "record":
            assert drafter.tree.num_nodes is not None
            found[name] = load_policy(drafter.adaptive, drafter.tree.num_nodes)
    return found
