"""SmolLM2-135M-Instruct for vllm-crossspec: its conversion, drafters for it, and prompts."""
