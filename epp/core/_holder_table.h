/* Block key -> which slots hold it in which tiers: a map to interned, counted bitsets.
 *
 * A set has two words for every 64 slots, device then CPU; "any tier" is their OR. Equal sets are
 * one set, so most steps of a walk are one comparison. Sets that no block has any more are freed at
 * once. Compiled twin of block_table.BlockTable.
 */
#ifndef KVPULL_HOLDER_TABLE_H
#define KVPULL_HOLDER_TABLE_H

#include "_u64_map.h"

#define HOLDERS_NONE 0u /* the empty set; never in the map */
#define HOLDERS_FAILED UINT32_MAX
#define IN_DEVICE 1u
#define IN_CPU 2u

typedef struct {
    uint64_t hash;
    uint64_t blocks; /* rows that have it */
    uint32_t next;   /* another set with the same hash */
    uint32_t pairs;  /* trailing zero pairs are cut off: equal sets have equal bytes */
    uint64_t bits[];
} holder_set;

typedef struct {
    u64_map rows;    /* block key -> set */
    u64_map by_hash; /* hash of a set -> set */
    holder_set **sets;
    uint32_t count, cap; /* ids given out, room for ids */
    uint32_t live;
    uint32_t *spare; /* ids to use again */
    uint32_t spares;
    uint64_t *scratch;
    uint32_t scratch_pairs;
    uint64_t secret;
    uint64_t bytes; /* allocated for all of this */
    /* The flip before this one; most blocks repeat it. Never stale: an id that was freed is only given
     * out again by another flip. */
    struct { uint32_t from, to, slot, change; } last;
} holder_table;

static void table_init(holder_table *t, const uint64_t *secrets) {
    memset(t, 0, sizeof *t);
    map_init(&t->rows, 0, secrets[0], secrets[1]);
    map_init(&t->by_hash, 0, secrets[2], secrets[3]);
    t->rows.account = t->by_hash.account = &t->bytes;
    t->secret = secrets[4];
    t->count = 1;
    t->last.from = HOLDERS_FAILED;
}

static void table_free(holder_table *t) {
    for (uint32_t i = 1; i < t->count; i++) free(t->sets[i]);
    free(t->sets);
    free(t->spare);
    free(t->scratch);
    map_free(&t->rows);
    map_free(&t->by_hash);
}

static inline size_t holder_set_bytes(uint32_t pairs) {
    return sizeof(holder_set) + 2 * (size_t)pairs * sizeof(uint64_t);
}

static inline uint64_t holder_bit_hash(const holder_table *t, uint32_t slot, uint32_t tier) {
    uint64_t z = (((uint64_t)slot << 2 | tier) ^ t->secret) + 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* Tiers in which `slot` is in the set. */
static inline uint32_t holder_tiers(const holder_table *t, uint32_t id, uint32_t slot) {
    if (id == HOLDERS_NONE || slot / 64 >= t->sets[id]->pairs) return 0;
    const uint64_t *pair = t->sets[id]->bits + 2 * (size_t)(slot / 64);
    return (uint32_t)((pair[0] >> slot % 64 & 1) | (pair[1] >> slot % 64 & 1) << 1);
}

static uint32_t holder_new_id(holder_table *t) {
    if (t->spares) return t->spare[--t->spares];
    if (t->count >= t->cap) {
        uint32_t cap = t->cap ? t->cap + t->cap / 2 : 64;
        if (cap <= t->cap || cap == HOLDERS_FAILED) return HOLDERS_FAILED;
        uint32_t *spare = realloc(t->spare, cap * sizeof *spare);
        if (!spare) return HOLDERS_FAILED;
        t->spare = spare;
        holder_set **sets = realloc(t->sets, cap * sizeof *sets);
        if (!sets) return HOLDERS_FAILED;
        t->sets = sets;
        t->sets[0] = NULL;
        t->bytes += (uint64_t)(cap - t->cap) * (sizeof *sets + sizeof *spare);
        t->cap = cap;
    }
    t->sets[t->count] = NULL;
    return t->count++;
}

/* The set with the first `pairs` of scratch as its content; made if there is none. */
static uint32_t holder_intern(holder_table *t, uint64_t hash, uint32_t pairs) {
    size_t bytes = 2 * (size_t)pairs * sizeof(uint64_t);
    uint8_t *head = map_find(&t->by_hash, hash);
    uint32_t first = head ? map_tag(head) : HOLDERS_NONE;
    for (uint32_t id = first; id != HOLDERS_NONE; id = t->sets[id]->next)
        if (t->sets[id]->pairs == pairs && !memcmp(t->sets[id]->bits, t->scratch, bytes)) return id;
    holder_set *set = malloc(holder_set_bytes(pairs));
    uint32_t id = set ? holder_new_id(t) : HOLDERS_FAILED;
    int fresh = 0;
    head = id == HOLDERS_FAILED ? NULL : map_put(&t->by_hash, hash, id, &fresh);
    if (!head) {
        free(set);
        if (id != HOLDERS_FAILED) t->spare[t->spares++] = id;
        return HOLDERS_FAILED;
    }
    set->hash = hash;
    set->blocks = 0;
    set->next = first;
    set->pairs = pairs;
    memcpy(set->bits, t->scratch, bytes);
    map_set_tag(head, id);
    t->sets[id] = set;
    t->live++;
    t->bytes += holder_set_bytes(pairs);
    return id;
}

static void holder_release(holder_table *t, uint32_t id) {
    if (id == HOLDERS_NONE || --t->sets[id]->blocks) return;
    holder_set *set = t->sets[id];
    uint8_t *head = map_find(&t->by_hash, set->hash);
    if (map_tag(head) != id) {
        uint32_t before = map_tag(head);
        while (t->sets[before]->next != id) before = t->sets[before]->next;
        t->sets[before]->next = set->next;
    } else if (set->next != HOLDERS_NONE) {
        map_set_tag(head, set->next);
    } else {
        map_del(&t->by_hash, set->hash);
    }
    t->bytes -= holder_set_bytes(set->pairs);
    free(set);
    t->sets[id] = NULL;
    t->spare[t->spares++] = id; /* has room for every id given out */
    t->live--;
}

/* The set `from` with the bits of `slot` in `tiers` flipped. */
static uint32_t holder_flip(holder_table *t, uint32_t from, uint32_t slot, uint32_t tiers) {
    if (t->last.from == from && t->last.slot == slot && t->last.change == tiers) return t->last.to;
    uint32_t old = from == HOLDERS_NONE ? 0 : t->sets[from]->pairs;
    uint32_t pairs = slot / 64 + 1 > old ? slot / 64 + 1 : old;
    if (pairs > t->scratch_pairs) {
        uint64_t *scratch = realloc(t->scratch, 2 * (size_t)pairs * sizeof *scratch);
        if (!scratch) return HOLDERS_FAILED;
        t->scratch = scratch;
        t->bytes += 2 * (uint64_t)(pairs - t->scratch_pairs) * sizeof *scratch;
        t->scratch_pairs = pairs;
    }
    if (old) memcpy(t->scratch, t->sets[from]->bits, 2 * (size_t)old * sizeof *t->scratch);
    memset(t->scratch + 2 * (size_t)old, 0, 2 * (size_t)(pairs - old) * sizeof *t->scratch);
    uint64_t hash = old ? t->sets[from]->hash : 0;
    for (uint32_t tier = 0; tier < 2; tier++) {
        if (!(tiers >> tier & 1)) continue;
        t->scratch[2 * (size_t)(slot / 64) + tier] ^= (uint64_t)1 << slot % 64;
        hash ^= holder_bit_hash(t, slot, tier);
    }
    while (pairs && !t->scratch[2 * (size_t)pairs - 2] && !t->scratch[2 * (size_t)pairs - 1]) pairs--;
    uint32_t to = pairs ? holder_intern(t, hash, pairs) : HOLDERS_NONE;
    if (to == HOLDERS_FAILED) return to;
    t->last.from = from;
    t->last.to = to;
    t->last.slot = slot;
    t->last.change = tiers;
    return to;
}

/* `slot` holds `key` in one tier from now on. 1: new, 0: it did already, -1: out of memory. */
static int table_hold(holder_table *t, uint64_t key, uint32_t slot, uint32_t tier) {
    int fresh;
    uint8_t *row = map_put(&t->rows, key, HOLDERS_FAILED, &fresh);
    if (!row) return -1;
    uint32_t from = fresh ? HOLDERS_NONE : map_tag(row);
    if (holder_tiers(t, from, slot) & tier) return 0;
    uint32_t to = holder_flip(t, from, slot, tier);
    if (to == HOLDERS_FAILED) {
        if (fresh) map_del(&t->rows, key);
        return -1;
    }
    t->sets[to]->blocks++;
    map_set_tag(row, to);
    holder_release(t, from);
    return 1;
}

/* `slot` holds `key` in `tiers` no more. 1: it did, 0: it never did, -1: out of memory. */
static int table_drop(holder_table *t, uint64_t key, uint32_t slot, uint32_t tiers) {
    uint8_t *row = map_find(&t->rows, key);
    if (!row) return 0;
    uint32_t from = map_tag(row), held = holder_tiers(t, from, slot) & tiers;
    if (!held) return 0;
    uint32_t to = holder_flip(t, from, slot, held);
    if (to == HOLDERS_FAILED) return -1;
    if (to == HOLDERS_NONE) {
        map_del_at(&t->rows, row);
    } else {
        t->sets[to]->blocks++;
        map_set_tag(row, to);
    }
    holder_release(t, from);
    return 1;
}

/* What is allocated, counted anew. For tests. */
static uint64_t table_count_bytes(const holder_table *t) {
    uint64_t bytes = t->rows.bytes + t->by_hash.bytes + 2 * (uint64_t)t->scratch_pairs * sizeof *t->scratch;
    bytes += (uint64_t)t->cap * (sizeof *t->sets + sizeof *t->spare);
    for (uint32_t i = 1; i < t->count; i++)
        if (t->sets[i]) bytes += holder_set_bytes(t->sets[i]->pairs);
    return bytes;
}

#endif
