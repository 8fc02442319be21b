"""DFlash (block diffusion): target states as the drafter's key/value context, one non-causal pass over a block."""
