"""A draft model whose output layer is a FlashHead (Ma and Wang, 2026)."""

from vllm_crossspec.drafters import draft_model

KIND = draft_model.KIND._replace(name="flashhead", head="flashhead")
