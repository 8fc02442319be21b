"""The frozen target as a teacher: the hidden states that drafters read and the distributions they imitate."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from crossspec_tools.train.generations import Batch


class States(NamedTuple):
    """What the target knows about a batch. B rows, T tokens, H hidden size, n taps."""

    taps: torch.Tensor  # [B, T, n * H], the residual stream after the tapped layers, concatenated in rising order
    last: torch.Tensor  # [B, T, H], final hidden state (normed), ready for the head


def check_target(folder: Path) -> None:
    """See that ``folder`` looks like a Hugging Face model. Raises ValueError: no ``config.json``, or no weights."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"--target {folder} has no config.json; give a Hugging Face model folder")
    if not [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
        raise ValueError(f"--target {folder} has no weights (*.safetensors); give a Hugging Face model folder")


def target_settings(folder: Path) -> Any:
    """The configuration of a Hugging Face folder, without its weights; raises as :func:`check_target` does."""
    check_target(folder)
    return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def load_target(
    folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a Hugging Face folder for inference on ``device``; raises as :func:`check_target` does."""
    check_target(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    return model.to(device).eval().requires_grad_(False), tokenizer


class Teacher(NamedTuple):
    """What the target would say at N places of a batch."""

    index: torch.Tensor  # int64 [B, T], which of the N places a position is (meaningless where it is none)
    probs: torch.Tensor  # float32 [N, V or kept tokens], the distribution of the token after the place
    top: torch.Tensor  # int64 [N], the most likely token of the whole vocabulary


class FrozenTarget:
    """A target that only answers questions about given tokens; it is never trained.

    ``tap_layers``: tap i is the residual stream after ``i`` layers (0: the embeddings). vLLM counts its auxiliary
    layers of EAGLE-3 the same way; z-lab's DFlash ids are one lower. Raises ValueError: a tap is not strictly inside
    the model. After the last layer transformers gives the normed state, vLLM the bare one.
    """

    def __init__(self, model: PreTrainedModel, tap_layers: Sequence[int], bfloat16: bool):
        depth = model.config.num_hidden_layers
        if not tap_layers or list(tap_layers) != [layer for layer in range(depth) if layer in tap_layers]:
            raise ValueError(f"target layers {list(tap_layers)} must rise and lie within 0..{depth - 1} of this target")
        self.model, self.tap_layers, self.bfloat16 = model, tuple(tap_layers), bfloat16
        self.config, self.device = model.config, model.device
        self.embedding = model.get_input_embeddings().weight.detach().float()
        self.head = model.get_output_embeddings().weight.detach().float()

    @property
    def reads_block_masks(self) -> bool:
        """Whether the model's attention is FlexAttention, which takes its masks as blocks."""
        return bool(self.model.config._attn_implementation == "flex_attention")

    def autocast(self) -> Any:
        """The context in which this target and what is trained beside it compute."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bfloat16)

    @torch.no_grad()
    def states(self, tokens: torch.Tensor) -> States:
        """Run the target over right-padded ``tokens`` int64 [B, T]; causal attention needs no padding mask."""
        with self.autocast():
            out = self.model.model(input_ids=tokens, use_cache=False, output_hidden_states=True)
        return self._states(out)

    @torch.no_grad()
    def states_and_cache(self, tokens: torch.Tensor) -> tuple[States, list[tuple[torch.Tensor, torch.Tensor]]]:
        """As :meth:`states`, and the keys and values [B, heads, T, head size] of every layer."""
        with self.autocast():
            out = self.model.model(input_ids=tokens, use_cache=True, output_hidden_states=True)
        return self._states(out), [(layer.keys, layer.values) for layer in out.past_key_values.layers]

    def _states(self, out: Any) -> States:
        return States(torch.cat([out.hidden_states[i] for i in self.tap_layers], dim=-1), out.last_hidden_state)

    @torch.no_grad()
    def teach(self, states: States, batch: Batch, temperature: float, kept: torch.Tensor | None = None) -> Teacher:
        """The target's next-token distributions at every place that predicts a response token.

        ``kept``: int64 ids of the tokens that they are restricted to; None: the whole vocabulary.
        """
        wanted = batch.is_asked
        with self.autocast():
            logits = F.linear(states.last[wanted], self.head)
        index = wanted.flatten().cumsum(0).view(wanted.shape) - 1
        some = logits if kept is None else logits[:, kept]
        return Teacher(index, (some.float() / temperature).softmax(-1), logits.argmax(-1))
