"""The one room that talks to vLLM."""
