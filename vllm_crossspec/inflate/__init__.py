"""Folders of inflated models: a target and all that goes with it, for ``crossspec inflate``."""
