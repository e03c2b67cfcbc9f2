# cython: language_level=3, embedsignature=False, cdivision=True, boundscheck=False, wraparound=False
"""Compiled twin of `tiers.PlainTier`: the same blocks evicted in the same order, names in C instead of dicts.

Slots are interchangeable here (nothing is stored in them), so which free one is taken is of no consequence.
Tables grow with what was ever in use: a tier that stays empty costs nothing, however large it may become.
"""

from cpython cimport array
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memset

import array as _arrays

from epp.engine_model.cache import CacheError

cdef array.array _SLOTS = _arrays.array("i")
cdef array.array _NAMES = _arrays.array("Q")

cdef enum:
    NAMED = 1
    OUTSIDE = -2  # of the list of evictable slots


cdef class CompiledTier:
    """See `tiers.Tier`."""

    cdef readonly Py_ssize_t slots
    cdef Py_ssize_t _untouched, _room, _evictable, _named
    cdef uint64_t *_names
    cdef uint32_t *_refs
    cdef uint8_t *_state
    cdef int32_t *_before
    cdef int32_t *_after
    cdef int32_t _oldest, _newest
    cdef int32_t *_freed
    cdef Py_ssize_t _freed_count
    cdef int32_t *_table  # slot + 1 by name; 0: empty
    cdef uint64_t _mask

    def __cinit__(self, Py_ssize_t slots):
        if slots < 1:
            raise ValueError(f"a tier needs at least one slot, not {slots}")
        self.slots = slots
        self._oldest = self._newest = -1
        self._grow(min(slots, 1024))

    def __dealloc__(self):
        free(self._names)
        free(self._refs)
        free(self._state)
        free(self._before)
        free(self._after)
        free(self._freed)
        free(self._table)

    def __len__(self):
        return self._named

    def __contains__(self, uint64_t name):
        return self._find(name) >= 0

    # --- storage ----------------------------------------------------------------------------------
    cdef int _grow(self, Py_ssize_t room) except -1:
        cdef uint64_t cells = 16
        cdef Py_ssize_t slot
        self._names = <uint64_t *>_sized(self._names, room * sizeof(uint64_t))
        self._refs = <uint32_t *>_sized(self._refs, room * sizeof(uint32_t))
        self._state = <uint8_t *>_sized(self._state, room)
        self._before = <int32_t *>_sized(self._before, room * sizeof(int32_t))
        self._after = <int32_t *>_sized(self._after, room * sizeof(int32_t))
        self._freed = <int32_t *>_sized(self._freed, room * sizeof(int32_t))
        for slot in range(self._room, room):
            self._refs[slot] = 0
            self._state[slot] = 0
            self._before[slot] = OUTSIDE
        self._room = room
        while cells < <uint64_t>room * 2:
            cells *= 2
        self._table = <int32_t *>_sized(self._table, cells * sizeof(int32_t))
        memset(self._table, 0, cells * sizeof(int32_t))
        self._mask = cells - 1
        for slot in range(self._untouched):
            if self._state[slot] & NAMED:
                self._enter(<int32_t>slot)
        return 0

    cdef inline uint64_t _home(self, uint64_t name) noexcept:
        return (name * <uint64_t>0x9E3779B97F4A7C15 >> 24) & self._mask

    cdef inline int32_t _find(self, uint64_t name) noexcept:
        cdef uint64_t at = self._home(name)
        cdef int32_t slot
        while True:
            slot = self._table[at] - 1
            if slot < 0 or self._names[slot] == name:
                return slot
            at = (at + 1) & self._mask

    cdef void _enter(self, int32_t slot) noexcept:
        cdef uint64_t at = self._home(self._names[slot])
        while self._table[at]:
            at = (at + 1) & self._mask
        self._table[at] = slot + 1

    cdef void _leave(self, int32_t slot) noexcept:
        cdef uint64_t hole = self._home(self._names[slot]), at, home
        while self._table[hole] != slot + 1:
            hole = (hole + 1) & self._mask
        at = hole
        while True:  # removal by shifting back
            at = (at + 1) & self._mask
            if not self._table[at]:
                break
            home = self._home(self._names[self._table[at] - 1])
            if ((at - home) & self._mask) >= ((at - hole) & self._mask):
                self._table[hole] = self._table[at]
                hole = at
        self._table[hole] = 0

    cdef inline void _append(self, int32_t slot) noexcept:
        self._before[slot] = self._newest
        self._after[slot] = -1
        if self._newest >= 0:
            self._after[self._newest] = slot
        else:
            self._oldest = slot
        self._newest = slot
        self._evictable += 1

    cdef inline void _take_out(self, int32_t slot) noexcept:
        cdef int32_t before = self._before[slot], after = self._after[slot]
        if before >= 0:
            self._after[before] = after
        else:
            self._oldest = after
        if after >= 0:
            self._before[after] = before
        else:
            self._newest = before
        self._before[slot] = OUTSIDE
        self._evictable -= 1

    cdef int32_t _hand_out(self, array.array evicted, Py_ssize_t *count) except -1:
        """One slot: freed, untouched or the oldest evictable one, whose name goes to `evicted`."""
        cdef int32_t slot
        if self._freed_count:
            self._freed_count -= 1
            slot = self._freed[self._freed_count]
        elif self._untouched < self.slots:
            if self._untouched == self._room:
                self._grow(min(self.slots, self._room * 2))
            slot = <int32_t>self._untouched
            self._untouched += 1
        else:
            slot = self._oldest
            if slot < 0:
                raise CacheError("no slot is left")
            self._take_out(slot)
            self._leave(slot)
            self._state[slot] = 0
            self._named -= 1
            evicted.data.as_ulonglongs[count[0]] = self._names[slot]
            count[0] += 1
        self._refs[slot] = 1
        return slot

    cdef int _name(self, int32_t slot, uint64_t name) noexcept:
        if self._find(name) >= 0:
            return 0
        self._names[slot] = name
        self._state[slot] = NAMED
        self._named += 1
        self._enter(slot)
        return 1

    cdef int _let_go(self, int32_t slot) except -1:
        if slot < 0 or slot >= self._untouched or self._refs[slot] == 0:
            raise CacheError(f"slot {slot} is not in use")
        self._refs[slot] -= 1
        if self._refs[slot] == 0:
            if self._state[slot] & NAMED:
                self._append(slot)
            else:
                self._freed[self._freed_count] = slot
                self._freed_count += 1
        return 0

    # --- questions --------------------------------------------------------------------------------
    @property
    def available(self):
        return self._free_slots()

    cdef Py_ssize_t _free_slots(self) noexcept:
        return self.slots - self._untouched + self._freed_count + self._evictable

    @property
    def in_use(self):
        return self.slots - self._free_slots()

    def prefix(self, names):
        cdef array.array wanted = names
        cdef Py_ssize_t count = 0, total = len(wanted)
        cdef array.array found = array.clone(_SLOTS, total, zero=False)
        cdef int32_t slot
        while count < total:
            slot = self._find(wanted.data.as_ulonglongs[count])
            if slot < 0:
                break
            found.data.as_ints[count] = slot
            count += 1
        array.resize(found, count)
        return found

    # --- changes ----------------------------------------------------------------------------------
    def allocate(self, Py_ssize_t count):
        if count < 0 or count > self._free_slots():
            return None
        cdef array.array slots = array.clone(_SLOTS, count, zero=False)
        cdef array.array evicted = array.clone(_NAMES, count, zero=False)
        cdef Py_ssize_t i, gone = 0
        for i in range(count):
            slots.data.as_ints[i] = self._hand_out(evicted, &gone)
        array.resize(evicted, gone)
        return slots, evicted

    def commit_all(self, slots, names):
        cdef array.array mine = slots, wanted = names
        cdef Py_ssize_t i, count = len(mine)
        cdef int32_t slot
        if len(wanted) != count:
            raise ValueError("as many names as slots")
        fresh = bytearray(count)
        cdef uint8_t *flags = fresh
        for i in range(count):
            slot = mine.data.as_ints[i]
            if slot < 0 or slot >= self._untouched or self._refs[slot] == 0 or self._state[slot] & NAMED:
                raise CacheError(f"slot {slot} cannot be named")
            flags[i] = self._name(slot, wanted.data.as_ulonglongs[i])
        return bytes(fresh)

    def store(self, names):
        cdef array.array wanted = names
        cdef Py_ssize_t i, count = len(wanted), gone = 0, missing = 0, room = self._free_slots()
        cdef array.array evicted = array.clone(_NAMES, count, zero=False)
        cdef array.array taken = array.clone(_SLOTS, count, zero=False)
        fresh = bytearray(count)
        cdef uint8_t *flags = fresh
        for i in range(count):  # what is missing is found before anything is evicted for it
            if missing < room and self._find(wanted.data.as_ulonglongs[i]) < 0:
                flags[i] = 1
                missing += 1
        for i in range(missing):
            taken.data.as_ints[i] = self._hand_out(evicted, &gone)
        missing = 0
        for i in range(count):
            if flags[i]:
                flags[i] = self._name(taken.data.as_ints[missing], wanted.data.as_ulonglongs[i])
                missing += 1
        for i in range(missing - 1, -1, -1):
            self._let_go(taken.data.as_ints[i])
        array.resize(evicted, gone)
        return bytes(fresh), evicted

    def pin(self, slots):
        cdef array.array mine = slots
        cdef Py_ssize_t i
        cdef int32_t slot
        for i in range(len(mine)):
            slot = mine.data.as_ints[i]
            if slot < 0 or slot >= self._untouched or (self._refs[slot] == 0 and not self._state[slot] & NAMED):
                raise CacheError(f"slot {slot} holds nothing to pin")
            if self._refs[slot] == 0:
                self._take_out(slot)
            self._refs[slot] += 1

    def unpin(self, slots):
        cdef array.array mine = slots
        cdef Py_ssize_t i
        for i in range(len(mine) - 1, -1, -1):
            self._let_go(mine.data.as_ints[i])

    def touch(self, names):
        cdef array.array wanted = names
        cdef Py_ssize_t i
        cdef int32_t slot
        for i in range(len(wanted) - 1, -1, -1):
            slot = self._find(wanted.data.as_ulonglongs[i])
            if slot >= 0 and self._refs[slot] == 0:
                self._take_out(slot)
                self._append(slot)

    def check_integrity(self):
        cdef Py_ssize_t slot, named = 0, referenced = 0, listed = 0
        cdef int32_t at = self._oldest
        while at >= 0:
            if self._refs[at] or not self._state[at] & NAMED:
                raise CacheError("an evictable slot is in use or without a name")
            listed += 1
            at = self._after[at]
        for slot in range(self._untouched):
            referenced += self._refs[slot] > 0
            if self._state[slot] & NAMED:
                named += 1
                if self._find(self._names[slot]) != slot:
                    raise CacheError("names and slots disagree")
        if listed != self._evictable or named != self._named:
            raise CacheError("counts are wrong")
        if listed + referenced + self._freed_count + self.slots - self._untouched != self.slots:
            raise CacheError("a slot is in no state or in two")


cdef void *_sized(void *memory, size_t size) except NULL:
    cdef void *found = realloc(memory, size)
    if found == NULL:
        raise MemoryError()
    return found
