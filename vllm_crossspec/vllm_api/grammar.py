"""How vLLM lays out the masks of grammars."""

from vllm.v1.worker.gpu import structured_outputs

MASKS_FOLLOW_DRAFTS = hasattr(structured_outputs, "_build_grammar_mapping")
"""Whether there is a mask for the root and each draft of a request that the scheduler planned, as in vLLM 0.32.

From 0.33 on every request has as many as a step can have rows, and those behind its last row with logits are skipped.
"""
