# Part of _compiled_index.pyx: secrets, the keyed hash, and block key -> holders.

cdef struct Secrets:
    uint64_t words[WORDS]


cdef Secrets _derive(bytes index_seed, bytes purpose):
    cdef Secrets secrets
    cdef bytes raw = hashlib.blake2b(index_seed, digest_size=WORDS * 8, person=purpose).digest()
    memcpy(secrets.words, PyBytes_AS_STRING(raw), WORDS * 8)
    return secrets


cdef inline const uint8_t *_data(bytes raw) noexcept:
    return <const uint8_t *>PyBytes_AS_STRING(raw)


cdef class _Hash:
    """The keyed hash, for one index seed."""

    cdef Secrets secrets

    def __cinit__(self, bytes index_seed):
        self.secrets = _derive(index_seed, b"kvpull-keys")

    def next_key(self, uint64_t parent, bytes block):
        return block_hash(self.secrets.words, parent, _data(block), PyBytes_GET_SIZE(block))

    def name_of(self, engine_hash):
        return self.name(engine_hash)

    cdef uint64_t name(self, object engine_hash) except? 0:
        """An engine's name as 64 bits: itself where it fits, a keyed hash of it where it does not."""
        try:
            return PyLong_AsUnsignedLongLong(engine_hash)
        except OverflowError:
            raw = engine_hash.to_bytes(engine_hash.bit_length() // 8 + 1, "little", signed=True)
            return block_hash(self.secrets.words, 0, _data(raw), PyBytes_GET_SIZE(raw))


class CompiledHasher(BlockHasher):
    """Block keys by the C hash; roots as in the reference."""

    scheme = "fold-chain-2"

    def __init__(self, index_seed):
        super().__init__(index_seed)
        self.hash = _Hash(index_seed)
        self.next_key = self.hash.next_key
        self.name = self.hash.name_of

    def chain(self, parent, bytes packed, Py_ssize_t block_size_tokens):
        cdef Py_ssize_t block_bytes = block_size_tokens * TOKEN_BYTES, i
        cdef _Hash kernel = self.hash
        cdef uint64_t key = parent
        keys = []
        for i in range(PyBytes_GET_SIZE(packed) // block_bytes):
            key = block_hash(kernel.secrets.words, key, _data(packed) + i * block_bytes, block_bytes)
            keys.append(key)
        return keys


cdef class CompiledTable:
    """Block key -> holders. See `block_table.BlockTable` for the methods.

    It is its own `byte_budget.ByteBudget`: the bytes are what the maps have allocated.
    """

    cdef holder_table table
    cdef Secrets secrets  # five words for the table, two for the maps of engine names, two for lanes (one is both's)
    cdef uint64_t of_endpoints  # bytes of their maps, and the estimates for what lives in Python
    cdef uint64_t most, tight
    cdef public Py_ssize_t endpoints

    def __cinit__(self, bytes index_seed, max_bytes):
        self.secrets = _derive(index_seed, b"kvpull-holders")
        table_init(&self.table, self.secrets.words)
        self.most = min(max_bytes, 1 << 62)
        self.tight = self.most - self.most // 8

    @property
    def budget(self):
        return self

    @property
    def table_bytes(self):
        return self.table.bytes

    @property
    def endpoint_bytes(self):
        return self.of_endpoints

    @property
    def total_bytes(self):
        return self.table.bytes + self.of_endpoints

    @property
    def is_full(self):
        return self.table.bytes + self.of_endpoints >= self.most

    def charge(self, int64_t bytes_):
        self.of_endpoints += <uint64_t>bytes_

    def refuses(self, own_bytes):
        if not _is_tight(self):
            return False
        return self.is_full or own_bytes * self.endpoints >= self.of_endpoints

    @property
    def is_tight(self):
        return _is_tight(self)

    def is_tight_with(self, uint64_t bytes_):
        return self.table.bytes + self.of_endpoints + bytes_ >= self.tight

    def __dealloc__(self):
        table_free(&self.table)

    def __len__(self):
        return self.table.rows.used

    @property
    def sets(self):
        return self.table.live

    cdef int hold(self, uint64_t key, uint32_t slot, uint32_t tier) except -1:
        cdef int changed = table_hold(&self.table, key, slot, tier)
        if changed < 0:
            raise MemoryError
        return changed

    cdef int drop(self, uint64_t key, uint32_t slot, uint32_t tiers) except -1:
        cdef int changed = table_drop(&self.table, key, slot, tiers)
        if changed < 0:
            raise MemoryError
        return changed

    def rows(self, uint32_t slots):
        """Every row with its bits as the reference would write them. Slow: for tests."""
        cdef map_cursor at = map_cursor(0, 0)
        cdef uint8_t *row = map_next(&self.table.rows, &at)
        cdef uint32_t slot, tiers
        found = {}
        while row != NULL:
            bits = 0
            for slot in range(slots):
                tiers = holder_tiers(&self.table, map_tag(row), slot)
                if tiers:
                    bits |= (tiers | 1 << ANY_LANE) << slot * LANES
            found[load_u64(row)] = bits
            row = map_next(&self.table.rows, &at)
        return found

    def check_integrity(self, expected):
        """As in the reference; the C structures are checked too."""
        cdef uint32_t i
        slots = max((bits.bit_length() // LANES + 1 for bits in expected.values()), default=0)
        require(self.rows(slots) == expected, "rows are off")
        counts = {}
        for bits in expected.values():
            counts[bits] = counts.get(bits, 0) + 1
        blocks = [self.table.sets[i].blocks for i in range(1, self.table.count) if self.table.sets[i] != NULL]
        require(sorted(blocks) == sorted(counts.values()), "interned sets are off")
        require(self.table.live == len(counts), "live sets are off")
        require(table_count_bytes(&self.table) == self.table.bytes, "table bytes are off")
        require(map_is_sound(&self.table.rows), "the row map is off")
        require(map_is_sound(&self.table.by_hash), "the set map is off")


cdef inline bint _is_tight(CompiledTable table) noexcept:
    return table.table.bytes + table.of_endpoints >= table.tight
