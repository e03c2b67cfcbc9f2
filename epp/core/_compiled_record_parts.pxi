# Part of _compiled_index.pyx: the values that the records of an endpoint are made of.

cdef class _Waiting:
    """A block whose content is unknown: rare, so it lives in Python."""

    cdef object parent
    cdef bytes payload
    cdef object device
    cdef object cpu

    def __cinit__(self):
        self.device = self.cpu = 0

    cdef object copies(self, uint32_t tier):
        return self.device if tier == IN_DEVICE else self.cpu

    cdef int add(self, uint32_t tier, int delta) except -1:
        if tier == IN_DEVICE:
            self.device += delta
        else:
            self.cpu += delta
        return 0


cdef enum:
    STRIDE = 32  # blocks whose records are fetched ahead: more would push each other out


cdef struct Counts:
    Py_ssize_t stored
    Py_ssize_t removed
    Py_ssize_t orphans
    Py_ssize_t unresolved
    Py_ssize_t skipped
    Py_ssize_t refused


cdef int _flush(Counts *counts, object tally) except -1:
    if counts.stored: tally.stored += counts.stored
    if counts.removed: tally.removed += counts.removed
    if counts.orphans: tally.orphans += counts.orphans
    if counts.unresolved: tally.unresolved += counts.unresolved
    if counts.skipped: tally.skipped += counts.skipped
    if counts.refused: tally.refused += counts.refused
    memset(counts, 0, sizeof(Counts))
    return 0


cdef struct Remembered:
    uint64_t name
    uint32_t before
    uint32_t after


cdef struct Named:
    uint64_t key
    uint64_t name


cdef int _by_key(const void *a, const void *b) noexcept nogil:
    cdef uint64_t left = (<const Named *>a).key, right = (<const Named *>b).key
    return (left > right) - (left < right)


cdef inline uint64_t _key(const uint8_t *record) noexcept:
    return load_u64(record + MAP_VALUE_AT)


cdef inline uint32_t _shift(uint32_t tier) noexcept:
    return 0 if tier == IN_DEVICE else CPU_SHIFT


cdef uint32_t _copies(uint32_t tag, uint32_t tier) noexcept:
    return 0 if tag & REMEMBERED else tag >> _shift(tier) & COPIES


cdef Py_ssize_t _bound(limit) except -2:
    return min(limit, 1 << 62)
