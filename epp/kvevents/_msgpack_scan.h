/* Reading msgpack from bytes that may be anything, and buffers that grow: the tools of `_event_scan.h`.
 *
 * Every read is checked against the end, every count against the bytes that are left (an item takes one
 * at least) before anything is allocated for it, and nothing recurses deeper than SCAN_DEPTH. It must not
 * know what an event is. Needs no Python.
 */
#ifndef KVPULL_MSGPACK_SCAN_H
#define KVPULL_MSGPACK_SCAN_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define SCAN_DEPTH 8     /* of a value that is skipped inside a packed event; deeper: the codec's affair */
#define SCAN_MAX_TEXT 1024

typedef enum { SCAN_OK, SCAN_BROKEN, SCAN_ODD, SCAN_TOO_MANY, SCAN_NO_MEMORY } scan_status;

typedef struct {
    uint32_t events, blocks, batch_blocks, tokens, block_size_tokens, hash_bytes;
} scan_limits;

typedef struct {
    uint8_t *data;
    size_t used, room;
} scan_buffer;

typedef struct {
    uint32_t position, start, length;
} scan_span;

typedef struct {
    const uint8_t *start, *at, *end;
    const scan_limits *limits;
    scan_buffer events, names, tokens; /* packed_event, u64, u32 */
    scan_buffer others, loras;         /* scan_span: events for the codec, names of adapters */
    uint32_t extra_entries;
    int no_memory;
} scan;

/* --- buffers ------------------------------------------------------------------------------------ */

static void *scan_extend(scan *s, scan_buffer *b, size_t bytes) {
    if (!b->data || bytes > b->room - b->used) {
        size_t room = b->room + b->room / 2 + bytes + 256;
        uint8_t *data = realloc(b->data, room);
        if (!data) { s->no_memory = 1; return NULL; }
        b->data = data;
        b->room = room;
    }
    void *start = b->data + b->used;
    b->used += bytes;
    return start;
}

static void scan_release(scan_buffer *b) {
    free(b->data);
    memset(b, 0, sizeof *b);
}

/* --- bytes -------------------------------------------------------------------------------------- */

static inline uint64_t scan_be(const uint8_t *p, unsigned bytes) {
    uint64_t value = 0;
    for (unsigned i = 0; i < bytes; i++) value = value << 8 | p[i];
    return value;
}

static inline uint32_t scan_be32(const uint8_t *p) {
    uint32_t value;
    memcpy(&value, p, 4);
    return __builtin_bswap32(value);
}

static inline uint64_t scan_be64(const uint8_t *p) {
    uint64_t value;
    memcpy(&value, p, 8);
    return __builtin_bswap64(value);
}

static inline size_t scan_left(const scan *s) { return (size_t)(s->end - s->at); }

/* A header's big-endian number behind the type byte. 0: cut off. */
static inline int scan_header(scan *s, unsigned bytes, uint64_t *value) {
    if (scan_left(s) < 1 + (size_t)bytes) return 0;
    *value = scan_be(s->at + 1, bytes);
    s->at += 1 + bytes;
    return 1;
}

/* Any integer, as its 64 bits and its sign. 0: something else, or cut off. */
static int scan_int(scan *s, uint64_t *bits, int *negative) {
    if (s->at == s->end) return 0;
    uint8_t first = *s->at;
    *negative = 0;
    if (first < 0x80 || first >= 0xe0) {
        *bits = (uint64_t)(int64_t)(int8_t)first;
        *negative = first >= 0xe0;
        s->at++;
        return 1;
    }
    if (first >= 0xcc && first <= 0xcf) return scan_header(s, 1u << (first - 0xcc), bits);
    if (first < 0xd0 || first > 0xd3) return 0;
    unsigned bytes = 1u << (first - 0xd0), unused = 64 - 8 * bytes;
    if (!scan_header(s, bytes, bits)) return 0;
    *negative = (int)(*bits >> (8 * bytes - 1)) & 1;
    if (*negative && unused) *bits |= ~(uint64_t)0 << (64 - unused);
    return 1;
}

static int scan_small(scan *s, uint64_t most, uint32_t *value) {
    uint64_t bits;
    int negative;
    if (!scan_int(s, &bits, &negative) || negative || bits > most) return 0;
    *value = (uint32_t)bits;
    return 1;
}

static inline int scan_null(scan *s) {
    if (s->at == s->end || *s->at != 0xc0) return 0;
    s->at++;
    return 1;
}

/* Header of an array whose items can all be there. */
static int scan_array(scan *s, uint32_t *count) {
    uint64_t items = 0;
    if (s->at == s->end) return 0;
    uint8_t first = *s->at;
    if (first >= 0x90 && first <= 0x9f) {
        items = first & 0x0f;
        s->at++;
    } else if (first == 0xdc || first == 0xdd) {
        if (!scan_header(s, first == 0xdc ? 2 : 4, &items)) return 0;
    } else {
        return 0;
    }
    *count = (uint32_t)items;
    return items <= scan_left(s);
}

/* A short text; `*text` points into the message. */
static int scan_text(scan *s, const uint8_t **text, size_t *length) {
    uint64_t bytes = 0;
    if (s->at == s->end) return 0;
    uint8_t first = *s->at;
    if (first >= 0xa0 && first <= 0xbf) {
        bytes = first & 0x1f;
        s->at++;
    } else if (first == 0xd9 || first == 0xda) {
        if (!scan_header(s, first == 0xd9 ? 1 : 2, &bytes)) return 0;
    } else {
        return 0;
    }
    if (bytes > SCAN_MAX_TEXT || bytes > scan_left(s)) return 0;
    *text = s->at;
    *length = (size_t)bytes;
    s->at += bytes;
    return 1;
}

static inline int scan_is(const uint8_t *text, size_t length, const char *word) {
    return length == strlen(word) && memcmp(text, word, length) == 0;
}

static int scan_is_ascii(const uint8_t *text, size_t length) {
    uint8_t seen = 0;
    for (size_t i = 0; i < length; i++) seen |= text[i];
    return seen < 0x80;
}

/* --- values that nobody looks at ---------------------------------------------------------------- */

/* Past one header; `*items` values follow it. 0: no msgpack, or cut off. */
static int scan_enter(scan *s, uint64_t *items) {
    uint64_t bytes = 0;
    *items = 0;
    if (s->at == s->end) return 0;
    uint8_t first = *s->at;
    if (first < 0x80 || first >= 0xe0 || first == 0xc0 || first == 0xc2 || first == 0xc3) {
        s->at++;
        return 1;
    }
    if (first <= 0x9f) {
        *items = first <= 0x8f ? 2 * (uint64_t)(first & 0x0f) : (uint64_t)(first & 0x0f);
        s->at++;
        return 1;
    }
    if (first <= 0xbf) {
        bytes = first & 0x1f;
        s->at++;
    } else if (first == 0xc1) {
        return 0;
    } else if (first <= 0xc6) { /* bin */
        if (!scan_header(s, 1u << (first - 0xc4), &bytes)) return 0;
    } else if (first <= 0xc9) { /* ext: a type byte more */
        if (!scan_header(s, 1u << (first - 0xc7), &bytes)) return 0;
        bytes++;
    } else if (first <= 0xcb) { /* float */
        bytes = first == 0xca ? 4 : 8;
        s->at++;
    } else if (first <= 0xd3) { /* unsigned, signed */
        bytes = (uint64_t)1 << ((first - 0xcc) & 3);
        s->at++;
    } else if (first <= 0xd8) { /* fixext */
        bytes = 1 + ((uint64_t)1 << (first - 0xd4));
        s->at++;
    } else if (first <= 0xdb) { /* str */
        if (!scan_header(s, 1u << (first - 0xd9), &bytes)) return 0;
    } else { /* array, map */
        if (!scan_header(s, first == 0xdc || first == 0xde ? 2 : 4, items)) return 0;
        if (first >= 0xde) *items *= 2;
    }
    if (bytes > scan_left(s)) return 0;
    s->at += bytes;
    return 1;
}

/* Past one value of any nesting. 0: broken. */
static int scan_skip(scan *s) {
    uint64_t due = 1, items;
    while (due) {
        if (due > scan_left(s) || !scan_enter(s, &items)) return 0;
        due += items - 1; /* a message of 2^32 bytes could not make this wrap */
    }
    return 1;
}

/* Past one value that is not nested deeply. 0: broken, or deeper. */
static int scan_skip_shallow(scan *s, int depth) {
    uint64_t items;
    if (!depth || !scan_enter(s, &items) || items > scan_left(s)) return 0;
    while (items--)
        if (!scan_skip_shallow(s, depth - 1)) return 0;
    return 1;
}

#endif
