"""JetSpec's blocks as hao-ai-lab's drafter computes them: ``DFlashDraftModel`` of ``jetspec/models/draft_head.py``."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from reference.compare import Draft, top_gaps

VARIABLE = "CROSSSPEC_JETSPEC_REFERENCE"
HOW_TO_GET = f"git clone https://github.com/hao-ai-lab/JetSpec and set {VARIABLE} to that folder"


def load(checkout: Path, drafter: Path) -> Any:
    """The drafter's model; the file alone is imported, for the package wants a GPU's libraries."""
    spec = importlib.util.spec_from_file_location("draft_head", checkout / "jetspec" / "models" / "draft_head.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    options = {"dtype": torch.float32, "attn_implementation": "sdpa", "output_loading_info": True}
    model, report = module.DFlashDraftModel.from_pretrained(drafter, **options)
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    return model.eval()


@torch.inference_mode()
def drafts(
    model: Any, target: nn.Module, states: torch.Tensor, tokens: list[int], starts: Sequence[int], num_draft_tokens: int
) -> dict[int, Draft]:
    """The block after each of ``starts`` known tokens: the last of these, and masks.

    Args:
        model: from :func:`load`.
        target: in transformers, for its embedding and its head.
        states: [1, T, layers * H] of the tapped layers, side by side.
        tokens: the text, prompt included.
        starts: numbers of known tokens.
        num_draft_tokens: masks of a block.
    """
    found = {}
    for known in starts:
        block = torch.tensor([tokens[known - 1], *[model.mask_token_id] * num_draft_tokens])
        hidden = model(
            position_ids=torch.arange(known - 1 + len(block))[None],
            noise_embedding=target.get_input_embeddings()(block)[None],
            target_hidden=states[:, : known - 1],
        )
        logits = target.lm_head(hidden[0, 1:])
        found[known] = Draft(logits.argmax(dim=-1).tolist(), top_gaps(logits))
    return found
