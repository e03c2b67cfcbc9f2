"""What a peer may ask for, and how long anything may take. Values only.

Limits are what *this* side grants. What would fit later waits for its turn, at most `queue_s` and never as
long as the peer itself would wait; what never can is answered at once with `refused_limit`. Deadlines bound
every wait: a dead, mute, frozen or slow peer costs at most these.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine_plugin import protocol


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one transport. A peer is here whoever speaks from one address: it cannot choose that."""

    # --- granted to a peer ---------------------------------------------------------------------
    connections: int = 256  # all peers together, after the handshake
    handshakes: int = 64  # connections that have proved nothing yet; their own limit, so that strangers
    handshakes_per_host: int = 16  # cannot lock peers out
    connections_per_peer: int = 32  # a pod's ranks speak from one address
    hashes_per_lookup: int = protocol.MAX_BLOCKS
    lookups_waiting: int = 256  # for their turn; one that waits for a supply has had it
    leases: int = 64  # look-ups under way and what they have pinned
    leased_bytes: int = 16 << 30
    moves_waiting: int = 256
    moves_in_flight: int = 8
    bytes_in_flight: int = 8 << 30
    movers_burst: int = 64  # replacements of its mover that a peer may tell of, and then
    movers_per_s: float = 1.0
    # --- granted to all peers together ---------------------------------------------------------
    leases_total: int = 512
    leased_share: float = 0.5  # of the tier: the engine must be able to evict
    leased_floor_bytes: int = 1 << 30  # a tier so small that one prefix fills it is not shared out
    moves_total: int = 16
    bytes_total: int = 16 << 30
    queue_s: float = 1.0  # longest wait for a turn
    # --- each message and pin ------------------------------------------------------------------
    message_bytes: int = 8 << 20  # one control frame after the handshake
    lease_s: float = 10.0  # pins of an offer that nobody fetches or that never finishes
    lookup_wait_s: float = 30.0  # longest announced-supply wait a peer may ask for

    # --- our own waits -------------------------------------------------------------------------
    connect_s: float = 1.0
    handshake_s: float = 1.0
    progress_s: float = 1.0  # a started move without a further chunk
    first_progress_s: float = 2.0  # the same before its first chunk: wire-up is lazy
    notification_s: float = 0.25  # after the source said done; then the checksums alone decide
    ping_s: float = 1.0  # a session asks for a sign of life this often
    silence_s: float = 4.0  # and ends after hearing nothing for this long
    redial_s: float = 0.25  # after a failed dial; doubles up to redial_max_s, answered `unreachable`
    redial_max_s: float = 4.0
    quarantine_s: float = 5.0  # an unresolved move's slots; then our mover is replaced
    own_mover_s: float = 0.3  # a pull waits this long for our own mover to come back
    mover_silence_s: float = 4.0  # a mover that gives no sign of life is killed and replaced
    mover_start_s: float = 20.0  # agent creation takes 0.4 s on an idle machine
    drain_s: float = 1.0  # transfers already posted when something is stopped

    # --- the move ------------------------------------------------------------------------------
    chunk_bytes: int = 4 << 20
    chunks_in_flight: int = 6
