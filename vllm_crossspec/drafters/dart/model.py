"""DART's drafter on vLLM's layers (Liu et al. 2026, section 3.2; tensor names of ``fvliang/DART``)."""

from collections.abc import Iterable

import torch
from torch import nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.llama_eagle3 import LlamaDecoderLayer
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, get_draft_quant_config, maybe_prefix


class DartLayer(LlamaDecoderLayer):
    """EAGLE-3's decoder layer.

    Difference from vLLM's EAGLE-3 layer: it runs over entries and masks; all masks are one learned vector.
    """

    def __init__(self, vllm_config: VllmConfig, prefix: str, config: object):
        super().__init__(vllm_config, prefix=prefix, config=config)
        self.mask_rep = nn.Parameter(torch.zeros(2 * config.hidden_size), requires_grad=False)  # type: ignore[attr-defined]

    def join(self, embeds: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Entries [n, 2H] of token embeddings and fused features, [n, H] each; masks need no such step."""
        return torch.cat([self.input_layernorm(embeds), self.hidden_norm(features)], dim=-1)

    def forward(
        self, positions: torch.Tensor, rows: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass over rows [n, 2H] with residuals [n, H]; returns the MLP's output and the residual to add."""
        states = self.self_attn(positions=positions, hidden_states=rows)
        states, residual = self.post_attention_layernorm(states, residual)
        return self.mlp(states), residual


@support_torch_compile(dynamic_arg_dims={"input_ids": 0, "positions": 0, "hidden_states": 0})
class DartModel(nn.Module):
    """The drafter without its head; the loader puts the target's embedding in place."""

    def __init__(self, *, vllm_config: VllmConfig, start_layer_id: int, prefix: str):
        super().__init__()
        assert vllm_config.speculative_config is not None
        config = vllm_config.speculative_config.draft_model_config.hf_config
        layer_prefix = maybe_prefix(prefix, f"layers.{start_layer_id}")
        self.layers = nn.ModuleList([DartLayer(get_current_vllm_config(), layer_prefix, config)])
        self.fc = ReplicatedLinear(
            input_size=3 * getattr(config, "target_hidden_size", config.hidden_size),
            output_size=config.hidden_size,
            bias=False,
            params_dtype=vllm_config.model_config.dtype,
            quant_config=get_draft_quant_config(vllm_config),
            prefix=maybe_prefix(prefix, "fc"),
            return_bias=False,
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, hidden_states: torch.Tensor, num_queries: int
    ) -> torch.Tensor:
        """As :meth:`DartForCausalLM.forward`, with every entry's inputs repeated K times: compiled for one size."""
        layer = self.layers[0]
        is_entry = (torch.arange(positions.shape[0], device=positions.device) % num_queries == 0)[:, None]
        mask = layer.mask_rep.to(hidden_states.dtype)
        rows = torch.where(is_entry, layer.join(self.embed_tokens(input_ids), hidden_states), mask)
        residual = torch.where(is_entry, hidden_states, mask[: hidden_states.shape[1]])
        states, residual = layer(positions, rows, residual)
        # The reference applies the norm in its forward and again before its head.
        states, _ = self.norm(states, residual)
        return self.norm(states)


class DartForCausalLM(nn.Module):
    """The drafter as vLLM loads it."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "midlayer.": "model.layers.0.",
            "fc.": "model.fc.",
            "norm.": "model.norm.",
            "d2t": "draft_id_to_target_id",
            "t2d": None,
            "embed_tokens.": None,
        },
        orig_to_new_stacked={
            ".q_proj": (".qkv_proj", "q"),
            ".k_proj": (".qkv_proj", "k"),
            ".v_proj": (".qkv_proj", "v"),
            ".gate_proj": (".gate_up_proj", 0),
            ".up_proj": (".gate_up_proj", 1),
        },
    )
    # Never the target's head, even with the full vocabulary.
    has_own_lm_head = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        assert vllm_config.speculative_config is not None
        self.config = vllm_config.speculative_config.draft_model_config.hf_config
        num_drafted = getattr(self.config, "draft_vocab_size", None) or self.config.vocab_size
        self.model = DartModel(
            vllm_config=vllm_config,
            start_layer_id=vllm_config.model_config.get_total_num_hidden_layers(),
            prefix=maybe_prefix(prefix, "model"),
        )
        self.lm_head = ParallelLMHead(
            num_drafted,
            self.config.hidden_size,
            quant_config=get_draft_quant_config(vllm_config),
            prefix=maybe_prefix(prefix, "lm_head"),
        )
        self.logits_processor = LogitsProcessor(num_drafted)
        self.draft_id_to_target_id = nn.Parameter(torch.zeros(num_drafted, dtype=torch.long), requires_grad=False)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, hidden_states: torch.Tensor, num_queries: int
    ) -> torch.Tensor:
        """[R * K, H] normed states of all draft positions; row i predicts the token i + 2 positions after the entry.

        Args:
            input_ids: int64 [R] the token after the last accepted entry of each request.
            positions: int64 [R * K] of the query rows: the entry's, then the masks'.
            hidden_states: [R, H] fused features of the entries.
            num_queries: K.
        """
        each = input_ids.repeat_interleave(num_queries), hidden_states.repeat_interleave(num_queries, dim=0)
        return self.model(each[0], positions, each[1], num_queries)

    def combine_hidden_states(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Fused features [n, H] of tapped target states [n, 3H]."""
        return self.model.fc(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)
