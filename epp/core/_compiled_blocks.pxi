# Part of _compiled_index.pyx: what one engine's stores and removals do to its records.

cdef class CompiledBlocks(CompiledWaiting):
    """See `engine_blocks.EngineBlocks` for the rules."""

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
        cdef uint64_t crowded
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
            crowded = 0
            for i in range(stride):
                crowded |= <uint64_t>map_prefetch_second(&self.names, words[i], True) << i
                map_prefetch_second(&self.table.table.rows, keys[i], True)
            for i in range(stride):
                if crowded >> i & 1:
                    map_prefetch_ways(&self.names, words[i])
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
        if self._is_at_most(word):
            self.counts.skipped += 1
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
        if self._is_at_most(name):
            tally.skipped += 1
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
