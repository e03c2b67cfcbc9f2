# Part of _compiled_index.pyx: the records of one endpoint, by the engine's own block names.

cdef class CompiledRecords:
    """Records of one endpoint between two clears, and what they claim. Its subclasses change them.

    Blocks whose content is known are in `names` (20 bytes a slot); waiting ones are Python objects.
    """

    cdef readonly uint32_t slot
    cdef readonly Py_ssize_t forgotten_waiting
    cdef public object block_size_tokens
    cdef public object main_group, groups
    cdef readonly Py_ssize_t refused
    cdef CompiledTable table
    cdef _Hash hash
    cdef u64_map names
    cdef map_cursor swept
    cdef Py_ssize_t device_claims
    cdef Py_ssize_t cpu_claims
    cdef Counts counts
    cdef dict more  # (name, tier) -> copies beyond what fits a tag
    cdef dict aliases  # (key, tier) -> further names of the same content
    cdef dict waiting_records
    cdef dict children
    cdef Py_ssize_t waiting_bytes
    cdef Py_ssize_t estimate  # bytes of what lives in Python
    cdef Named *sample  # as `name_sample.NameSample`
    cdef uint32_t sampled
    cdef uint64_t sample_last  # keys up to here are of interest
    cdef Py_ssize_t max_blocks, max_waiting, max_waiting_bytes, max_remembered
    # a doubly linked list of the remembered records, oldest first
    cdef Remembered *nodes
    cdef uint32_t node_room, nodes_used, spare_node, oldest, newest
    cdef Py_ssize_t remembered_count

    def __cinit__(self, uint32_t slot, CompiledTable table, _Hash kernel, limits):
        self.slot, self.table, self.hash = slot, table, kernel
        map_init(&self.names, sizeof(uint64_t), table.secrets.words[5], table.secrets.words[6])
        self.names.account = &table.of_endpoints
        self.sample_last = <uint64_t>-1
        self.spare_node = self.oldest = self.newest = NOWHERE
        self.max_blocks = _bound(limits.max_blocks)
        self.max_waiting = _bound(limits.max_waiting_blocks)
        self.max_waiting_bytes = _bound(limits.max_waiting_bytes)
        self.max_remembered = min(_bound(limits.max_remembered_blocks), 1 << 30)
        self.block_size_tokens = 0
        self.more, self.aliases, self.waiting_records, self.children = {}, {}, {}, {}

    def __dealloc__(self):
        self.names.account = NULL  # the table may be gone already
        map_free(&self.names)
        free(self.nodes)
        free(self.sample)

    def __len__(self):
        return self.names.used + len(self.waiting_records)

    @property
    def is_pristine(self):
        learned = len(self) or self.block_size_tokens or self.groups is not None
        return not learned and self.main_group is None

    @property
    def own_bytes(self):
        own = self.names.bytes + self.node_room * sizeof(Remembered) + self.estimate
        return own if self.groups is None else own + self.groups.own_bytes

    @property
    def waiting(self):
        return len(self.waiting_records)

    @property
    def claims(self):
        return {_DEVICE: self.device_claims, _CPU: self.cpu_claims}

    def key_of(self, name):
        cdef uint8_t *record = map_find(&self.names, self.hash.name(name))
        return None if record == NULL else _key(record)
    # --- records and claims -------------------------------------------------------------------

    cdef int _add_record(self, uint64_t word, uint64_t key, uint32_t tag) except -1:
        """A record that was not there, with at least one copy; claims them."""
        cdef uint8_t *record = map_add(&self.names, word, tag)
        if record == NULL:
            raise MemoryError
        save_u64(record + MAP_VALUE_AT, key)
        if _copies(tag, IN_DEVICE):
            self._claim(key, IN_DEVICE)
        if _copies(tag, IN_CPU):
            self._claim(key, IN_CPU)
        if key <= self.sample_last:
            self._sample(word, key)
        if self.groups is not None and word in self.groups.awaited:
            self.groups.settle(word, key)
        return 0

    cdef int _sample(self, uint64_t word, uint64_t key) except -1:
        """Keep the smallest keys with their names; half of the room is for newcomers."""
        cdef uint32_t i, kept = 0
        if self.sample == NULL:
            self.sample = <Named *>malloc(2 * SAMPLE_SIZE * sizeof(Named))
            if self.sample == NULL:
                raise MemoryError
        self.sample[self.sampled] = Named(key, word)
        self.sampled += 1
        if self.sampled < 2 * SAMPLE_SIZE:
            return 0
        qsort(self.sample, self.sampled, sizeof(Named), &_by_key)
        for i in range(self.sampled):
            if kept < SAMPLE_SIZE and (not kept or self.sample[i].key != self.sample[kept - 1].key):
                self.sample[kept] = self.sample[i]
                kept += 1
        self.sampled = kept
        if kept == SAMPLE_SIZE:
            self.sample_last = self.sample[kept - 1].key
        return 0

    def sampled_names(self):
        cdef uint32_t i
        return {self.sample[i].key: self.sample[i].name for i in range(self.sampled)}

    cdef bint _refuses(self, uint64_t word, uint64_t key) except -1:
        """The budget is tight: whether it refuses a new block, as `byte_budget` says. An endpoint at or
        above the mean may still fill slots that are there."""
        if self.table.is_full or not self.table.refuses(self.own_bytes):
            return self.table.is_full
        return not (map_has_room(&self.names, word) and map_has_room(&self.table.table.rows, key))

    cdef int _refuse(self, Py_ssize_t blocks) except -1:
        self.counts.refused += blocks
        self.refused += blocks
        return 0

    cdef int _charge(self, Py_ssize_t bytes_) except -1:
        self.estimate += bytes_
        self.table.of_endpoints += <uint64_t>bytes_
        return 0

    cdef int _add_copy(self, uint8_t *record, uint32_t tier) except -1:
        cdef uint32_t tag = map_tag(record), copies = _copies(tag, tier)
        if copies == COPIES:
            place = (load_u64(record), tier)
            self.more[place] = self.more.get(place, 0) + 1
            return 0
        if not copies:
            self._claim(_key(record), tier)
        if tag & REMEMBERED:
            self._unlink(tag & ~REMEMBERED)
            tag = 0
        map_set_tag(record, tag + (<uint32_t>1 << _shift(tier)))
        return 0

    cdef int _claim(self, uint64_t key, uint32_t tier) except -1:
        if not self.table.hold(key, self.slot, tier):
            self.aliases[key, tier] = self.aliases.get((key, tier), 0) + 1
        if tier == IN_DEVICE:
            self.device_claims += 1
        else:
            self.cpu_claims += 1
        return 0

    cdef int _unclaim(self, uint64_t key, uint32_t tier) except -1:
        others = self.aliases.pop((key, tier), 0) if self.aliases else 0
        if not others:
            self.table.drop(key, self.slot, tier)
        elif others > 1:
            self.aliases[key, tier] = others - 1
        if tier == IN_DEVICE:
            self.device_claims -= 1
        else:
            self.cpu_claims -= 1
        return 0

    # --- remembered: no copy left ------------------------------------------------------------

    cdef int _remember(self, uint8_t *record) except -1:
        """The record has no copy left: keep its key a while. `record` may be gone afterwards."""
        cdef uint32_t node = self._new_node()
        cdef uint64_t oldest_name
        self.nodes[node] = Remembered(load_u64(record), self.newest, NOWHERE)
        if self.newest == NOWHERE:
            self.oldest = node
        else:
            self.nodes[self.newest].after = node
        self.newest = node
        self.remembered_count += 1
        map_set_tag(record, REMEMBERED | node)
        if self.remembered_count > self.max_remembered:
            oldest_name = self.nodes[self.oldest].name
            self._unlink(self.oldest)
            map_del(&self.names, oldest_name)
        return 0

    cdef uint32_t _new_node(self) except? 0:
        cdef uint32_t node = self.spare_node, room
        cdef Remembered *nodes
        if node != NOWHERE:
            self.spare_node = self.nodes[node].after
            return node
        if self.nodes_used == self.node_room:  # at most max_remembered + 1: below 2^31
            room = self.node_room + self.node_room // 2 + 16
            nodes = <Remembered *>realloc(self.nodes, room * sizeof(Remembered))
            if nodes == NULL:
                raise MemoryError
            self.table.of_endpoints += (room - self.node_room) * sizeof(Remembered)
            self.nodes, self.node_room = nodes, room
        self.nodes_used += 1
        return self.nodes_used - 1

    cdef void _unlink(self, uint32_t node) noexcept:
        cdef Remembered *at = self.nodes + node
        if at.before == NOWHERE:
            self.oldest = at.after
        else:
            self.nodes[at.before].after = at.after
        if at.after == NOWHERE:
            self.newest = at.before
        else:
            self.nodes[at.after].before = at.before
        at.after = self.spare_node
        self.spare_node = node
        self.remembered_count -= 1

    def _remembered(self):
        cdef uint32_t node = self.oldest
        names = []
        while node != NOWHERE:
            names.append(self.nodes[node].name)
            node = self.nodes[node].after
        require(len(names) == self.remembered_count, "remembered count is off")
        return set(names)

    # --- the end -----------------------------------------------------------------------------

    def release(self):
        """As in the reference."""
        if self.groups is not None:
            self.groups.release()
        map_free(&self.names)
        self.swept = map_cursor(0, 0)
        free(self.nodes)
        self.table.of_endpoints -= self.node_room * sizeof(Remembered)
        self.nodes, self.node_room, self.nodes_used = NULL, 0, 0
        self.spare_node = self.oldest = self.newest = NOWHERE
        self._charge(-self.estimate)

    def held(self):
        """Every claim, once per engine hash and tier."""
        cdef map_cursor at = map_cursor(0, 0)
        cdef uint8_t *record = map_next(&self.names, &at)
        found = []
        while record != NULL:
            if _copies(map_tag(record), IN_DEVICE):
                found.append((_key(record), _DEVICE))
            if _copies(map_tag(record), IN_CPU):
                found.append((_key(record), _CPU))
            record = map_next(&self.names, &at)
        return found
