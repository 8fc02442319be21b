"""A target that sees and whose states drafters may read.

vLLM has several (LLaVA, Qwen2.5-VL), but none that can be imported beside a torch without torchvision, as the CPU build
is. So this one has PaddleOCR-VL's eyes and the pocket target's language model.
"""

import engines
from torch import nn
from transformers import Qwen3Config
from vllm.config import VllmConfig
from vllm.model_executor.models.interfaces import SupportsEagle3
from vllm.model_executor.models.paddleocr_vl import (
    PaddleOCRVLForConditionalGeneration,
    Projector,
    SiglipVisionModel,
)
from vllm.model_executor.models.utils import init_vllm_registered_model, maybe_prefix


class PocketSeeing(PaddleOCRVLForConditionalGeneration, SupportsEagle3):
    """PaddleOCR-VL with Qwen3 in Ernie's place, and as everywhere else in vLLM the states of its layers."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        nn.Module.__init__(self)
        self.config = config = vllm_config.model_config.hf_config
        config.hidden_size = config.text_config.hidden_size
        with self._mark_tower_model(vllm_config, "image"):
            self.visual = SiglipVisionModel(config=config.vision_config, prefix=maybe_prefix(prefix, "visual"))
            self.mlp_AR = Projector(config, config.vision_config)
        with self._mark_language_model(vllm_config):
            self.language_model = init_vllm_registered_model(
                vllm_config=vllm_config,
                hf_config=Qwen3Config.from_pretrained(engines.TARGET),
                architectures=["Qwen3ForCausalLM"],
                prefix=maybe_prefix(prefix, "language_model"),
            )
        self.make_empty_intermediate_tensors = self.language_model.make_empty_intermediate_tensors
