"""EAGLE-3 as SafeAILab's code drafts it: ``Model.topK_genrate`` of ``eagle/model/cnets.py``, with one branch."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from reference.compare import Draft, top_gaps

VARIABLE = "CROSSSPEC_EAGLE_REFERENCE"
HOW_TO_GET = f"git clone https://github.com/SafeAILab/EAGLE and set {VARIABLE} to that folder"


def tapped_layers(num_layers: int) -> tuple[int, int, int]:
    """The layers whose inputs its target models hand out (``modeling_qwen3_kv.py``)."""
    return (2, num_layers // 2, num_layers - 3)


def load(checkout: Path, drafter: Path, target: Any, num_draft_tokens: int) -> Any:
    """The drafter's model, set up as ``EaModel`` does it; the embedding is the target's.

    A tree with one branch and as many nodes as there are levels is a chain.
    """
    sys.path.insert(0, str(checkout))
    try:
        cnets = importlib.import_module("eagle.model.cnets")
        configs = importlib.import_module("eagle.model.configs")
    finally:
        sys.path.remove(str(checkout))
    config = configs.EConfig.from_pretrained(str(drafter / "config.json"))
    # transformers 5 moves these two into rope_parameters; without them EAGLE's rotary embedding would silently
    # fall back to a theta of 10,000.
    written = json.loads((drafter / "config.json").read_text())
    config.rope_theta, config.rope_scaling = written["rope_theta"], written.get("rope_scaling")
    model = cnets.Model(config, total_tokens=num_draft_tokens + 1, depth=num_draft_tokens - 1, top_k=1)
    if config.vocab_size == config.draft_vocab_size:
        del model.d2t, model.t2d
    result = model.load_state_dict(load_file(drafter / "model.safetensors"), strict=False)
    assert result.missing_keys == ["embed_tokens.weight"] and not result.unexpected_keys, result
    model.embed_tokens.weight.data = target.get_input_embeddings().weight.data
    model.init_tree()
    return model.eval()


def drafts(model: Any, states: torch.Tensor, tokens: list[int], rounds: list[int]) -> dict[int, Draft]:
    """Every round of one request, with the drafter's own cache from round to round.

    Args:
        model: from :func:`load`.
        states: [1, T, 3H] of the target, for all of ``tokens``.
        tokens: the text, prompt included.
        rounds: numbers of tokens known at the start of each round.
    """
    logits: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda module, inputs, output: logits.append(output))
    model.reset_kv()
    drafted, done = {}, 0
    try:
        for known in rounds:
            logits.clear()
            # The last known token has no state yet: the target has not seen it.
            new_states = states[:, done : known - 1]
            chain = model.topK_genrate(new_states, torch.tensor([tokens[:known]]), None, None)[0]
            done = known - 1
            assert chain[0, 0] == tokens[known - 1]
            gaps = [gap for step in logits for gap in top_gaps(step)]
            drafted[known] = Draft(chain[0, 1:].tolist(), gaps)
    finally:
        hook.remove()
    return drafted
