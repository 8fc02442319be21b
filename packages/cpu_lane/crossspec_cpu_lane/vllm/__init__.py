"""The plugin's platform without a GPU: what its engines, and vLLM's, do in another way (`platform.py`)."""
