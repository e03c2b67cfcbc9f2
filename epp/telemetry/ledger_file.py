"""The decision ledger on disk: one JSON line a record, rotated by size.

`write` blocks and belongs in a thread. `PATH` is the newest file, `PATH.1` the one before it, and so on. A
disk that fails costs records, which are counted and said once, never a request.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
from collections.abc import Sequence
from io import FileIO
from pathlib import Path

import orjson

from epp.core.decision_record import DecisionRecord
from epp.telemetry.decision_json import decision_json

log = logging.getLogger(__name__)


class LedgerFile:
    """Appends records; `written` and `dropped` count them."""

    def __init__(self, path: Path, *, max_bytes: int = 64 << 20, keep: int = 4) -> None:
        """At most about `max_bytes` a file and `keep` files."""
        if max_bytes < 1 or keep < 1:
            raise ValueError("max_bytes and keep must be at least 1")
        self._path = path
        self._max_bytes = max_bytes
        self._keep = keep
        self._file: FileIO | None = None
        self._fault: str | None = None
        self._torn = False  # the file may end in half a line
        self._one_at_a_time = threading.Lock()
        self.written = 0
        self.dropped = 0

    def write(self, records: Sequence[DecisionRecord], unix_offset_s: float) -> None:
        """Append. `unix_offset_s`: what to add to the core's clock to get Unix time. Never raises for
        what a disk can do."""
        with self._one_at_a_time:
            done = 0
            try:
                for record in records:
                    self._append(_line(record, unix_offset_s))
                    done += 1
                self._fault = None
            except OSError as error:
                self._note(error)
            self.written += done
            self.dropped += len(records) - done

    def _append(self, line: bytes) -> None:
        file = self._file or self._open()
        if file.tell() and file.tell() + len(line) > self._max_bytes:
            self._rotate()
            file = self._open()
        if self._torn:
            line = b"\n" + line  # a reader skips the half line, not this one too
        self._torn = True
        if file.write(line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._torn = False

    def _open(self) -> FileIO:
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._file = FileIO(fd, "a")
        return self._file

    def _rotate(self) -> None:
        self.close()
        for number in range(self._keep - 1, 0, -1):
            older = self._path if number == 1 else self._numbered(number - 1)
            if older.exists():
                older.replace(self._numbered(number))
        if self._keep == 1:
            self._path.unlink(missing_ok=True)

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")

    def _note(self, error: OSError) -> None:
        self.close()
        fault = str(error.strerror or error)
        if fault != self._fault:
            log.error("decision ledger %s cannot be written, records are lost: %s", self._path, fault)
        self._fault = fault

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                log.error("decision ledger %s: %s", self._path, error.strerror)


def _line(record: DecisionRecord, unix_offset_s: float) -> bytes:
    line = {"decided_unix_s": round(record.decided_at_s + unix_offset_s, 3)} | decision_json(record)
    try:
        return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # a client's id that is no Unicode: json writes it as an escape
        return json.dumps(line, separators=(",", ":")).encode() + b"\n"
