"""What drafters there are, and how their public checkpoints are read and checked. Nothing here imports vLLM."""
