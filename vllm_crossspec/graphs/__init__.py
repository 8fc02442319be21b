"""CUDA graphs that vLLM does not capture by itself."""
