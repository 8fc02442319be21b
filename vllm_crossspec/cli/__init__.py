"""The `crossspec` command."""
