"""A model on a machine, as far as serving times depend on it: steps, pulls, restores. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from epp.engine_model.timing import EngineTiming

# one H200 node: no fitted or assumed value may be better than the hardware
MAX_NETWORK_BYTES_PER_S = 50e9  # one 400 Gb/s adapter
MAX_HOST_BYTES_PER_S = 64e9  # PCIe 5 x16, one direction
MAX_MEMORY_BYTES_PER_S = 4.8e12  # HBM3e of one H200


class ImpossibleProfile(ValueError):
    """A value that no hardware has; the message names it."""


@dataclass(frozen=True, slots=True)
class TransferTiming:
    """A pull between idle endpoints takes `floor_s` plus its bytes at `stream_bytes_per_s`, the copy to the
    device included; the first of a pair `session_s` more. A restore from the own CPU tier: the same with
    `restore_*`."""

    floor_s: float
    stream_bytes_per_s: float
    session_s: float = 0.0
    restore_floor_s: float = 0.0
    restore_bytes_per_s: float = 20e9


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """Everything that the engine model needs of one model.

    Raises:
        ImpossibleProfile: a rate is above what the hardware can do.
    """

    name: str
    kv_bytes_per_token: float
    timing: EngineTiming
    transfer: TransferTiming
    devices: int = 1  # GPUs behind one endpoint
    expert_bytes: float = 0.0  # of one expert in all layers; 0: dense, or not known

    def __post_init__(self) -> None:
        read = self.kv_bytes_per_token / max(self.timing.decode_context_ns * 1e-9, 1e-30) / self.devices
        expert_s = self.timing.expert_ms * 1e-3  # 0: experts are not modelled
        experts = self.expert_bytes / expert_s / self.devices if expert_s else 0.0
        rates = (
            ("stream_bytes_per_s", self.transfer.stream_bytes_per_s, MAX_NETWORK_BYTES_PER_S),
            ("restore_bytes_per_s", self.transfer.restore_bytes_per_s, MAX_HOST_BYTES_PER_S * self.devices),
            ("decode_context_ns, as bytes/s of device memory,", read, MAX_MEMORY_BYTES_PER_S),
            ("expert_ms, as bytes/s of device memory,", experts, MAX_MEMORY_BYTES_PER_S),
        )
        for what, value, most in rates:
            if value > most:
                raise ImpossibleProfile(
                    f"{self.name}: {what} is {value:.3g}, above the hardware's {most:.3g}"
                )
