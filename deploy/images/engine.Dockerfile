# syntax=docker/dockerfile:1
# vLLM's own image, any release from 0.30 on, and the connectors. From the top of the repository:
#
#     docker build -f deploy/images/engine.Dockerfile -t ecshare-engine:0.1.0 .
#     docker build --build-arg VLLM_IMAGE=vllm/vllm-openai-cpu:v0.32.0 ...
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0
ARG PYTHON_IMAGE=python:3.12-slim-bookworm

FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY ecshare ecshare
COPY kvshare kvshare
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .

FROM ${VLLM_IMAGE}
USER 0
# vLLM's images have uv, pip or both, and their packages in the system's Python or in an environment
# that is first on PATH. Both ways install beside them. vLLM's own versions stay: what is there is
# not upgraded, so no constraints are used. The last line fails if they ended up in another Python.
# hadolint ignore=DL3013
RUN --mount=type=bind,from=wheel,source=/wheel,target=/wheel \
    set -e; wheel="$(echo /wheel/ecshare-*.whl)[s3]"; \
    if python3 -m pip --version; then \
        python3 -m pip install --no-cache-dir --break-system-packages "$wheel"; \
    else \
        uv pip install --no-cache --break-system-packages --python "$(command -v python3)" "$wheel"; \
    fi; \
    python3 -c 'from importlib.metadata import version as v; print(v("vllm"), v("ecshare"))'
# vLLM's CUDA image has the user `vllm`, 2000:0, since pull request 40275 of vllm-project/vllm;
# others may not. PyTorch needs a name for the user, and everything else that is written is below
# HOME, /tmp and /dev/shm.
RUN id -u vllm || useradd --uid 2000 --gid 0 --create-home --home-dir /home/vllm vllm; \
    install -d -o 2000 -g 0 -m 0770 /home/vllm
ENV HOME=/home/vllm VLLM_NO_USAGE_STATS=1 PYTHONDONTWRITEBYTECODE=1
USER 2000:0
WORKDIR /home/vllm
EXPOSE 8000
# A real model takes minutes to load; the start period ends with the first success.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=6 \
    CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["vllm", "serve"]
