"""vllm_crossspec: several drafters, one engine, the target model's own text (a plugin for vLLM 0.32)."""
