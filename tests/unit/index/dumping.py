"""Stand-in for dump and restore of the index."""

from __future__ import annotations

from array import array

from epp.core.engine_blocks import Tally
from epp.core.index_dump import DumpRefused, EndpointDump
from epp.core.prefix_index import PythonPrefixIndex
from epp.core.types import CacheTier


class DumpingIndex(PythonPrefixIndex):
    scheme = "xxh3-chain-1"

    def dump(self, endpoint):
        known = self._endpoints[endpoint]
        r = {n: x for n, x in known.blocks._records.items() if x.key is not None}
        return EndpointDump(
            self.scheme,
            known.model,
            known.blocks.block_size_tokens,
            array("Q", r).tobytes(),
            array("Q", [x.key for x in r.values()]).tobytes(),
            array("H", [x.device for x in r.values()]).tobytes(),
            array("H", [x.cpu for x in r.values()]).tobytes(),
            len(r) == len(known.blocks._records),
        )

    def restore(self, endpoint, dump):
        if dump.scheme != self.scheme:
            raise DumpRefused("scheme")
        if (
            len(dump.keys) != len(dump.names)
            or len(dump.names) % 8
            or len(dump.device_copies) * 4 != len(dump.names)
        ):
            raise DumpRefused("columns")
        blocks = self._endpoints[endpoint].blocks
        blocks.block_size_tokens = dump.block_size_tokens
        for n, k, d, c in zip(
            array("Q", dump.names),
            array("Q", dump.keys),
            array("H", dump.device_copies),
            array("H", dump.cpu_copies),
        ):
            for _ in range(d):
                blocks.hold(n, k, CacheTier.DEVICE, Tally())
            for _ in range(c):
                blocks.hold(n, k, CacheTier.CPU, Tally())
