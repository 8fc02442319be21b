"""What is relied on of each version of vLLM below its public surface."""
