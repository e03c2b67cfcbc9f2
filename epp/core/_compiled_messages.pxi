# Part of _compiled_index.pyx: applies packed batches from their arrays, with no object per block.

cdef struct Packed:
    # the arrays of one batch; the batch itself keeps them alive
    const packed_event *events
    Py_ssize_t count
    const uint8_t *names
    uint64_t names_count
    const uint8_t *tokens
    uint64_t tokens_count


cdef Packed _packed(bytes table, bytes names, bytes tokens) noexcept:
    return Packed(
        <const packed_event *>_data(table),
        PyBytes_GET_SIZE(table) // <Py_ssize_t>sizeof(packed_event),
        _data(names),
        PyBytes_GET_SIZE(names) // sizeof(uint64_t),
        _data(tokens),
        PyBytes_GET_SIZE(tokens) // sizeof(uint32_t),
    )


cdef int _read(const Packed *p, Py_ssize_t number, packed_event *event) except -1:
    """The record `number`, whose spans lie inside the arrays whoever made them."""
    memcpy(event, p.events + number, sizeof(packed_event))
    if event.kind == PACKED_STORED or event.kind == PACKED_REMOVED:
        if <uint64_t>event.first_name + event.names > p.names_count:
            raise IndexCorrupt("packed names are short")
        if <uint64_t>event.first_token + event.tokens > p.tokens_count:
            raise IndexCorrupt("packed tokens are short")
    return 0


cdef bint _store_packed(
    index, known, CompiledBlocks blocks, const Packed *p, const packed_event *event, tuple adapters
) except -1:
    """A store whose blocks need no Python. False: not that case, nothing was done."""
    cdef uint32_t tier = IN_CPU if event.flags & PACKED_CPU else IN_DEVICE
    cdef const uint8_t *names = p.names + event.first_name * sizeof(uint64_t)
    cdef uint64_t size, key
    cdef uint8_t *record
    if not event.names:
        return False
    if not event.tokens or (tier == IN_CPU and not event.flags & PACKED_HAS_EXTRA):
        blocks.hold_words_by_name(names, event.names, tier)
        return True
    size = event.block_size_tokens
    # compared as objects: what is learned may be any integer
    if not size or size != blocks.block_size_tokens or size * event.names != event.tokens:
        return False
    if event.flags & PACKED_HAS_EXTRA and event.extra_count != event.names:
        return False
    if event.flags & PACKED_HAS_PARENT:
        record = map_find(&blocks.names, event.parent)
        if record == NULL:
            return False
        key = _key(record)
    else:
        adapter = adapters[event.lora - 1] if event.lora else None
        key = index._hasher.root(known.model, adapter, None)
    blocks.hold_words(
        names, event.names, key, p.tokens + event.first_token * sizeof(uint32_t), size * sizeof(uint32_t), tier
    )
    return True


cdef object _apply_packed(index, endpoint, batch):
    """`PythonPrefixIndex.apply` for a packed batch: usual events from the arrays, the others as ever."""
    cdef Packed p = _packed(batch.table, batch.names, batch.tokens)
    cdef packed_event event
    cdef CompiledBlocks blocks
    cdef tuple adapters = batch.adapters
    cdef Py_ssize_t i
    cdef bint done, main
    known, tally = index._endpoints[endpoint], Tally()
    for i in range(p.count):
        _read(&p, i, &event)
        blocks = <CompiledBlocks?>known.blocks  # a clear brings new ones
        done = False
        # the main group's, as `group_events` tells it; which number that is, is learned in Python
        main = event.flags >> PACKED_GROUP_SHIFT < PACKED_FULL_KINDS and (
            not event.group or event.group - 1 == blocks.main_group
        )
        try:
            if event.kind == PACKED_STORED and main:
                done = _store_packed(index, known, blocks, &p, &event, adapters)
            elif event.kind == PACKED_REMOVED and main:
                blocks.remove_words(
                    p.names + event.first_name * sizeof(uint64_t),
                    event.names,
                    IN_CPU if event.flags & PACKED_CPU else IN_DEVICE,
                )
                done = True
        finally:
            _flush(&blocks.counts, tally)
        if done:
            if index._cleared:
                index._sweep_after(event.names)
            continue
        ordinary = batch.event(i)
        if ordinary is not None:
            index._apply_event(endpoint, known, ordinary, tally)
    return tally.applied()
