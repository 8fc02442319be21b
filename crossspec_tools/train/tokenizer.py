"""The pocket tokenizer: byte-level BPE with single digits, so that arithmetic stays readable to a small model."""

import random
from collections.abc import Sequence

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from crossspec_tools.train.data import CHAT_TEMPLATE, END_OF_TEXT, IM_END, SPECIAL_TOKENS

# Words with their leading space, single digits, runs of punctuation, and white space kept apart from line ends.
_SPLIT = r"'(?:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"


def train_tokenizer(
    texts: Sequence[str], vocab_size: int, seed: int, sample_bytes: int = 12_000_000
) -> PreTrainedTokenizerFast:
    """Train a tokenizer of ``vocab_size`` tokens (the special ones included) on a sample of ``texts``."""
    order = list(texts)
    random.Random(seed).shuffle(order)
    sample, size = [], 0
    for text in order:
        if size >= sample_bytes:
            break
        sample.append(text)
        size += len(text)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=IM_END, pad_token=END_OF_TEXT)
    fast.chat_template = CHAT_TEMPLATE
    fast.model_max_length = 2048
    return fast
