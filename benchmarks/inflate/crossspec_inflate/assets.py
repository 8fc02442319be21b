"""What drafters and routers have beside their checkpoints: clusters of FlashHead, and a trained router."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import torch

from crossspec_inflate import matrices
from crossspec_inflate.growth import Width
from crossspec_inflate.matrices import Maker
from crossspec_tools.flashhead.files import read_output_embedding, save_assets
from vllm_crossspec.drafting.flashhead.assets import read_assets
from vllm_crossspec.drafting.flashhead.check import FINGERPRINT, check_fingerprint, fingerprint
from vllm_crossspec.drafting.flashhead.embedding import own_output
from vllm_crossspec.routing.checkpoint import FACTS_FILE, RouterCheckpoint, middle_size, read_router, save_router


def owner_of_clusters(folder: Path, drafters: Mapping[str, Path], key: str) -> str | None:
    """The drafter whose output embedding was clustered; None if these drafters do not have it.

    Args:
        folder: of the clusters.
        drafters: folders by name.
        key: of the clusters, for messages.
    """
    assets = read_assets(folder, key=key)
    for name, drafter in drafters.items():
        if own_output(drafter, name) is None:
            continue
        weight = read_output_embedding(drafter, name)
        if tuple(weight.shape) != (assets.vocab_size, assets.centroids.shape[1]):
            continue
        try:
            check_fingerprint(assets, weight, "")
        except ValueError:
            continue
        return name
    return None


def inflate_clusters(folder: Path, drafter: Path, out: Path, key: str) -> None:
    """Write the clusters of ``folder`` for the inflated ``drafter``.

    A state's first copy is what the drafter's output layer reads, and the centroids read no more. What is new of them
    is zero: they are normed before they are compared.
    """
    assets, weight = read_assets(folder, key=key), read_output_embedding(drafter, key)
    width = assets.centroids.shape[1]
    centroids = torch.zeros(len(assets.centroids), weight.shape[1], dtype=assets.centroids.dtype)
    centroids[:, :width] = assets.centroids
    save_assets(out, assets._replace(centroids=centroids, facts={**assets.facts, FINGERPRINT: fingerprint(weight)}))


def inflate_router(folder: Path, width: Width, out: Path, key: str) -> None:
    """Write the router of ``folder`` for wide states: its middle layer grows with them, and its gains stay.

    Raises:
        ValueError: it is another target's, or damaged.
    """
    try:
        drafters = tuple(json.loads((folder / FACTS_FILE).read_text())["drafters"])
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise ValueError(f"{key}: {folder / FACTS_FILE} cannot be read ({problem}); copy it again") from None
    old = read_router(folder, hidden_size=width.old, drafters=drafters, key=key)
    few, many = middle_size(width.old), middle_size(width.new)
    bias, gains = torch.zeros(many), torch.zeros(len(old.gain_weight), many)
    bias[:few], gains[:, :few] = old.hidden_bias, old.gain_weight
    recipe = matrices.inward(lambda _: old.hidden_weight.float(), [(0, 0, few)], many, width)
    hidden = Maker(torch.float32, torch.device("cpu")).make("hidden.weight", recipe)
    facts = dataclasses.replace(old.facts, hidden_size=width.new)
    save_router(out, RouterCheckpoint(facts, hidden, bias, gains, old.gain_bias))
