"""Tiny targets of other architectures than the pocket one's: written to folders, for engines of the tests."""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import engines
import torch
from safetensors.torch import load_file, save_file

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def write_pocket_moe(folder: Path, num_experts: int = 4, scale: float = 1.0) -> Path:
    """The pocket target as a Qwen3-MoE: each layer's MLP is split into experts, and every token takes all of them.

    A router of zeros gives each expert the weight 1 / E, and the experts' last matrices are E times the MLP's, so
    that in exact arithmetic the sum over experts is the MLP's output: the pocket drafters fit this target as well as
    the dense one.

    Args:
        folder: to write; made if it is not there.
        num_experts: E, a power of two (by which the weights are scaled without rounding).
        scale: of the MLPs' output; anything but 1 is another model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((engines.TARGET / "config.json").read_text())
    width = config["intermediate_size"] // num_experts
    config |= {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": num_experts,
        "num_experts_per_tok": num_experts,
        "moe_intermediate_size": width,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(engines.TARGET / "model.safetensors").items():
        layer, _, matrix = name.partition(".mlp.")
        if not matrix:
            tensors[name] = tensor
            continue
        is_last = matrix == "down_proj.weight"
        for expert, part in enumerate(tensor.split(width, dim=1 if is_last else 0)):
            tensors[f"{layer}.mlp.experts.{expert}.{matrix}"] = (
                part * num_experts * scale if is_last else part
            ).contiguous()
        tensors[f"{layer}.mlp.gate.weight"] = torch.zeros(num_experts, config["hidden_size"], dtype=tensor.dtype)
    save_file(tensors, folder / "model.safetensors")
    copy_tokenizer(folder)
    return folder


def copy_tokenizer(folder: Path) -> None:
    """The pocket target's tokenizer."""
    for name in TOKENIZER:
        shutil.copy(engines.TARGET / name, folder)


WORDS = 40
"""Tokens that random targets know: so few that text repeats itself, and lookups find what to draft."""


def write_random(folder: Path, config: Any, model_class: Any, seed: int = 0) -> Path:
    """A random model of a Transformers class that says the first :data:`WORDS` tokens of the pocket tokenizer's alone.

    Args:
        folder: to write.
        config: of the model; its ``initializer_range`` should be wide, so that near-ties are rare.
        model_class: the class of Transformers.
        seed: of the weights.
    """
    torch.manual_seed(seed)
    model = model_class(config).float()
    with torch.no_grad():
        model.get_output_embeddings().weight[WORDS:] = 0
    model.save_pretrained(folder)
    copy_tokenizer(folder)
    return folder


SMALL = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "bos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
"""Sizes of a random target that is sure of itself: near-ties would make exact tests flaky."""
REPEATING = [[5, 6, 7, 8] * 6, [9, 3, 9, 4, 9, 3, 9, 5, 9, 3], [31, 32, 33] * 9, list(range(3, 40))]
"""Prompts in which lookups find something; random targets soon repeat themselves, too."""
SEEDED = {"temperature": 0.8, "top_p": 0.95, "seed": 7}
POCKET = {
    "eagle3": engines.ours("eagle3", engines.EAGLE3),
    "eagle3-tree": engines.tree("eagle3", engines.EAGLE3, num_nodes=24),
    "dflash-tree": engines.tree("dflash", engines.DFLASH, num_nodes=24),
    "draft_model": {
        "method": "draft_model",
        "model": str(engines.TARGET),
        "num_speculative_tokens": 4,
        "tree": engines.CHAIN,
    },
    "whiflash": {**engines.both("dflash"), "router": {"policy": "entropy", "threshold": 1.0}},
}
"""The pocket drafters of every kind of proposer, over whatever is made of the pocket target."""
LOOKUPS: dict[str, dict[str, Any]] = {
    "chain": {"method": "suffix", "tree": engines.CHAIN, "num_speculative_tokens": 5},
    "tree": {"method": "suffix", "tree": {"num_nodes": 16}},
}
"""Drafters that fit any target: with chains and with trees."""


class Answers(NamedTuple):
    """What an engine said to the same prompts, greedily and seeded, and what it accepted of drafts."""

    greedy: list[list[int]]
    seeded: list[list[int]]
    counts: engines.Counts

    @property
    def texts(self) -> tuple[list[list[int]], list[list[int]]]:
        """Both."""
        return self.greedy, self.seeded


def answers(llm: Any, requests: list[Any] | None = None, max_tokens: int = 40, **options: Any) -> Answers:
    """Greedy and seeded answers of an engine.

    Args:
        llm: running.
        requests: prompts; lists of token ids, texts, or vLLM's dictionaries. None: those that repeat themselves.
        max_tokens: of the greedy answers; seeded ones are half as long.
        options: of vLLM's ``generate``.
    """
    from vllm import SamplingParams

    requests = REPEATING if requests is None else requests
    requests = [{"prompt_token_ids": r} if isinstance(r, list) else r for r in requests]
    found = []
    for sampling in ({"temperature": 0.0, "max_tokens": max_tokens}, SEEDED | {"max_tokens": max_tokens // 2}):
        outputs = llm.generate(requests, SamplingParams(ignore_eos=True, **sampling), use_tqdm=False, **options)
        found.append([list(output.outputs[0].token_ids) for output in outputs])
    return Answers(*found, engines.counts(llm))


def run(spec: dict[str, Any] | None, model: Path, requests: list[Any] | None = None, **overrides: Any) -> Answers:
    """Start an engine, ask it, stop it."""
    with engines.engine(spec, model=model, **overrides) as llm:
        return answers(llm, requests)


IMAGE_TOKEN = 3
"""The pocket tokenizer's mask token, which stands for an image in the prompts of targets that see."""


def image(seed: int) -> Any:
    """A small picture of noise."""
    import numpy as np
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (24, 32, 3), dtype=np.uint8))


def with_images(tokens: list[int], *seeds: int) -> dict[str, Any]:
    """A request whose prompt has an :data:`IMAGE_TOKEN` for every image."""
    assert tokens.count(IMAGE_TOKEN) == len(seeds)
    return {"prompt_token_ids": tokens, "multi_modal_data": {"image": [image(seed) for seed in seeds]}}


def write_processor(folder: Path, processor: dict[str, Any], images: dict[str, Any]) -> None:
    """What Transformers reads to make a processor of prompts with images, around the pocket tokenizer."""
    file = folder / "tokenizer_config.json"
    tokens = {"extra_special_tokens": {"image_token": "<|mask|>"}}
    file.write_text(json.dumps(json.loads(file.read_text()) | tokens))
    (folder / "processor_config.json").write_text(json.dumps(processor))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor | images))


EYES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "patch_size": 4,
    "image_size": 32,
}
PICTURES = {
    "image_processor_type": "PaddleOCRVLImageProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 1,
    "size": {"shortest_edge": 64, "longest_edge": 1024},
}


def write_ocr(folder: Path) -> Path:
    """A random PaddleOCR-VL: M-RoPE and images, of an architecture that needs no torchvision."""
    from transformers import PaddleOCRVLConfig, PaddleOCRVLForConditionalGeneration

    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
    config = PaddleOCRVLConfig(
        text_config=SMALL | {"head_dim": 32, "rope_parameters": rope},
        vision_config=EYES,
        image_token_id=IMAGE_TOKEN,
        tie_word_embeddings=True,
    )
    write_random(folder, config, PaddleOCRVLForConditionalGeneration)
    write_processor(folder, {"processor_class": "PaddleOCRVLProcessor"}, PICTURES)
    return folder


def write_pocket_seeing(folder: Path) -> Path:
    """The pocket target behind a random PaddleOCR-VL's eyes (``seeing``): for text it is the pocket target."""
    from transformers import PaddleOCRVLConfig, PaddleOCRVLForConditionalGeneration

    pocket = json.loads((engines.TARGET / "config.json").read_text())
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    sizes = {name: pocket[name] for name in (*names, "head_dim", "vocab_size", "rms_norm_eps", "rope_parameters")}
    config = PaddleOCRVLConfig(
        text_config=SMALL | sizes, vision_config=EYES, image_token_id=IMAGE_TOKEN, tie_word_embeddings=True
    )
    write_random(folder, config, PaddleOCRVLForConditionalGeneration)
    write_processor(folder, {"processor_class": "PaddleOCRVLProcessor"}, PICTURES)
    file = folder / "model.safetensors"
    eyes = {name: tensor for name, tensor in load_file(file).items() if not name.startswith(("model.", "lm_head."))}
    save_file(eyes | load_file(engines.TARGET / "model.safetensors"), file)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": ["PocketSeeing"]}))
    return folder
