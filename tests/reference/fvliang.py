"""DART as fvliang's code drafts it: ``LlamaForCausalLMDart`` and its cache, in the rounds of ``dart_utils.py``."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file

VARIABLE = "CROSSSPEC_DART_REFERENCE"
HOW_TO_GET = f"git clone https://github.com/fvliang/DART and set {VARIABLE} to that folder"


def tapped_layers(num_layers: int) -> tuple[int, int, int]:
    """The layers whose inputs its target models hand out (``modeling_qwen3_kv.py``)."""
    return (2, num_layers // 2, num_layers - 3)


def _module(checkout: Path, name: str) -> ModuleType:
    # Its own package would import all of it: target models that want transformers 4, and a compiled trie.
    package = ModuleType("fvliang_dart_model")
    package.__path__ = [str(checkout / "dart" / "model")]
    sys.modules.setdefault(package.__name__, package)
    # It compiles single norms and rotations: the same numbers, after minutes.
    with patch("torch.compile", lambda *_, **__: lambda function: function):
        return importlib.import_module(f"{package.__name__}.{name}")


def load(checkout: Path, drafter: Path, target_embedding: torch.Tensor) -> Any:
    """The drafter's model in float32, set up as ``DartModel`` does it.

    Args:
        checkout: of the reference.
        drafter: folder of a checkpoint.
        target_embedding: the target's, [V, H].
    """
    config = _module(checkout, "dart_configs").DartConfig.from_pretrained(str(drafter))
    # transformers 5 moves these two into rope_parameters; without them its rotary embedding would silently fall back
    # to a theta of 10,000.
    written = json.loads((drafter / "config.json").read_text())
    config.rope_theta, config.rope_scaling = written["rope_theta"], written.get("rope_scaling")
    model = _module(checkout, "llama3_dart").LlamaForCausalLMDart(config)
    result = model.load_state_dict(load_file(drafter / "model.safetensors"), strict=False)
    assert result.missing_keys == ["embed_tokens.weight"] and not result.unexpected_keys, result
    model.embed_tokens.weight.data = target_embedding.detach().float()
    return model.float().eval()


class Cache:
    """The drafter's own cache of one request, from round to round.

    Args:
        checkout: of the reference.
        model: from :func:`load`.
        max_length: entries and masks that it has room for.
    """

    def __init__(self, checkout: Path, model: Any, max_length: int):
        make = _module(checkout, "kv_cache").initialize_past_key_values_for_dart
        self.layers, self.storage, self.lengths = make(model, max_length=max_length)
        self.num_entries = 0


@torch.inference_mode()
def draft_logits(model: Any, features_new: torch.Tensor, tokens_all: list[int], cache: Cache) -> torch.Tensor:
    """One round: take the new entries into the cache and draft after the last of them.

    Args:
        model: from :func:`load`.
        features_new: [1, n, 3H] of the target, for the n tokens since the last round; all but the newest token at
            first.
        tokens_all: every token known, the one that the target has just emitted included.
        cache: of this request; the masks of the round before are released first, as ``update_inference_inputs`` does.

    Returns:
        Logits [d, draft vocabulary], d = draft_length + 1; row i is about the token i + 1 after ``tokens_all``.
    """
    assert cache.num_entries + features_new.shape[1] == len(tokens_all) - 1
    cache.lengths.fill_(cache.num_entries)
    hidden = model(
        hidden_states=features_new,
        inputs_embeds=model.embed_input_ids(torch.tensor([tokens_all[cache.num_entries + 1 :]])),
        attention_mask=None,
        past_key_values=cache.layers,
        use_cache=True,
    )
    cache.num_entries += features_new.shape[1]
    return model.compute_logits(hidden)[0]
