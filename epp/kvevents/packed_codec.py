"""Payload -> `PackedBatch` by the compiled scan: the same verdicts as `codec.decode_batch`, no object per
token or block.

The scan packs what is usual and refuses what is no msgpack; every other event goes through the codec's
own functions, one by one, so the rules stay in one place. Here, too, the only exception is CodecError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from epp.core.events import Batch
from epp.core.index_choice import COMPILED, PURE
from epp.core.packed_events import PackedBatch
from epp.kvevents import codec, event_fields
from epp.kvevents.framing import CodecError

Decode = Callable[[bytes], Batch]


class DecoderChoice(NamedTuple):
    """`implementation` and `reason` as in `index_choice.IndexChoice`."""

    implementation: str
    decode: Decode
    reason: str = ""


def choose_decoder(index: str) -> DecoderChoice:
    """The decoder that suits the index in use: packed batches help only the compiled one."""
    if index != COMPILED:
        return DecoderChoice(PURE, codec.decode_batch)
    try:
        return DecoderChoice(COMPILED, make_packed_decoder())
    except ImportError as error:
        return DecoderChoice(
            PURE, codec.decode_batch, f"the compiled decoder of KV events cannot be loaded: {error}"
        )


def make_packed_decoder() -> Decode:
    """`codec.decode_batch` with another form of result.

    Raises:
        ImportError: it is not built here.
    """
    from epp.kvevents import _compiled_scan as compiled

    scan = compiled.Scanner(
        event_fields.MAX_EVENTS,
        event_fields.MAX_BLOCKS,
        event_fields.MAX_BATCH_BLOCKS,
        event_fields.MAX_TOKENS,
        event_fields.MAX_BLOCK_SIZE_TOKENS,
        event_fields.MAX_HASH_BYTES,
    ).scan

    def decode(payload: bytes) -> Batch:
        codec.check_size(payload)
        scanned = scan(payload)
        if len(scanned) == 1:
            (status,) = scanned
            if status == compiled.ODD:  # not the frame of a batch that we know: the codec decides
                return codec.decode_batch(payload)
            reason = "size" if status == compiled.TOO_MANY else "payload"
            raise CodecError(reason, "refused by the compiled scan")
        _, table, names, tokens, adapters, rare, entries = scanned
        if not rare:
            return PackedBatch(table, names, tokens, adapters, (), 0, xxh3_64_intdigest(payload))
        wired = [codec.decode_event(raw, position) for position, raw in rare]
        codec.check_work(wired, len(names) // 8, entries)
        others = tuple([codec.build_event(w, position) for w, (position, _) in zip(wired, rare, strict=True)])
        unknown = others.count(None)
        return PackedBatch(table, names, tokens, adapters, others, unknown, xxh3_64_intdigest(payload))

    return decode
