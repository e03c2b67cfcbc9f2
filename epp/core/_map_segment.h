/* One segment of `_u64_map.h`: buckets of one cache line each, and two of them for every key (cuckoo hashing).
 *
 * Applying events is waiting for memory, and this is the fewest lines that such a table can do with: a record
 * is in the first bucket of its key, or in the second where the first was full; how many of its keys had to go
 * to their second is written in every bucket, so a search for what is not there mostly ends after one line,
 * too. Removal is forgetting a slot. The position of a key depends on two secret words: nobody outside can
 * prepare keys that meet.
 *
 * A slot is `stride` bytes: u64 key, u32 tag (0: empty), then stride - 12 bytes of the caller's. Slots are
 * not aligned; they are read and written with memcpy.
 */
#ifndef KVPULL_MAP_SEGMENT_H
#define KVPULL_MAP_SEGMENT_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#if defined(__SANITIZE_ADDRESS__)
#define MAP_OWN_PAGES 262144u /* where the bounds of an allocation are watched, let most be */
#else
#define MAP_OWN_PAGES 65536u /* bytes of buckets */
#endif
#define MAP_PAGE_BYTES 4096u
#ifndef MAP_POPULATE
#define MAP_POPULATE 0 /* Linux: all pages at once, they are written next */
#endif
#define MAP_TAG_AT 8
#define MAP_VALUE_AT 12
#define MAP_BUCKET_BYTES 64u
#define MAP_OVERFLOW_AT 60 /* u32: keys whose first bucket this is and that are in their second */
#define MAP_SEGMENT_SLOTS 16384u
#define MAP_SMALL_BUCKETS 1024u /* below, a doubling costs no memory to speak of */
#define MAP_MAX_DEPTH 24u
#define MAP_SEARCHED 96 /* buckets looked at for a way to make room */

typedef struct {
    uint8_t *buckets; /* on a line */
    void *memory;
    uint32_t cap, used; /* buckets, records */
    uint32_t depth;     /* how many leading hash bits all its keys share */
} map_segment;

typedef struct {
    map_segment **dir; /* 2^depth pointers, by the leading bits of the hash; NULL: nothing stored yet */
    uint32_t depth, stride, per; /* per: slots of a bucket */
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

/* --- where a key belongs -------------------------------------------------------------------------- */

static inline uint64_t map_hash(const u64_map *m, uint64_t key) { return mum(key ^ m->secret, m->factor); }
static inline size_t map_dir_at(const u64_map *m, uint64_t hash) {
    return m->depth ? (size_t)(hash >> (64 - m->depth)) : 0;
}
static inline uint8_t *map_bucket(const map_segment *s, uint32_t i) {
    return s->buckets + (size_t)i * MAP_BUCKET_BYTES;
}
static inline uint32_t map_first(const map_segment *s, uint64_t hash) {
    return (uint32_t)(((hash & 0xffffffffu) * s->cap) >> 32);
}
static inline uint32_t map_second(const map_segment *s, uint64_t hash) {
    uint32_t at = (uint32_t)((((hash * 0x9e3779b97f4a7c15u) >> 32) * s->cap) >> 32);
    if (at != map_first(s, hash)) return at;
    return at + 1 == s->cap ? 0 : at + 1;
}

static inline uint32_t map_tag(const uint8_t *slot) { return load_u32(slot + MAP_TAG_AT); }
static inline void map_set_tag(uint8_t *slot, uint32_t tag) { save_u32(slot + MAP_TAG_AT, tag); }
static inline uint32_t map_overflow(const uint8_t *bucket) { return load_u32(bucket + MAP_OVERFLOW_AT); }
static inline void map_overflow_add(uint8_t *bucket, uint32_t more) {
    save_u32(bucket + MAP_OVERFLOW_AT, map_overflow(bucket) + more);
}

static void map_init(u64_map *m, uint32_t value_bytes, uint64_t secret, uint64_t factor) {
    memset(m, 0, sizeof *m);
    m->stride = MAP_VALUE_AT + value_bytes;
    m->per = MAP_OVERFLOW_AT / m->stride;
    m->secret = secret;
    m->factor = factor | 1;
}

/* --- memory ------------------------------------------------------------------------------------------ */

static inline void map_charge(u64_map *m, uint64_t more, uint64_t fewer) {
    m->bytes += more - fewer;
    if (m->account) *m->account += more - fewer;
}

static inline int map_has_pages(uint32_t cap) { return (uint64_t)cap * MAP_BUCKET_BYTES >= MAP_OWN_PAGES; }

/* Large segments have pages of their own: what one leaves behind in the heap when it grows fits the next one
 * badly, and a sixth of all memory was such holes. */
static inline uint64_t map_buckets_bytes(uint32_t cap) {
    uint64_t bytes = (uint64_t)cap * MAP_BUCKET_BYTES;
    if (bytes < MAP_OWN_PAGES) return bytes + MAP_BUCKET_BYTES; /* a line more, to begin on one */
    return (bytes + MAP_PAGE_BYTES - 1) / MAP_PAGE_BYTES * MAP_PAGE_BYTES;
}

static int map_new_buckets(map_segment *s, uint32_t cap) {
    uint64_t bytes = map_buckets_bytes(cap);
    if (!map_has_pages(cap)) {
        s->memory = calloc(1, bytes);
    } else {
        s->memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
        if (s->memory == MAP_FAILED) s->memory = NULL;
    }
    if (!s->memory) return -1;
    s->buckets = (uint8_t *)(((uintptr_t)s->memory + MAP_BUCKET_BYTES - 1) & ~(uintptr_t)(MAP_BUCKET_BYTES - 1));
    s->cap = cap;
    s->used = 0;
    return 0;
}

static inline uint64_t map_segment_bytes(uint32_t cap) { return sizeof(map_segment) + map_buckets_bytes(cap); }

/* A segment with pages gets `cap` buckets, all empty, which may be fewer. -1: out of memory, nothing changed. */
static int map_stretch(u64_map *m, map_segment *s, uint32_t cap) {
    uint64_t old = map_buckets_bytes(s->cap), bytes = map_buckets_bytes(cap);
    uint8_t *memory = mremap(s->memory, old, bytes, MREMAP_MAYMOVE);
    if (memory == MAP_FAILED) return -1;
    memset(memory, 0, old < bytes ? old : bytes);
#ifdef MADV_POPULATE_WRITE
    if (old < bytes) (void)madvise(memory + old, bytes - old, MADV_POPULATE_WRITE);
#endif
    map_charge(m, bytes, old);
    s->memory = s->buckets = memory;
    s->cap = cap;
    s->used = 0;
    return 0;
}

static void map_drop_segment(u64_map *m, map_segment *s) {
    if (!s) return;
    map_charge(m, 0, map_segment_bytes(s->cap));
    if (map_has_pages(s->cap)) munmap(s->memory, map_buckets_bytes(s->cap));
    else free(s->memory);
    free(s);
}

static map_segment *map_new_segment(u64_map *m, uint32_t cap, uint32_t depth) {
    map_segment *s = malloc(sizeof *s);
    if (!s) return NULL;
    if (map_new_buckets(s, cap)) { free(s); return NULL; }
    s->depth = depth;
    map_charge(m, map_segment_bytes(cap), 0);
    return s;
}

/* Buckets that `records` fill to three quarters, from a ladder of two steps an octave: with more, filling
 * is mostly moving. */
static uint32_t map_cap_for(const u64_map *m, uint64_t records) {
    uint64_t buckets = (records + records / 3) / m->per + 1;
    if (buckets <= 4) return (uint32_t)buckets;
    uint32_t octave = 0;
    while (buckets > (uint64_t)7 << octave) octave++;
    uint64_t step = (uint64_t)1 << octave, cap = 4 * step;
    while (cap < buckets) cap += 2 * step;
    return (uint32_t)cap;
}

static uint32_t map_next_cap(uint32_t cap) {
    if (cap < MAP_SMALL_BUCKETS) return cap * 2;
    uint32_t octave = 0;
    while (cap >= (uint32_t)8 << octave) octave++;
    return cap + ((uint32_t)2 << octave);
}

/* --- room for a record ---------------------------------------------------------------------------------- */

/* The strides in use, as constants: loops over the slots of a bucket are unrolled, copies are no calls. */
#define MAP_WITH_STRIDE(m, name, ...)                                     \
    ((m)->stride == 20 ? name((m), __VA_ARGS__, 20, 3)                    \
     : (m)->stride == 12 ? name((m), __VA_ARGS__, 12, 5)                  \
                         : name((m), __VA_ARGS__, (m)->stride, (m)->per))
#define MAP_INLINE static inline __attribute__((always_inline))

/* The first empty slot, or NULL. All are looked at: which one it is, no branch could foresee. */
MAP_INLINE uint8_t *map_empty_as(const u64_map *m, uint8_t *bucket, uint32_t stride, uint32_t per) {
    uint8_t *empty = NULL;
    (void)m;
    for (uint32_t k = per; k-- > 0;) empty = map_tag(bucket + k * stride) ? empty : bucket + k * stride;
    return empty;
}

static inline uint8_t *map_empty_in(const u64_map *m, uint8_t *bucket) {
    return MAP_WITH_STRIDE(m, map_empty_as, bucket);
}

/* Move the record at `from` to `to`, in the other one of its two buckets. */
static void map_move(const u64_map *m, map_segment *s, uint8_t *to, uint8_t *from) {
    uint64_t hash = map_hash(m, load_u64(from));
    uint8_t *first = map_bucket(s, map_first(s, hash));
    memcpy(to, from, m->stride);
    map_set_tag(from, 0);
    map_overflow_add(first, from >= first && from < first + MAP_BUCKET_BYTES ? 1u : (uint32_t)-1);
}

typedef struct {
    uint32_t bucket;
    int16_t before; /* the bucket whose slot can move here; negative: the key itself can */
    uint16_t slot;
} map_step;

/* The other bucket of the record at `slot`, which is in `bucket`. */
static inline uint32_t map_other(const u64_map *m, const map_segment *s, const uint8_t *slot, uint32_t bucket) {
    uint64_t hash = map_hash(m, load_u64(slot));
    uint32_t first = map_first(s, hash);
    return first == bucket ? map_second(s, hash) : first;
}

/* Where the records of the bucket `steps[at]` could move: further steps. Returns how many there are now. */
static int map_ways_on(const u64_map *m, const map_segment *s, map_step *steps, int at, int count) {
    uint32_t bucket = steps[at].bucket;
    const uint8_t *slot = map_bucket(s, bucket);
    for (uint32_t k = 0; k < m->per && count < MAP_SEARCHED; k++, slot += m->stride) {
        uint32_t next = map_other(m, s, slot, bucket);
        __builtin_prefetch(map_bucket(s, next));
        steps[count++] = (map_step){next, (int16_t)at, (uint16_t)k};
    }
    return count;
}

/* An empty slot in one of the two full buckets of `hash`: others move on to their other bucket, by the
 * shortest way there is. NULL: none is near; nothing was moved. */
static uint8_t *map_make_room(const u64_map *m, map_segment *s, uint64_t hash) {
    map_step steps[MAP_SEARCHED];
    steps[0] = (map_step){map_first(s, hash), -1, 0};
    steps[1] = (map_step){map_second(s, hash), -1, 0};
    int count = 2, followed = 0;
    for (int at = 2;; at++) {
        if (at == count) { /* all that are known are full: a step further from one of them */
            if (count == MAP_SEARCHED) return NULL;
            count = map_ways_on(m, s, steps, followed++, count);
        }
        uint8_t *empty = map_empty_in(m, map_bucket(s, steps[at].bucket));
        if (!empty) continue;
        while (steps[at].before >= 0) {
            const map_step *step = &steps[at];
            at = step->before;
            uint8_t *from = map_bucket(s, steps[at].bucket) + step->slot * m->stride;
            map_move(m, s, empty, from);
            empty = from;
        }
        return empty;
    }
}

/* An empty slot for a key that is known not to be there. NULL: make the segment larger. */
MAP_INLINE uint8_t *map_place_as(const u64_map *m, map_segment *s, uint64_t hash, uint32_t stride, uint32_t per) {
    uint8_t *place = map_empty_as(m, map_bucket(s, map_first(s, hash)), stride, per);
    if (place || s->cap == 1) return place;
    place = map_empty_as(m, map_bucket(s, map_second(s, hash)), stride, per);
    return place ? place : map_make_room(m, s, hash);
}

static inline uint8_t *map_place(const u64_map *m, map_segment *s, uint64_t hash) {
    return MAP_WITH_STRIDE(m, map_place_as, s, hash);
}

/* Count a record that was put into an empty slot. */
static inline void map_count(map_segment *s, uint64_t hash, const uint8_t *slot) {
    uint8_t *first = map_bucket(s, map_first(s, hash));
    if (slot < first || slot >= first + MAP_BUCKET_BYTES) map_overflow_add(first, 1);
    s->used++;
}

/* Copy the records of `s` to parts[0], or to parts[1] where their hash has `bit`. 0: one finds no place. */
MAP_INLINE int map_take_over_as(const u64_map *m, const map_segment *s, map_segment *const *parts, uint64_t bit,
                                uint32_t stride, uint32_t per) {
    for (uint32_t at = 0; at < s->cap; at++) {
        const uint8_t *p = map_bucket(s, at), *end = p + (size_t)per * stride;
        for (; p < end; p += stride) {
            if (!map_tag(p)) continue;
            uint64_t hash = map_hash(m, load_u64(p));
            map_segment *to = parts[(hash & bit) != 0];
            uint8_t *place = map_place_as(m, to, hash, stride, per);
            if (!place) return 0;
            memcpy(place, p, stride);
            map_count(to, hash, place);
        }
    }
    return 1;
}

static int map_take_over(const u64_map *m, const map_segment *s, map_segment *const *parts, uint64_t bit) {
    return MAP_WITH_STRIDE(m, map_take_over_as, s, parts, bit);
}

#endif
