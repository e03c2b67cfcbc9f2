"""Every address of one local fleet, derived once from two numbers.

A fleet is moved aside (so that two run side by side) by another loopback block for the engines and an
offset for all ports. Nothing else in `deploy.local` adds a number to a port.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass

from deploy.local.errors import FleetError
from engine_plugin import wire as engine_wire

DEFAULT_BLOCK = "127.0.1"
MAX_OFFSET = 50_000
CONTROL_HOST = "127.0.0.1"


class AddressError(FleetError):
    """An address block or port offset that cannot be used; the message says what is allowed."""


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where one pod listens: its sidecar (`serving`), its engine, and the engine's side channels."""

    pod: str
    host: str
    serving_port: int
    sidecar_metrics_port: int
    engine_port: int
    events_port: int
    replay_port: int
    p2p_port: int

    @property
    def serving(self) -> str:
        """`ip:port` of the sidecar: the value of routing headers."""
        return f"{self.host}:{self.serving_port}"

    def listeners(self) -> Iterator[tuple[str, str, int]]:
        """(part, host, port) of everything that binds here."""
        yield f"sidecar of {self.pod}", self.host, self.serving_port
        yield f"sidecar metrics of {self.pod}", self.host, self.sidecar_metrics_port
        yield self.pod, self.host, self.engine_port
        yield f"KV events of {self.pod}", self.host, self.events_port
        yield f"event replay of {self.pod}", self.host, self.replay_port
        yield f"peer control of {self.pod}", self.host, self.p2p_port


@dataclass(frozen=True, slots=True)
class ControlPorts:
    """Ports of Envoy and the picker on 127.0.0.1.

    `lab_port` is the gateway's second listener: it does not strip routing headers and takes a subset
    hint from a request header, so that the scenario can try what a client must not achieve.
    """

    gateway_port: int
    lab_port: int
    admin_port: int
    extproc_port: int
    health_port: int
    metrics_port: int

    def listeners(self) -> Iterator[tuple[str, str, int]]:
        yield "gateway", CONTROL_HOST, self.gateway_port
        yield "gateway (lab listener)", CONTROL_HOST, self.lab_port
        yield "Envoy admin", CONTROL_HOST, self.admin_port
        yield "picker ext-proc", CONTROL_HOST, self.extproc_port
        yield "picker health", CONTROL_HOST, self.health_port
        yield "picker metrics", CONTROL_HOST, self.metrics_port


@dataclass(frozen=True, slots=True)
class AddressPlan:
    """The block of loopback addresses and the port offset of one fleet."""

    block: str = DEFAULT_BLOCK
    port_offset: int = 0

    def __post_init__(self) -> None:
        try:
            first = ipaddress.IPv4Address(f"{self.block}.1")
        except ValueError as error:
            raise AddressError(
                f"address block {self.block!r} must be three numbers such as {DEFAULT_BLOCK}"
            ) from error
        if not first.is_loopback:
            raise AddressError(f"address block {self.block} is not loopback; it must start with 127.")
        if not 0 <= self.port_offset <= MAX_OFFSET:
            raise AddressError(f"port offset {self.port_offset} must be in 0..{MAX_OFFSET}")

    @property
    def control(self) -> ControlPorts:
        o = self.port_offset
        return ControlPorts(8080 + o, 8081 + o, 9901 + o, 9002 + o, 9003 + o, 9090 + o)

    def engine(self, number: int, pod: str) -> EngineAddress:
        """Address of the `number`-th pod (from 1)."""
        o = self.port_offset
        return EngineAddress(
            pod=pod,
            host=f"{self.block}.{number}",
            serving_port=8000 + o,
            sidecar_metrics_port=8100 + o,
            engine_port=8200 + o,
            events_port=engine_wire.EVENTS_PORT + o,
            replay_port=engine_wire.REPLAY_PORT + o,
            p2p_port=engine_wire.P2P_PORT + o,
        )
