"""Clusters for an inflated drafter: the same tokens in each, the centroids as wide as its states."""

from collections.abc import Mapping
from pathlib import Path

import torch

from vllm_crossspec.heads.flashhead.assets import Assets, read_assets, save_assets
from vllm_crossspec.heads.flashhead.check import FINGERPRINT, check_fingerprint, fingerprint
from vllm_crossspec.heads.flashhead.embedding import own_output, read_output_embedding


def owner(folder: Path, drafters: Mapping[str, Path], key: str) -> str | None:
    """The drafter whose output embedding was clustered; None where it is none of these.

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
        if tuple(weight.shape) == (assets.vocab_size, assets.centroids.shape[1]) and _is_of(assets, weight):
            return name
    return None


def inflate(folder: Path, drafter: Path, out: Path, key: str) -> None:
    """Write the clusters of ``folder`` for the inflated ``drafter``.

    A state's first copy is what the drafter's output layer reads, and the centroids read no more. What is new of them
    is zero: they are normed before they are compared.
    """
    assets, weight = read_assets(folder, key=key), read_output_embedding(drafter, key)
    width = assets.centroids.shape[1]
    centroids = torch.zeros(len(assets.centroids), weight.shape[1], dtype=assets.centroids.dtype)
    centroids[:, :width] = assets.centroids
    save_assets(out, assets._replace(centroids=centroids, facts={**assets.facts, FINGERPRINT: fingerprint(weight)}))


def _is_of(assets: Assets, weight: torch.Tensor) -> bool:
    try:
        check_fingerprint(assets, weight, "")
    except ValueError:
        return False
    return True
