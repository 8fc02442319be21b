# vLLM's own CUDA image of the supported version, with this plugin beside it.
#
#   docker build -t crossspec .
#   docker run --gpus all -p 8000:8000 crossspec MODEL --speculative-config '{...}'
#
# The image keeps vLLM's entry point, `vllm serve`.
FROM vllm/vllm-openai:v0.32.0

COPY pyproject.toml README.md LICENSE /opt/vllm-crossspec/
COPY vllm_crossspec /opt/vllm-crossspec/vllm_crossspec
RUN python3 -m pip install --no-cache-dir /opt/vllm-crossspec \
    && crossspec --help
