# Part of _compiled_index.pyx: an endpoint's records as columns, and back. No Python object a block.

cdef inline void _put_le(uint8_t *at, uint64_t value, int size) noexcept:
    cdef int i
    if _LITTLE_ENDIAN:
        memcpy(at, &value, size)
        return
    for i in range(size):
        at[i] = <uint8_t>(value >> 8 * i)


cdef inline uint64_t _get_le(const uint8_t *at, int size) noexcept:
    cdef int i
    cdef uint64_t value = 0
    if _LITTLE_ENDIAN:
        memcpy(&value, at, size)
        return value
    for i in range(size):
        value |= <uint64_t>at[i] << 8 * i
    return value


cdef struct RecordColumns:
    uint8_t *names
    uint8_t *keys
    uint8_t *device
    uint8_t *cpu


cdef RecordColumns _pointers(bytes names, bytes keys, bytes device, bytes cpu):
    return RecordColumns(
        <uint8_t *>PyBytes_AS_STRING(names),
        <uint8_t *>PyBytes_AS_STRING(keys),
        <uint8_t *>PyBytes_AS_STRING(device),
        <uint8_t *>PyBytes_AS_STRING(cpu),
    )


cdef void _write(RecordColumns *to, Py_ssize_t i, uint64_t name, uint64_t key, uint64_t device, uint64_t cpu) noexcept:
    _put_le(to.names + 8 * i, name, 8)
    _put_le(to.keys + 8 * i, key, 8)
    _put_le(to.device + 2 * i, device, 2)
    _put_le(to.cpu + 2 * i, cpu, 2)


cdef Py_ssize_t _coprime(Py_ssize_t count):
    """A step that visits every place of `count` once, far from the place before."""
    cdef Py_ssize_t step = max(1, <Py_ssize_t>(count * 0.6180339887))
    while gcd(step, count) != 1:
        step += 1
    return step


cdef class _Dumping:
    """Reads and fills the records of one endpoint in one go."""

    cdef CompiledBlocks blocks
    cdef bint exact

    def __cinit__(self, CompiledBlocks blocks):
        self.blocks, self.exact = blocks, True

    cdef uint64_t copies(self, uint64_t name, uint32_t tag, uint32_t tier) except? 0xFFFF:
        cdef uint32_t few = _copies(tag, tier)
        if few < COPIES or not self.blocks.more:
            return few
        all_ = few + self.blocks.more.get((name, tier), 0)
        self.exact = self.exact and all_ <= MAX_COPIES
        return min(all_, MAX_COPIES)

    cdef columns(self):
        cdef Py_ssize_t count = self.blocks.names.used, at = 0
        cdef bytes names = PyBytes_FromStringAndSize(NULL, 8 * count)
        cdef bytes keys = PyBytes_FromStringAndSize(NULL, 8 * count)
        cdef bytes device = PyBytes_FromStringAndSize(NULL, 2 * count)
        cdef bytes cpu = PyBytes_FromStringAndSize(NULL, 2 * count)
        cdef RecordColumns to = _pointers(names, keys, device, cpu)
        cdef map_cursor cursor = map_cursor(0, 0)
        cdef uint8_t *record = map_next(&self.blocks.names, &cursor)
        cdef uint64_t name
        cdef uint32_t tag, node = self.blocks.oldest
        while record != NULL:
            tag, name = map_tag(record), load_u64(record)
            if not tag & REMEMBERED:
                require(at < count, "records are off")
                _write(
                    &to, at, name, _key(record),
                    self.copies(name, tag, IN_DEVICE), self.copies(name, tag, IN_CPU),
                )
                at += 1
            record = map_next(&self.blocks.names, &cursor)
        while node != NOWHERE and at < count:
            name = self.blocks.nodes[node].name
            _write(&to, at, name, _key(map_find(&self.blocks.names, name)), 0, 0)
            at += 1
            node = self.blocks.nodes[node].after
        require(at == count and node == NOWHERE, "records are off")
        return Columns(names, keys, device, cpu), self.exact

    cdef int load(self, dump, Py_ssize_t start, Py_ssize_t stop) except -1:
        """Part [start, stop) of a dump, in an order of its own: a map filled in the order of another map
        of the same secrets crowds one part of itself after the other and takes quadratic time. The
        blocks without a copy come with the last part, in their order."""
        cdef RecordColumns of = _pointers(dump.names, dump.keys, dump.device_copies, dump.cpu_copies)
        cdef Py_ssize_t count = len(dump.names) // 8, i, place
        require(0 <= start < stop <= count, "steps are off")
        cdef Py_ssize_t stride = _coprime(count)
        place = start * stride % count
        for i in range(start, stop):
            self.load_one(&of, place, False)
            place = (place + stride) % count
        if stop == count:
            for i in range(count):
                self.load_one(&of, i, True)
        return 0

    cdef int load_one(self, RecordColumns *of, Py_ssize_t i, bint idle) except -1:
        cdef CompiledBlocks blocks = self.blocks
        cdef uint32_t device = <uint32_t>_get_le(of.device + 2 * i, 2), cpu = <uint32_t>_get_le(of.cpu + 2 * i, 2)
        cdef uint32_t tag = min(device, <uint32_t>COPIES) | min(cpu, <uint32_t>COPIES) << CPU_SHIFT
        if idle != (tag == 0):
            return 0
        cdef uint64_t name = _get_le(of.names + 8 * i, 8), key = _get_le(of.keys + 8 * i, 8)
        if map_find(&blocks.names, name) != NULL:
            raise DumpRefused("duplicate")
        if _is_tight(blocks.table) and blocks._refuses(name, key):
            raise DumpRefused("full")
        if not tag:
            if blocks.remembered_count >= blocks.max_remembered:
                raise DumpRefused("limits")
            blocks._add_record(name, key, REMEMBERED)
            return blocks._remember(map_find(&blocks.names, name))
        blocks._add_record(name, key, tag)
        if device > COPIES:
            blocks.more[name, IN_DEVICE] = device - COPIES
        if cpu > COPIES:
            blocks.more[name, IN_CPU] = cpu - COPIES
        return 0
