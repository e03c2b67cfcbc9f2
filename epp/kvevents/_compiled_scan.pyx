# cython: language_level=3, embedsignature=False, cdivision=True
"""The scan of `_event_scan.h` for Python: message bytes -> the parts of a `PackedBatch`.

It must not decide about an event that is out of the usual: it hands back where that event lies. The
GIL is held throughout, so that one set of buffers serves every message.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_DecodeASCII
from libc.stdint cimport uint8_t, uint32_t
from libc.string cimport memset

import sys

if sys.byteorder != "little":
    raise ImportError("the compiled event scan needs a little-endian machine")

cdef extern from "_event_scan.h":
    ctypedef enum scan_status:
        SCAN_OK
        SCAN_BROKEN
        SCAN_ODD
        SCAN_TOO_MANY
        SCAN_NO_MEMORY
    ctypedef struct scan_limits:
        uint32_t events
        uint32_t blocks
        uint32_t batch_blocks
        uint32_t tokens
        uint32_t block_size_tokens
        uint32_t hash_bytes
    ctypedef struct scan_buffer:
        uint8_t *data
        size_t used
        size_t room
    ctypedef struct scan_span:
        uint32_t position
        uint32_t start
        uint32_t length
    ctypedef struct scan:
        const scan_limits *limits
        scan_buffer events
        scan_buffer names
        scan_buffer tokens
        scan_buffer others
        scan_buffer loras
        uint32_t extra_entries
    scan_status scan_batch(scan *s, const uint8_t *data, size_t size) noexcept
    void scan_release(scan_buffer *b) noexcept

cdef enum:
    KEPT_BYTES = 1 << 20  # of a buffer between two messages

OK, BROKEN, ODD, TOO_MANY = <int>SCAN_OK, <int>SCAN_BROKEN, <int>SCAN_ODD, <int>SCAN_TOO_MANY


cdef bytes _taken(scan_buffer *buffer):
    """A copy of what the buffer holds; a large buffer is given back."""
    raw = PyBytes_FromStringAndSize(<char *>buffer.data, buffer.used) if buffer.used else b""
    if buffer.room > KEPT_BYTES:
        scan_release(buffer)
    return raw


cdef class Scanner:
    """Scans message after message under fixed limits."""

    cdef scan state
    cdef scan_limits limits

    def __cinit__(
        self, uint32_t events, uint32_t blocks, uint32_t batch_blocks, uint32_t tokens,
        uint32_t block_size_tokens, uint32_t hash_bytes,
    ):
        memset(&self.state, 0, sizeof(scan))
        self.limits = scan_limits(events, blocks, batch_blocks, tokens, block_size_tokens, hash_bytes)
        self.state.limits = &self.limits

    def __dealloc__(self):
        scan_release(&self.state.events)
        scan_release(&self.state.names)
        scan_release(&self.state.tokens)
        scan_release(&self.state.others)
        scan_release(&self.state.loras)

    def scan(self, bytes payload not None):
        """(OK, table, names, tokens, adapters, spans of other events, entries of extra keys); or
        (another status,). A span is (position among the events, bytes of the event)."""
        cdef const char *data = PyBytes_AS_STRING(payload)
        cdef Py_ssize_t size = PyBytes_GET_SIZE(payload)
        cdef scan_status status
        if size > 0x7FFFFFFF:
            return (BROKEN,)
        status = scan_batch(&self.state, <const uint8_t *>data, size)
        if status == SCAN_NO_MEMORY:
            raise MemoryError
        table, names = _taken(&self.state.events), _taken(&self.state.names)
        tokens = _taken(&self.state.tokens)
        others = self._spans(payload, &self.state.others) if status == SCAN_OK else None
        adapters = self._adapters(data) if status == SCAN_OK else None
        _taken(&self.state.others)
        _taken(&self.state.loras)
        if status != SCAN_OK:
            return (<int>status,)
        return (OK, table, names, tokens, adapters, others, self.state.extra_entries)

    cdef list _spans(self, bytes payload, scan_buffer *buffer):
        cdef scan_span *span = <scan_span *>buffer.data
        cdef size_t i
        return [
            (span[i].position, payload[span[i].start : span[i].start + span[i].length])
            for i in range(buffer.used // sizeof(scan_span))
        ]

    cdef tuple _adapters(self, const char *data):
        cdef scan_span *span = <scan_span *>self.state.loras.data
        cdef size_t i
        if not self.state.loras.used:
            return ()
        return tuple([
            PyUnicode_DecodeASCII(data + span[i].start, span[i].length, NULL)
            for i in range(self.state.loras.used // sizeof(scan_span))
        ])
