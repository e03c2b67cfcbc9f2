"""KV events of the engines, from the socket to the core: `subscriber` receives on one thread, `codec`
turns frames into `epp.core.events`, `manager` applies them on the event loop and runs replays.

Nothing here decides what an engine holds: that is `epp.core.cache_view`, reached through a sink.
"""
