"""Clustering of an output embedding for a FlashHead, and `crossspec flashhead`."""
