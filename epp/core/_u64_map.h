/* A map from u64 to a small record, in segments of at most 15K slots.
 *
 * Why segments (extendible hashing): a table of millions that doubles stalls for tens of ms; here
 * the most that is ever moved at once is one segment, some 0.1 ms. Large segments grow in small
 * steps, so that they are two thirds full or more. The position of a key depends on two secret words:
 * nobody outside can prepare keys that meet.
 *
 * Slots come in groups of 15. A group's 16 marks lie together, apart from the slots: one byte a slot (0:
 * empty, else seven bits of the hash, and 0x80 if the record is not in the group it belongs to), and how
 * many records went past this group because it was full. A search compares 15 marks at once and touches
 * little more than one line of marks and one slot, found or not; it ends at a group that nobody went past.
 * A removal calls one of those back, so there are no tombstones and searches stay short. Millions of
 * records do not fit a cache, their marks nearly do.
 *
 * A slot is `stride` bytes: u64 key, u32 tag (not 0), then stride - 12 bytes of the caller's.
 * Slots are not aligned; they are read and written with memcpy. Pointers into the map are good
 * until the next map_put, map_add or map_del. No function is safe against another thread: hold the GIL.
 */
#ifndef KVPULL_U64_MAP_H
#define KVPULL_U64_MAP_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define MAP_TAG_AT 8
#define MAP_VALUE_AT 12
#define MAP_GROUP_SLOTS 15u
#define MAP_MARKS 16u /* of a group: 15 slots, and the count of those that went past */
#define MAP_AWAY 0x80u
#define MAP_SEGMENT_GROUPS 1024u
#define MAP_SMALL_GROUPS 64u /* below, a doubling costs no memory to speak of */
#define MAP_MAX_DEPTH 24u

typedef struct {
    uint8_t *marks; /* of all groups; their slots lie behind them, in the same allocation */
    uint32_t groups, used;
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
    uint32_t mark;
} map_cursor;

typedef struct {
    map_segment *segment;
    uint32_t group, at; /* `at` of 15 in the group */
} map_place;

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
/* The strides in use, as constants: a memcpy of unknown length is a call. */
static inline void map_copy(const u64_map *m, uint8_t *to, const uint8_t *from) {
    if (m->stride == 20) memcpy(to, from, 20);
    else if (m->stride == 12) memcpy(to, from, 12);
    else memcpy(to, from, m->stride);
}

static inline uint32_t map_home(const map_segment *s, uint64_t hash) {
    return (uint32_t)(((hash & 0xffffffffu) * s->groups) >> 32);
}
static inline uint32_t map_next_group(const map_segment *s, uint32_t group) {
    return group + 1 == s->groups ? 0 : group + 1;
}
static inline uint8_t map_mark(uint64_t hash, int is_home) {
    uint8_t bits = (uint8_t)(hash >> 32 & 0x7f);
    return (uint8_t)((bits ? bits : 1) | (is_home ? 0 : MAP_AWAY));
}
static inline uint8_t *map_marks(const map_segment *s, uint32_t group) {
    return s->marks + (size_t)group * MAP_MARKS;
}
static inline uint8_t *map_slot(const u64_map *m, const map_segment *s, uint32_t group, uint32_t at) {
    size_t slot = (size_t)group * MAP_GROUP_SLOTS + at;
    return s->marks + (size_t)s->groups * MAP_MARKS + slot * m->stride;
}
static inline uint32_t map_tag(const uint8_t *slot) { return load_u32(slot + MAP_TAG_AT); }
static inline void map_set_tag(uint8_t *slot, uint32_t tag) { save_u32(slot + MAP_TAG_AT, tag); }

/* Bit i: slot i of the group is marked `mark`. */
static inline uint32_t map_matches(const uint8_t *marks, uint8_t mark) {
#ifdef __SSE2__
    __m128i equal = _mm_cmpeq_epi8(_mm_loadu_si128((const __m128i *)marks), _mm_set1_epi8((char)mark));
    return (uint32_t)_mm_movemask_epi8(equal) & 0x7fffu;
#else
    uint32_t found = 0;
    for (uint32_t i = 0; i < MAP_GROUP_SLOTS; i++) found |= (uint32_t)(marks[i] == mark) << i;
    return found;
#endif
}

/* Bit i: slot i of the group has a record of another group. */
static inline uint32_t map_away(const uint8_t *marks) {
#ifdef __SSE2__
    return (uint32_t)_mm_movemask_epi8(_mm_loadu_si128((const __m128i *)marks)) & 0x7fffu;
#else
    uint32_t found = 0;
    for (uint32_t i = 0; i < MAP_GROUP_SLOTS; i++) found |= (uint32_t)(marks[i] >> 7) << i;
    return found;
#endif
}

/* How many went past a group; a count that has reached its end stays there until the segment is rebuilt. */
static inline void map_count_past(uint8_t *marks, int more) {
    uint8_t *past = marks + MAP_GROUP_SLOTS;
    if (*past != UINT8_MAX) *past = (uint8_t)(*past + more);
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

static inline uint64_t map_segment_bytes(const u64_map *m, uint32_t groups) {
    return (uint64_t)groups * (MAP_MARKS + MAP_GROUP_SLOTS * m->stride);
}

static void map_drop_segment(u64_map *m, map_segment *s) {
    if (!s) return;
    map_charge(m, 0, sizeof *s + map_segment_bytes(m, s->groups));
    free(s->marks);
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
static uint32_t map_groups_for(uint64_t slots) {
    uint64_t wanted = slots / MAP_GROUP_SLOTS + 1, step = 1;
    while (wanted > 7 * step) step *= 2;
    if (wanted <= 4) return (uint32_t)wanted;
    uint64_t groups = 4 * step;
    while (groups < wanted) groups += step;
    return (uint32_t)groups;
}

static uint32_t map_next_groups(const map_segment *s) {
    return s->groups < MAP_SMALL_GROUPS ? s->groups * 2
                                        : map_groups_for((uint64_t)s->groups * MAP_GROUP_SLOTS);
}

static map_segment *map_new_segment(u64_map *m, uint32_t groups, uint32_t depth) {
    map_segment *s = malloc(sizeof *s);
    if (!s) return NULL;
    s->marks = calloc(1, map_segment_bytes(m, groups));
    if (!s->marks) { free(s); return NULL; }
    s->groups = groups;
    s->used = 0;
    s->depth = depth;
    map_charge(m, sizeof *s + map_segment_bytes(m, groups), 0);
    return s;
}

/* A slot, taken, for a key that is known not to be there; there has to be an empty one. */
static uint8_t *map_take_slot(const u64_map *m, map_segment *s, uint64_t hash) {
    uint32_t home = map_home(s, hash), group = home, empty;
    while (!(empty = map_matches(map_marks(s, group), 0))) {
        map_count_past(map_marks(s, group), 1);
        group = map_next_group(s, group);
    }
    uint32_t at = (uint32_t)__builtin_ctz(empty);
    map_marks(s, group)[at] = map_mark(hash, group == home);
    s->used++;
    return map_slot(m, s, group, at);
}

/* Next record of one segment from `mark` on, NULL at the end. */
static uint8_t *map_segment_next(const u64_map *m, const map_segment *s, uint32_t *mark) {
    while (*mark < s->groups * MAP_MARKS) {
        uint32_t group = *mark / MAP_MARKS, at = *mark % MAP_MARKS;
        ++*mark;
        if (at != MAP_GROUP_SLOTS && map_marks(s, group)[at]) return map_slot(m, s, group, at);
    }
    return NULL;
}

static int map_resize(u64_map *m, map_segment *s, uint32_t groups) {
    map_segment bigger = {calloc(1, map_segment_bytes(m, groups)), groups, 0, s->depth};
    if (!bigger.marks) return -1;
    uint32_t mark = 0;
    for (const uint8_t *p; (p = map_segment_next(m, s, &mark));)
        map_copy(m, map_take_slot(m, &bigger, map_hash(m, load_u64(p))), p);
    map_charge(m, map_segment_bytes(m, groups), map_segment_bytes(m, s->groups));
    free(s->marks);
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

static inline int map_segment_has_room(const map_segment *s) {
    return (uint64_t)(s->used + 1) * 8 <= (uint64_t)s->groups * MAP_GROUP_SLOTS * 7;
}

/* Give the keys of `s` whose next hash bit is set to a segment of their own. */
static int map_split(u64_map *m, map_segment *s, uint64_t hash) {
    if (s->depth == m->depth && map_double_dir(m)) return -1;
    uint64_t bit = (uint64_t)1 << (63 - s->depth);
    uint32_t groups = map_groups_for(s->used / 2 + s->used / 6); /* three quarters full */
    map_segment *halves[2] = {map_new_segment(m, groups, s->depth + 1), map_new_segment(m, groups, s->depth + 1)};
    int failed = !halves[0] || !halves[1];
    uint32_t mark = 0;
    for (const uint8_t *p; !failed && (p = map_segment_next(m, s, &mark));) {
        uint64_t h = map_hash(m, load_u64(p));
        map_segment *half = halves[(h & bit) != 0];
        if (!map_segment_has_room(half)) failed = map_resize(m, half, map_next_groups(half)) != 0;
        if (!failed) map_copy(m, map_take_slot(m, half, h), p);
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

/* Where `key` is; 0: nowhere. */
static inline int map_locate(const u64_map *m, uint64_t key, uint64_t hash, map_place *place) {
    map_segment *s = m->dir[map_dir_at(m, hash)];
    uint32_t group = map_home(s, hash);
    for (uint32_t seen = 0; seen < s->groups; seen++) {
        const uint8_t *marks = map_marks(s, group);
        for (uint32_t like = map_matches(marks, map_mark(hash, !seen)); like; like &= like - 1) {
            uint32_t at = (uint32_t)__builtin_ctz(like);
            if (load_u64(map_slot(m, s, group, at)) != key) continue;
            *place = (map_place){s, group, at};
            return 1;
        }
        if (!marks[MAP_GROUP_SLOTS]) return 0;
        group = map_next_group(s, group);
    }
    return 0;
}

static inline uint8_t *map_find(const u64_map *m, uint64_t key) {
    map_place place;
    if (!m->dir || !map_locate(m, key, map_hash(m, key), &place)) return NULL;
    return map_slot(m, place.segment, place.group, place.at);
}

/* Two steps that bring what a search for `key` (or its map_add) is going to touch: first the marks, and
 * once they may be there, the slot. */
static inline __attribute__((always_inline)) void map_prefetch(const u64_map *m, uint64_t key) {
    if (!m->dir) return;
    uint64_t hash = map_hash(m, key);
    const map_segment *s = m->dir[map_dir_at(m, hash)];
    __builtin_prefetch(map_marks(s, map_home(s, hash)));
}

static inline __attribute__((always_inline)) void map_prefetch_slot(const u64_map *m, uint64_t key) {
    if (!m->dir) return;
    uint64_t hash = map_hash(m, key);
    const map_segment *s = m->dir[map_dir_at(m, hash)];
    uint32_t group = map_home(s, hash);
    uint32_t likely = map_matches(map_marks(s, group), map_mark(hash, 1));
    if (!likely) likely = map_matches(map_marks(s, group), 0);
    const uint8_t *slot = map_slot(m, s, group, likely ? (uint32_t)__builtin_ctz(likely) : 0);
    __builtin_prefetch(slot);
    __builtin_prefetch(slot + m->stride - 1);
}

/* A new `key` would fit without an allocation. */
static inline int map_has_room(const u64_map *m, uint64_t key) {
    return m->dir && map_segment_has_room(m->dir[map_dir_at(m, map_hash(m, key))]);
}

/* A slot for `key`, which is not there, with `tag` (not 0) and zeros. NULL: out of memory, nothing changed. */
static uint8_t *map_add(u64_map *m, uint64_t key, uint32_t tag) {
    if (!m->dir) {
        map_segment *s = map_new_segment(m, map_groups_for(0), 0);
        m->dir = s ? malloc(sizeof *m->dir) : NULL;
        if (!m->dir) { map_drop_segment(m, s); return NULL; }
        map_charge(m, sizeof *m->dir, 0);
        m->dir[0] = s;
    }
    uint64_t hash = map_hash(m, key);
    map_segment *s = m->dir[map_dir_at(m, hash)];
    while (!map_segment_has_room(s)) {
        int failed = s->groups >= MAP_SEGMENT_GROUPS && s->depth < MAP_MAX_DEPTH
                         ? map_split(m, s, hash)
                         : map_resize(m, s, map_next_groups(s));
        if (failed) return NULL;
        s = m->dir[map_dir_at(m, hash)];
    }
    uint8_t *p = map_take_slot(m, s, hash);
    save_u64(p, key);
    map_set_tag(p, tag);
    memset(p + MAP_VALUE_AT, 0, m->stride - MAP_VALUE_AT);
    m->used++;
    return p;
}

/* The slot of `key`; as map_add if it is not there. */
static uint8_t *map_put(u64_map *m, uint64_t key, uint32_t tag, int *fresh) {
    uint8_t *found = map_find(m, key);
    *fresh = !found;
    if (found) return found;
    found = map_add(m, key, tag);
    *fresh = found != NULL;
    return found;
}

/* Records of this and that group went past `from`, and no further than `to`: one fewer. */
static void map_count_back(const map_segment *s, uint32_t from, uint32_t to) {
    for (; from != to; from = map_next_group(s, from)) map_count_past(map_marks(s, from), -1);
}

/* Some record behind the group of `hole` that went past it. 0: none. */
static int map_find_past(const u64_map *m, const map_place *hole, map_place *found, uint32_t *home) {
    map_segment *s = hole->segment;
    uint32_t group = hole->group;
    for (uint32_t beyond = 1; beyond < s->groups && map_marks(s, group)[MAP_GROUP_SLOTS]; beyond++) {
        group = map_next_group(s, group);
        for (uint32_t away = map_away(map_marks(s, group)); away; away &= away - 1) {
            uint32_t at = (uint32_t)__builtin_ctz(away);
            *home = map_home(s, map_hash(m, load_u64(map_slot(m, s, group, at))));
            if ((group + s->groups - *home) % s->groups < beyond) continue;
            *found = (map_place){s, group, at};
            return 1;
        }
    }
    return 0;
}

/* Take out `key`; harmless if it is not there. */
static void map_del(u64_map *m, uint64_t key) {
    map_place hole, past;
    uint64_t hash = map_hash(m, key);
    if (!m->dir || !map_locate(m, key, hash, &hole)) return;
    map_segment *s = hole.segment;
    uint32_t home;
    map_count_back(s, map_home(s, hash), hole.group);
    while (map_find_past(m, &hole, &past, &home)) {
        map_copy(m, map_slot(m, s, hole.group, hole.at), map_slot(m, s, past.group, past.at));
        uint8_t mark = map_marks(s, past.group)[past.at];
        map_marks(s, hole.group)[hole.at] = hole.group == home ? mark & (uint8_t)~MAP_AWAY : mark;
        map_count_back(s, hole.group, past.group);
        hole = past;
    }
    map_marks(s, hole.group)[hole.at] = 0;
    s->used--;
    m->used--;
    if (!m->used && m->depth) map_free(m);
    else if (s->groups > 4 && s->used < s->groups * MAP_GROUP_SLOTS / 4)
        (void)map_resize(m, s, map_groups_for((uint64_t)s->used * 2));
}

/* Next record after `at`, NULL at the end. Nothing may be put or deleted meanwhile. */
static uint8_t *map_next(const u64_map *m, map_cursor *at) {
    while (m->dir && at->dir < (uint64_t)1 << m->depth) {
        const map_segment *s = m->dir[at->dir];
        uint8_t *p = map_segment_next(m, s, &at->mark);
        if (p) return p;
        at->mark = 0;
        at->dir += (uint64_t)1 << (m->depth - s->depth);
    }
    return NULL;
}

/* As map_next, and forgets the record: for maps that nobody looks into any more. The record can be read
 * until the next call. */
static uint8_t *map_take_next(u64_map *m, map_cursor *at, uint32_t *tag) {
    uint8_t *p = map_next(m, at);
    if (!p) return NULL;
    map_segment *s = m->dir[at->dir];
    s->marks[at->mark - 1] = 0;
    s->used--;
    m->used--;
    *tag = map_tag(p);
    return p;
}

/* The marks of one segment say what its slots hold and who went past its groups. For tests. */
static int map_segment_is_sound(const u64_map *m, const map_segment *s) {
    uint32_t mark = 0, used = 0;
    uint32_t *past = calloc(s->groups, sizeof *past);
    if (!past) return 0;
    int sound = s->depth <= m->depth;
    for (const uint8_t *p; (p = map_segment_next(m, s, &mark)); used++) {
        uint64_t hash = map_hash(m, load_u64(p));
        uint32_t home = map_home(s, hash), group = (mark - 1) / MAP_MARKS;
        sound = sound && map_tag(p) && s->marks[mark - 1] == map_mark(hash, group == home);
        for (; home != group; home = map_next_group(s, home)) past[home]++;
    }
    for (uint32_t group = 0; group < s->groups; group++) {
        uint8_t count = map_marks(s, group)[MAP_GROUP_SLOTS];
        sound = sound && (count == past[group] || count == UINT8_MAX);
        sound = sound && (!past[group] || !map_matches(map_marks(s, group), 0)); /* called back */
    }
    free(past);
    return sound && used == s->used && used < s->groups * MAP_GROUP_SLOTS;
}

/* Every record can be found, no segment is too full, counts and bytes are right. For tests. */
static int map_is_sound(const u64_map *m) {
    map_cursor at = {0, 0};
    for (const uint8_t *p; (p = map_next(m, &at));)
        if (map_find(m, load_u64(p)) != p) return 0;
    uint64_t used = 0, bytes = m->dir ? ((uint64_t)1 << m->depth) * sizeof *m->dir : 0;
    for (size_t i = 0; m->dir && i < (size_t)1 << m->depth;) {
        const map_segment *s = m->dir[i];
        if (!map_segment_is_sound(m, s)) return 0;
        used += s->used;
        bytes += sizeof *s + map_segment_bytes(m, s->groups);
        i += (size_t)1 << (m->depth - s->depth);
    }
    return used == m->used && bytes == m->bytes;
}

#endif
