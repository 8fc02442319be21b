"""Training of what the plugin serves: the pocket target and its drafters. Nothing here imports vLLM."""
