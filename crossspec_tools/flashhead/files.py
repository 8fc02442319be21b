"""What FlashHead's commands read of models and write: output embeddings, special tokens, clusters."""

from pathlib import Path

import torch
from safetensors.torch import save

from vllm_crossspec.drafting.flashhead.assets import (
    ASSETS_FOLDER,
    CONFIG_FILE,
    FACTS_KEY,
    FOLDER_KEY,
    TENSORS_FILE,
    Assets,
)
from vllm_crossspec.drafting.flashhead.embedding import config_value, open_rows, own_output, tensor_files
from vllm_crossspec.files import read_json, replacing, write_json

_STOPS = ("bos_token_id", "eos_token_id", "pad_token_id")


def read_output_embedding(folder: Path, key: str = "MODEL") -> torch.Tensor:
    """The matrix [V, D] that turns hidden states into logits, as the folder of a model or a drafter has it.

    Raises ValueError: one sentence that begins with ``key``, what the setting is called.
    """
    place = own_output(folder, key)
    if place is None:
        raise ValueError(
            f"{key} {folder} has no output embedding (lm_head.weight, or a tied embed_tokens.weight); a drafter "
            "without one uses its target's: give the target's folder"
        )
    with open_rows(*place, key) as rows:
        weight: torch.Tensor = rows[:]
    if weight.ndim != 2 or not weight.is_floating_point():
        raise ValueError(
            f"{key} {folder}: {place[1]} is {weight.dtype} {list(weight.shape)}; give an unquantised model"
        )
    return weight


def read_target_ids(folder: Path, key: str = "MODEL") -> torch.Tensor | None:
    """int64 [V] the target's id of each token of a drafter's reduced vocabulary; None where it has the target's own."""
    places = tensor_files(folder, key)
    if "d2t" not in places:
        return None
    with open_rows(places["d2t"], "d2t", key) as rows:
        offsets: torch.Tensor = rows[:].long()
    return offsets + torch.arange(len(offsets))


def read_special_tokens(folder: Path, vocab_size: int, key: str = "MODEL") -> tuple[int, ...]:
    """Ids below ``vocab_size`` that the model's files call special: begin, end, padding, and the tokenizer's own."""
    found: set[int] = set()
    for file in ("config.json", "generation_config.json"):
        if (folder / file).is_file():
            content = read_json(folder / file, key)
            for name in _STOPS:
                ids = config_value(content, name, None)
                found |= set(ids if isinstance(ids, list) else [ids])
    if (folder / "tokenizer.json").is_file():
        added = read_json(folder / "tokenizer.json", key).get("added_tokens") or []
        found |= {token["id"] for token in added if token.get("special")}
    return tuple(sorted(token for token in found if isinstance(token, int) and 0 <= token < vocab_size))


def save_assets(folder: str | Path, assets: Assets) -> None:
    """Write both files; the config last, so that a folder with a config is whole."""
    folder = Path(folder)
    check_out(folder)
    (folder / ASSETS_FOLDER).mkdir(parents=True, exist_ok=True)
    tensors = {
        "centroids": assets.centroids.detach().cpu().t().contiguous()[None, None],
        "cluster_assignments": assets.assignments.cpu(),
    }
    # Not by safetensors' own writer: its files are their owner's alone.
    with replacing(folder / ASSETS_FOLDER / TENSORS_FILE) as partial:
        partial.write_bytes(save(tensors))
    content = {
        FOLDER_KEY: ASSETS_FOLDER,
        "flash_head_special_token_ids": list(assets.special_token_ids),
        "n_probes": assets.num_probes,
        FACTS_KEY: assets.facts,
    }
    write_json(folder / CONFIG_FILE, content)


def check_out(folder: Path, key: str = "--out") -> None:
    """Raises ValueError, one sentence, where :func:`save_assets` must not write."""
    config = folder / CONFIG_FILE
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{key} {folder} is a file; name a folder for the clusters")
    if config.exists() and FACTS_KEY not in read_json(config, f"{key}:"):
        raise ValueError(f"{key} {folder} has a config.json that is not ours; name a new folder for the clusters")
