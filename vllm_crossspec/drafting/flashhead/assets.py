"""FlashHead's clusters on disk, in the published layout; shapes by the folder's legend.

    config.json                                      flash_head_cache_dir, flash_head_special_token_ids, n_probes
    FLASH_HEAD_CACHE_DIR/clustering_cache.safetensors
        centroids            float [1, 1, D, C]      of any length: the search normalises them
        cluster_assignments  int [V]                 the cluster of each token; every cluster has V / C tokens

Published folders also hold the model; `crossspec flashhead build` writes only the clusters.
"""

from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch

from vllm_crossspec.files import open_tensors, read_json

CONFIG_FILE, TENSORS_FILE, ASSETS_FOLDER = "config.json", "clustering_cache.safetensors", "flash_head_assets"
FOLDER_KEY, FACTS_KEY = "flash_head_cache_dir", "crossspec_flashhead"
DEFAULT_PROBE_SHARE = 16
"""The public implementation probes C // 16 clusters by default."""
MAX_CLUSTERS = 32768
"""One program holds the scores of all clusters."""
_REMEDY = "make them with `crossspec flashhead build`"
_INTEGERS = ("I8", "U8", "I16", "U16", "I32", "U32", "I64")
_FLOATS = ("F16", "BF16", "F32", "F64")


class Assets(NamedTuple):
    """Clusters of an output embedding.

    Attributes:
        centroids: float [C, D], as stored.
        members: int64 [C, M], the tokens of each cluster, ascending.
        special_token_ids: S ids, ascending, each once.
        num_probes: P, clusters to probe by default.
        facts: how the clusters were made, if known; free-form.
    """

    centroids: torch.Tensor
    members: torch.Tensor
    special_token_ids: tuple[int, ...]
    num_probes: int
    facts: dict[str, Any]

    @property
    def vocab_size(self) -> int:
        """V."""
        return int(self.members.numel())

    @property
    def assignments(self) -> torch.Tensor:
        """int64 [V], the cluster of each token."""
        clusters = torch.arange(len(self.members)).repeat_interleave(self.members.shape[1])
        return torch.empty_like(clusters).scatter_(0, self.members.flatten(), clusters)


def default_probes(num_clusters: int) -> int:
    """P for a config without ``n_probes``."""
    return max(1, num_clusters // DEFAULT_PROBE_SHARE)


def group(assignments: torch.Tensor, num_clusters: int) -> torch.Tensor | None:
    """int64 [C, M] tokens of each cluster from int [V] clusters of each token; None if sizes differ."""
    sizes = torch.bincount(assignments.long(), minlength=num_clusters)
    if int(sizes.min()) != int(sizes.max()):
        return None
    return assignments.argsort(stable=True).view(num_clusters, -1)


def read_assets(
    folder: str | Path, *, vocab_size: int | None = None, hidden_size: int | None = None, key: str = "head.model"
) -> Assets:
    """Read clusters and check that they are complete and fit.

    Args:
        folder: with a config.json that names ``flash_head_cache_dir``, or that directory itself.
        vocab_size, hidden_size: V and D of the drafter's output embedding; None: not checked.
        key: of the setting that named the folder, for messages.

    Returns:
        The clusters, on the CPU. Special ids beyond the vocabulary are dropped, as in the public implementation.

    Raises:
        ValueError: names ``key`` and the problem.
    """
    path, config = _locate(Path(folder).expanduser(), key)
    where = f"{key}: {path}"
    with open_tensors(path, where) as file:
        _check_shapes(file, where, vocab_size, hidden_size)
        centroids = file.get_tensor("centroids")[0, 0].t().contiguous()
        assignments = file.get_tensor("cluster_assignments").long()
    members = _check_values(centroids, assignments, where)
    special = _special_ids(config, len(assignments), key)
    return Assets(centroids, members, special, _num_probes(config, len(members), key), dict(config.get(FACTS_KEY, {})))


def named_folder(config: dict[str, Any], where: str) -> str | None:
    """The folder of clusters that a config.json names, which must be below it; None if it names none."""
    named = config.get(FOLDER_KEY)
    if not isinstance(named, str):
        return None
    path = PurePosixPath(named)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{where}: {FOLDER_KEY} {named!r} leads out of its folder; name one that lies there")
    return named


def _locate(folder: Path, key: str) -> tuple[Path, dict[str, Any]]:
    """The tensors' file and its config."""
    if not folder.is_dir():
        raise ValueError(f"{key}: there is no folder {str(folder)!r}; {_REMEDY}, or give the folder of some")
    for place in (folder, folder.parent):
        config = read_json(place / CONFIG_FILE, f"{key}:") if (place / CONFIG_FILE).is_file() else {}
        named = named_folder(config, f"{key}: {place / CONFIG_FILE}")
        if named is None:
            continue
        assets = place / named
        if place == folder or assets.resolve() == folder.resolve():
            if not (assets / TENSORS_FILE).is_file():
                raise ValueError(f"{key}: {assets} has no {TENSORS_FILE}; copy it again, or {_REMEDY}")
            return assets / TENSORS_FILE, config
    if (folder / TENSORS_FILE).is_file():
        return folder / TENSORS_FILE, {}
    raise ValueError(f"{key}: {folder} has no clusters ({TENSORS_FILE}) and no config.json that names any; {_REMEDY}")


def _check_shapes(file: Any, where: str, vocab_size: int | None, hidden_size: int | None) -> None:
    names = set(file.keys())
    for name in ("centroids", "cluster_assignments"):
        if name not in names:
            raise ValueError(f"{where} has no tensor `{name}`; {_REMEDY}")
    pieces = file.get_slice("centroids"), file.get_slice("cluster_assignments")
    (centroids, assignments), kinds = (piece.get_shape() for piece in pieces), [piece.get_dtype() for piece in pieces]
    if kinds[0] not in _FLOATS or kinds[1] not in _INTEGERS:
        raise ValueError(f"{where}: centroids and cluster_assignments are {kinds[0]} and {kinds[1]}; {_REMEDY} again")
    if len(centroids) != 4 or centroids[:2] != [1, 1] or min(centroids) < 1:
        raise ValueError(
            f"{where}: `centroids` has the shape {centroids}, not [1, 1, width, clusters]; {_REMEDY} again"
        )
    if len(assignments) != 1 or not assignments[0]:
        raise ValueError(f"{where}: `cluster_assignments` has the shape {assignments}, not [tokens]; {_REMEDY} again")
    if hidden_size is not None and centroids[2] != hidden_size:
        raise ValueError(
            f"{where} is for hidden states of width {centroids[2]}, the drafter's have {hidden_size}: the clusters are "
            f"another model's; {_REMEDY} from this one"
        )
    if vocab_size is not None and assignments[0] != vocab_size:
        raise ValueError(
            f"{where} is for a vocabulary of {assignments[0]} tokens, the drafter's output embedding has {vocab_size}: "
            f"the clusters are another model's; {_REMEDY} from this one"
        )
    if centroids[3] > min(MAX_CLUSTERS, assignments[0]):
        raise ValueError(
            f"{where} has {centroids[3]} clusters of {assignments[0]} tokens; the most are {MAX_CLUSTERS}, "
            f"and no more than tokens: {_REMEDY} with more tokens a cluster"
        )


def _check_values(centroids: torch.Tensor, assignments: torch.Tensor, where: str) -> torch.Tensor:
    """Check centroids and assignments; return the members [C, M]."""
    lengths = centroids.float().norm(dim=1)
    if not lengths.isfinite().all() or not (lengths > 0).all():
        raise ValueError(f"{where}: some centroid is zero or holds values that are no numbers; {_REMEDY} again")
    lowest, highest = int(assignments.min()), int(assignments.max())
    if lowest < 0 or highest >= len(centroids):
        raise ValueError(
            f"{where}: tokens are assigned to clusters {lowest} to {highest}, but there are {len(centroids)} "
            f"centroids; {_REMEDY} again"
        )
    members = group(assignments, len(centroids))
    if members is None:
        sizes = torch.bincount(assignments, minlength=len(centroids))
        raise ValueError(
            f"{where}: clusters have {int(sizes.min())} to {int(sizes.max())} tokens; the head needs clusters of "
            f"equal size: {_REMEDY}"
        )
    return members


def _special_ids(config: dict[str, Any], vocab_size: int, key: str) -> tuple[int, ...]:
    given = config.get("flash_head_special_token_ids")
    listed = [] if given is None else given if isinstance(given, list) else [given]
    if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in listed):
        raise ValueError(f"{key}: flash_head_special_token_ids {given} in config.json are no token ids; correct them")
    return tuple(sorted({token for token in listed if token < vocab_size}))


def _num_probes(config: dict[str, Any], num_clusters: int, key: str) -> int:
    given = config.get("n_probes")
    if given is None:
        return default_probes(num_clusters)
    if isinstance(given, bool) or not isinstance(given, int) or not 1 <= given <= num_clusters:
        raise ValueError(f"{key}: n_probes {given} in config.json is not between 1 and the {num_clusters} clusters")
    return given
