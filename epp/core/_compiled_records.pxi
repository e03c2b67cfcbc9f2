# Part of _compiled_index.pyx: what one engine says it holds, in its own block names.

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


cdef class CompiledBlocks:
    """Records of one endpoint between two clears. See `engine_blocks.EngineBlocks` for the rules.

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

    # --- stores ---------------------------------------------------------------------------------

    def hold(self, name, uint64_t key, uint32_t tier, tally):
        try:
            self._hold(self.hash.name(name), key, tier)
        finally:
            _flush(&self.counts, tally)

    def hold_chain(self, tuple names, parent, bytes packed, Py_ssize_t block_bytes, uint32_t tier, tally):
        """`hold` for a whole chain of blocks that are nothing but tokens."""
        cdef uint64_t key = parent
        cdef Py_ssize_t i, count = len(names)
        require(block_bytes > 0 and PyBytes_GET_SIZE(packed) // block_bytes >= count, "tokens are short")
        try:
            for i in range(count):
                key = block_hash(self.hash.secrets.words, key, _data(packed) + i * block_bytes, block_bytes)
                self._hold(self.hash.name(names[i]), key, tier)
        finally:
            _flush(&self.counts, tally)

    cdef int hold_words(
        self, const uint8_t *names, uint32_t count, uint64_t key, const uint8_t *tokens, size_t block_bytes,
        uint32_t tier,
    ) except -1:
        """`hold_chain` for names in an array. Counts are left in `counts`."""
        cdef uint64_t keys[STRIDE]
        cdef uint64_t words[STRIDE]
        cdef uint32_t done = 0, stride, i
        while done < count:
            stride = min(<uint32_t>STRIDE, count - done)
            for i in range(stride):  # hashing takes longer than a line of memory needs to come
                words[i] = load_u64(names + (done + i) * sizeof(uint64_t))
                map_prefetch(&self.names, words[i])
                keys[i] = key = block_hash(
                    self.hash.secrets.words, key, tokens + (done + i) * block_bytes, block_bytes
                )
                map_prefetch(&self.table.table.rows, key)
            for i in range(stride):
                map_prefetch_second(&self.names, words[i], True)
                map_prefetch_second(&self.table.table.rows, keys[i], True)
            for i in range(stride):
                self._hold(words[i], keys[i], tier)
            done += stride
        return 0

    cdef int hold_words_by_name(self, const uint8_t *names, uint32_t count, uint32_t tier) except -1:
        """`hold_by_name` for names in an array. Counts are left in `counts`."""
        cdef uint32_t i
        for i in range(count):
            self._hold_by_name(load_u64(names + i * sizeof(uint64_t)), tier)
        return 0

    def hold_by_name(self, name, uint32_t tier, tally):
        try:
            self._hold_by_name(self.hash.name(name), tier)
        finally:
            _flush(&self.counts, tally)

    cdef int _hold_by_name(self, uint64_t word, uint32_t tier) except -1:
        cdef _Waiting waiting
        cdef uint8_t *record = map_find(&self.names, word)
        if record != NULL:
            self._add_copy(record, tier)
            self.counts.stored += 1
            return 0
        if self._refuses_waiting(word):
            self.counts.refused += 1
            return 0
        self.counts.unresolved += 1
        waiting = self._waiting_record(word)
        waiting.add(tier, 1)
        self._trim_waiting()
        return 0

    def hold_orphan(self, name, parent, bytes payload, uint32_t tier, tally):
        cdef _Waiting waiting
        cdef uint8_t *record = map_find(&self.names, self.hash.name(name))
        if record != NULL:
            self._add_copy(record, tier)
            tally.stored += 1
            return
        if self._refuses_waiting(name):
            tally.refused += 1
            return
        tally.orphans += 1
        waiting = self._waiting_record(name)
        if waiting.payload is None:
            waiting.parent, waiting.payload = parent, payload
            self.waiting_bytes += len(payload)
            self._charge(len(payload))
            self.children.setdefault(parent, {})[name] = None
        waiting.add(tier, 1)
        self._trim_waiting()

    cdef int _hold(self, uint64_t word, uint64_t key, uint32_t tier) except -1:
        cdef uint8_t *record = map_find(&self.names, word)
        if record == NULL and self.waiting_records and word in self.waiting_records:
            self._settle(word, key)
            record = map_find(&self.names, word)
        elif record == NULL and <Py_ssize_t>self.names.used + len(self.waiting_records) >= self.max_blocks:
            self.counts.skipped += 1
            return 0
        if record == NULL:
            if _is_tight(self.table) and self._refuses(word, key):
                self._refuse(1)
                return 0
            self._add_record(word, key, 1 << _shift(tier))
        elif _key(record) == key:
            self._add_copy(record, tier)
        else:  # one name for two contents: believe the first
            self.counts.skipped += 1
            return 0
        self.counts.stored += 1
        if self.children and word in self.children:
            self._settle_descendants(word, key)
        return 0

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

    cdef bint _refuses_waiting(self, name) except -1:
        if not _is_tight(self.table) or name in self.waiting_records:
            return False
        if not self.table.refuses(self.own_bytes):
            return False
        self.refused += 1
        return True

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

    # --- waiting --------------------------------------------------------------------------------

    cdef _Waiting _waiting_record(self, object name):
        waiting = self.waiting_records.get(name)
        if waiting is None:
            waiting = self.waiting_records[name] = _Waiting()
            self._charge(WAITING_BYTES)
        return waiting

    cdef int _settle(self, uint64_t word, uint64_t key) except -1:
        """A waiting block's content is known now: claim the copies it already has."""
        cdef _Waiting waiting = self.waiting_records[word]
        cdef uint32_t tag = 0, tier
        self._stop_waiting(word, waiting)
        if _is_tight(self.table) and self._refuses(word, key):
            return self._refuse(waiting.device + waiting.cpu)
        for tier in (IN_DEVICE, IN_CPU):
            copies = waiting.copies(tier)
            self.counts.stored += copies
            tag |= <uint32_t>min(copies, COPIES) << _shift(tier)
            if copies > COPIES:
                self.more[word, tier] = copies - COPIES
        if tag:
            self._add_record(word, key, tag)
        else:
            self._add_record(word, key, REMEMBERED)
            self._remember(map_find(&self.names, word))
        return 0

    cdef int _settle_descendants(self, object name, uint64_t key) except -1:
        cdef _Waiting waiting
        found = [(name, key)]
        while found:
            parent, parent_key = found.pop()
            for child in self.children.pop(parent, {}):
                waiting = self.waiting_records[child]
                child_key = self.hash.next_key(parent_key, waiting.payload)
                self._settle(child, child_key)
                found.append((child, child_key))
        return 0

    cdef int _stop_waiting(self, object name, _Waiting waiting) except -1:
        del self.waiting_records[name]
        self._charge(-WAITING_BYTES - len(waiting.payload or b""))
        if waiting.payload is not None:
            self.waiting_bytes -= len(waiting.payload)
            siblings = self.children.get(waiting.parent)
            if siblings is not None:
                siblings.pop(name, None)
                if not siblings:
                    del self.children[waiting.parent]
        waiting.parent = waiting.payload = None
        return 0

    cdef int _trim_waiting(self) except -1:
        while len(self.waiting_records) > self.max_waiting or self.waiting_bytes > self.max_waiting_bytes:
            oldest = next(iter(self.waiting_records))
            self._stop_waiting(oldest, self.waiting_records[oldest])
            self.forgotten_waiting += 1
        return 0

    # --- removals -------------------------------------------------------------------------------

    def remove(self, name, uint32_t tier, tally):
        self.remove_all((name,), tier, tally)

    def remove_all(self, tuple names, uint32_t tier, tally):
        try:
            for name in names:
                self._remove(self.hash.name(name), tier)
        finally:
            _flush(&self.counts, tally)

    cdef int remove_words(self, const uint8_t *names, uint32_t count, uint32_t tier) except -1:
        """`remove_all` for names in an array. Counts are left in `counts`."""
        cdef uint64_t words[STRIDE]
        cdef uint32_t done = 0, stride, i
        while done < count:
            stride = min(<uint32_t>STRIDE, count - done)
            for i in range(stride):
                words[i] = load_u64(names + (done + i) * sizeof(uint64_t))
                map_prefetch(&self.names, words[i])
            for i in range(stride):
                map_prefetch_second(&self.names, words[i], False)
            self._fetch_for_removal(words, stride)
            for i in range(stride):
                self._remove(words[i], tier)
            done += stride
        return 0

    cdef void _fetch_for_removal(self, const uint64_t *words, uint32_t count) noexcept:
        """Fetch the rows of the records of `words`, and the remembered records that those push out."""
        cdef uint32_t i, node = NOWHERE
        cdef uint8_t *record
        if self.remembered_count + count > self.max_remembered:
            node = self.oldest
        for i in range(count):
            record = map_find(&self.names, words[i])
            if record != NULL:
                map_prefetch(&self.table.table.rows, _key(record))
            if node != NOWHERE:
                map_prefetch(&self.names, self.nodes[node].name)
                node = self.nodes[node].after

    cdef int _remove(self, uint64_t word, uint32_t tier) except -1:
        cdef uint8_t *record = map_find(&self.names, word)
        if record == NULL:
            return self._remove_waiting(word, tier) if self.waiting_records else 0
        cdef uint32_t tag = map_tag(record), copies = _copies(tag, tier)
        if not copies:
            return 0
        self.counts.removed += 1
        if copies == COPIES and self.more:
            place = (load_u64(record), tier)
            beyond = self.more.pop(place, 0)
            if beyond:
                if beyond > 1:
                    self.more[place] = beyond - 1
                return 0
        if copies == 1:
            self._unclaim(_key(record), tier)
        tag -= <uint32_t>1 << _shift(tier)
        if tag:
            map_set_tag(record, tag)
        else:
            self._remember(record)
        return 0

    cdef int _remove_waiting(self, object name, uint32_t tier) except -1:
        cdef _Waiting waiting = self.waiting_records.get(name)
        if waiting is None or not waiting.copies(tier):
            return 0
        self.counts.removed += 1
        waiting.add(tier, -1)
        # its content, if known, may still be what its children wait for
        if waiting.payload is None and not (waiting.device or waiting.cpu):
            self._stop_waiting(name, waiting)
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

    # --- the end, and checks --------------------------------------------------------------------

    def sweep(self, Py_ssize_t max_records):
        """As in the reference: nobody asks about these records any more."""
        cdef Py_ssize_t done = 0
        cdef uint8_t *record
        cdef uint32_t tag, tiers
        while done < max_records and self.waiting_records:
            self.waiting_records.popitem()
            done += 1
        while done < max_records and self.names.used:
            record = map_take_next(&self.names, &self.swept, &tag)
            if record == NULL:
                break
            if not self.aliases:
                tiers = IN_DEVICE if _copies(tag, IN_DEVICE) else 0
                tiers |= IN_CPU if _copies(tag, IN_CPU) else 0
                self.table.drop(_key(record), self.slot, tiers)
            else:
                if _copies(tag, IN_DEVICE):
                    self._unclaim(_key(record), IN_DEVICE)
                if _copies(tag, IN_CPU):
                    self._unclaim(_key(record), IN_CPU)
            done += 1
        if not len(self):
            self.release()
        return done

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

    def check_integrity(self):
        """Raises IndexCorrupt if the side tables contradict the records."""
        cdef _Waiting waiting
        cdef map_cursor at = map_cursor(0, 0)
        cdef uint8_t *record = map_next(&self.names, &at)
        idle = set()
        while record != NULL:
            require(map_tag(record) != 0, "a record is empty")
            if map_tag(record) & REMEMBERED:
                idle.add(load_u64(record))
            record = map_next(&self.names, &at)
        require(map_is_sound(&self.names), "the name map is off")
        require(idle == self._remembered(), "remembered set is off")
        payloads = []
        for waiting in self.waiting_records.values():
            if waiting.payload is not None:
                payloads.append(waiting.payload)
        require(self.waiting_bytes == sum(map(len, payloads)), "waiting bytes are off")
        require(sum(map(len, self.children.values())) == len(payloads), "children are off")
        claims = self.held()
        for tier, count in self.claims.items():
            require(count == sum(1 for claim in claims if claim[1] is tier), "claim count is off")
        require(sum(self.aliases.values()) == len(claims) - len(set(claims)), "aliases are off")
        waits = WAITING_BYTES * len(self.waiting_records) + self.waiting_bytes
        require(self.estimate == waits, "estimated bytes are off")
        if self.groups is not None:
            self.groups.check_integrity()

    def _remembered(self):
        cdef uint32_t node = self.oldest
        names = []
        while node != NOWHERE:
            names.append(self.nodes[node].name)
            node = self.nodes[node].after
        require(len(names) == self.remembered_count, "remembered count is off")
        return set(names)
