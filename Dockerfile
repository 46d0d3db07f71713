# One file, one target per role:  docker build --target relay|coordinator|trainer|worker|calibrate .
# `--build-arg BUILD=$(git rev-parse HEAD)` is what `--version` then tells.
# Dependencies are pinned by hash in deploy/requirements (`make requirements` writes them anew). A relay needs neither
# torch nor a GPU and stays small.
ARG PYTHON=python:3.11.14-slim-bookworm

FROM ${PYTHON} AS wheel
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY protocol protocol
COPY protos protos
COPY coordinator coordinator
COPY worker worker
COPY shardcast shardcast
COPY trainer trainer
COPY environments environments
COPY recipes recipes
ARG BUILD=unknown
RUN echo "$BUILD" > protocol/BUILD && pip wheel --no-deps --wheel-dir /wheels .

FROM ${PYTHON} AS installed-relay
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/rollswarm
COPY deploy/requirements/relay.txt /requirements.txt
RUN /opt/rollswarm/bin/pip install --require-hashes --no-deps -r /requirements.txt
COPY --from=wheel /wheels /wheels
RUN /opt/rollswarm/bin/pip install --no-deps /wheels/*.whl

# Some of what the environments need has no wheel (pycosat, a C extension): it is compiled here, and only here.
FROM installed-relay AS compiling
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

FROM compiling AS installed-coordinator
COPY deploy/requirements/coordinator.txt /requirements.txt
RUN /opt/rollswarm/bin/pip install --require-hashes --no-deps -r /requirements.txt

FROM compiling AS installed-trainer
COPY deploy/requirements/trainer.txt /requirements.txt
RUN /opt/rollswarm/bin/pip install --require-hashes --no-deps -r /requirements.txt

FROM compiling AS installed-worker
COPY deploy/requirements/worker.txt /requirements.txt
RUN /opt/rollswarm/bin/pip install --require-hashes --no-deps -r /requirements.txt

FROM installed-worker AS installed-calibrate
COPY deploy/requirements/calibrate.txt /requirements.txt
RUN /opt/rollswarm/bin/pip install --require-hashes --no-deps -r /requirements.txt

# A named volume takes the owner of the folder that it is mounted over, so these exist.
FROM ${PYTHON} AS base
ENV PYTHONUNBUFFERED=1 PATH=/opt/rollswarm/bin:$PATH
RUN useradd --create-home --uid 10001 rollswarm \
    && install -d -o 10001 -g 10001 /data /weights /checkpoints /cache /relay /worker
WORKDIR /data

FROM base AS relay
COPY --from=installed-relay /opt/rollswarm /opt/rollswarm
USER 10001:10001
EXPOSE 8600 8601
ENTRYPOINT ["shardcast"]
CMD ["relay", "--help"]

FROM base AS coordinator
COPY --from=installed-coordinator /opt/rollswarm /opt/rollswarm
USER 10001:10001
EXPOSE 7447 7448
ENTRYPOINT ["coordinator"]
CMD ["serve", "--config", "/data/run.toml"]

FROM base AS trainer
COPY --from=installed-trainer /opt/rollswarm /opt/rollswarm
USER 10001:10001
ENTRYPOINT ["trainer"]
CMD ["run", "--config", "/data/run.toml"]

# Triton, which vLLM computes with on a GPU, compiles its launchers when they are first called.
FROM base AS base-with-compiler
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

FROM base-with-compiler AS worker
COPY --from=installed-worker /opt/rollswarm /opt/rollswarm
USER 10001:10001
ENTRYPOINT ["worker"]
CMD ["--help"]

# The worker's engine and the coordinator's code: for `coordinator calibrate`, once per model.
FROM base-with-compiler AS calibrate
COPY --from=installed-calibrate /opt/rollswarm /opt/rollswarm
USER 10001:10001
ENTRYPOINT ["coordinator"]
CMD ["calibrate", "--help"]
