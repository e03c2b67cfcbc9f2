"""HTTP/1.1 of both sides of the proxy, over asyncio transports and llhttp (`httptools`).

    message   heads as values and as bytes, and what a peer can do wrong
    reader    bytes in, events out: llhttp in its strict mode, and the limits that it does not have
    body      a body on its way in: read, taken whole, or piped on with back-pressure
    answer    the answer to one request: framing, the end of it, or a break that nobody takes for the end
    service   what the connections of a listener share, and a request
    server    a client's connection: keep-alive, pipelining, deadlines
    client    a connection to an engine: one call at a time
    pool      idle connections by address

A piece goes from one socket to the other within one call of the event loop: no task, no timer, no stream
object a piece. Deadlines are looked at by one timer a listener or pool (`sweep`). Nothing here
knows of routing.
"""
