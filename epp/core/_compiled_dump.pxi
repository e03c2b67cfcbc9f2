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


cdef class _Frozen:
    """The records of one endpoint as they are now. One copy of memory (some ms for a million blocks); the
    columns are made of it in steps, whatever happens to the endpoint meanwhile."""

    cdef readonly Py_ssize_t count
    cdef readonly bint exact
    cdef uint8_t *buckets
    cdef uint64_t left  # buckets
    cdef Py_ssize_t done
    cdef uint32_t per, stride
    cdef uint8_t *at
    cdef dict more
    cdef list idle  # (name, key) of the remembered ones, oldest first
    cdef bytes names, keys, device, cpu
    cdef RecordColumns to

    def __cinit__(self, CompiledBlocks blocks):
        cdef uint32_t node = blocks.oldest
        cdef uint64_t name
        self.count, self.exact, self.more, self.idle = blocks.names.used, True, dict(blocks.more), []
        self.left, self.per, self.stride = map_count_buckets(&blocks.names), blocks.names.per, blocks.names.stride
        self.buckets = self.at = <uint8_t *>malloc(max(<uint64_t>1, self.left * <uint64_t>MAP_BUCKET_BYTES))
        if self.buckets == NULL:
            raise MemoryError
        map_copy_buckets(&blocks.names, self.buckets)
        while node != NOWHERE:
            name = blocks.nodes[node].name
            self.idle.append((name, _key(map_find(&blocks.names, name))))
            node = blocks.nodes[node].after
        self.names = PyBytes_FromStringAndSize(NULL, 8 * self.count)
        self.keys = PyBytes_FromStringAndSize(NULL, 8 * self.count)
        self.device = PyBytes_FromStringAndSize(NULL, 2 * self.count)
        self.cpu = PyBytes_FromStringAndSize(NULL, 2 * self.count)
        self.to = _pointers(self.names, self.keys, self.device, self.cpu)

    def __dealloc__(self):
        free(self.buckets)

    cdef uint64_t copies(self, uint64_t name, uint32_t tag, uint32_t tier) except? 0xFFFF:
        cdef uint32_t few = _copies(tag, tier)
        if few < COPIES or not self.more:
            return few
        all_ = few + self.more.get((name, tier), 0)
        self.exact = self.exact and all_ <= MAX_COPIES
        return min(all_, MAX_COPIES)

    def step(self, Py_ssize_t blocks):
        """Mutates: look at that many records (give or take a bucket), or at places for them. False: all done."""
        cdef Py_ssize_t places = blocks
        cdef uint32_t k, tag
        cdef uint64_t name
        cdef const uint8_t *record
        while places > 0 and self.left:
            for k in range(self.per):
                record = self.at + k * self.stride
                tag, name = map_tag(record), load_u64(record)
                if tag and not tag & REMEMBERED:
                    require(self.done < self.count, "records are off")
                    _write(
                        &self.to, self.done, name, _key(record),
                        self.copies(name, tag, IN_DEVICE), self.copies(name, tag, IN_CPU),
                    )
                    self.done += 1
            self.at += MAP_BUCKET_BYTES
            self.left -= 1
            places -= self.per
        return self.left > 0

    def columns(self):
        """The columns, when all is done."""
        require(not self.left and self.done + len(self.idle) == self.count, "records are off")
        for at, (name, key) in enumerate(self.idle, self.done):
            _write(&self.to, at, name, key, 0, 0)
        return Columns(self.names, self.keys, self.device, self.cpu), self.exact


cdef class _Loading:
    """Takes a dump over, in steps.

    In an order of its own: a map filled in the order of another map of the same secrets crowds one part of
    itself after the other. The blocks without a copy come with the last step, in their order."""

    cdef CompiledBlocks blocks
    cdef object dump  # keeps the columns alive
    cdef RecordColumns of
    cdef Py_ssize_t count, stride
    cdef list idle  # places of the blocks without a copy

    def __cinit__(self, CompiledBlocks blocks, dump):
        self.blocks, self.dump, self.idle = blocks, dump, []
        self.of = _pointers(dump.names, dump.keys, dump.device_copies, dump.cpu_copies)
        self.count = len(dump.names) // 8
        self.stride = _coprime(self.count)

    def load(self, Py_ssize_t start, Py_ssize_t stop):
        """Mutates the endpoint: part [start, stop) of the dump."""
        cdef Py_ssize_t i, place
        require(0 <= start < stop <= self.count, "steps are off")
        place = start * self.stride % self.count
        for i in range(start, stop):
            if not self.load_one(place):
                self.idle.append(place)
                if len(self.idle) > self.blocks.max_remembered:
                    raise DumpRefused("limits")
            place = (place + self.stride) % self.count
        if stop == self.count:
            for place in sorted(self.idle):
                self.remember_one(place)

    cdef int admit(self, uint64_t name, uint64_t key) except -1:
        if map_find(&self.blocks.names, name) != NULL:
            raise DumpRefused("duplicate")
        if _is_tight(self.blocks.table) and self.blocks._refuses(name, key):
            raise DumpRefused("full")
        return 0

    cdef bint load_one(self, Py_ssize_t i) except -1:
        """False: a block without a copy, nothing was done."""
        cdef uint32_t device = <uint32_t>_get_le(self.of.device + 2 * i, 2)
        cdef uint32_t cpu = <uint32_t>_get_le(self.of.cpu + 2 * i, 2)
        cdef uint32_t tag = min(device, <uint32_t>COPIES) | min(cpu, <uint32_t>COPIES) << CPU_SHIFT
        cdef uint64_t name = _get_le(self.of.names + 8 * i, 8), key = _get_le(self.of.keys + 8 * i, 8)
        if not tag:
            return False
        self.admit(name, key)
        self.blocks._add_record(name, key, tag)
        if device > COPIES:
            self.blocks.more[name, IN_DEVICE] = device - COPIES
        if cpu > COPIES:
            self.blocks.more[name, IN_CPU] = cpu - COPIES
        return True

    cdef int remember_one(self, Py_ssize_t i) except -1:
        cdef uint64_t name = _get_le(self.of.names + 8 * i, 8), key = _get_le(self.of.keys + 8 * i, 8)
        self.admit(name, key)
        self.blocks._add_record(name, key, REMEMBERED)
        return self.blocks._remember(map_find(&self.blocks.names, name))
