/* A prompt's tokens -> how deep each slot holds it: the blocks' keys, and one linear walk over their rows.
 *
 * The keys of a stretch are made, and their rows asked for from memory, while the stretch before it is
 * walked. No bisection: sets of holders are not prefix closed. Compiled twin of BlockTable.depths.
 */
#ifndef KVPULL_PROMPT_WALK_H
#define KVPULL_PROMPT_WALK_H

#include "_block_hash.h"
#include "_holder_table.h"

#define WALK_LANES 3 /* device, CPU, any: as in block_table */
#define WALK_STRETCH 32u
#define WALK_ROWS (MAP_OVERFLOW_AT / MAP_VALUE_AT) /* rows of a bucket */

typedef struct {
    uint64_t *alive; /* WALK_LANES words for every 64 slots */
    int64_t *depths; /* WALK_LANES for every slot */
    uint32_t pairs;
    uint32_t last; /* every slot alive is in this set */
} holder_walk;

typedef struct {
    size_t first, count;
    uint64_t keys[WALK_STRETCH];
    const uint8_t *buckets[WALK_STRETCH]; /* where the rows are first looked for; NULL: there are no rows */
    uint32_t ids[WALK_STRETCH];           /* sets, of the rows found there */
} walk_stretch;

typedef struct {
    const uint8_t *data; /* packed token ids */
    size_t block_bytes, blocks;
    uint64_t root;
} walk_prompt;

static inline void walk_note(holder_walk *w, uint32_t pair, uint32_t lane, uint64_t bits, int64_t depth) {
    for (; bits; bits &= bits - 1) {
        size_t slot = (size_t)pair * 64 + (size_t)__builtin_ctzll(bits);
        w->depths[slot * WALK_LANES + lane] = depth;
    }
}

/* The holders change at block `depth`: note whose prefix ends here. 0: nobody is left. */
static int walk_step(const holder_table *t, holder_walk *w, uint32_t id, int64_t depth) {
    const holder_set *set = id == HOLDERS_NONE ? NULL : t->sets[id];
    uint64_t anybody = 0;
    for (uint32_t pair = 0; pair < w->pairs; pair++) {
        uint64_t *alive = w->alive + (size_t)pair * WALK_LANES;
        int in = set && pair < set->pairs;
        uint64_t device = in ? set->bits[2 * (size_t)pair] : 0;
        uint64_t cpu = in ? set->bits[2 * (size_t)pair + 1] : 0;
        const uint64_t held[WALK_LANES] = {device, cpu, device | cpu};
        for (uint32_t lane = 0; lane < WALK_LANES; lane++) {
            uint64_t lost = alive[lane] & ~held[lane];
            if (lost) walk_note(w, pair, lane, lost, depth);
            alive[lane] &= held[lane];
            anybody |= alive[lane];
        }
    }
    w->last = id;
    return anybody != 0;
}

/* The rows in the buckets that were asked for; those that can only be in another one are asked for now. */
static void walk_look_up(const holder_table *t, walk_stretch *s) {
    for (size_t i = 0; i < s->count; i++) {
        const uint8_t *row = s->buckets[i] ? map_find_in(s->buckets[i], s->keys[i], MAP_VALUE_AT, WALK_ROWS) : NULL;
        s->ids[i] = row ? map_tag(row) : HOLDERS_NONE;
        if (!row) map_prefetch_second(&t->rows, s->keys[i], 0);
    }
}

/* 0: nobody is left. */
static int walk_over(const holder_table *t, holder_walk *w, walk_stretch *s) {
    walk_look_up(t, s);
    for (size_t i = 0; i < s->count; i++) {
        uint32_t id = s->ids[i];
        if (id == w->last && id != HOLDERS_NONE) continue;
        if (id == HOLDERS_NONE) {
            const uint8_t *row = map_find(&t->rows, s->keys[i]);
            id = row ? map_tag(row) : HOLDERS_NONE;
            if (id == w->last && id != HOLDERS_NONE) continue;
        }
        if (!walk_step(t, w, id, (int64_t)(s->first + i))) return 0;
    }
    return 1;
}

/* The next stretch behind `key`; the last key of it. */
static uint64_t walk_hash(const holder_table *t, const uint64_t *secrets, const walk_prompt *p, walk_stretch *s,
                          size_t first, uint64_t key) {
    s->first = first;
    s->count = p->blocks - first < WALK_STRETCH ? p->blocks - first : WALK_STRETCH;
    for (size_t i = 0; i < s->count; i++) {
        key = block_hash(secrets, key, p->data + (first + i) * p->block_bytes, p->block_bytes);
        s->keys[i] = key;
        s->buckets[i] = map_prefetch(&t->rows, key);
    }
    return key;
}

/* Walk as long as anybody is left. `keys`, where given, has room for all blocks and takes those that were
 * hashed: no more than needed, unless the `whole` prompt is asked for. */
static void walk_blocks(const holder_table *t, holder_walk *w, const uint64_t *secrets, const walk_prompt *p,
                        uint64_t *keys, int whole) {
    walk_stretch stretches[2];
    uint64_t key = p->root;
    int alive = 1, turn = 0;
    size_t hashed = 0;
    stretches[1].count = 0;
    while (hashed < p->blocks && (alive || whole)) {
        walk_stretch *s = &stretches[turn];
        key = walk_hash(t, secrets, p, s, hashed, key);
        if (keys) memcpy(keys + hashed, s->keys, s->count * sizeof *keys);
        hashed += s->count;
        turn = !turn;
        if (alive) alive = walk_over(t, w, &stretches[turn]); /* the one before */
    }
    if (alive && p->blocks) alive = walk_over(t, w, &stretches[!turn]);
    for (uint32_t pair = 0; alive && pair < w->pairs; pair++)
        for (uint32_t lane = 0; lane < WALK_LANES; lane++)
            walk_note(w, pair, lane, w->alive[(size_t)pair * WALK_LANES + lane], (int64_t)p->blocks);
}

#endif
