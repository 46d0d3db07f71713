# One file, one target per role:  docker build --target relay|coordinator|trainer|worker .
# A relay needs neither torch nor a GPU and stays small.
ARG PYTHON_VERSION=3.11

FROM python:${PYTHON_VERSION}-slim AS base
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN useradd --create-home --uid 10001 rollswarm
WORKDIR /opt/rollswarm
COPY pyproject.toml README.md LICENSE ./
COPY protocol protocol
COPY protos protos
COPY coordinator coordinator
COPY worker worker
COPY shardcast shardcast
COPY trainer trainer
COPY environments environments
VOLUME /data

FROM base AS relay
RUN pip install .
USER rollswarm
EXPOSE 8601
ENTRYPOINT ["shardcast"]
CMD ["relay", "--help"]

FROM base AS coordinator
RUN pip install '.[coordinator]'
USER rollswarm
EXPOSE 7447 7448
ENTRYPOINT ["coordinator"]
# In the run file, server.host must be "0.0.0.0" for the ports to be reachable from outside the container.
CMD ["serve", "--config", "/data/run.toml"]

FROM base AS trainer
RUN pip install '.[trainer]'
USER rollswarm
ENTRYPOINT ["trainer"]
CMD ["run", "--config", "/data/run.toml"]

FROM base AS worker
RUN pip install '.[worker]'
USER rollswarm
ENTRYPOINT ["worker"]
CMD ["--help"]
