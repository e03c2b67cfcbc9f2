"""The bound in bytes is one of memory: an index counts what its process grows by (one of its own here)."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from epp.core.index_choice import COMPILED, PURE, available_indexes

_FILL = """
import gc, json, random, sys
from array import array
from engine_plugin.identity import EndpointId
from epp.core.events import BlockStored
from epp.core.index_choice import available_indexes
from epp.core.types import CacheTier, EngineBlockHash

def resident_bytes():
    with open("/proc/self/statm") as status:
        return int(status.read().split()[1]) * 4096

index = available_indexes()[sys.argv[1]](bytes(16))
rng = random.Random(1)
endpoints = [EndpointId(f"e{n}") for n in range(4)]
for endpoint in endpoints:
    index.add_endpoint(endpoint)
gc.collect()
before, seen = resident_bytes(), []
for number in range(4_800):
    tokens = array("I", [number]) * (32 * 16)
    for endpoint in endpoints:
        names = tuple(EngineBlockHash(rng.getrandbits(63)) for _ in range(32))
        index.apply(endpoint, [BlockStored(CacheTier.DEVICE, names, None, tokens, 16, has_extra_keys=True)])
    if number % 200 == 199 and number >= 2_400:
        gc.collect()
        seen.append((index.total_bytes, resident_bytes() - before))
print(json.dumps(seen))
"""


# (implementation, what is counted may be this little and this much of what the process grew by)
@pytest.mark.parametrize(("implementation", "least", "most"), [(COMPILED, 0.9, 1.1), (PURE, 1.0, 1.6)])
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_is_counted_is_what_the_process_grows_by(implementation: str, least: float, most: float) -> None:
    if implementation not in available_indexes():
        pytest.skip("the compiled index is not built here")
    command = [sys.executable, "-c", _FILL, implementation]
    result = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    for counted, resident in json.loads(result.stdout):
        assert least <= counted / resident <= most, f"{counted:,} counted, {resident:,} resident"
