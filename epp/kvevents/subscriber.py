"""The event loop's handle on the thread that receives the KV events of all engines.

It starts and stops the thread (`receiver`) and sends it commands; what the thread received comes back
through the `HandOver`. It must not touch the thread's sockets.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque

import zmq

from engine_plugin.identity import EndpointId
from epp.kvevents.hand_over import HandOver
from epp.kvevents.link import Add, Cancel, Command, EventSource, Received, Remove, Replay, SocketSettings
from epp.kvevents.receiver import WAKE_ADDRESS, Receiver

log = logging.getLogger(__name__)

_STOP_S = 5.0


class Subscriber:
    """Starts and stops the receiving thread and sends it commands. Methods are for the loop's thread."""

    def __init__(self, hand_over: HandOver[Received], settings: SocketSettings) -> None:
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, min(65_536, self._context.get(zmq.SOCKET_LIMIT)))
        self._commands: deque[Command] = deque()
        self._wake = self._context.socket(zmq.PAIR)
        self._wake.linger = 0
        self._wake.bind(WAKE_ADDRESS)
        self._stopping = threading.Event()
        self._receiver = Receiver(self._context, self._commands, self._stopping, hand_over, settings)
        self._thread = threading.Thread(target=self._receiver.run, name="kvevents", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, endpoint: EndpointId, link: int, source: EventSource) -> None:
        self._send(Add(endpoint, link, source))

    def remove(self, link: int) -> None:
        self._send(Remove(link))

    def replay(self, replay: int, source: EventSource, from_seq: int) -> None:
        """Ask for a replay; it answers with frames and one ReplayEnded under this number."""
        if not source.replay_port:
            raise ValueError(f"{source.host} has no replay port")
        self._send(Replay(replay, source.address(source.replay_port), from_seq))

    def cancel(self, replay: int) -> None:
        """Stop a replay; frames already handed over still carry its number."""
        self._send(Cancel(replay))

    def wake(self) -> None:
        """Make the thread look at its commands and at the room in the hand-over."""
        with contextlib.suppress(zmq.Again):  # enough wake-ups are under way
            self._wake.send(b"", zmq.NOBLOCK)

    def stop(self) -> None:
        """End the thread and close everything; blocks a moment: call it in an executor."""
        self._stopping.set()
        self.wake()
        if self._thread.ident is not None:
            self._thread.join(_STOP_S)
            if self._thread.is_alive():
                log.error("the KV event thread did not end within %.0f s", _STOP_S)
                return  # its sockets are its own: closing them here would crash it
        self._wake.close(0)
        self._context.destroy(linger=0)

    def _send(self, command: Command) -> None:
        self._commands.append(command)
        self.wake()
