"""Types of the compiled scan, for readers and mypy; see `_compiled_scan.pyx`."""

OK: int
BROKEN: int
ODD: int
TOO_MANY: int

_Scanned = tuple[int, bytes, bytes, bytes, tuple[str, ...], list[tuple[int, bytes]], int]

class Scanner:
    def __init__(
        self,
        events: int,
        blocks: int,
        batch_blocks: int,
        tokens: int,
        block_size_tokens: int,
        hash_bytes: int,
    ) -> None: ...
    def scan(self, payload: bytes) -> _Scanned | tuple[int]: ...
