# One wheel, three images: `docker build --target epp|sidecar .` (the engine image is vLLM's own, plus
# `pip install kvpull[engine]`).
FROM python:3.11-slim-bookworm AS build
WORKDIR /src
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc=4:12.2.0-3 libc6-dev=2.36-9+deb12u14 \
    && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml setup.py README.md LICENSE ./
COPY requirements requirements
COPY epp epp
COPY sidecar sidecar
COPY engine_plugin engine_plugin
COPY simulator simulator
RUN python -m venv /opt/kvpull \
    && /opt/kvpull/bin/pip install --no-cache-dir --no-deps --require-hashes -r requirements/runtime.lock \
    && /opt/kvpull/bin/pip install --no-cache-dir --no-deps --no-build-isolation .

FROM python:3.11-slim-bookworm AS base
COPY --from=build /opt/kvpull /opt/kvpull
ENV PATH=/opt/kvpull/bin:$PATH PYTHONUNBUFFERED=1
USER 65532:65532

FROM base AS sidecar
EXPOSE 8000
ENTRYPOINT ["kvpull-sidecar"]

FROM base AS epp
EXPOSE 9002 9003 9090
ENTRYPOINT ["kvpull", "epp"]
