# cython: language_level=3, embedsignature=False, cdivision=True
"""Compiled twin of `prefix_index.PythonPrefixIndex`: the same rules, another storage.

`CompiledPrefixIndex` *is* the reference with three parts replaced: the block table and the records
of an endpoint live in C (`_u64_map.h`, `_holder_table.h`), keys are hashed in C (`_block_hash.h`),
and the two common events and the query run without Python work per block. Every rarer case
(salts, orphans, unknown extra keys, wrong numbers) runs through the reference's own methods on top
of the same parts, so that there is one place where a rule is written.

The GIL is held throughout: it is the lock. Nothing here trusts a number from an event: sizes are
checked before a pointer is made, and names may be any integer.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.long cimport PyLong_AsUnsignedLongLong
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, qsort, realloc
from libc.string cimport memcpy, memset

import hashlib
import sys
from array import array
from math import gcd

from epp.core.block_table import ANY_LANE, CPU_LANE, DEVICE_LANE, LANES, IndexCorrupt, require
from epp.core.byte_budget import WAITING_BYTES
from epp.core.hashing import TOKEN_BYTES, BlockHasher, pack_tokens
from epp.core.index_dump import MAX_COPIES as _MAX_COPIES, Columns, DumpRefused
from epp.core.index_limits import Tally
from epp.core.name_sample import SAMPLE_SIZE as _SAMPLE_SIZE
from epp.core.packed_events import RECORD, PackedBatch
from epp.core.prefix_index import Depths, PythonPrefixIndex
from epp.core.types import CacheTier
from epp.core.window_groups import WindowGroups

cdef extern from "_holder_table.h":
    ctypedef struct u64_map:
        uint32_t stride, per
        uint64_t used
        uint64_t bytes
        uint64_t *account
    ctypedef struct map_cursor:
        uint64_t dir
        uint32_t slot
    ctypedef struct holder_set:
        uint64_t blocks
    ctypedef struct holder_table:
        u64_map rows
        u64_map by_hash
        holder_set **sets
        uint32_t count
        uint32_t live
        uint64_t bytes
    const uint32_t IN_DEVICE
    const uint32_t IN_CPU
    uint64_t load_u64(const uint8_t *p) noexcept
    void save_u64(uint8_t *p, uint64_t value) noexcept
    void map_init(u64_map *m, uint32_t value_bytes, uint64_t secret, uint64_t factor) noexcept
    void map_free(u64_map *m) noexcept
    const uint8_t *map_prefetch(const u64_map *m, uint64_t key) noexcept
    int map_prefetch_second(const u64_map *m, uint64_t key, int adding) noexcept
    void map_prefetch_ways(const u64_map *m, uint64_t key) noexcept
    uint8_t *map_find(const u64_map *m, uint64_t key) noexcept
    uint8_t *map_add(u64_map *m, uint64_t key, uint32_t tag) noexcept
    uint8_t *map_put(u64_map *m, uint64_t key, uint32_t tag, int *fresh) noexcept
    void map_del(u64_map *m, uint64_t key) noexcept
    uint8_t *map_next(const u64_map *m, map_cursor *at) noexcept
    uint64_t map_count_buckets(const u64_map *m) noexcept
    void map_copy_buckets(const u64_map *m, uint8_t *to) noexcept
    uint8_t *map_take_next(u64_map *m, map_cursor *at, uint32_t *tag) noexcept
    int map_has_room(const u64_map *m, uint64_t key) noexcept
    int map_is_sound(const u64_map *m) noexcept
    uint32_t map_tag(const uint8_t *slot) noexcept
    void map_set_tag(uint8_t *slot, uint32_t tag) noexcept
    const int MAP_VALUE_AT
    const int MAP_BUCKET_BYTES
    void table_init(holder_table *t, const uint64_t *secrets) noexcept
    uint64_t table_count_bytes(const holder_table *t) noexcept
    void table_free(holder_table *t) noexcept
    int table_hold(holder_table *t, uint64_t key, uint32_t slot, uint32_t tier) noexcept
    int table_drop(holder_table *t, uint64_t key, uint32_t slot, uint32_t tiers) noexcept
    uint32_t holder_tiers(const holder_table *t, uint32_t id, uint32_t slot) noexcept

cdef extern from "_prompt_walk.h":
    ctypedef struct holder_walk:
        uint64_t *alive
        int64_t *depths
        uint32_t pairs
        uint32_t last
    ctypedef struct walk_prompt:
        const uint8_t *data
        size_t block_bytes, blocks
        uint64_t root
    void walk_blocks(
        const holder_table *t, holder_walk *w, const uint64_t *secrets, const walk_prompt *p, uint64_t *keys, int whole
    ) noexcept

cdef extern from "_window_walk.h":
    ctypedef struct window_group:
        const u64_map *held
        uint64_t needed, run
    uint64_t window_deepest(const uint64_t *keys, uint64_t depth, window_group *groups, uint32_t count) noexcept

cdef extern from "_block_hash.h":
    ctypedef struct PyTypeObject:
        pass
    uint64_t block_hash(const uint64_t *secrets, uint64_t parent, const uint8_t *data, size_t size) noexcept
    int unpack_ids(object ids, uint32_t *out, Py_ssize_t count) except -1
    object new_triple(PyTypeObject *kind, int64_t a, int64_t b, int64_t c)

cdef extern from "_packed_events.h":
    ctypedef struct packed_event:
        uint64_t parent
        uint32_t kind, flags
        uint32_t first_name, names
        uint32_t first_token, tokens
        uint32_t block_size_tokens
        uint32_t extra_count
        uint32_t lora
        uint32_t group
        uint32_t window, unused
    const uint32_t PACKED_FULL_KINDS
    const uint32_t PACKED_GROUP_SHIFT
    const uint32_t PACKED_STORED
    const uint32_t PACKED_REMOVED
    const uint32_t PACKED_CPU
    const uint32_t PACKED_HAS_PARENT
    const uint32_t PACKED_HAS_EXTRA

cdef enum:
    WORDS = 8  # secret words of a purpose
    # a record's tag: copies on the device, copies in CPU memory; or its place in the remembered list
    COPIES = 0x7FFF
    CPU_SHIFT = 15

cdef int64_t MAX_COPIES = _MAX_COPIES
cdef uint32_t SAMPLE_SIZE = _SAMPLE_SIZE
cdef uint32_t REMEMBERED = 0x80000000
cdef uint32_t NOWHERE = 0xFFFFFFFF
cdef object _DEVICE = CacheTier.DEVICE
cdef object _CPU = CacheTier.CPU
cdef object _ZERO = Depths()
cdef bint _LITTLE_ENDIAN = sys.byteorder == "little"

# `table_walk` and the reference number the lanes alike
require((DEVICE_LANE, CPU_LANE, ANY_LANE, LANES) == (0, 1, 2, 3), "lanes are off")
require(RECORD.size == sizeof(packed_event), "packed records are off")


include "_compiled_table.pxi"
include "_compiled_record_parts.pxi"
include "_compiled_records.pxi"
include "_compiled_waiting.pxi"
include "_compiled_blocks.pxi"
include "_compiled_dump.pxi"
include "_compiled_messages.pxi"
include "_compiled_windows.pxi"


cdef class _Asked:
    """The endpoints of one query, in order, and what is found for them."""

    cdef Py_ssize_t count
    cdef int64_t *slots  # -1: no block size learned, so no claim
    cdef uint32_t *families
    cdef list endpoints
    cdef list roots  # of each family: (model, block size)
    cdef list limited  # (endpoint, family) of those with further groups
    cdef Py_ssize_t top  # one more than the highest slot
    cdef holder_walk walk

    def __cinit__(self, list endpoints):
        self.endpoints, self.roots, self.limited, self.count = endpoints, [], [], len(endpoints)
        self.slots = <int64_t *>malloc(max(1, self.count) * sizeof(int64_t))
        self.families = <uint32_t *>malloc(max(1, self.count) * sizeof(uint32_t))
        if self.slots == NULL or self.families == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.slots)
        free(self.families)
        free(self.walk.alive)
        free(self.walk.depths)

    cdef int look_up(self, dict known) except -1:
        cdef Py_ssize_t i
        cdef CompiledBlocks blocks
        cdef dict numbers = {}
        cdef object model = None, size = None
        cdef uint32_t number = 0
        for i in range(self.count):
            entry = known[self.endpoints[i]]
            blocks = <CompiledBlocks?>entry.blocks
            self.slots[i] = -1
            if not blocks.block_size_tokens:
                continue
            if entry.model != model or blocks.block_size_tokens != size:
                model, size = entry.model, blocks.block_size_tokens
                number = numbers.setdefault((model, size), len(numbers))
            self.slots[i], self.families[i] = blocks.slot, number
            if blocks.groups is not None:
                self.limited.append((self.endpoints[i], number))
            self.top = max(self.top, <Py_ssize_t>blocks.slot + 1)
        self.roots = list(numbers)
        self.walk.pairs = <uint32_t>((self.top + 63) // 64)
        self.walk.alive = <uint64_t *>malloc(max(1, self.walk.pairs) * 3 * sizeof(uint64_t))
        self.walk.depths = <int64_t *>calloc(max(1, self.top) * 3, sizeof(int64_t))
        if self.walk.alive == NULL or self.walk.depths == NULL:
            raise MemoryError
        return 0

    cdef int start(self, uint32_t family) except -1:
        """Every endpoint of the family is still in the race, in every lane."""
        cdef Py_ssize_t i, lane
        self.walk.last = NOWHERE
        memset(self.walk.alive, 0, self.walk.pairs * 3 * sizeof(uint64_t))
        for i in range(self.count):
            if self.slots[i] >= 0 and self.families[i] == family:
                for lane in range(3):
                    self.walk.alive[self.slots[i] // 64 * 3 + lane] |= <uint64_t>1 << (self.slots[i] % 64)
        return 0

    cdef dict result(self):
        cdef Py_ssize_t i
        cdef int64_t *at
        cdef dict found = {}
        for i in range(self.count):
            depths = _ZERO
            if self.slots[i] >= 0:
                at = self.walk.depths + self.slots[i] * 3  # device, CPU, any
                if at[2]:
                    depths = new_triple(<PyTypeObject *>Depths, at[2], at[0], at[1])
            found[self.endpoints[i]] = depths
        return found


cdef bytes _walk(
    CompiledTable table, _Hash kernel, holder_walk *walk, uint64_t root, bytes packed, size, bint whole, bint kept
):
    """Hash and look up a prompt as long as anybody holds it. The answer is its keys: all of them if `whole`,
    those that were looked up if they are to be `kept`."""
    cdef Py_ssize_t total = PyBytes_GET_SIZE(packed), block_bytes, count
    cdef bytes keys = b""
    cdef walk_prompt prompt
    if size * TOKEN_BYTES > total:  # as objects: what is learned may be any integer
        return keys
    block_bytes = size * TOKEN_BYTES
    count = total // block_bytes
    prompt = walk_prompt(_data(packed), block_bytes, count, root)
    if whole or kept:
        keys = PyBytes_FromStringAndSize(NULL, count * sizeof(uint64_t))
    walk_blocks(
        &table.table, walk, kernel.secrets.words, &prompt, <uint64_t *>_data(keys) if whole or kept else NULL, whole
    )
    return keys


cdef bytes _pack(object token_ids):
    """`hashing.pack_tokens`, with the usual list taken apart in C."""
    cdef Py_ssize_t count
    cdef bytes packed
    if type(token_ids) is list and _LITTLE_ENDIAN:
        count = len(token_ids)
        packed = PyBytes_FromStringAndSize(NULL, count * TOKEN_BYTES)
        if unpack_ids(token_ids, <uint32_t *>PyBytes_AS_STRING(packed), count):
            return packed
    return pack_tokens(token_ids)


class CompiledPrefixIndex(PythonPrefixIndex):
    """The reference with compiled storage, hash, common events and query."""

    implementation = "compiled"
    scheme = CompiledHasher.scheme

    def __init__(self, index_seed, limits=None):
        super().__init__(index_seed, limits)
        self._hasher = CompiledHasher(index_seed)
        self._table = CompiledTable(index_seed, self._limits.max_bytes)

    def _new_blocks(self):
        return CompiledBlocks(self._slots.take(), self._table, self._hasher.hash, self._limits)

    def apply_batch(self, endpoint, batch):
        if type(batch) is PackedBatch:
            return _apply_packed(self, endpoint, batch)
        return super().apply_batch(endpoint, batch)

    def _pack(self, tokens):
        return _pack(tokens)

    def _remove(self, blocks, event, tally):
        number = event.group_idx
        if number is not None and number != blocks.main_group and self._remove_from_group(blocks, event):
            return
        blocks.remove_all(event.hashes, event.tier, tally)

    def depths(self, query, endpoints, keys=None):
        cdef _Asked asked = _Asked(list(endpoints))
        cdef CompiledTable table = self._table
        cdef _Hash kernel = self._hasher.hash
        cdef uint32_t family
        chains = []  # the keys of each family, as far as they are asked for
        asked.look_up(self._endpoints)
        if asked.roots:
            packed = _pack(query.token_ids)
            for family, (model, size) in enumerate(asked.roots):
                asked.start(family)
                root = self._hasher.root(model, query.lora_name, query.cache_salt)
                hashed = _walk(
                    table, kernel, &asked.walk, root, packed, size, keys is not None, bool(asked.limited)
                )
                chains.append(hashed)
                if keys is not None:
                    keys[model, size] = array("Q", hashed)
        found = asked.result()
        for family, chain in enumerate(chains if asked.limited else ()):
            self._limit(found, chain, [endpoint for endpoint, number in asked.limited if number == family])
        return found

    def _groups_of(self, blocks):
        if blocks.groups is None:
            limits = self._limits
            blocks.groups = CompiledGroups(self._table, limits.max_blocks, limits.max_waiting_blocks)
        return blocks.groups

    def _freeze(self, blocks):
        return _Frozen(blocks)

    def _loader(self, blocks, dump):
        return _Loading(blocks, dump).load
