# vLLM's own CUDA image of the supported version, with this plugin beside it.
#
#   docker build -t crossspec --build-arg VERSION=0.1.0 .
#   docker run --gpus all -p 8000:8000 crossspec MODEL --speculative-config '{...}'
#   docker run --gpus all --entrypoint crossspec crossspec demo      # whether it works on this GPU
#
# The image keeps vLLM's entry point, `vllm serve`. The pocket models are in it for the demo.
FROM vllm/vllm-openai:v0.32.0

# There is no git in the image to ask for the tag.
ARG VERSION=0.1.0.dev0
COPY pyproject.toml README.md LICENSE /opt/vllm-crossspec/
COPY vllm_crossspec /opt/vllm-crossspec/vllm_crossspec
COPY crossspec_tools /opt/vllm-crossspec/crossspec_tools
COPY packages/pocket /opt/vllm-crossspec/packages/pocket
RUN SETUPTOOLS_SCM_PRETEND_VERSION=$VERSION \
    python3 -m pip install --no-cache-dir /opt/vllm-crossspec /opt/vllm-crossspec/packages/pocket \
    && rm -r /opt/vllm-crossspec \
    && crossspec --version \
    && crossspec pocket eagle3-tree
