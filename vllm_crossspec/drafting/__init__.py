"""Shared parts of proposers: the interface, heads, tree growth, and coupling with the target's noise."""
