/* The compiled index's own block key: a chained, keyed 64-bit hash of a block's bytes.
 *
 * Folded multiplications in two lanes over eight secret words, which are derived from the index seed:
 * without them nobody can prepare blocks that meet (a collision would cost a recompute, never
 * a wrong answer). The keys differ from the reference's (xxh3) on purpose of speed: a call from
 * Python per block costs more than the rest of the walk. Keys never leave the index.
 */
#ifndef KVPULL_BLOCK_HASH_H
#define KVPULL_BLOCK_HASH_H

#include <Python.h>

#include "_u64_map.h"

#define HASH_SECRETS 8

/* The bytes of one block, whatever is in front of it: the blocks of a chain can be hashed side by side. */
static inline uint64_t block_content(const uint64_t *secrets, const uint8_t *data, size_t bytes) {
    uint64_t a = secrets[0], b = secrets[1];
    size_t at = 0;
    for (; at + 32 <= bytes; at += 32) {
        a = mum(load_u64(data + at) ^ secrets[2], load_u64(data + at + 8) ^ a);
        b = mum(load_u64(data + at + 16) ^ secrets[3], load_u64(data + at + 24) ^ b);
    }
    if (at < bytes) { /* the rest, with zeros behind it: the length is hashed too */
        uint8_t rest[32] = {0};
        memcpy(rest, data + at, bytes - at);
        a = mum(load_u64(rest) ^ secrets[4], load_u64(rest + 8) ^ a);
        b = mum(load_u64(rest + 16) ^ secrets[5], load_u64(rest + 24) ^ b);
    }
    return mum(a ^ secrets[6] ^ (uint64_t)bytes, b ^ secrets[7]);
}

/* Key of a block behind `parent`: the only step that has to wait for the block before it. */
static inline uint64_t block_key(const uint64_t *secrets, uint64_t parent, uint64_t content) {
    return mum(parent ^ secrets[4], content ^ secrets[5]) ^ content;
}

static inline uint64_t block_hash(const uint64_t *secrets, uint64_t parent, const uint8_t *data,
                                  size_t bytes) {
    return block_key(secrets, parent, block_content(secrets, data, bytes));
}

/* Exact ints of [0, 2^32) in a list or tuple -> u32. 0: something else is among them. */
static int unpack_ids(PyObject *ids, uint32_t *out, Py_ssize_t count) {
    PyObject **items = PySequence_Fast_ITEMS(ids);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = items[i];
        if (!PyLong_CheckExact(item)) return 0;
#if PY_VERSION_HEX >= 0x030C0000
        if (PyUnstable_Long_IsCompact((PyLongObject *)item)) {
            Py_ssize_t small = PyUnstable_Long_CompactValue((PyLongObject *)item);
            if (small < 0) return 0;
            out[i] = (uint32_t)small; /* compact: below 2^30 */
            continue;
        }
#else
        Py_ssize_t digits = Py_SIZE(item);
        if (digits == 0 || digits == 1) {
            out[i] = digits ? (uint32_t)((PyLongObject *)item)->ob_digit[0] : 0;
            continue;
        }
#endif
        int overflow;
        long long value = PyLong_AsLongLongAndOverflow(item, &overflow);
        if (overflow || value < 0 || value > (long long)UINT32_MAX) return 0;
        out[i] = (uint32_t)value;
    }
    return 1;
}

/* A tuple subclass of three small ints, as tuple.__new__ makes it. New reference, or NULL. */
static PyObject *new_triple(PyTypeObject *type, int64_t a, int64_t b, int64_t c) {
    const int64_t values[3] = {a, b, c};
    PyObject *triple = type->tp_alloc(type, 3);
    if (!triple) return NULL;
    for (int i = 0; i < 3; i++) {
        PyObject *value = PyLong_FromLongLong(values[i]);
        if (!value) { Py_DECREF(triple); return NULL; }
        PyTuple_SET_ITEM(triple, i, value);
    }
    return triple;
}

#endif
