# For a GPU: train, evaluate and generate with the Triton kernels. The host needs an NVIDIA driver and the NVIDIA container toolkit.
#   docker build -t inplace-ttt .
#   docker run --rm --gpus all --shm-size 8g --user "$(id -u):$(id -g)" -v "$PWD:/work" inplace-ttt train recipes/smollm2-135m-8k-1gpu.yaml
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS wheel
COPY . /source
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheel /source

FROM python:${PYTHON}-slim
# Triton compiles what launches a kernel with a C compiler. CUDA itself comes with torch's wheel; no nvcc: DeepSpeed's offloading needs it.
# hadolint ignore=DL3008 # any version that this Debian has
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
# A layer of its own, since it is most of the image and seldom changes.
ARG TORCH=2.13.0
RUN pip install --no-cache-dir "torch==${TORCH}"
RUN --mount=type=bind,from=wheel,source=/wheel,target=/wheel \
    pip install --no-cache-dir "torch==${TORCH}" "$(echo /wheel/*.whl)[kernels,train]"
# Any user may write there, so that with --user what is written in /work has its owner; torch asks for a user's name.
ENV HOME=/home/user USER=user
RUN useradd --uid 1000 --home-dir "$HOME" user && mkdir "$HOME" /work && chmod 1777 "$HOME" /work
USER 1000
WORKDIR /work
ENTRYPOINT ["inplace-ttt"]
CMD ["--help"]
