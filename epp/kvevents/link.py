"""What passes between the event loop and the receiving thread: commands one way, frames the other."""

from __future__ import annotations

from dataclasses import dataclass

from engine_plugin.identity import EndpointId
from epp.kvevents.event_fields import MAX_PAYLOAD_BYTES


@dataclass(frozen=True, slots=True)
class EventSource:
    """Where an engine rank publishes. `replay_port` None or 0: it has no replay socket."""

    host: str
    events_port: int
    replay_port: int | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for what cannot be an address."""
        if not self.host or not set(self.host).isdisjoint(" /*"):
            raise ValueError(f"{self.host!r} is no host name or address")
        for port in (self.events_port, self.replay_port or 1):
            if not 0 < port < 65_536:
                raise ValueError(f"port {port} of {self.host} is out of range")

    @property
    def has_replay(self) -> bool:
        return bool(self.replay_port)

    def address(self, port: int) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{port}"


@dataclass(frozen=True, slots=True)
class SocketSettings:
    """Socket options, each chosen on purpose."""

    # messages, each up to max_message_bytes; what does not fit waits in the engine's own queue (100,000 in
    # vLLM), and is lost and replayed only if that is full
    live_hwm: int = 16
    replay_hwm: int = 16_384  # above an engine's buffer of 10,000: an engine drops replays silently
    max_message_bytes: int = MAX_PAYLOAD_BYTES + 4_096
    reconnect_s: float = 0.1
    reconnect_max_s: float = 2.0
    heartbeat_s: float = 5.0  # finds a peer that vanished without a word
    heartbeat_timeout_s: float = 15.0
    replay_deadline_s: float = 30.0
    replay_idle_s: float = 5.0  # without a message


# --- what the thread hands over ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LiveFrames:
    """`link` is new for every `add`, so that a removed endpoint's late messages are recognised."""

    endpoint: EndpointId
    link: int
    frames: list[bytes]


@dataclass(frozen=True, slots=True)
class LinkChanged:
    endpoint: EndpointId
    link: int
    up: bool


@dataclass(frozen=True, slots=True)
class ReplayFrames:
    replay: int
    frames: list[bytes]


@dataclass(frozen=True, slots=True)
class ReplayEnded:
    replay: int
    ok: bool
    reason: str  # "end" | "deadline" | "idle" | "unreachable" | "cut" (more than can be kept)


@dataclass(frozen=True, slots=True)
class ReceiverFailed:
    """The thread is gone; the traceback is in the log."""

    reason: str


Received = LiveFrames | LinkChanged | ReplayFrames | ReplayEnded | ReceiverFailed


# --- commands of the loop ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Add:
    endpoint: EndpointId
    link: int
    source: EventSource


@dataclass(frozen=True, slots=True)
class Remove:
    link: int


@dataclass(frozen=True, slots=True)
class Replay:
    replay: int
    address: str
    from_seq: int


@dataclass(frozen=True, slots=True)
class Cancel:
    replay: int


Command = Add | Remove | Replay | Cancel
