/* One strict pass over the bytes of a KV-event batch: msgpack in, packed events out.
 *
 * `codec.py` is the rule. What it surely accepts is packed here, with the same meaning; an event that
 * is valid msgpack but anything rarer (other tiers, extra keys, unknown types, wrong fields, huge
 * numbers) is only marked with its span, and the codec decides about that event. Broken msgpack is
 * refused, as the codec would. The input is hostile: see `_msgpack_scan.h`.
 */
#ifndef KVPULL_EVENT_SCAN_H
#define KVPULL_EVENT_SCAN_H

#include "../core/_packed_events.h"
#include "_msgpack_scan.h"

/* --- fields ------------------------------------------------------------------------------------- */

/* A block's name: an integer, or the last eight bytes of a byte string. */
static int scan_name(scan *s, uint64_t *name) {
    int negative;
    uint64_t bytes;
    if (s->at == s->end) return 0;
    uint8_t first = *s->at;
    if (first < 0xc4 || first > 0xc6) return scan_int(s, name, &negative);
    if (!scan_header(s, 1u << (first - 0xc4), &bytes)) return 0;
    if (!bytes || bytes > s->limits->hash_bytes || bytes > scan_left(s)) return 0;
    unsigned last = bytes < 8 ? (unsigned)bytes : 8;
    *name = scan_be(s->at + bytes - last, last);
    s->at += bytes;
    return 1;
}

static int scan_names(scan *s, packed_event *e) {
    uint32_t count;
    if (!scan_array(s, &count) || count > s->limits->blocks) return 0;
    size_t first = s->names.used / sizeof(uint64_t);
    uint64_t *names = scan_extend(s, &s->names, (size_t)count * sizeof *names);
    if (!names) return 0;
    for (uint32_t i = 0; i < count; i++) {
        if (scan_left(s) >= 9 && *s->at == 0xcf) {
            names[i] = scan_be64(s->at + 1);
            s->at += 9;
        } else if (!scan_name(s, &names[i])) {
            return 0;
        }
    }
    e->first_name = (uint32_t)first;
    e->names = count;
    return 1;
}

static int scan_tokens(scan *s, packed_event *e) {
    uint32_t count;
    if (scan_null(s)) return 1;
    if (!scan_array(s, &count) || count > s->limits->tokens) return 0;
    size_t first = s->tokens.used / sizeof(uint32_t);
    uint32_t *tokens = scan_extend(s, &s->tokens, (size_t)count * sizeof *tokens);
    if (!tokens) return 0;
    const uint8_t *p = s->at, *end = s->end;
    uint32_t i = 0;
    for (; i < count && end - p >= 5; i++) {
        uint32_t wide = (uint32_t)*p - 0xcd; /* 0: two bytes, 1: four; most are, and nobody can foresee which */
        if (wide < 2) {
            tokens[i] = scan_be32(p + 1) >> (16 - 16 * wide);
            p += 3 + 2 * wide;
        } else if (*p < 0x80) {
            tokens[i] = *p++;
        } else if (*p == 0xcc) {
            tokens[i] = p[1];
            p += 2;
        } else {
            break;
        }
    }
    s->at = p;
    for (; i < count; i++) /* the end of the message, and wider or signed forms of small numbers */
        if (!scan_small(s, UINT32_MAX, &tokens[i])) return 0;
    e->first_token = (uint32_t)first;
    e->tokens = count;
    return 1;
}

/* Only a list of nulls is packed: the usual one, of plain text. */
static int scan_extra(scan *s, packed_event *e) {
    uint32_t count;
    if (scan_null(s)) return 1;
    if (!scan_array(s, &count) || count > s->limits->blocks) return 0;
    for (uint32_t i = 0; i < count; i++)
        if (!scan_null(s)) return 0;
    e->flags |= PACKED_HAS_EXTRA;
    e->extra_count = count;
    return 1;
}

static int scan_tier(scan *s, packed_event *e) {
    const uint8_t *text;
    size_t length;
    if (scan_null(s)) return 1;
    if (!scan_text(s, &text, &length)) return 0;
    if (scan_is(text, length, "CPU")) e->flags |= PACKED_CPU;
    else if (!scan_is(text, length, "GPU")) return 0;
    return 1;
}

static int scan_lora(scan *s, packed_event *e, uint32_t position) {
    const uint8_t *text;
    size_t length;
    if (scan_null(s)) return 1;
    if (!scan_text(s, &text, &length) || !scan_is_ascii(text, length)) return 0;
    scan_span *span = scan_extend(s, &s->loras, sizeof *span);
    if (!span) return 0;
    *span = (scan_span){position, (uint32_t)(text - s->start), (uint32_t)length};
    e->lora = (uint32_t)(s->loras.used / sizeof *span);
    return 1;
}

/* `packed_events.GROUP_KINDS` */
static const char *const SCAN_GROUPS[] = {"full_attention", "mla_attention", "sink_full_attention", "sliding_window",
                                          "sliding_window_mla"};

static int scan_group_kind(scan *s, packed_event *e, int *given) {
    const uint8_t *text;
    size_t length;
    if (scan_null(s)) return 1;
    if (!scan_text(s, &text, &length)) return 0;
    for (uint32_t i = 0; i < sizeof SCAN_GROUPS / sizeof *SCAN_GROUPS; i++) {
        if (!scan_is(text, length, SCAN_GROUPS[i])) continue;
        e->flags |= i << PACKED_GROUP_SHIFT;
        *given = 1;
        return 1;
    }
    return 0;
}

/* --- events ------------------------------------------------------------------------------------- */

enum {
    F_HASHES, F_PARENT, F_TOKENS, F_SIZE, F_LORA_ID, F_MEDIUM, F_LORA_NAME, F_EXTRA, F_GROUP, F_KIND,
    F_WINDOW, FIELDS, F_UNKNOWN = FIELDS, F_NONE
};

static const char *const SCAN_FIELDS[FIELDS] = {
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id",
    "medium", "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window"};
/* what a positional event has after its type */
static const uint8_t SCAN_STORED[] = {F_HASHES, F_PARENT, F_TOKENS, F_SIZE, F_LORA_ID,
                                      F_MEDIUM, F_LORA_NAME, F_EXTRA, F_GROUP, F_KIND, F_WINDOW};
static const uint8_t SCAN_REMOVED[] = {F_HASHES, F_MEDIUM, F_GROUP};

typedef struct {
    uint32_t seen;  /* bits of fields */
    int has_lora_id, has_group_kind;
} scan_fields;

static int scan_field(scan *s, packed_event *e, scan_fields *f, int field, uint32_t position) {
    uint64_t bits;
    int negative;
    if (field < FIELDS) {
        if (f->seen >> field & 1) return 0; /* twice: let the codec say which one counts */
        f->seen |= 1u << field;
    }
    switch (field) {
    case F_HASHES: return scan_names(s, e);
    case F_PARENT:
        if (scan_null(s)) return 1;
        e->flags |= PACKED_HAS_PARENT;
        return scan_name(s, &e->parent);
    case F_TOKENS: return scan_tokens(s, e);
    case F_SIZE: return scan_small(s, s->limits->block_size_tokens, &e->block_size_tokens);
    case F_LORA_ID:
        if (scan_null(s)) return 1;
        f->has_lora_id = 1;
        return scan_int(s, &bits, &negative);
    case F_MEDIUM: return scan_tier(s, e);
    case F_LORA_NAME: return scan_lora(s, e, position);
    case F_EXTRA: return scan_extra(s, e);
    case F_GROUP:
        if (scan_null(s)) return 1;
        if (!scan_small(s, INT32_MAX, &e->group)) return 0;
        e->group++;
        return 1;
    case F_KIND: return scan_group_kind(s, e, &f->has_group_kind);
    case F_WINDOW: return scan_null(s) || (scan_small(s, INT32_MAX, &e->window) && e->window);
    default: return scan_skip_shallow(s, SCAN_DEPTH);
    }
}

/* Which field a map's key names. Engines keep to the order of the fields, so the search starts at `from`. */
static int scan_key(scan *s, const uint8_t *known, size_t knowns, size_t from) {
    const uint8_t *text;
    size_t length;
    if (!scan_text(s, &text, &length) || scan_is(text, length, "type")) return F_NONE;
    for (size_t i = 0; i < knowns; i++) {
        uint8_t field = known[(from + i) % knowns];
        if (scan_is(text, length, SCAN_FIELDS[field])) return field;
    }
    return scan_is_ascii(text, length) ? F_UNKNOWN : F_NONE;
}

static uint32_t scan_event_kind(const uint8_t *text, size_t length) {
    if (scan_is(text, length, "BlockStored")) return PACKED_STORED;
    if (scan_is(text, length, "BlockRemoved")) return PACKED_REMOVED;
    return scan_is(text, length, "AllBlocksCleared") ? PACKED_CLEARED : PACKED_OTHER;
}

/* Whether the fields that were there make an event that needs no second look. */
static int scan_is_whole(const packed_event *e, const scan_fields *f) {
    const uint32_t stored = 1u << F_HASHES | 1u << F_PARENT | 1u << F_TOKENS | 1u << F_SIZE;
    if (e->kind == PACKED_REMOVED) return f->seen >> F_HASHES & 1;
    if (e->kind == PACKED_CLEARED) return 1;
    if ((f->seen & stored) != stored) return 0;
    if (f->has_lora_id && !e->lora) return 0;
    return f->has_group_kind || e->group <= 1; /* without a kind only group 0 is known to be full attention */
}

/* One event of a known type with nothing unusual in it. 0: not that; what was written is to be undone. */
static int scan_usual_event(scan *s, packed_event *e, uint32_t position) {
    const uint8_t *text;
    size_t length;
    scan_fields f = {0, 0, 0};
    uint64_t items;
    uint8_t first = *s->at;
    int is_map = (first & 0xf0) == 0x80 || first == 0xde || first == 0xdf;
    if (!is_map && (first & 0xf0) != 0x90 && first != 0xdc && first != 0xdd) return 0;
    if (!scan_enter(s, &items) || !items || items > scan_left(s)) return 0;
    if (is_map && (!scan_text(s, &text, &length) || !scan_is(text, length, "type"))) return 0;
    if (!scan_text(s, &text, &length)) return 0;
    e->kind = scan_event_kind(text, length);
    if (e->kind == PACKED_OTHER) return 0;
    const uint8_t *known = e->kind == PACKED_STORED ? SCAN_STORED : SCAN_REMOVED;
    size_t knowns = e->kind == PACKED_STORED ? sizeof SCAN_STORED
                  : e->kind == PACKED_REMOVED ? sizeof SCAN_REMOVED : 0;
    uint64_t fields = is_map ? items / 2 - 1 : items - 1;
    for (uint64_t i = 0; i < fields; i++) {
        int field = is_map ? scan_key(s, known, knowns, i) : i < knowns ? known[i] : F_UNKNOWN;
        if (field == F_NONE || !scan_field(s, e, &f, field, position)) return 0;
    }
    return scan_is_whole(e, &f);
}

static scan_status scan_event(scan *s, uint32_t position) {
    const uint8_t *start = s->at;
    size_t names = s->names.used, tokens = s->tokens.used, loras = s->loras.used;
    packed_event e = {0};
    if (s->at == s->end) return SCAN_BROKEN;
    if (scan_usual_event(s, &e, position)) {
        s->extra_entries += e.extra_count; /* at most one a byte of the message */
        if (s->names.used / sizeof(uint64_t) > s->limits->batch_blocks) return SCAN_TOO_MANY;
        if (s->extra_entries > s->limits->batch_blocks) return SCAN_TOO_MANY;
    } else {
        if (s->no_memory) return SCAN_NO_MEMORY;
        s->at = start;
        s->names.used = names;
        s->tokens.used = tokens;
        s->loras.used = loras;
        if (!scan_skip(s)) return SCAN_BROKEN;
        memset(&e, 0, sizeof e);
        e.first_name = (uint32_t)(s->others.used / sizeof(scan_span));
        scan_span *span = scan_extend(s, &s->others, sizeof *span);
        if (!span) return SCAN_NO_MEMORY;
        *span = (scan_span){position, (uint32_t)(start - s->start), (uint32_t)(s->at - start)};
    }
    packed_event *place = scan_extend(s, &s->events, sizeof e);
    if (!place) return SCAN_NO_MEMORY;
    memcpy(place, &e, sizeof e);
    return SCAN_OK;
}

/* The whole batch, `[ts, events, ...]`. The buffers of `s` are reused: their contents are lost. */
static scan_status scan_batch(scan *s, const uint8_t *data, size_t size) {
    uint32_t items, events;
    uint64_t none;
    s->start = s->at = data;
    s->end = data + size;
    s->events.used = s->names.used = s->tokens.used = s->others.used = s->loras.used = 0;
    s->extra_entries = 0;
    s->no_memory = 0;
    if (!scan_array(s, &items) || items < 2) return SCAN_ODD;
    uint8_t ts = *s->at; /* two items are there */
    if (ts >= 0x80 && ts < 0xe0 && (ts < 0xca || ts > 0xd3)) return SCAN_ODD;
    if (!scan_enter(s, &none)) return SCAN_BROKEN;
    if (!scan_array(s, &events) || events > s->limits->events) return SCAN_ODD;
    for (uint32_t i = 0; i < events; i++) {
        scan_status status = scan_event(s, i);
        if (status != SCAN_OK) return status;
    }
    for (uint32_t i = 2; i < items; i++)
        if (!scan_skip_shallow(s, SCAN_DEPTH)) return SCAN_ODD;
    return s->at == s->end ? SCAN_OK : SCAN_BROKEN;
}

#endif
