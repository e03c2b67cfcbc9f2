# Part of _compiled_index.pyx: what groups besides the main one hold, and what that leaves of a prefix.

cdef class CompiledLane:
    """See `window_walk.Lane`."""

    cdef u64_map names  # content -> names with a copy, as the tag

    def __cinit__(self, CompiledTable table):
        map_init(&self.names, 0, table.secrets.words[7], table.secrets.words[6])

    def __dealloc__(self):
        map_free(&self.names)

    def add_all(self, keys):
        for key in keys:
            self.add(key)

    cpdef add(self, uint64_t key):
        cdef int fresh
        cdef uint8_t *slot = map_put(&self.names, key, 1, &fresh)
        if slot == NULL:
            raise MemoryError
        if not fresh:
            map_set_tag(slot, map_tag(slot) + 1)

    def drop(self, uint64_t key):
        cdef uint8_t *slot = map_find(&self.names, key)
        if slot == NULL:
            raise KeyError(key)
        if map_tag(slot) == 1:
            map_del(&self.names, key)
        else:
            map_set_tag(slot, map_tag(slot) - 1)

    def counts(self):
        cdef map_cursor at = map_cursor(0, 0)
        cdef uint8_t *slot = map_next(&self.names, &at)
        require(map_is_sound(&self.names), "the map of a lane is off")
        found = {}
        while slot != NULL:
            found[load_u64(slot)] = map_tag(slot)
            slot = map_next(&self.names, &at)
        return found


cdef class _Rules:
    """The lanes of all groups, and how many blocks of each a prefix needs. Good until a group is added."""

    cdef uint32_t count
    cdef object size
    cdef list lanes  # keeps them alive
    cdef window_group *groups  # device, CPU, any: `count` of each

    def __cinit__(self, list groups, size):
        cdef uint32_t i, lane
        cdef CompiledLane held
        self.count, self.size, self.lanes = len(groups), size, []
        self.groups = <window_group *>malloc(max(1, self.count) * 3 * sizeof(window_group))
        if self.groups == NULL:
            raise MemoryError
        for lane, name in enumerate(("device", "cpu", "any")):
            for i, group in enumerate(groups):
                held = getattr(group, name)
                self.lanes.append(held)
                self.groups[lane * self.count + i] = window_group(&held.names, group.needed_blocks(size), 0)

    def __dealloc__(self):
        free(self.groups)

    cdef uint64_t deepest(self, const uint64_t *keys, uint64_t depth, uint32_t lane) noexcept:
        return window_deepest(keys, depth, self.groups + lane * self.count, self.count)


class CompiledGroups(WindowGroups):
    """The reference with compiled lanes and a compiled walk. `keys` are packed words here."""

    def __init__(self, table, max_blocks, max_awaited):
        super().__init__(table, max_blocks, max_awaited)
        self._rules = None

    def new_lane(self):
        return CompiledLane(self.account)

    def usable(self, bytes keys, depths, size):
        cdef _Rules rules = self._rules
        cdef const uint64_t *words = <const uint64_t *>_data(keys)
        cdef uint64_t any_blocks = depths[0], device, cpu
        if rules is None or rules.count != len(self._groups) or rules.size != size:
            rules = self._rules = _Rules(list(self._groups.values()), size)
        require(PyBytes_GET_SIZE(keys) // sizeof(uint64_t) >= any_blocks, "keys are short")
        device = rules.deepest(words, min(<uint64_t>depths[1], any_blocks), 0)
        cpu = rules.deepest(words, min(<uint64_t>depths[2], any_blocks), 1)
        if device != any_blocks and cpu != any_blocks:  # what one tier can serve, both can
            any_blocks = rules.deepest(words, any_blocks, 2)
        return any_blocks, device, cpu

    def release(self):
        super().release()
        self._rules = None
