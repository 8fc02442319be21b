"""Draft trees: what a drafter's candidates become before the target verifies them. Nothing here imports vLLM."""
