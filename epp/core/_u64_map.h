/* A map from u64 to a small record, in segments of at most 16K slots.
 *
 * Why segments (extendible hashing): a table of millions that doubles stalls for tens of ms; here the most
 * that is ever moved at once is one segment, some 0.1 ms. Large segments grow in small steps, so that they
 * are 57 to 85 % full. What is in a segment: `_map_segment.h`.
 *
 * Pointers into the map are good until the next map_put or map_add, or a map_del that makes it smaller. No
 * function is safe against another thread: hold the GIL.
 */
#ifndef KVPULL_U64_MAP_H
#define KVPULL_U64_MAP_H

#include "_map_segment.h"

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

/* --- growth --------------------------------------------------------------------------------------------- */

/* Fresh segments with the records of `s`: one, or with a `bit` two that part them by it, of at least `cap`
 * buckets each. -1: out of memory, nothing changed. */
static int map_make_parts(u64_map *m, const map_segment *s, uint32_t cap, uint64_t bit, map_segment **parts) {
    for (;; cap = map_next_cap(cap)) {
        uint32_t depth = s->depth + (bit != 0);
        parts[0] = map_new_segment(m, cap, depth);
        parts[1] = bit ? map_new_segment(m, cap, depth) : parts[0];
        int whole = parts[0] && parts[1];
        if (whole && map_take_over(m, s, parts, bit)) return 0;
        map_drop_segment(m, parts[0]);
        if (bit) map_drop_segment(m, parts[1]);
        if (!whole) return -1;
    }
}

/* Room for `bytes`, the same for all maps: what is in it is lost with the next call. */
static uint8_t *map_scratch(size_t bytes) {
    static uint8_t *scratch;
    static size_t room;
    if (bytes > room) {
        uint8_t *more = realloc(scratch, bytes);
        if (!more) return NULL;
        scratch = more;
        room = bytes;
    }
    return scratch;
}

/* More buckets for a segment with pages of its own: those it has stay, because pages cost more than copying. */
static int map_grow_pages(u64_map *m, map_segment *s, uint32_t cap) {
    size_t bytes = (size_t)s->cap * MAP_BUCKET_BYTES;
    map_segment before = *s, *const parts[2] = {s, s};
    before.buckets = map_scratch(bytes);
    if (!before.buckets) return -1;
    memcpy(before.buckets, s->buckets, bytes);
    do {
        if (map_stretch(m, s, cap)) { /* as it was */
            (void)map_stretch(m, s, before.cap);
            memcpy(s->buckets, before.buckets, bytes);
            s->used = before.used;
            return -1;
        }
        cap = map_next_cap(cap);
    } while (!map_take_over(m, &before, parts, 0));
    return 0;
}

static int map_resize(u64_map *m, map_segment *s, uint32_t cap) {
    if (map_has_pages(s->cap) && cap > s->cap) return map_grow_pages(m, s, cap);
    map_segment *parts[2];
    if (map_make_parts(m, s, cap, 0, parts)) return -1;
    map_segment old = *s;
    *s = *parts[0];
    *parts[0] = old;
    map_drop_segment(m, parts[0]);
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
    map_segment *parts[2];
    if (map_make_parts(m, s, map_cap_for(m, s->used / 2 + 1), bit, parts)) return -1;
    size_t span = (size_t)1 << (m->depth - s->depth);
    size_t first = map_dir_at(m, hash) & ~(span - 1);
    for (size_t i = 0; i < span; i++) m->dir[first + i] = parts[i >= span / 2];
    map_drop_segment(m, s);
    return 0;
}

static inline int map_segment_has_room(const u64_map *m, const map_segment *s) {
    return (uint64_t)(s->used + 1) * 20 <= (uint64_t)s->cap * m->per * 17;
}

/* A new `key` would, but for bad luck, fit without an allocation. */
static inline int map_has_room(const u64_map *m, uint64_t key) {
    return m->dir && map_segment_has_room(m, m->dir[map_dir_at(m, map_hash(m, key))]);
}

/* --- search --------------------------------------------------------------------------------------------- */

/* The slot of `key` in one bucket, or NULL. All slots are looked at: the branch that would save some is one
 * that nobody can foresee. An empty slot does not count whatever its key. */
MAP_INLINE uint8_t *map_find_in(const uint8_t *bucket, uint64_t key, uint32_t stride, uint32_t per) {
    const uint8_t *found = NULL;
    for (uint32_t k = 0; k < per; k++) {
        const uint8_t *p = bucket + k * stride;
        found = (load_u64(p) == key) & (map_tag(p) != 0) ? p : found;
    }
    return (uint8_t *)found;
}

static inline uint8_t *map_find_bucket(const u64_map *m, const uint8_t *bucket, uint64_t key) {
    if (m->stride == 12) return map_find_in(bucket, key, 12, 5);
    if (m->stride == 20) return map_find_in(bucket, key, 20, 3);
    return map_find_in(bucket, key, m->stride, m->per);
}

static inline uint8_t *map_find(const u64_map *m, uint64_t key) {
    if (!m->dir) return NULL;
    uint64_t hash = map_hash(m, key);
    const map_segment *s = m->dir[map_dir_at(m, hash)];
    const uint8_t *first = map_bucket(s, map_first(s, hash));
    uint8_t *found = map_find_bucket(m, first, key);
    if (found || !map_overflow(first)) return found;
    return map_find_bucket(m, map_bucket(s, map_second(s, hash)), key);
}

/* Ask for the first bucket of `key`. Inlined come what may: GCC takes a function that does nothing but
 * prefetch for one without effect, and deletes the calls of it. */
MAP_INLINE const uint8_t *map_prefetch(const u64_map *m, uint64_t key) {
    if (!m->dir) return NULL;
    uint64_t hash = map_hash(m, key);
    const map_segment *s = m->dir[map_dir_at(m, hash)];
    const uint8_t *first = map_bucket(s, map_first(s, hash));
    __builtin_prefetch(first);
    return first;
}

/* Ask for the second bucket of `key` if the first, which has come meanwhile, does not settle the matter: the
 * key may be in the second, or (`adding`) have to go there. Whether it has to. */
MAP_INLINE int map_prefetch_second(const u64_map *m, uint64_t key, int adding) {
    if (!m->dir) return 0;
    uint64_t hash = map_hash(m, key);
    const map_segment *s = m->dir[map_dir_at(m, hash)];
    uint8_t *first = map_bucket(s, map_first(s, hash));
    if (map_find_bucket(m, first, key)) return 0;
    int full = adding && !map_empty_in(m, first);
    if (full || map_overflow(first)) __builtin_prefetch(map_bucket(s, map_second(s, hash)));
    return full;
}

/* Ask for the buckets where `map_make_room` looks first for a `key` that has to go to its second bucket, if
 * that one, which has come meanwhile, is full, too. */
MAP_INLINE void map_prefetch_ways(const u64_map *m, uint64_t key) {
    uint64_t hash = map_hash(m, key);
    const map_segment *s = m->dir[map_dir_at(m, hash)];
    if (map_empty_in(m, map_bucket(s, map_second(s, hash)))) return;
    uint32_t first = map_first(s, hash);
    const uint8_t *slot = map_bucket(s, first);
    for (uint32_t k = 0; k < m->per; k++, slot += m->stride)
        __builtin_prefetch(map_bucket(s, map_other(m, s, slot, first)));
}

/* --- changes -------------------------------------------------------------------------------------------- */

/* A slot for `key`, which is not there, with `tag` (not 0) and zeros. NULL: out of memory, nothing changed. */
static uint8_t *map_add(u64_map *m, uint64_t key, uint32_t tag) {
    if (!m->dir) {
        map_segment *s = map_new_segment(m, 1, 0);
        m->dir = s ? malloc(sizeof *m->dir) : NULL;
        if (!m->dir) { map_drop_segment(m, s); return NULL; }
        map_charge(m, sizeof *m->dir, 0);
        m->dir[0] = s;
    }
    uint64_t hash = map_hash(m, key);
    map_segment *s = m->dir[map_dir_at(m, hash)];
    uint8_t *p = map_segment_has_room(m, s) ? map_place(m, s, hash) : NULL;
    while (!p) {
        int failed = (uint64_t)s->cap * m->per >= MAP_SEGMENT_SLOTS && s->depth < MAP_MAX_DEPTH
                         ? map_split(m, s, hash)
                         : map_resize(m, s, map_next_cap(s->cap));
        if (failed) return NULL;
        s = m->dir[map_dir_at(m, hash)];
        p = map_segment_has_room(m, s) ? map_place(m, s, hash) : NULL;
    }
    save_u64(p, key);
    map_set_tag(p, tag);
    memset(p + MAP_VALUE_AT, 0, m->stride - MAP_VALUE_AT);
    map_count(s, hash, p);
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

/* Take out the record at `hole`, which map_find has given. */
static void map_del_at(u64_map *m, uint8_t *hole) {
    uint64_t hash = map_hash(m, load_u64(hole));
    map_segment *s = m->dir[map_dir_at(m, hash)];
    uint8_t *first = map_bucket(s, map_first(s, hash));
    if (hole < first || hole >= first + MAP_BUCKET_BYTES) map_overflow_add(first, (uint32_t)-1);
    map_set_tag(hole, 0);
    s->used--;
    m->used--;
    if (!m->used && m->depth) map_free(m);
    else if (s->cap > 16 && s->used * 4 < s->cap * m->per) (void)map_resize(m, s, map_cap_for(m, (uint64_t)s->used * 3 / 2));
}

/* Take out `key`; harmless if it is not there. */
static void map_del(u64_map *m, uint64_t key) {
    uint8_t *hole = map_find(m, key);
    if (hole) map_del_at(m, hole);
}

/* --- all records ---------------------------------------------------------------------------------------- */

/* Next record after `at`, NULL at the end. Nothing may be put or deleted meanwhile. */
static uint8_t *map_next(const u64_map *m, map_cursor *at) {
    while (m->dir && at->dir < (uint64_t)1 << m->depth) {
        const map_segment *s = m->dir[at->dir];
        while (at->slot < s->cap * m->per) {
            uint8_t *p = map_bucket(s, at->slot / m->per) + (size_t)(at->slot % m->per) * m->stride;
            at->slot++;
            if (map_tag(p)) return p;
        }
        at->slot = 0;
        at->dir += (uint64_t)1 << (m->depth - s->depth);
    }
    return NULL;
}

static uint64_t map_count_buckets(const u64_map *m) {
    uint64_t buckets = 0;
    for (size_t i = 0; m->dir && i < (size_t)1 << m->depth; i += (size_t)1 << (m->depth - m->dir[i]->depth))
        buckets += m->dir[i]->cap;
    return buckets;
}

/* All buckets as they are, one behind the other, to memory that has room for them. */
static void map_copy_buckets(const u64_map *m, uint8_t *to) {
    for (size_t i = 0; m->dir && i < (size_t)1 << m->depth; i += (size_t)1 << (m->depth - m->dir[i]->depth)) {
        size_t bytes = (size_t)m->dir[i]->cap * MAP_BUCKET_BYTES;
        memcpy(to, m->dir[i]->buckets, bytes);
        to += bytes;
    }
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
    uint64_t seen = 0, second = 0, used = 0, bytes = m->dir ? ((uint64_t)1 << m->depth) * sizeof *m->dir : 0;
    for (uint8_t *p; (p = map_next(m, &at));) {
        uint64_t hash = map_hash(m, load_u64(p));
        const map_segment *s = m->dir[map_dir_at(m, hash)];
        const uint8_t *first = map_bucket(s, map_first(s, hash));
        if (map_find(m, load_u64(p)) != p) return 0;
        second += p < first || p >= first + MAP_BUCKET_BYTES;
        seen++;
    }
    for (size_t i = 0; m->dir && i < (size_t)1 << m->depth;) {
        const map_segment *s = m->dir[i];
        if (s->depth > m->depth || s->used > s->cap * m->per) return 0;
        for (uint32_t b = 0; b < s->cap; b++) second -= map_overflow(map_bucket(s, b));
        used += s->used;
        bytes += map_segment_bytes(s->cap);
        i += (size_t)1 << (m->depth - s->depth);
    }
    return !second && seen == m->used && used == m->used && bytes == m->bytes;
}

#endif
