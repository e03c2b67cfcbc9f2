#!/bin/sh
# Make the virtual environment the Makefile uses: every package pinned and checked by hash, none
# resolved again (so nixl-cu12 comes without torch). Says what is missing in one sentence.
set -eu
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}

fail() { echo "setup: $1" >&2; exit 2; }

command -v "$PYTHON" >/dev/null 2>&1 || fail "$PYTHON is not installed; kvpull needs Python 3.11 or newer"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$PYTHON is $("$PYTHON" -V 2>&1); kvpull needs Python 3.11 or newer (set PYTHON=...)"
"$PYTHON" -c 'import venv, ensurepip' 2>/dev/null ||
    fail "$PYTHON has no venv module; on Debian install the package python3-venv"
[ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || [ "$(uname -s)-$(uname -m)" = Linux-aarch64 ] ||
    fail "the local fleet runs on Linux x86_64 or aarch64, not $(uname -s) $(uname -m)"
free_kb=$(df -Pk . | awk 'NR==2 {print $4}')
[ "$free_kb" -gt 2000000 ] || fail "2 GB of free disk are needed here, $((free_kb / 1024)) MB are left"

[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
for lock in runtime nixl kube dev; do
    echo "setup: installing requirements/$lock.lock"
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes \
        -r "requirements/$lock.lock" 2>"$VENV/pip.log" ||
        { tail -n 5 "$VENV/pip.log" >&2; fail "pip could not install requirements/$lock.lock (see $VENV/pip.log)"; }
done

# the compiled prefix index and decoder of its events: the same answers as the pure one, many times faster; never a reason to fail
echo "setup: building the compiled prefix index"
rm -f epp/core/_compiled_index.*.so epp/kvevents/_compiled_scan.*.so
"$VENV/bin/python" setup.py build_ext --inplace >"$VENV/build.log" 2>&1 || true
"$VENV/bin/python" -c 'import epp.core._compiled_index, epp.kvevents._compiled_scan' 2>>"$VENV/build.log" ||
    echo "setup: no compiled prefix index (it needs a C compiler and Python's headers; see $VENV/build.log):" \
        "kvpull works the same with the pure Python one, only slower"
