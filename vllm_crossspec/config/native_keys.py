"""Keys of vLLM's own speculative config in ours: which are handed on, which are translated, which are refused.

vLLM takes every key with every method and does not look at most of them. Here a key has an effect or is refused.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, StrictInt, TypeAdapter, ValidationError

from vllm_crossspec.config.schema import CrossSpecConfig, DrafterConfig
from vllm_crossspec.kinds.drafter import DrafterKind

INTERNAL_KEYS = {f"{whose}_{what}_config" for whose in ("target", "draft") for what in ("model", "parallel")}
"""Set by vLLM itself when it builds the config. A user who writes one gets the sentence of an unknown key."""

SCHEDULE_KEY = "num_speculative_tokens_per_batch_size"
"""vLLM's own form of ``tree.by_batch_size``: a list of [from, to, draft tokens]."""

_RANGES = TypeAdapter(list[tuple[Annotated[StrictInt, Field(ge=1)], StrictInt, Annotated[StrictInt, Field(ge=0)]]])

_OF_MODELS = (
    "revision", "quantization", "draft_tensor_parallel_size", "attention_backend", "kv_cache_dtype",
    "draft_load_config",
)  # fmt: skip
"""What vLLM's loader does with any drafter that has weights."""

_OF_REJECTION = (
    "rejection_sample_method", "synthetic_acceptance_rates", "synthetic_acceptance_length",
    "fly_window_size", "fly_entropy_threshold", "fly_entropy_top_k",
)  # fmt: skip

_REASONS = {
    "enforce_eager": "vLLM's V2 model runner does not read it; use --enforce-eager, which holds for drafters too",
    "tensor_parallel_size": "it is called draft_tensor_parallel_size",
    "max_model_len": "a drafter drafts as far as the target goes; leave it out, or use --max-model-len",
    "index_share_for_mtp_iteration": "it is for vLLM's own 'mtp'; leave it out",
    "disable_padded_drafter_batch": "vLLM's V2 model runner does not read it; leave it out",
    "use_heterogeneous_vocab": "a drafter has the target's vocabulary; leave it out, or give such a draft model",
    "prompt_lookup_min": "it is for vLLM's own 'ngram'; leave it out",
    "prompt_lookup_max": "it is for vLLM's own 'ngram'; leave it out",
    "parallel_drafting": "the drafter's kind says whether it drafts in parallel; leave it out",
    "suffix_decoding_max_tree_depth": "it is for vLLM's own 'suffix'; here num_speculative_tokens is the depth",
    "suffix_decoding_max_cached_requests": "it is for vLLM's own 'suffix'; here it is lookup.cache_tokens with share",
    "suffix_decoding_max_spec_factor": "it is for vLLM's own 'suffix'; here num_speculative_tokens is the limit",
    "suffix_decoding_min_token_prob": "it is for vLLM's own 'suffix'; here tree.num_nodes is the limit",
    "enable_adaptive_verification": 'it is for vLLM\'s own methods; here it is "budget": "batch" in the tree',
    "dspark_draft_topk": "it is for vLLM's own 'dspark'; leave it out",
    "draft_lm_head_quantization": (
        "drafters take the target's output layer as it is; leave it out, or use a head of clusters (head)"
    ),
}
"""Why a key of vLLM's has no effect here, and what to do."""


def with_schedule(raw: Mapping[str, Any], path: str) -> dict[str, Any]:
    """A drafter's settings with vLLM's schedule as ``tree.by_batch_size``; ValueError for none, or two."""
    if SCHEDULE_KEY not in raw:
        return dict(raw)
    key, rest = f"speculative_config.{path}{SCHEDULE_KEY}", {k: v for k, v in raw.items() if k != SCHEDULE_KEY}
    schedule = _by_batch_size(raw[SCHEDULE_KEY], key)
    tree = rest.get("tree", {})
    if not isinstance(tree, Mapping):
        return rest  # refused for that
    if "by_batch_size" in tree:
        raise ValueError(f"{key} and {path}tree.by_batch_size say the same; leave out one of the two")
    return {**rest, "tree": {**tree, "by_batch_size": schedule}}


def _by_batch_size(ranges: Any, key: str) -> dict[str, int]:
    """{"1": 8, "9": 0} of [[1, 8, 8], [9, 64, 0]]. As in vLLM, gaps and what follows have the range before them."""
    try:
        ordered = sorted(_RANGES.validate_python(ranges))
    except ValidationError:
        ordered = []
    if not ordered or any(start > end for start, end, _ in ordered):
        raise ValueError(f"{key} is {ranges!r}; give whole numbers as [[from, to, draft tokens], ...]")
    ends = [0, *(end for _, end, _ in ordered)]
    if ordered[0][0] != 1 or any(start <= end for (start, _, _), end in zip(ordered, ends, strict=False)):
        raise ValueError(f"{key} is {ranges!r}; its ranges must begin at 1 request and must not overlap")
    return {str(start): tokens for start, _, tokens in ordered}


def check_native(config: CrossSpecConfig, drafter: DrafterConfig, kind: DrafterKind, path: str) -> None:
    """Refuse keys of vLLM's that would have no effect."""
    for key in sorted(drafter.native):
        if why := _why_not(key, config, drafter, kind):
            raise ValueError(f"{path}{key}: {why}")


def _why_not(key: str, config: CrossSpecConfig, drafter: DrafterConfig, kind: DrafterKind) -> str | None:
    """Why a key would have no effect; None where it has one."""
    if key in _OF_MODELS:
        return None if kind.has_model else f"a {kind.name} drafter has no weights; leave it out"
    if key in _OF_REJECTION:
        wanted = 'it is about vLLM\'s rejection sampler; add "verification": "rejection"'
        return None if config.verification == "rejection" else wanted
    if key == "moe_backend":
        return None if kind.has_model and not kind.can_share else f"a {kind.name} drafter has no experts; leave it out"
    if key == "code_revision":
        return None if kind.may_bring_code else f"no code is run that a {kind.name} drafter brings; leave it out"
    if key == "disable_eagle_block_drop":
        is_dropped = kind.has_model and kind.can_share and len(config.drafters) == 1
        return None if is_dropped else "no block is dropped for this drafter, or for several; leave it out"
    if key == "use_local_argmax_reduction":
        return _why_no_local_argmax(config, drafter, kind)
    return _REASONS.get(key, "it is for vLLM's own methods, and has no effect here; leave it out")


def _why_no_local_argmax(config: CrossSpecConfig, drafter: DrafterConfig, kind: DrafterKind) -> str | None:
    if not kind.has_model or kind.contemplates or not drafter.tree.is_chain or drafter.head is not None:
        return "only chains of a drafter with weights and without a head of its own know it; leave it out"
    if config.verification == "match" and config.draft_sample_method in (None, "coupled"):
        return 'drafts that are coupled to the target\'s noise need every logit; add "draft_sample_method": "greedy"'
    return None
