"""The mover: one disposable process per rank that holds the NIXL agent, and its supervision.

`__main__`, `moves` and `agent` run in the process; `link` and `supervisor` run in the engine; `messages`
is what they say to each other. Nothing but `agent` knows NIXL.
"""
