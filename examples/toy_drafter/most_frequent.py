"""A toy drafter: after every token comes the one that followed it most often in a text.

`python -m most_frequent TARGET TEXT OUT` counts the tokens of the file TEXT, as the tokenizer of the folder TARGET
splits it, and writes a checkpoint to the folder OUT. docs/develop/add-a-drafter.md explains this file part by part.
"""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from vllm_crossspec.api import DrafterFacts, DrafterKind, StatelessProposer, TargetFacts, require

ARCHITECTURE = "MostFrequentToken"
WEIGHTS = "model.safetensors"

KIND = DrafterKind(
    name="most_frequent",
    vllm_method="ngram_gpu",
    checkpoint="most_frequent",
    proposer="most_frequent:MostFrequentProposer",
    has_head=False,
    can_sample=False,
)


def read_facts(config: dict[str, Any], key: str, target: TargetFacts) -> DrafterFacts:
    """What config.json says of the drafter; the caller compares the vocabulary with the target's."""
    if config.get("architectures") != [ARCHITECTURE]:
        raise ValueError(f"{key}: config.json is not of a {ARCHITECTURE}; make one with `python -m most_frequent`")
    return DrafterFacts(
        target_hidden_size=None,
        vocab_size=require(config, "vocab_size", key),
        draft_vocab_size=require(config, "vocab_size", key),
        target_layers=(),
        max_draft_tokens=None,
        default_draft_tokens=3,
        mask_token_id=None,
    )


class MostFrequentProposer(StatelessProposer):
    """K look-ups in a table on the device, one for each token of the chain."""

    def load(self, folder: str) -> None:
        self.next_tokens = load_file(Path(folder).expanduser() / WEIGHTS)["next_tokens"].to(self.device)

    def draft(self, last_tokens: torch.Tensor) -> torch.Tensor:
        chain = [last_tokens]
        for _ in range(self.num_speculative_steps):
            chain.append(self.next_tokens[chain[-1]])
        return torch.stack(chain[1:], dim=1)


def write_checkpoint(token_ids: Sequence[int], vocab_size: int, out: Path) -> None:
    """The folder of a drafter; what was never followed by anything is followed by the most frequent token."""
    table = torch.full((vocab_size,), Counter(token_ids).most_common(1)[0][0])
    for (token, following), _ in reversed(Counter(pairwise(token_ids)).most_common()):
        table[token] = following  # the most frequent pair is the last to be written
    out.mkdir(parents=True, exist_ok=True)
    save_file({"next_tokens": table}, out / WEIGHTS)
    (out / "config.json").write_text(json.dumps({"architectures": [ARCHITECTURE], "vocab_size": vocab_size}))


if __name__ == "__main__":
    from transformers import AutoTokenizer

    target, text, out = map(Path, sys.argv[1:])
    size = json.loads((target / "config.json").read_text())["vocab_size"]
    write_checkpoint(AutoTokenizer.from_pretrained(target, trust_remote_code=False).encode(text.read_text()), size, out)
