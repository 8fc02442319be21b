"""Prompts answered by several replicas with `ray.data.llm`, our `speculative_config` among the engine's arguments.

`crossspec batch` does the same, goes on where it was stopped, and tells each row's acceptance, which Ray's do not.
Without a GPU pass --cpu: `ray.data.llm` asks for one otherwise.

Needs `pip install "ray[data,llm]"`. Run with Ray 2.60 and --cpu on two busy cores (2026-11-27): eight rows, no error,
228 seconds, of which the replica took most to come up.

    python examples/batch_ray_data.py --model vllm_crossspec/pocket/target --drafter vllm_crossspec/pocket/eagle3 --cpu
"""

import argparse

import ray
from ray.data.llm import build_processor, vLLMEngineProcessorConfig

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="Qwen/Qwen3-8B")
parser.add_argument("--drafter", default="AngelSlim/Qwen3-8B_eagle3")
parser.add_argument("--replicas", type=int, default=1)
parser.add_argument("--cpu", action="store_true")
given = parser.parse_args()

config = vLLMEngineProcessorConfig(
    model_source=given.model,
    engine_kwargs={
        "speculative_config": {"method": "eagle3", "model": given.drafter, "tree": {"num_nodes": 60}},
        "max_model_len": 512,
        "enforce_eager": given.cpu,
    },
    placement_group_config={"bundle_per_worker": {"CPU": 1}} if given.cpu else None,
    concurrency=given.replicas,
    batch_size=32,
    should_continue_on_error=True,
)
answer = build_processor(
    config,
    preprocess=lambda row: {
        "messages": [{"role": "user", "content": row["prompt"]}],
        "sampling_params": {"temperature": 0.0, "max_tokens": 16},
    },
    postprocess=lambda row: {"text": row["generated_text"], "error": row["__inference_error__"]},
)
for row in answer(ray.data.from_items([{"prompt": f"What is {n} times 7?"} for n in range(8)])).take_all():
    print(row)
