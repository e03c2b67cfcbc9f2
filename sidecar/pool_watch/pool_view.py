"""From an InferencePool and its pods to endpoints: which there are, and which are draining. Pure.

    pod without address, or ended           no endpoint
    pod never ready                         no endpoint
    pod ready                               one endpoint for each target port: pod + rank
    pod was ready and is not, or is deleted draining: no new work, what is known of it stays
    pod gone, or no longer selected         its endpoints leave
    same name, another uid                  another engine: the old one leaves first
    two pods with one address               the younger has it: the address was given out anew
    rank not in the pod's active ports      that rank is no endpoint

Removals are told before additions, since an address or a name may pass on in one change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from engine_plugin import wire as engine_wire
from engine_plugin.identity import EndpointId, default_ports
from sidecar.endpoint_file import EndpointRow
from sidecar.pool_watch.views import InvalidPool, PodView, PoolSpec


@dataclass(frozen=True, slots=True)
class Member:
    """One endpoint of the pool."""

    row: EndpointRow
    draining: bool


class PoolView:
    """Sink of a pool's pods. The callbacks must not call back."""

    def __init__(
        self,
        on_put: Callable[[Member], None],
        on_remove: Callable[[EndpointId], None],
        *,
        p2p_base_port: int = engine_wire.P2P_PORT,
    ) -> None:
        self._on_put = on_put
        self._on_remove = on_remove
        self._p2p_base_port = p2p_base_port
        self._spec: PoolSpec | None = None
        self._pods: dict[str, PodView] = {}
        self._by_ip: dict[str, set[str]] = {}  # names of the pods that say they have an address
        self._members: dict[str, tuple[str, tuple[Member, ...]]] = {}  # by pod: its uid, what was told

    @property
    def members(self) -> tuple[Member, ...]:
        return tuple(member for _, members in self._members.values() for member in members)

    @property
    def pods(self) -> int:
        """Pods that are known, endpoints or not."""
        return len(self._pods)

    # --- the pool ---------------------------------------------------------------------------------
    def set_spec(self, spec: PoolSpec | None) -> None:
        """Another pool, or none: no endpoints."""
        if spec != self._spec:
            self._spec = spec
            self._settle(list(self._pods))

    # --- its pods ---------------------------------------------------------------------------------
    def replace(self, pods: dict[str, PodView], spec: PoolSpec | None) -> None:
        """These are all, selected by this pool."""
        self._spec = spec
        touched = list(dict.fromkeys((*self._pods, *pods)))
        self._pods = dict(pods)
        self._by_ip = {}
        for name, pod in pods.items():
            self._claim(name, pod)
        self._settle(touched)

    def put(self, name: str, pod: PodView) -> None:
        before = self._pods.get(name)
        if before == pod:
            return
        touched = {name}
        if before is not None:
            touched |= self._disclaim(name, before)
        self._pods[name] = pod
        self._claim(name, pod)
        touched |= self._by_ip.get(pod.ip, set())
        self._settle(touched)

    def remove(self, name: str) -> None:
        pod = self._pods.pop(name, None)
        if pod is not None:
            self._settle({name} | self._disclaim(name, pod))

    def _claim(self, name: str, pod: PodView) -> None:
        if pod.ip:
            self._by_ip.setdefault(pod.ip, set()).add(name)

    def _disclaim(self, name: str, pod: PodView) -> set[str]:
        """The pods that may have the address now."""
        left = self._by_ip.get(pod.ip, set())
        left.discard(name)
        if not left:
            self._by_ip.pop(pod.ip, None)
        return left

    # --- what follows -----------------------------------------------------------------------------
    def _settle(self, names: Iterable[str]) -> None:
        """Tell what is different now for these pods."""
        after = {name: self._endpoints_of(name) for name in names}
        for name, (uid, members) in after.items():
            self._tell_removals(name, uid, members)
        for name, (uid, members) in after.items():
            told = self._members.get(name, ("", ()))[1]
            if members:
                self._members[name] = (uid, members)
            else:
                self._members.pop(name, None)
            for member in members:
                if member not in told:
                    self._on_put(member)

    def _tell_removals(self, name: str, uid: str, members: tuple[Member, ...]) -> None:
        old_uid, told = self._members.get(name, ("", ()))
        same = old_uid == uid
        kept = {member.row.id for member in members} if same else set()
        for member in told:
            if member.row.id not in kept:
                self._on_remove(member.row.id)
        if not same:
            self._members.pop(name, None)

    def _endpoints_of(self, name: str) -> tuple[str, tuple[Member, ...]]:
        pod, spec = self._pods.get(name), self._spec
        if pod is None or spec is None or not pod.ip or self._owner(pod.ip) != name:
            return (pod.uid if pod else "", ())
        was_told = self._members.get(name, ("", ()))[0] == pod.uid
        if not was_told and (not pod.ready or pod.deleting):
            return pod.uid, ()
        draining = pod.deleting or not pod.ready
        return pod.uid, tuple(
            Member(self._row(name, pod, rank, port), draining)
            for rank, port in enumerate(spec.target_ports)
            if pod.active_ports is None or port in pod.active_ports
        )

    def _owner(self, ip: str) -> str:
        return max(self._by_ip[ip], key=lambda name: (self._pods[name].created, self._pods[name].uid))

    def _row(self, name: str, pod: PodView, rank: int, port: int) -> EndpointRow:
        ports = default_ports(rank)
        return EndpointRow(
            pod=name,
            rank=rank,
            host=pod.ip,
            serving_port=port,
            metrics_port=port,
            events_port=ports.events,
            replay_port=ports.replay,
            p2p_port=self._p2p_base_port + rank,
            labels=pod.labels,
        )


class PoolObject:
    """Sink of the InferencePool object itself: hands on every usable spec, None when there is none."""

    def __init__(
        self,
        name: str,
        on_spec: Callable[[PoolSpec | None], None],
        on_problem: Callable[[str], None] = lambda problem: None,
    ) -> None:
        """`on_problem` hears of every new reason against using the pool as it is now."""
        self._name = name
        self._on_spec = on_spec
        self._on_problem = on_problem
        self.problem: str | None = None  # why there is no spec, or not the newest one

    def replace(self, pools: dict[str, PoolSpec | InvalidPool]) -> None:
        if self._name in pools:
            self.put(self._name, pools[self._name])
        else:
            self.remove(self._name)

    def put(self, name: str, pool: PoolSpec | InvalidPool) -> None:
        """An invalid pool changes nothing: the last good one stays."""
        if name != self._name:
            return
        if isinstance(pool, InvalidPool):
            self._note(f"InferencePool {name}: {pool.reason}")
            return
        self.problem = None
        self._on_spec(pool)

    def remove(self, name: str) -> None:
        if name == self._name:
            self._note(f"InferencePool {name} does not exist")
            self._on_spec(None)

    def _note(self, problem: str) -> None:
        if problem != self.problem:
            self.problem = problem
            self._on_problem(problem)
