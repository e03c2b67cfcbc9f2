# One wheel, two images: `docker build --target epp|sidecar .` (the engine image is vLLM's own, plus
# `pip install kvpull[engine]`). BASE and BUILD_BASE may be anything with the same Python in the same place; BUILD_BASE
# has a compiler too. For a build that can be repeated give them by digest. `python -m deploy.image` builds and tries both.
ARG BASE=python:3.11-slim-bookworm
ARG BUILD_BASE=python:3.11-bookworm

FROM ${BUILD_BASE} AS wheel
ARG PIP_NO_INDEX
ARG PIP_FIND_LINKS
WORKDIR /src
COPY requirements/image-build.lock requirements/
RUN python3 -m venv /opt/build \
    && /opt/build/bin/pip install --no-cache-dir --no-deps --require-hashes -r requirements/image-build.lock
COPY pyproject.toml setup.py README.md LICENSE ./
COPY epp epp
COPY sidecar sidecar
COPY engine_plugin engine_plugin
COPY simulator simulator
# the wheel has a compiled index or the build ends here: in an image nobody would see that it is missing
RUN /opt/build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /dist . \
    && /opt/build/bin/python -c 'import glob, zipfile; w, = glob.glob("/dist/*.whl"); n = zipfile.ZipFile(w).namelist(); \
        assert sum("/_compiled_" in x and x.endswith(".so") for x in n) == 4, n'

# Packages without pip; bytecode is made here, since the file system is read-only where this runs. The kubernetes
# package is 1,900 modules of which 70 are ever imported: only those are compiled.
FROM ${BASE} AS packages
COPY --from=wheel /dist /dist
COPY deploy/image/sbom.py /src/

FROM packages AS epp-packages
ARG PIP_NO_INDEX
ARG PIP_FIND_LINKS
COPY requirements/image-epp.lock /src/
RUN python3 -m venv /opt/pip && python3 -m venv --without-pip /opt/kvpull \
    && /opt/pip/bin/pip --python /opt/kvpull install --no-cache-dir --no-compile --no-deps --require-hashes -r /src/image-epp.lock \
    && /opt/pip/bin/pip --python /opt/kvpull install --no-cache-dir --no-compile --no-deps --no-index /dist/*.whl \
    && /opt/kvpull/bin/python -m compileall -q --invalidation-mode unchecked-hash -x '/site-packages/kubernetes/' /opt/kvpull/lib \
    && /opt/kvpull/bin/python -c 'import epp.app, kubernetes.aio.config.incluster_config, kubernetes.aio.client.rest' \
    && /opt/kvpull/bin/python /src/sbom.py --name kvpull/epp --output /opt/kvpull/sbom.cdx.json

FROM packages AS sidecar-packages
ARG PIP_NO_INDEX
ARG PIP_FIND_LINKS
COPY requirements/image-sidecar.lock /src/
RUN python3 -m venv /opt/pip && python3 -m venv --without-pip /opt/kvpull \
    && /opt/pip/bin/pip --python /opt/kvpull install --no-cache-dir --no-compile --no-deps --require-hashes -r /src/image-sidecar.lock \
    && /opt/pip/bin/pip --python /opt/kvpull install --no-cache-dir --no-compile --no-deps --no-index /dist/*.whl \
    && /opt/kvpull/bin/python -m compileall -q --invalidation-mode unchecked-hash -x '/site-packages/kubernetes/' /opt/kvpull/lib \
    && /opt/kvpull/bin/python -c 'import sidecar.server, kubernetes.aio.config.incluster_config, kubernetes.aio.client.rest' \
    && /opt/kvpull/bin/python /src/sbom.py --name kvpull/sidecar --output /opt/kvpull/sbom.cdx.json

FROM ${BASE} AS sidecar
COPY --from=sidecar-packages /opt/kvpull /opt/kvpull
ENV PATH=/opt/kvpull/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
EXPOSE 8000
ENTRYPOINT ["kvpull-sidecar"]

FROM ${BASE} AS epp
COPY --from=epp-packages /opt/kvpull /opt/kvpull
ENV PATH=/opt/kvpull/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
EXPOSE 9002 9003 9090
ENTRYPOINT ["kvpull", "epp"]
