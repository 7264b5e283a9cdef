# A released vLLM image with DeepGEMM's linear layers, and kernels baked for the
# models in PRECOMPILE. The entry point stays vLLM's own.
#
#   docker build -t vllm-deepgemm .
#   docker build -t vllm-deepgemm --build-arg PRECOMPILE="Qwen/Qwen3-32B-FP8 --tp-size 1 2" .
#
# VLLM_VERSION, PIN  the release and its pin (python apply.py --list)
# BASE_IMAGE         an image with that vLLM; default: the released one
# BUILD_IMAGE        an image with nvcc 12.3 or newer in /usr/local/cuda
# PRECOMPILE         arguments of `kernels.py precompile`; none: kernels are
#                    compiled at the first start, which then needs an nvcc
# DEEPGEMM_SOURCE    a folder of the build context with DeepGEMM at the pin and
#                    its CUTLASS submodule, where a clone is not possible
ARG VLLM_VERSION=0.9.1
ARG BASE_IMAGE=vllm/vllm-openai:v${VLLM_VERSION}
ARG BUILD_IMAGE=nvidia/cuda:12.8.1-devel-ubuntu22.04

# hadolint ignore=DL3006
FROM ${BUILD_IMAGE} AS toolkit

# Wheel and kernels, made by the Python that will use them.
# hadolint ignore=DL3006
FROM ${BASE_IMAGE} AS build
ARG PRECOMPILE=""
ARG DEEPGEMM_SOURCE=""
COPY --from=toolkit /usr/local/cuda /opt/toolkit
COPY . /src
WORKDIR /src
SHELL ["/bin/bash", "-eo", "pipefail", "-c"]
RUN bash tools/install_deepgemm.sh --wheel-dir /out \
        ${DEEPGEMM_SOURCE:+--source "/src/${DEEPGEMM_SOURCE}"} \
    && mkdir -p /out/kernels \
    && if [ -n "${PRECOMPILE}" ]; then \
        echo "${PRECOMPILE}" | DG_JIT_NVCC_COMPILER=/opt/toolkit/bin/nvcc \
            xargs python3 kernels.py precompile --out /out/kernels; \
    fi \
    && mkdir -p /out/apply \
    && { python3 -c 'import git' 2>/dev/null || python3 -m pip install --no-cache-dir \
        --disable-pip-version-check -q --target /out/apply 'GitPython>=3.1.40'; }

# hadolint ignore=DL3006
FROM ${BASE_IMAGE}
ARG VLLM_VERSION
ARG PIN=v${VLLM_VERSION}
ARG OVERLAY_VERSION=0.1.0
ARG DEEPGEMM_COMMIT=bfe983c4c27634d5f696fd613154c965c110385e
LABEL vllm.deepgemm.pin="${PIN}" \
      vllm.deepgemm.overlay="${OVERLAY_VERSION}" \
      vllm.deepgemm.deepgemm-commit="${DEEPGEMM_COMMIT}"
# Readable by every uid; nothing is written below it when the cache covers the model.
COPY --from=build /out/kernels /opt/deep_gemm_linear
ENV DG_JIT_CACHE_DIR=/opt VLLM_USE_DEEP_GEMM_LINEAR=1
# A build that would not serve, or whose labels lie, does not get past this step.
SHELL ["/bin/bash", "-eo", "pipefail", "-c"]
RUN --mount=type=bind,from=build,source=/src,target=/src \
    --mount=type=bind,from=build,source=/out,target=/out \
    export PYTHONPATH=/out/apply PYTHONDONTWRITEBYTECODE=1 \
    && python3 -m pip install --no-cache-dir --disable-pip-version-check -q --no-deps \
        /out/deep_gemm-*.whl \
    && { python3 -c 'import cuda.bindings.driver' 2>/dev/null || python3 -m pip install \
        --no-cache-dir --disable-pip-version-check -q 'cuda-bindings>=12.8,<13'; } \
    && python3 /src/apply.py --check \
    && python3 /src/apply.py \
    && python3 /src/apply.py --status | grep -F "pin ${PIN}" \
    && grep -qF "\"${OVERLAY_VERSION}\"" /src/overlay/vllm/*/*/*/*/__init__.py \
    && grep -qF "\"${DEEPGEMM_COMMIT}\"" /src/tools/deepgemm_pin.py \
    && python3 /src/kernels.py verify --out /opt/deep_gemm_linear \
    && python3 /src/doctor.py --no-gpu \
    && python3 -c 'import deep_gemm, vllm.model_executor.layers.quantization.utils.fp8_utils, \
        vllm.model_executor.layers.quantization.deep_gemm_linear.linear'
