"""Endless inputs for whoever reads KV-event batches: recorded ones, made ones, and both damaged.

Seeded. Structure-aware: fields get values that are wrong in type, sign, width, length or nesting, numbers
and lengths come in every width that msgpack allows, and headers are tampered with where they are.
As a program: `python -m benchmarks.event_inputs SEED COUNT` writes them, each behind its length.
"""

from __future__ import annotations

import json
import random
import struct
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parents[1] / "tests" / "data" / "kv_events" / "vllm-0.32.jsonl"
LENGTH_BYTES = 4
NAMES = 400  # few, so that stores, parents and removals meet again
FIELDS = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
          "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window")  # fmt: skip
HEADERS = bytes(
    [0xC0, 0xC1, 0xC4, 0xC6, 0xC9, 0xCA, 0xCC, 0xCF, 0xD0, 0xD3, 0xD9, 0xDB, 0xDC, 0xDD, 0xDF, 0x91]
)


class Ext:
    """An extension value of msgpack."""


ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63),
    1.5, float("nan"), "", "GPU", "CPU", "DISK", "x" * 1_024, "x" * 1_025, "\u00e9t\u00e9", "type", b"",
    b"\x01" * 8, bytes(64), bytes(65), b"ab", [], [None], [[]], [1], [[1, "x"]], {}, {"a": 1}, {"type": 1},
    Ext(), [None] * 40, [[None]] * 3, [["salt"]], [1] * 300, [-1], [2**32], [1.5], ["a"], [b"abc"],
    "mamba", "mla_attention", [[[[[[[[[[1]]]]]]]]]],
]  # fmt: skip


def recorded_payloads() -> list[bytes]:
    """What a real engine sent."""
    return [bytes.fromhex(json.loads(line)["frames_hex"][2]) for line in RECORDED.read_text().splitlines()]


class Packer:
    """msgpack with every number and length in any width that holds it; minimal where `sloppy` is 0."""

    def __init__(self, rng: random.Random, sloppy: float) -> None:
        self._rng = rng
        self._sloppy = sloppy

    def pack(self, value: Any) -> bytes:
        match value:
            case None:
                return b"\xc0"
            case bool():
                return b"\xc3" if value else b"\xc2"
            case int():
                return self._int(value)
            case float():
                return b"\xcb" + struct.pack(">d", value)
            case str():
                raw = value.encode()
                return self._header(len(raw), (0xA0, 31), b"\xd9\xda\xdb") + raw
            case bytes():
                return self._header(len(value), None, b"\xc4\xc5\xc6") + value
            case list():
                head = self._header(len(value), (0x90, 15), b"\x00\xdc\xdd")
                return head + b"".join(map(self.pack, value))
            case dict():
                items = b"".join(self.pack(key) + self.pack(item) for key, item in value.items())
                return self._header(len(value), (0x80, 15), b"\x00\xde\xdf") + items
        return self._rng.choice(
            [b"\xd4\x05x", b"\xd8\x05" + bytes(16), b"\xc7\x03\x05abc", b"\xd6\xff" + bytes(4)]
        )

    def _is_sloppy(self) -> bool:
        return self._rng.random() < self._sloppy

    def _header(self, length: int, fixed: tuple[int, int] | None, wide: bytes) -> bytes:
        """`wide`: type bytes for lengths of 1, 2 and 4 bytes; 0 where there is none."""
        forms = [bytes([fixed[0] | length])] if fixed and length <= fixed[1] else []
        for kind, width in zip(wide, (1, 2, 4), strict=True):
            if kind and length < 1 << 8 * width:
                forms.append(bytes([kind]) + length.to_bytes(width, "big"))
        return self._rng.choice(forms) if self._is_sloppy() else forms[0]

    def _int(self, value: int) -> bytes:
        forms = [value.to_bytes(1, "big", signed=value < 0)] if -32 <= value < 128 else []
        for at, width in enumerate((1, 2, 4, 8)):
            if 0 <= value < 1 << 8 * width:
                forms.append(bytes([0xCC + at]) + value.to_bytes(width, "big"))
            if -(1 << 8 * width - 1) <= value < 1 << 8 * width - 1:
                forms.append(bytes([0xD0 + at]) + value.to_bytes(width, "big", signed=True))
        return self._rng.choice(forms) if self._is_sloppy() else forms[0]


class EventInputs:
    """An endless iterator of payloads."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._recorded = recorded_payloads()

    def __iter__(self) -> Iterator[bytes]:
        rng = self._rng
        while True:
            payload = rng.choice(self._recorded) if rng.random() < 0.3 else self._made()
            for _ in range(rng.choice((0, 0, 0, 1, 1, 2, 4))):
                payload = self._damaged(payload)
            yield payload

    def _made(self) -> bytes:
        rng = self._rng
        batch: Any = [1.5, [self._event() for _ in range(rng.choice((0, 1, 1, 2, 3)))], 0]
        if rng.random() < 0.03:
            batch[rng.randrange(3)] = rng.choice(ODD)
        if rng.random() < 0.03:
            batch = [batch[:2], [*batch, rng.choice(ODD)], batch[:1], {"events": batch}][rng.randrange(4)]
        return Packer(rng, rng.choice((0, 0, 0.05, 0.5))).pack(batch)

    def _event(self) -> Any:
        rng = self._rng
        kind = rng.choices(("BlockStored", "BlockRemoved", "AllBlocksCleared", "Future"), (60, 30, 3, 2))[0]
        fields = (
            self._stored() if kind == "BlockStored" else self._removed() if kind == "BlockRemoved" else {}
        )
        while rng.random() < 0.15:
            fields[rng.choice((*FIELDS, "type", "later", "\u00e9"))] = rng.choice(ODD)
        if rng.random() < 0.3:
            order = FIELDS if kind == "BlockStored" else ("block_hashes", "medium", "group_idx")
            values = [fields.get(name) for name in order]
            return [
                kind,
                *values[: rng.choice((len(values), len(values), 4, 1))],
                *rng.choice(([], [], [1, "x"])),
            ]
        if rng.random() < 0.05 and fields:
            del fields[rng.choice(list(fields))]
        items = list({"type": kind, **fields}.items())
        if rng.random() < 0.05:
            rng.shuffle(items)
        return dict(items) if rng.random() < 0.98 else rng.choice(ODD)

    def _stored(self) -> dict[str, Any]:
        """A stretch of one of some chains: block n of a chain has the same content whenever it is named."""
        rng = self._rng
        chain, count = rng.randrange(8), rng.choice((1, 1, 2, 5, 30))
        first = rng.choice((0, 0, rng.randrange(20)))
        lora = rng.choice((None, None, None, "tuned"))
        names = [chain * 50 + first + i for i in range(count)]
        as_bytes = rng.random() < 0.1
        tokens = [t for name in names for t in (name, 200 + name, 40_000, 2**31 + name)]
        extras: Any = rng.choice((None, [None] * count, [None] * count, [None] * count))
        if rng.random() < 0.1:
            extras = [rng.choice((None, [], ["salt"], ["tuned"], [1.5], [b"x", 7])) for _ in range(count)]
        group = self._group()
        return {
            "block_hashes": [n.to_bytes(32, "big") if as_bytes else n for n in names],
            "parent_block_hash": names[0] - 1 if first else None,
            "token_ids": rng.choice((tokens, tokens, tokens, tokens, [], None)),
            "block_size": rng.choice((4, 4, 4, 4, 4, 4, 2, 0)),
            "lora_id": None if lora is None else 3,
            "medium": rng.choice(("GPU", "GPU", "CPU", None, "DISK")),
            "lora_name": lora,
            "extra_keys": extras,
        } | group

    def _group(self) -> dict[str, Any]:
        """Mostly one full-attention and one sliding-window group, because any other ends all claims."""
        rng, wild = self._rng, self._rng.random() < 0.01
        if rng.random() < 0.4:
            window = rng.choice((None, 0, -1, 1 << 31, 1 << 40)) if wild else 12
            return {
                "group_idx": 2,
                "kv_cache_spec_kind": "sliding_window",
                "kv_cache_spec_sliding_window": window,
            }
        return {
            "group_idx": rng.choice((None, 1) if wild else (0, 0, None)),
            "kv_cache_spec_kind": rng.choice(
                ("mla_attention", None, "mamba") if wild else ("full_attention",)
            ),
        }

    def _removed(self) -> dict[str, Any]:
        rng = self._rng
        names: list[Any] = [rng.randrange(NAMES) for _ in range(rng.choice((0, 1, 3, 20)))]
        return {
            "block_hashes": names,
            "medium": rng.choice(("GPU", "CPU", None, "DISK")),
            "group_idx": rng.choice((None, 0, 0, 2)) if rng.random() < 0.99 else 1,
        }

    def _damaged(self, payload: bytes) -> bytes:
        rng, raw = self._rng, bytearray(payload)
        if not raw:
            return rng.randbytes(rng.randrange(8))
        at = rng.randrange(len(raw))
        match rng.randrange(8):
            case 0:
                raw[at] ^= 1 << rng.randrange(8)
            case 1:
                del raw[at : at + rng.randrange(1, 12)]
            case 2:
                raw[at:at] = rng.randbytes(rng.randrange(1, 12))
            case 3:
                del raw[at:]
            case 4:
                raw[at] = rng.choice(HEADERS)
            case 5:  # an absurd length, where a header is or might be
                raw[at : at + 5] = bytes([rng.choice(b"\xc6\xc9\xdb\xdd\xdf")]) + rng.choice(
                    (b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x00\x00\x00\xff", b"\x00\x10\x00\x00")
                )
            case 6:
                raw[at:at] = raw[at : at + rng.randrange(1, 60)]
            case _:
                depth = rng.choice((3, 9, 40))
                raw[at : at + 1] = rng.choice((b"\x91", b"\x81\xa1x")) * depth + raw[at : at + 1]
        return bytes(raw)


if __name__ == "__main__":
    for _payload in islice(EventInputs(int(sys.argv[1])), int(sys.argv[2])):
        sys.stdout.buffer.write(len(_payload).to_bytes(LENGTH_BYTES, "little") + _payload)
