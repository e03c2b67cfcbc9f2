"""Types of the compiled index, for readers and mypy; see `_compiled_index.pyx`."""

from epp.core.engine_blocks import IndexLimits
from epp.core.hashing import BlockHasher
from epp.core.prefix_index import PythonPrefixIndex

class CompiledHasher(BlockHasher): ...

class CompiledPrefixIndex(PythonPrefixIndex):
    implementation: str
    def __init__(self, index_seed: bytes, limits: IndexLimits | None = None) -> None: ...
