"""Root of what can go wrong with a local fleet. Each message is a sentence for a person."""

from __future__ import annotations


class FleetError(Exception):
    """The fleet cannot start, or the scenario cannot go on."""
