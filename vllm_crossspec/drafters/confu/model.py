"""ConFu's drafter on vLLM's layers: EAGLE-3's, plus the parts for futures (Qin et al. 2026, section 3)."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

OWN_PARTS = ("soft_prompts.", "contemplate_embed.", "future_embed.", "future_skip.", "no_future_embed")


class SoftPrompts(nn.Module):
    """Keys (after rotation) and values for contemplate rows in every target layer: [layers, Hkv, s, Dh] each."""

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.keys = nn.Parameter(torch.zeros(shape), requires_grad=False)
        self.values = nn.Parameter(torch.zeros(shape), requires_grad=False)


class Mixture(nn.Module):
    """An embedding mixed from the best experts (section 3.2); as in ``crossspec_tools.train.confu``."""

    def __init__(self, width: int, hidden: int, num_experts: int, top: int):
        super().__init__()
        self.router = nn.Parameter(torch.zeros(num_experts, width), requires_grad=False)
        self.experts = nn.Parameter(torch.zeros(num_experts, hidden), requires_grad=False)
        self.top = top

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Embeddings [n, H] from states [n, width]."""
        states = F.rms_norm(states.float(), states.shape[-1:])
        best = (states @ self.router.float().T).softmax(-1).topk(self.top, dim=-1)
        weights = best.values / best.values.sum(-1, keepdim=True)
        return (weights[..., None] * self.experts[best.indices].float()).sum(-2).to(self.experts.dtype)


class ConfuForCausalLM(Eagle3LlamaForCausalLM):
    """ConFu's drafter.

    Differences from vLLM's EAGLE-3 model:

    - It holds soft prompts and contemplate embeddings for the target, and embeddings of futures.
    - Its pass always takes embeddings, so it is compiled once, for those.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config, target = self.config, self.config.target
        hidden, experts = config.hidden_size, (config.num_experts, config.top_experts)
        layers, kv_heads, head_dim = (target[name] for name in ("num_hidden_layers", "num_key_value_heads", "head_dim"))
        self.soft_prompts = SoftPrompts((layers, kv_heads, config.num_soft_prompts, head_dim))
        self.contemplate_embed = Mixture(self.model.fc_input_size, hidden, *experts)
        self.future_embed = Mixture(hidden, hidden, *experts)
        self.future_skip = nn.Linear(hidden, hidden, bias=False).requires_grad_(False)
        nn.init.zeros_(self.future_skip.weight)
        self.no_future_embed = nn.Parameter(torch.zeros(hidden), requires_grad=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        inputs_embeds: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if inputs_embeds is None:
            inputs_embeds = self.embed_input_ids(input_ids)
        return self.model(input_ids, positions, hidden_states, inputs_embeds)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        own = dict(self.named_parameters())
        rest = []
        for name, tensor in weights:
            if name.startswith(OWN_PARTS):
                own[name].data.copy_(tensor)
            else:
                rest.append((name, tensor))
        super().load_weights(rest)
