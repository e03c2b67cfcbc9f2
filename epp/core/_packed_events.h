/* One event of a packed batch, as the compiled decoder writes it and the compiled index reads it.
 *
 * Neutral: nothing of the wire form is left. Names (u64) and token ids (u32) of all events of the batch
 * lie in two arrays; an event has spans of them. `packed_events.py` reads the same records in Python.
 */
#ifndef KVPULL_PACKED_EVENTS_H
#define KVPULL_PACKED_EVENTS_H

#include <stdint.h>

enum packed_kind { PACKED_OTHER, PACKED_STORED, PACKED_REMOVED, PACKED_CLEARED };

enum packed_flag {
    PACKED_CPU = 1,        /* the tier; else the device */
    PACKED_HAS_PARENT = 2, /* else the chain starts at block 0 */
    PACKED_HAS_EXTRA = 4,  /* a list of extra keys was there, every entry of it null */
    PACKED_GROUP_SHIFT = 4 /* above: the kind of the group, by its number in `packed_events.GROUP_KINDS` */
};

#define PACKED_FULL_KINDS 3u /* kinds below: full attention */

typedef struct {
    uint64_t parent;
    uint32_t kind, flags;
    uint32_t first_name, names; /* PACKED_OTHER: `first_name` is its number among the other events */
    uint32_t first_token, tokens;
    uint32_t block_size_tokens;
    uint32_t extra_count; /* entries of the list of extra keys */
    uint32_t lora;        /* number of the adapter's name + 1; 0: none */
    uint32_t group;       /* group_idx + 1; 0: none */
    uint32_t window;      /* tokens of a sliding window; 0: none told */
    uint32_t unused;
} packed_event;

#endif
