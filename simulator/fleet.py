"""A fleet in virtual time: the product's picker, its inputs as late as in life, and the modelled engines.

What the picker sees is what the live one sees: scraped metrics, events with a delay, reports of pulls, first
tokens and ends of streams. It is driven through its public methods only.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from engine_plugin.identity import EndpointId
from epp.config import EppConfig
from epp.core.cache_view import CacheView
from epp.core.endpoint_picker import EndpointPicker
from epp.core.events import ReplayNeeded
from epp.core.index_choice import choose_index
from epp.core.packed_events import PackedBatch
from epp.core.thresholds import PullSettings, everywhere
from epp.core.types import (
    Endpoint,
    EndpointMetrics,
    EngineInfo,
)
from epp.engine_model.network import FairNetwork
from epp.engine_model.profile import ModelProfile
from simulator.engine import EngineShape, SimulatedEngine
from simulator.life import RequestLife, ignore, ignore_end
from simulator.orders import Orders
from simulator.prompts import Content, random_tokens
from simulator.pulls import PullLimits, Pulls
from simulator.requests import EngineRequest, Record
from simulator.steps import Stepper
from simulator.timeline import Timeline, seldom_collecting

_INDEX_SEED = b"simulated picker"
_SAME_FOR_S = 0.1  # half of the shortest time after which a plugin calls figures stale
ROLE_LABEL = "llm-d.ai/role"


@dataclass(frozen=True, slots=True)
class FleetShape:
    """A fleet, and how late the picker learns things."""

    engines: int
    shape: EngineShape = field(default_factory=EngineShape)
    roles: Mapping[str, int] = field(default_factory=dict)  # role -> engines; empty: no roles
    link_bytes_per_s: float = 50e9
    scrape_s: float = 0.05
    event_delay_s: float = 0.1
    gateway_s: float = 0.15  # client to engine: gateway, tokeniser, picker, sidecar
    warm_sessions: bool = True
    keeps_connected: bool = False  # who joins or comes back connects to all peers by itself (`connect`)
    ranks_per_instance: int = 1  # engines, in their order, whose steps are one instance's
    limits: PullLimits = field(default_factory=PullLimits)


@dataclass(slots=True)
class _Stream:
    """One engine's event stream, and what its replay buffer still has of this epoch."""

    epoch: int = 0
    seq: int = 0
    kept: deque[tuple[int, PackedBatch]] = field(default_factory=lambda: deque(maxlen=0))


class Fleet:
    """One run. `submit` is the gateway's door."""

    def __init__(
        self,
        shape: FleetShape,
        profile: ModelProfile,
        config: EppConfig,
        thresholds: PullSettings | None = None,
        seed: int = 0,
    ) -> None:
        self.shape, self.profile, self.seed = shape, profile, seed
        self.timeline = Timeline()
        self.network = FairNetwork(shape.link_bytes_per_s)
        self.pulls = Pulls(self.timeline, self.network, shape.limits)
        self._config, self._thresholds = config, thresholds
        self.picker = self._new_picker()
        self.picker_back_s = 0.0  # requests wait until then
        self.engines: dict[EndpointId, SimulatedEngine] = {}
        self.orders = Orders(self)
        self.decisions: list[str] = []  # one line each, for golden tests
        self.records: list[Record] = []
        self._streams: dict[EndpointId, _Stream] = {}
        self._addresses: dict[EndpointId, str] = {}
        self._open = 0
        self._scraping = False
        self._info: dict[EndpointId, EngineInfo] = {}
        self._steppers: dict[int, Stepper] = {}
        self._shown: dict[EndpointId, tuple[tuple[int, int, float] | None, float]] = {}
        for number, role in enumerate(self._roles()):
            self.add_engine(number, role)
        if shape.warm_sessions:
            names = [engine.name for engine in self.engines.values()]
            self.pulls.warm([(a, b) for a in names for b in names])

    def _roles(self) -> list[str]:
        roles = [role for role, count in self.shape.roles.items() for _ in range(count)]
        return roles or [""] * self.shape.engines

    def _new_picker(self) -> EndpointPicker:
        index = choose_index().make(_INDEX_SEED)
        picker = EndpointPicker(self._config.settings, CacheView(index, speculation=self._config.speculation))
        if self._thresholds is not None:
            picker.sources.set_thresholds(everywhere(self._thresholds))
        return picker

    # --- the pool -----------------------------------------------------------------------------------
    def add_engine(self, number: int, role: str = "") -> EndpointId:
        """A cold engine joins the pool."""
        endpoint_id = EndpointId(f"engine-{number:04d}")
        name = str(endpoint_id)
        engine = SimulatedEngine(
            name,
            self.shape.shape,
            self.profile,
            self.timeline,
            pull=lambda request, first: self._pull(engine, request, first),
            publish=partial(self._publish, endpoint_id),
            stepper=self._stepper(number),
        )
        self.engines[endpoint_id] = engine
        self._streams[endpoint_id] = _Stream()
        host = f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"
        self._info[endpoint_id] = _info(name, f"{host}:7777", self.shape.shape.block_tokens)
        labels = {ROLE_LABEL: role} if role else {}
        self.picker.upsert_endpoint(Endpoint(endpoint_id, host, 8000, labels, p2p_address=f"{host}:7777"))
        self._connect(endpoint_id)
        self._scrape_one(endpoint_id, engine)
        return endpoint_id

    def _stepper(self, number: int) -> Stepper:
        """One for each instance."""
        instance = number // self.shape.ranks_per_instance
        return self._steppers.setdefault(instance, Stepper(self.timeline))

    def _pull(self, engine: SimulatedEngine, request: EngineRequest, first: int) -> None:
        assert request.source is not None
        self.pulls.begin(self.engines[EndpointId(request.source)], engine, request, first)

    def restart(self, endpoint_id: EndpointId, down_s: float) -> None:
        """The engine's process dies now and is back, empty, after `down_s`. What ran there fails."""
        engine, stream = self.engines[endpoint_id], self._streams[endpoint_id]
        stream.epoch += 1
        stream.seq = 0
        stream.kept.clear()
        engine.alive = False
        self.picker.cache.on_disconnect(endpoint_id, self.timeline.now_s)
        self.picker.remove_endpoint(endpoint_id)
        self._shown.pop(endpoint_id, None)
        engine.lose_everything()
        self.pulls.forget_engine(engine.name)
        self.timeline.after(down_s, self._back, endpoint_id)

    def connect_ahead(self, endpoint_id: EndpointId) -> None:
        """An engine that has come up dials its peers, if the fleet does so: pulls find a session later on."""
        if self.shape.keeps_connected:
            name = str(endpoint_id)
            others = [e.name for e in self.engines.values() if e.name != name]
            pairs = [pair for other in others for pair in ((name, other), (other, name))]
            self.timeline.after(self.profile.transfer.session_s, self.pulls.warm, pairs)

    def _back(self, endpoint_id: EndpointId) -> None:
        engine = self.engines[endpoint_id]
        engine.alive = True
        self.connect_ahead(endpoint_id)
        number = int(endpoint_id.pod.rpartition("-")[2])
        address = self._info[endpoint_id].p2p_addr
        role = self._roles()[number] if number < len(self._roles()) else ""
        labels = {ROLE_LABEL: role} if role else {}
        host = address.partition(":")[0]
        self.picker.upsert_endpoint(Endpoint(endpoint_id, host, 8000, labels, p2p_address=address))
        self._connect(endpoint_id)
        self._scrape_one(endpoint_id, engine)

    def _connect(self, endpoint_id: EndpointId) -> None:
        cache, now_s = self.picker.cache, self.timeline.now_s
        result = cache.on_connect(endpoint_id, now_s)
        while isinstance(result, ReplayNeeded):
            for seq, batch in [b for b in self._streams[endpoint_id].kept if b[0] >= result.from_seq]:
                cache.on_batch(endpoint_id, seq, batch, now_s, replayed=True)
            result = cache.on_replay_end(endpoint_id, True, now_s)

    # --- another picker ---------------------------------------------------------------------------
    def keep_batches(self, count: int) -> None:
        """Every engine's replay buffer holds its last `count` batches from now on."""
        for stream in self._streams.values():
            stream.kept = deque(stream.kept, maxlen=count)

    def restart_picker(self, down_s: float, memory: str) -> None:
        """The picker's process dies; the next one is there after `down_s`."""
        self.picker_back_s = self.timeline.now_s + down_s
        self.timeline.at(self.picker_back_s, self._replace_picker, memory)

    def _replace_picker(self, memory: str) -> None:
        """`memory`: a sibling's snapshot, then engines repeat what is newer; only what they repeat; or
        `nothing`, because they have no replay socket."""
        before, self.picker = self.picker, self._new_picker()
        self._shown.clear()
        for endpoint in before.endpoints:
            self.picker.upsert_endpoint(endpoint, has_replay=memory != "nothing")
            exported = before.cache.export(endpoint.id) if memory == "snapshot" else None
            if exported is not None:
                self.picker.cache.adopt(endpoint.id, exported)
            self._connect(endpoint.id)
            self._scrape_one(endpoint.id, self.engines[endpoint.id])

    # --- what the picker hears --------------------------------------------------------------------
    def _publish(self, endpoint_id: EndpointId, batch: PackedBatch) -> None:
        stream = self._streams[endpoint_id]
        batch = batch._replace(digest=stream.epoch << 32 | stream.seq)
        self.timeline.after(
            self.shape.event_delay_s, self._deliver, endpoint_id, stream.epoch, stream.seq, batch
        )
        stream.kept.append((stream.seq, batch))
        stream.seq += 1

    def _deliver(self, endpoint_id: EndpointId, epoch: int, seq: int, batch: PackedBatch) -> None:
        if epoch == self._streams[endpoint_id].epoch:
            self.picker.cache.on_batch(endpoint_id, seq, batch, self.timeline.now_s)

    def _scrape(self) -> None:
        for endpoint_id, engine in self.engines.items():
            if engine.alive:
                self._scrape_one(endpoint_id, engine)
        self._scraping = self._open > 0
        if self._scraping:
            self.timeline.after(self.shape.scrape_s, self._scrape)

    def _scrape_one(self, endpoint_id: EndpointId, engine: SimulatedEngine) -> None:
        """A scrape that shows nothing new is passed on only now and then, so that it stays fresh."""
        shown = (engine.waiting, engine.running, engine.kv_usage)
        last, at_s = self._shown.get(endpoint_id, (None, 0.0))
        if shown == last and self.timeline.now_s - at_s < _SAME_FOR_S:
            return
        self._shown[endpoint_id] = (shown, self.timeline.now_s)
        self.picker.update_metrics(
            endpoint_id,
            EndpointMetrics(
                scraped_at_s=self.timeline.now_s,
                waiting_requests=float(shown[0]),
                running_requests=float(shown[1]),
                kv_usage=shown[2],
                block_size_tokens=self.shape.shape.block_tokens,
                info=self._info[endpoint_id],
            ),
        )

    # --- requests -----------------------------------------------------------------------------------
    def submit(
        self,
        content: Content,
        prompt_tokens: int,
        output_tokens: int,
        *,
        tag: str = "",
        session: str = "",
        timeout_s: float | None = None,
        then: Callable[[Record], None] | None = None,
    ) -> Record:
        """A client sends a request now; `then` hears of its end, whatever that is."""
        now_s = self.timeline.now_s
        request_id = f"{self.seed}-{len(self.records)}"
        record = Record(request_id, tag, now_s, prompt_tokens, output_tokens, session)
        self.records.append(record)
        life = RequestLife(self, record, content, timeout_s, then)
        self._open += 1
        if not self._scraping:
            self._scraping = True
            self._scrape()
        if timeout_s is not None:
            self.timeline.after(timeout_s, life.give_up)
        self.timeline.after(self.shape.gateway_s, life.route)
        return record

    def prime(self) -> None:
        """Every engine answers one short prompt of its own, past the picker: it has shown its block size."""
        size = self.shape.shape.block_tokens
        for number, engine in enumerate(self.engines.values()):
            tokens = random_tokens(random.Random(f"prime {number}"), 2 * size + 2)
            record = Record(f"prime-{number}", "prime", 0.0, len(tokens) - 1, 1)
            content = Content.of(tokens, size)
            engine.submit(EngineRequest(record, content, len(tokens) - 1, 1, ignore, ignore_end))
        self.run()

    def closed(self) -> None:
        self._open -= 1

    def run(self) -> None:
        """Until nothing is left to do."""
        with seldom_collecting():
            self.timeline.run()

    def check(self) -> None:
        """Raises if bytes, blocks or load have been lost: for tests, after a run."""
        for engine in self.engines.values():
            engine.cache.check_integrity()
            if engine.cache.device.in_use or engine.cache.cpu.in_use:
                raise AssertionError(f"{engine.name} still holds references")
        self.picker.ledger.check_integrity()
        if len(self.picker.ledger) or len(self.network) or self.pulls.open or self._open:
            raise AssertionError("something has not ended")


def _info(name: str, p2p_address: str, block_tokens: int) -> EngineInfo:
    return EngineInfo(
        instance=name,
        block_size_tokens=block_tokens,
        hash_algo="sha256",
        seed_fp="simulated",
        model_fp="simulated",
        layout_fp="simulated",
        protocol="1",
        p2p_addr=p2p_address,
    )
