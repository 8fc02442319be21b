"""The frozen target as a teacher: the hidden states that drafters read and the distributions they imitate.

States are run anew, or read where ``crossspec train generate --states`` has stored them (:mod:`stored`).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from crossspec_tools.train.cli_options import check_target
from crossspec_tools.train.generations import Batch


class States(NamedTuple):
    """What the target knows about a batch. B rows, T tokens, H hidden size, n taps."""

    taps: torch.Tensor  # [B, T, n * H], the residual stream after the tapped layers, concatenated in rising order
    last: torch.Tensor  # [B, T, H], final hidden state (normed), ready for the head
    top: torch.Tensor | None = None  # int64 [B, T], the most likely next token if it was stored; -1 where it was not


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


def load_ends(folder: Path, device: torch.device | str = "cpu") -> PreTrainedModel:
    """A target in float32 with embedding, last norm and head, but none of its layers."""
    config = target_settings(folder)
    config.num_hidden_layers = 0
    if getattr(config, "layer_types", None):
        config.layer_types = []
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # it would list the layers' weights as left over
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float32, trust_remote_code=False
        )
    finally:
        transformers.logging.set_verbosity(verbosity)
    return model.to(device).eval().requires_grad_(False)


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

    ``config``: of the whole target, where ``model`` is one of :func:`load_ends`; it then answers of stored states only.
    """

    def __init__(self, model: PreTrainedModel, tap_layers: Sequence[int], bfloat16: bool, config: Any = None):
        self.config, self.device = config or model.config, model.device
        depth = self.config.num_hidden_layers
        if list(tap_layers) != [layer for layer in range(depth) if layer in tap_layers]:
            raise ValueError(f"target layers {list(tap_layers)} must rise and lie within 0..{depth - 1} of this target")
        self.model, self.tap_layers, self.bfloat16 = model, tuple(tap_layers), bfloat16
        self.embedding = model.get_input_embeddings().weight.detach().float()
        self.head = model.get_output_embeddings().weight.detach().float()

    @property
    def reads_block_masks(self) -> bool:
        """Whether the model's attention is FlexAttention, which takes its masks as blocks."""
        return bool(self.model.config._attn_implementation == "flex_attention")

    def autocast(self) -> Any:
        """The context in which this target and what is trained beside it compute."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bfloat16)

    def states_of(self, batch: Batch) -> States:
        """The stored states of a batch whose rows have them all, float32; else as :meth:`states`.

        States of padding, and of each row's last token, are then zeros.
        """
        if batch.states is None:
            return self.states(batch.tokens)
        rows = [read() for read in batch.states]
        taps, last, top = (torch.nn.utils.rnn.pad_sequence(list(part), True) for part in zip(*rows, strict=True))
        missing = batch.tokens.shape[1] - last.shape[1]  # of the last token alone
        taps, last = (F.pad(x.to(self.device).float(), (0, 0, 0, missing)) for x in (taps, last))
        return States(taps, last, F.pad(top.to(self.device).long(), (0, missing), value=-1))

    @torch.no_grad()
    def states(self, tokens: torch.Tensor) -> States:
        """Run the target over right-padded ``tokens`` int64 [B, T]; causal attention needs no padding mask."""
        assert self.model.config.num_hidden_layers == self.config.num_hidden_layers, "its layers were not loaded"
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
        last = out.last_hidden_state
        taps = [out.hidden_states[i] for i in self.tap_layers]
        return States(torch.cat(taps, dim=-1) if taps else last[..., :0], last)

    @torch.no_grad()
    def teach(self, states: States, batch: Batch, temperature: float, kept: torch.Tensor | None = None) -> Teacher:
        """The target's next-token distributions at every place that predicts a response token.

        ``kept``: int64 ids of the tokens that they are restricted to; None: the whole vocabulary.
        """
        wanted = batch.is_asked
        last = states.last[wanted]
        index = wanted.flatten().cumsum(0).view(wanted.shape) - 1
        with self.autocast():
            if states.top is None or kept is None:
                logits = F.linear(last, self.head)
                some, top = logits if kept is None else logits[:, kept], logits.argmax(-1)
            else:  # the whole vocabulary is much wider than what is kept of it
                some, top = F.linear(last, self.head[kept]), states.top[wanted]
                if len(unknown := (top < 0).nonzero()[:, 0]):
                    top[unknown] = F.linear(last[unknown], self.head).argmax(-1)
        return Teacher(index, (some.float() / temperature).softmax(-1), top)
