"""Snapshots between replicas of the picker: a restarted one takes over what another one knows.

One exchange over TLS with certificates on both sides, on a port of its own. Plain asyncio streams, not
HTTP: both ends are ours, there is one question, and lengths are checked before anything is allocated.
"""
