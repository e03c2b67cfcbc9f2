"""A wire between two engines' control channels that a test can cut, silence, or watch.

What it carries is encrypted, so a stage is counted in turns: a turn is over when the other side speaks.

    1 TLS hello   2 TLS answer   3 identity   4 identity, accepted   5 mover, look-up   6 found   7 move
    8 progress and end
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Final

TURNS: Final = 8
_PIECE_BYTES: Final = 65_536


class ControlLine:
    """Listens on `port`; every connection to it goes on to `target_port`.

    When turn `at` of all its traffic begins, `act` is called once, before what began it is passed on.
    """

    def __init__(self, target_port: int, at: int, act: Callable[[ControlLine], None]) -> None:
        self._target_port = target_port
        self._at = at
        self._act = act
        self._lock = threading.Lock()
        self._turn = 0
        self._last: socket.socket | None = None
        self._muted = False
        self._ends: list[socket.socket] = []
        self.acted = False
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """End it, whatever is under way; nobody connects any more."""
        self._shut(self._listening)
        for end in self._ends:
            self._shut(end)

    def mute(self) -> None:
        """From now on everything is swallowed, in both directions."""
        self._muted = True

    @staticmethod
    def _shut(end: socket.socket) -> None:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
                far = socket.create_connection(("127.0.0.1", self._target_port))
            except OSError:
                return
            self._ends += [near, far]
            for here, there in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(here, there), daemon=True).start()

    def _carry(self, here: socket.socket, there: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := here.recv(_PIECE_BYTES):
                self._count(here)
                if not self._muted:
                    there.sendall(piece)
        with contextlib.suppress(OSError):
            there.shutdown(socket.SHUT_WR)

    def _count(self, speaker: socket.socket) -> None:
        with self._lock:
            if speaker is not self._last:
                self._turn, self._last = self._turn + 1, speaker
            due = self._turn >= self._at and not self.acted
            self.acted = self.acted or due
        if due:
            self._act(self)
