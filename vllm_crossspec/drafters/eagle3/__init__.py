"""EAGLE-3 (Li et al., 2025): one layer over fused low, middle and high target states, autoregressive."""
