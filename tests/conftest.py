"""Shared pieces: the environment that engines need, the pocket models, and engines kept for several tests."""

import os

for _name, _value in {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}.items():
    os.environ.setdefault(_name, _value)

# The negative controls send functions into the workers to break them.
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
