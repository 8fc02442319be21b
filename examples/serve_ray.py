"""An OpenAI-compatible server of several replicas with Ray Serve LLM, our `speculative_config` among the arguments.

python examples/serve_ray.py --replicas 2
curl localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{"model": "m", "prompt": "Hi"}'

Needs `pip install "ray[serve,llm]"`, and a CPU for Serve's ingress beside two for each replica: on a machine of two
cores `ray start --head --num-cpus 8` first. Run so with one replica (Ray 2.60, --cpu, 2026-11-27): it answered after
four minutes.
"""

import argparse

from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="Qwen/Qwen3-8B")
parser.add_argument("--drafter", default="AngelSlim/Qwen3-8B_eagle3")
parser.add_argument("--replicas", type=int, default=1)
parser.add_argument("--cpu", action="store_true", help="ask Ray for a CPU a replica, not for a GPU")
given = parser.parse_args()

config = LLMConfig(
    model_loading_config={"model_id": "m", "model_source": given.model},
    deployment_config={"autoscaling_config": {"min_replicas": given.replicas, "max_replicas": given.replicas}},
    placement_group_config={"bundle_per_worker": {"CPU": 1}} if given.cpu else None,
    engine_kwargs={
        "speculative_config": {"method": "eagle3", "model": given.drafter, "tree": {"num_nodes": 60}},
        "max_model_len": 512,
        "enforce_eager": given.cpu,
    },
)
serve.run(build_openai_app({"llm_configs": [config]}), blocking=True)
