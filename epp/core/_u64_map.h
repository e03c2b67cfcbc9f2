/* A map from u64 to a small record, in segments of at most 16K slots.
 *
 * Why segments (extendible hashing): a table of millions that doubles stalls for tens of ms; here
 * the most that is ever moved at once is one segment, some 0.1 ms. Large segments grow in small
 * steps, so that they are two thirds full or more. Open addressing, linear probing, removal by
 * shifting back (no tombstones). The position of a key depends on two secret words: nobody outside
 * can prepare keys that meet.
 *
 * A slot is `stride` bytes: u64 key, u32 tag (0: empty), then stride - 12 bytes of the caller's.
 * Slots are not aligned; they are read and written with memcpy. Pointers into the map are good
 * until the next map_put, map_add or map_del. No function is safe against another thread: hold the GIL.
 */
#ifndef KVPULL_U64_MAP_H
#define KVPULL_U64_MAP_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MAP_TAG_AT 8
#define MAP_VALUE_AT 12
#define MAP_SEGMENT_SLOTS 16384u
#define MAP_SMALL_SLOTS 1024u /* below, a doubling costs no memory to speak of */
#define MAP_MAX_DEPTH 24u

typedef struct {
    uint8_t *slots;
    uint32_t cap, used;
    uint32_t depth; /* how many leading hash bits all its keys share */
} map_segment;

typedef struct {
    map_segment **dir; /* 2^depth pointers, by the leading bits of the hash; NULL: nothing stored yet */
    uint32_t depth, stride;
    uint64_t used;
    uint64_t secret, factor;
    uint64_t bytes;    /* allocated for it */
    uint64_t *account; /* the same, summed over several maps; NULL: nobody counts */
} u64_map;

typedef struct {
    uint64_t dir;
    uint32_t slot;
} map_cursor;

static inline uint64_t load_u64(const uint8_t *p) { uint64_t v; memcpy(&v, p, 8); return v; }
static inline uint32_t load_u32(const uint8_t *p) { uint32_t v; memcpy(&v, p, 4); return v; }
static inline void save_u64(uint8_t *p, uint64_t v) { memcpy(p, &v, 8); }
static inline void save_u32(uint8_t *p, uint32_t v) { memcpy(p, &v, 4); }

/* 64 x 64 -> 128 bits, folded */
static inline uint64_t mum(uint64_t a, uint64_t b) {
    __extension__ typedef unsigned __int128 u128;
    u128 r = (u128)a * b;
    return (uint64_t)r ^ (uint64_t)(r >> 64);
}

static inline uint64_t map_hash(const u64_map *m, uint64_t key) { return mum(key ^ m->secret, m->factor); }
static inline size_t map_dir_at(const u64_map *m, uint64_t hash) {
    return m->depth ? (size_t)(hash >> (64 - m->depth)) : 0;
}
static inline uint32_t map_home(const map_segment *s, uint64_t hash) {
    return (uint32_t)(((hash & 0xffffffffu) * s->cap) >> 32);
}
static inline uint8_t *map_slot(const u64_map *m, const map_segment *s, uint32_t i) {
    return s->slots + (size_t)i * m->stride;
}
static inline uint32_t map_tag(const uint8_t *slot) { return load_u32(slot + MAP_TAG_AT); }
static inline void map_set_tag(uint8_t *slot, uint32_t tag) { save_u32(slot + MAP_TAG_AT, tag); }

/* The strides in use, as constants: a memcpy of unknown length is a call. */
static inline void map_copy(const u64_map *m, uint8_t *to, const uint8_t *from) {
    if (m->stride == 20) memcpy(to, from, 20);
    else if (m->stride == 12) memcpy(to, from, 12);
    else memcpy(to, from, m->stride);
}

static void map_init(u64_map *m, uint32_t value_bytes, uint64_t secret, uint64_t factor) {
    memset(m, 0, sizeof *m);
    m->stride = MAP_VALUE_AT + value_bytes;
    m->secret = secret;
    m->factor = factor | 1;
}

static inline void map_charge(u64_map *m, uint64_t more, uint64_t fewer) {
    m->bytes += more - fewer;
    if (m->account) *m->account += more - fewer;
}

static void map_drop_segment(u64_map *m, map_segment *s) {
    if (!s) return;
    map_charge(m, 0, sizeof *s + (uint64_t)s->cap * m->stride);
    free(s->slots);
    free(s);
}

static void map_free(u64_map *m) {
    if (!m->dir) return;
    for (size_t i = 0; i < (size_t)1 << m->depth;) {
        map_segment *s = m->dir[i];
        i += (size_t)1 << (m->depth - s->depth);
        map_drop_segment(m, s);
    }
    map_charge(m, 0, ((uint64_t)1 << m->depth) * sizeof *m->dir);
    free(m->dir);
    m->dir = NULL;
    m->depth = 0;
    m->used = 0;
}

/* Sizes come from a ladder of four steps an octave, so that a freed one fits the next segment that grows. */
static uint32_t map_cap_for(uint64_t slots) {
    uint32_t octave = 2;
    while (slots > (uint64_t)7 << octave) octave++;
    uint64_t step = (uint64_t)1 << octave, cap = 4 * step;
    while (cap < slots) cap += step;
    return (uint32_t)cap;
}

static uint32_t map_next_cap(const map_segment *s) {
    return s->cap < MAP_SMALL_SLOTS ? s->cap * 2 : map_cap_for((uint64_t)s->cap + 1);
}

static map_segment *map_new_segment(u64_map *m, uint32_t cap, uint32_t depth) {
    map_segment *s = malloc(sizeof *s);
    if (!s) return NULL;
    s->slots = calloc(cap, m->stride);
    if (!s->slots) { free(s); return NULL; }
    s->cap = cap;
    s->used = 0;
    s->depth = depth;
    map_charge(m, sizeof *s + (uint64_t)cap * m->stride, 0);
    return s;
}

/* First empty slot for a key that is known not to be there. */
static uint8_t *map_place(const u64_map *m, map_segment *s, uint64_t hash) {
    uint32_t i = map_home(s, hash);
    while (map_tag(map_slot(m, s, i))) i = i + 1 == s->cap ? 0 : i + 1;
    s->used++;
    return map_slot(m, s, i);
}

static int map_resize(u64_map *m, map_segment *s, uint32_t cap) {
    map_segment bigger = {calloc(cap, m->stride), cap, 0, s->depth};
    if (!bigger.slots) return -1;
    for (uint32_t i = 0; i < s->cap; i++) {
        const uint8_t *p = map_slot(m, s, i);
        if (map_tag(p)) map_copy(m, map_place(m, &bigger, map_hash(m, load_u64(p))), p);
    }
    map_charge(m, (uint64_t)cap * m->stride, (uint64_t)s->cap * m->stride);
    free(s->slots);
    *s = bigger;
    return 0;
}

static int map_double_dir(u64_map *m) {
    size_t count = (size_t)1 << m->depth;
    map_segment **dir = malloc(2 * count * sizeof *dir);
    if (!dir) return -1;
    for (size_t i = 0; i < count; i++) dir[2 * i] = dir[2 * i + 1] = m->dir[i];
    free(m->dir);
    m->dir = dir;
    m->depth++;
    map_charge(m, count * sizeof *dir, 0);
    return 0;
}

/* Give the keys of `s` whose next hash bit is set to a segment of their own. */
static int map_split(u64_map *m, map_segment *s, uint64_t hash) {
    if (s->depth == m->depth && map_double_dir(m)) return -1;
    uint64_t bit = (uint64_t)1 << (63 - s->depth);
    uint32_t cap = map_cap_for(s->used / 2 + s->used / 6); /* three quarters full */
    map_segment *halves[2] = {map_new_segment(m, cap, s->depth + 1), map_new_segment(m, cap, s->depth + 1)};
    int failed = !halves[0] || !halves[1];
    for (uint32_t i = 0; i < s->cap && !failed; i++) {
        const uint8_t *p = map_slot(m, s, i);
        if (!map_tag(p)) continue;
        uint64_t h = map_hash(m, load_u64(p));
        map_segment *half = halves[(h & bit) != 0];
        if (half->used + 1 >= half->cap) failed = map_resize(m, half, map_next_cap(half)) != 0;
        if (!failed) map_copy(m, map_place(m, half, h), p);
    }
    if (failed) {
        for (int i = 0; i < 2; i++) map_drop_segment(m, halves[i]);
        return -1;
    }
    size_t span = (size_t)1 << (m->depth - s->depth);
    size_t first = map_dir_at(m, hash) & ~(span - 1);
    for (size_t i = 0; i < span; i++) m->dir[first + i] = halves[i >= span / 2];
    map_drop_segment(m, s);
    return 0;
}

static inline uint8_t *map_find(const u64_map *m, uint64_t key) {
    if (!m->dir) return NULL;
    uint64_t hash = map_hash(m, key);
    const map_segment *s = m->dir[map_dir_at(m, hash)];
    for (uint32_t i = map_home(s, hash);; i = i + 1 == s->cap ? 0 : i + 1) { /* never full: it ends */
        uint8_t *p = map_slot(m, s, i);
        if (!map_tag(p)) return NULL;
        if (load_u64(p) == key) return p;
    }
}

/* Inlined come what may: GCC takes a function that does nothing but prefetch for one without effect, and
 * deletes the calls of it. Most searches end within the two lines. */
static inline __attribute__((always_inline)) void map_prefetch(const u64_map *m, uint64_t key) {
    if (!m->dir) return;
    uint64_t hash = map_hash(m, key);
    const map_segment *s = m->dir[map_dir_at(m, hash)];
    const uint8_t *home = map_slot(m, s, map_home(s, hash));
    __builtin_prefetch(home);
    __builtin_prefetch(home + 64);
}

static inline int map_segment_has_room(const map_segment *s) {
    return (uint64_t)(s->used + 1) * 6 <= (uint64_t)s->cap * 5;
}

/* A new `key` would fit without an allocation. */
static inline int map_has_room(const u64_map *m, uint64_t key) {
    return m->dir && map_segment_has_room(m->dir[map_dir_at(m, map_hash(m, key))]);
}

/* A slot for `key`, which is not there, with `tag` (not 0) and zeros. NULL: out of memory, nothing changed. */
static uint8_t *map_add(u64_map *m, uint64_t key, uint32_t tag) {
    if (!m->dir) {
        map_segment *s = map_new_segment(m, map_cap_for(0), 0);
        m->dir = s ? malloc(sizeof *m->dir) : NULL;
        if (!m->dir) { map_drop_segment(m, s); return NULL; }
        map_charge(m, sizeof *m->dir, 0);
        m->dir[0] = s;
    }
    uint64_t hash = map_hash(m, key);
    map_segment *s = m->dir[map_dir_at(m, hash)];
    while (!map_segment_has_room(s)) {
        int failed = s->cap >= MAP_SEGMENT_SLOTS && s->depth < MAP_MAX_DEPTH
                         ? map_split(m, s, hash)
                         : map_resize(m, s, map_next_cap(s));
        if (failed) return NULL;
        s = m->dir[map_dir_at(m, hash)];
    }
    uint8_t *p = map_place(m, s, hash);
    save_u64(p, key);
    map_set_tag(p, tag);
    memset(p + MAP_VALUE_AT, 0, m->stride - MAP_VALUE_AT);
    m->used++;
    return p;
}

/* The slot of `key`; as map_add if it is not there. */
static uint8_t *map_put(u64_map *m, uint64_t key, uint32_t tag, int *fresh) {
    uint8_t *found = map_find(m, key);
    *fresh = 0;
    if (found) return found;
    found = map_add(m, key, tag);
    *fresh = found != NULL;
    return found;
}

/* Take out `key`; harmless if it is not there. */
static void map_del(u64_map *m, uint64_t key) {
    uint8_t *hole = map_find(m, key);
    if (!hole) return;
    map_segment *s = m->dir[map_dir_at(m, map_hash(m, key))];
    uint32_t i = (uint32_t)((size_t)(hole - s->slots) / m->stride), j = i;
    for (;;) {
        j = j + 1 == s->cap ? 0 : j + 1;
        uint8_t *p = map_slot(m, s, j);
        if (!map_tag(p)) break;
        uint32_t home = map_home(s, map_hash(m, load_u64(p)));
        uint32_t from_home = j >= home ? j - home : j + s->cap - home;
        uint32_t from_hole = j >= i ? j - i : j + s->cap - i;
        if (from_home >= from_hole) {
            map_copy(m, map_slot(m, s, i), p);
            i = j;
        }
    }
    map_set_tag(map_slot(m, s, i), 0);
    s->used--;
    m->used--;
    if (!m->used && m->depth) map_free(m);
    else if (s->cap > 64 && s->used < s->cap / 4) (void)map_resize(m, s, map_cap_for((uint64_t)s->used * 2));
}

/* Next record after `at`, NULL at the end. Nothing may be put or deleted meanwhile. */
static uint8_t *map_next(const u64_map *m, map_cursor *at) {
    while (m->dir && at->dir < (uint64_t)1 << m->depth) {
        const map_segment *s = m->dir[at->dir];
        while (at->slot < s->cap) {
            uint8_t *p = map_slot(m, s, at->slot++);
            if (map_tag(p)) return p;
        }
        at->slot = 0;
        at->dir += (uint64_t)1 << (m->depth - s->depth);
    }
    return NULL;
}

/* As map_next, and forgets the record: for maps that nobody looks into any more. The record, but for
 * its tag, can be read until the next call. */
static uint8_t *map_take_next(u64_map *m, map_cursor *at, uint32_t *tag) {
    uint8_t *p = map_next(m, at);
    if (!p) return NULL;
    m->dir[at->dir]->used--;
    m->used--;
    *tag = map_tag(p);
    map_set_tag(p, 0);
    return p;
}

/* Every record can be found, no segment is too full, counts and bytes are right. For tests. */
static int map_is_sound(const u64_map *m) {
    map_cursor at = {0, 0};
    uint64_t seen = 0, used = 0, bytes = m->dir ? ((uint64_t)1 << m->depth) * sizeof *m->dir : 0;
    for (uint8_t *p; (p = map_next(m, &at));) {
        if (map_find(m, load_u64(p)) != p) return 0;
        seen++;
    }
    for (size_t i = 0; m->dir && i < (size_t)1 << m->depth;) {
        const map_segment *s = m->dir[i];
        if (s->depth > m->depth || s->used >= s->cap) return 0;
        used += s->used;
        bytes += sizeof *s + (uint64_t)s->cap * m->stride;
        i += (size_t)1 << (m->depth - s->depth);
    }
    return seen == m->used && used == m->used && bytes == m->bytes;
}

#endif
