/* The longest prefix that several groups of blocks can serve, each from a window at its end.
 *
 * Compiled twin of window_walk.deepest, over maps whose keys are what a group holds.
 */
#ifndef KVPULL_WINDOW_WALK_H
#define KVPULL_WINDOW_WALK_H

#include "_u64_map.h"

#define WINDOW_ROUNDS 16 /* of every group in turn, before one pass over all blocks is cheaper */
#define WINDOW_AHEAD 8   /* blocks asked for before they are looked at */

typedef struct {
    const u64_map *held;
    uint64_t needed; /* blocks at the end of a prefix; all, where there are fewer */
    uint64_t run;    /* of a pass: held blocks in a row */
} window_group;

/* The largest end of at most `depth` that fits one group. */
static uint64_t window_end(const uint64_t *keys, uint64_t depth, const window_group *g) {
    uint64_t end = depth, at = depth;
    while (at && end - at < g->needed) {
        at--;
        if (at >= WINDOW_AHEAD) map_prefetch(g->held, keys[at - WINDOW_AHEAD]);
        if (!map_find(g->held, keys[at])) end = at;
    }
    return end;
}

/* The same for all groups by one pass from block 0 on, for groups that disagree again and again. */
static uint64_t window_pass(const uint64_t *keys, uint64_t depth, window_group *groups, uint32_t count) {
    uint64_t best = 0;
    for (uint32_t i = 0; i < count; i++) groups[i].run = 0;
    for (uint64_t at = 0; at < depth; at++) {
        int fits = 1;
        for (uint32_t i = 0; i < count; i++) {
            window_group *g = groups + i;
            g->run = map_find(g->held, keys[at]) ? g->run + 1 : 0;
            fits &= g->run >= (g->needed < at + 1 ? g->needed : at + 1);
        }
        if (fits) best = at + 1;
    }
    return best;
}

static uint64_t window_deepest(const uint64_t *keys, uint64_t depth, window_group *groups, uint32_t count) {
    for (int round = 0; round < WINDOW_ROUNDS; round++) {
        uint64_t lowest = depth;
        for (uint32_t i = 0; i < count; i++) lowest = window_end(keys, lowest, groups + i);
        if (lowest == depth) return depth;
        depth = lowest;
    }
    return window_pass(keys, depth, groups, count);
}

#endif
