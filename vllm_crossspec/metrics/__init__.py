"""Figures of a run: counted on the device, read without stopping it."""
