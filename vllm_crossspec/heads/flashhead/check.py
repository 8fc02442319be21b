"""Whether clusters are a drafter's own: as far as files tell, before any weight is loaded, and once it is."""

import glob
import hashlib
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download

from vllm_crossspec.config import DrafterConfig, HeadConfig
from vllm_crossspec.drafters.base import drafter_kind
from vllm_crossspec.drafters.checkpoint import layer_config, read_config
from vllm_crossspec.heads.flashhead.assets import CONFIG_FILE, Assets, named_folder, read_assets
from vllm_crossspec.heads.flashhead.embedding import open_rows, own_output
from vllm_crossspec.heads.flashhead.head import MAX_TOP_K, check_probes
from vllm_crossspec.types import DrafterFacts

FINGERPRINT = "fingerprint"
"""Of the output embedding that was clustered, in the assets' facts."""
_SAMPLED_ROWS = 64
_SCALED = ("logit_scale", "logits_scaling", "final_logit_softcapping")
"""Settings of models whose logits are more than products."""


def check_head(drafter: DrafterConfig, facts: DrafterFacts, key: str) -> None:
    """See that the drafter's ``head``, if it has one, can serve it; nothing but the clusters and a few rows are read.

    Args:
        drafter: with its tree resolved.
        facts: of its checkpoint.
        key: of the setting, ``speculative_config.head`` for example.

    Raises:
        ValueError: one sentence that names the key and the fix: no clusters, damaged ones, another model's, more
            probes than clusters, fewer candidates than a tree asks for, an output layer that is no product.
    """
    head = drafter.head
    if head is None:
        return
    revision = drafter.native.get("revision")
    config = layer_config(read_config(drafter.model, key, revision))
    config = config | (config.get("text_config") or {})
    scaled = [name for name in _SCALED if config.get(name) not in (None, 1, 1.0)]
    if scaled:
        raise ValueError(
            f"{key}: {drafter.model} changes its logits by {scaled[0]}, which no FlashHead does; leave out head"
        )
    assets = head_assets(
        head,
        drafter.model,
        f"{key}.model",
        vocab_size=facts.draft_vocab_size,
        hidden_size=config.get("hidden_size"),
        revision=revision,
    )
    num_clusters, size = assets.members.shape
    num_probes = check_probes(head.num_probes or assets.num_probes, num_clusters, f"{key}.num_probes")
    _check_tree(drafter.tree.top_k, num_probes * size + len(assets.special_token_ids), key)
    folder = Path(drafter.model).expanduser()
    if folder.is_dir() and FINGERPRINT in assets.facts:
        place = own_output(folder, key, may_be_tied=drafter_kind(drafter.kind, key).ties_head)
        if place is not None:
            with open_rows(*place, key) as rows:
                check_fingerprint(assets, rows, f"{key}.model")


def _check_tree(top_k: int | None, num_candidates: int, key: str) -> None:
    """Refuse trees that want more candidates than the head gives."""
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
    """The clusters that a head's settings name: ``head.model``, else beside the drafter's weights.

    Args:
        head: its settings.
        drafter: folder or hub id of the drafter.
        key: of ``head.model``, for messages.
        vocab_size, hidden_size: of the drafter's output embedding; None: not checked.
        revision: of the drafter on the hub.

    Raises:
        ValueError: as :func:`vllm_crossspec.heads.flashhead.assets.read_assets`.
    """
    named = head.model or drafter
    folder = _local(named, key, revision if head.model is None else None)
    return read_assets(folder, vocab_size=vocab_size, hidden_size=hidden_size, key=key)


def _local(named: str, key: str, revision: str | None) -> Path:
    """The folder, or what of a hub repository makes its clusters, copied from there or from the local cache."""
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
    """What tells one output embedding from another: a hash of rows from all over it, in bfloat16.

    Args:
        rows: [V, D] a tensor, or a slice of a file.
    """
    vocab_size = rows.shape[0] if isinstance(rows, torch.Tensor) else rows.get_shape()[0]
    digest = hashlib.sha256(str(vocab_size).encode())
    for place in torch.linspace(0, vocab_size - 1, _SAMPLED_ROWS, dtype=torch.float64).long().tolist():
        row = rows[place : place + 1].to("cpu", torch.bfloat16).contiguous()
        digest.update(row.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def check_fingerprint(assets: Assets, rows: Any, key: str) -> None:
    """Refuse clusters that were made from another embedding; published ones do not say from which.

    Args:
        assets: the clusters.
        rows: [V, D] output embedding: a tensor, or a slice of a file.
        key: of ``head.model``, for the message.

    Raises:
        ValueError: one sentence.
    """
    known = assets.facts.get(FINGERPRINT)
    if known is not None and known != fingerprint(rows):
        raise ValueError(
            f"{key}: these clusters were made from another output embedding ({assets.facts.get('model', 'unnamed')}); "
            "make them with `crossspec flashhead build` from this one"
        )
