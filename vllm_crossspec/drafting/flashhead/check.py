"""Checks that clusters belong to a drafter: from files before weights are loaded, and from the loaded weights."""

import glob
import hashlib
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download

from vllm_crossspec.config.schema import DrafterConfig, HeadConfig
from vllm_crossspec.drafting.flashhead.assets import CONFIG_FILE, Assets, named_folder, read_assets
from vllm_crossspec.drafting.flashhead.embedding import open_rows, own_output
from vllm_crossspec.drafting.flashhead.head import MAX_TOP_K, check_probes
from vllm_crossspec.kinds.checkpoint import layer_config, read_config
from vllm_crossspec.types import DrafterFacts

FINGERPRINT = "fingerprint"
"""Key in the assets' facts: the hash of the clustered output embedding."""
_SAMPLED_ROWS = 64
_SCALED = ("logit_scale", "logits_scaling", "final_logit_softcapping")
"""Settings of models that change their logits after the output layer."""


def check_head(drafter: DrafterConfig, config: dict[str, Any], facts: DrafterFacts, key: str) -> None:
    """Check that the drafter's ``head``, if any, fits it; reads only the clusters and a few rows of weights.

    Args:
        drafter: with its tree resolved.
        config: its checkpoint's config.json.
        facts: of its checkpoint.
        key: of the setting, for example ``speculative_config.head``.

    Raises:
        ValueError: names the key and the remedy.
    """
    head = drafter.head
    if head is None:
        return
    config = layer_config(config)
    config = config | (config.get("text_config") or {})
    scaled = [name for name in _SCALED if config.get(name) not in (None, 1, 1.0)]
    if scaled:
        raise ValueError(
            f"{key}: {drafter.model} changes its logits by {scaled[0]}, which no FlashHead does; leave out head"
        )
    sizes = {"vocab_size": facts.draft_vocab_size, "hidden_size": config.get("hidden_size")}
    assets = head_assets(head, drafter.model, f"{key}.model", **sizes, revision=drafter.native.get("revision"))
    num_clusters, size = assets.members.shape
    num_probes = check_probes(head.num_probes or assets.num_probes, num_clusters, f"{key}.num_probes")
    _check_tree(drafter.tree.top_k, num_probes * size + len(assets.special_token_ids), key)
    folder = Path(drafter.model).expanduser()
    if folder.is_dir() and FINGERPRINT in assets.facts:
        place = own_output(folder, key, may_be_tied=drafter.traits.ties_head)
        if place is not None:
            with open_rows(*place, key) as rows:
                check_fingerprint(assets, rows, f"{key}.model")


def _check_tree(top_k: int | None, num_candidates: int, key: str) -> None:
    """Refuse trees that need more candidates than the head gives."""
    tree = f"{key.removesuffix('head')}tree.top_k"
    if top_k is not None and top_k > MAX_TOP_K:
        raise ValueError(
            f"{tree} is {top_k}, but a FlashHead gives at most {MAX_TOP_K} candidates; use {MAX_TOP_K} or less"
        )
    if top_k is not None and top_k > num_candidates:
        raise ValueError(
            f"{tree} is {top_k}, but {key} scores {num_candidates} tokens; use fewer, or raise {key}.num_probes"
        )


def head_assets(
    head: HeadConfig,
    drafter: str,
    key: str,
    *,
    vocab_size: int | None = None,
    hidden_size: int | None = None,
    revision: str | None = None,
) -> Assets:
    """:func:`read_assets` of ``head.model``, else of the drafter's own folder or hub id (at ``revision``)."""
    named = head.model or drafter
    folder = _local(named, key, revision if head.model is None else None)
    return read_assets(folder, vocab_size=vocab_size, hidden_size=hidden_size, key=key)


def _local(named: str, key: str, revision: str | None) -> Path:
    """The folder, or a local copy of a hub repository's clusters."""
    folder = Path(named).expanduser()
    if folder.is_dir() or named.count("/") != 1 or named.startswith((".", "~", "/")):
        return folder
    config = read_config(named, key, revision)
    clusters = named_folder(config, f"{key}: config.json of {named}")
    wanted = [CONFIG_FILE, f"{glob.escape(clusters or '')}/*"]
    try:
        return Path(snapshot_download(named, revision=revision, allow_patterns=wanted))
    except OSError as error:
        why = str(error).splitlines()[0]
        raise ValueError(f"{key}: the clusters of {named!r} cannot be had ({why}); give a local folder") from None


def fingerprint(rows: Any) -> str:
    """Hash of evenly spaced rows of an output embedding [V, D] in bfloat16; a tensor or a slice of a file."""
    vocab_size = rows.shape[0] if isinstance(rows, torch.Tensor) else rows.get_shape()[0]
    digest = hashlib.sha256(str(vocab_size).encode())
    for place in torch.linspace(0, vocab_size - 1, _SAMPLED_ROWS, dtype=torch.float64).long().tolist():
        row = rows[place : place + 1].to("cpu", torch.bfloat16).contiguous()
        digest.update(row.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def check_fingerprint(assets: Assets, rows: Any, key: str) -> None:
    """Refuse clusters that were made from another embedding than ``rows``; published clusters have no fingerprint."""
    known = assets.facts.get(FINGERPRINT)
    if known is not None and known != fingerprint(rows):
        raise ValueError(
            f"{key}: these clusters were made from another output embedding ({assets.facts.get('model', 'unnamed')}); "
            "make them with `crossspec flashhead build` from this one"
        )
