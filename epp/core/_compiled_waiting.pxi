# Part of _compiled_index.pyx: blocks whose content is not known yet. Rare, so they live in Python.

cdef class CompiledWaiting(CompiledRecords):
    """Adds the blocks that wait for their parent, or for a store that tells their content."""

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

    cdef bint _is_at_most(self, name) except -1:
        """A new waiting block would be one too many: it counts before its content is known, too."""
        if <Py_ssize_t>self.names.used + len(self.waiting_records) < self.max_blocks:
            return False
        return name not in self.waiting_records

    cdef bint _refuses_waiting(self, name) except -1:
        if not _is_tight(self.table) or name in self.waiting_records:
            return False
        if not self.table.refuses(self.own_bytes):
            return False
        self.refused += 1
        return True
