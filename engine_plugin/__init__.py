"""The pull inside the engine: protocol, plan, NIXL transport, and the vLLM adapter.

Depends on nothing else in this repository.
"""
