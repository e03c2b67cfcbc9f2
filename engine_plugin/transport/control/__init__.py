"""The control channel between engines: handshake, look-ups, leases, moves. No block travels here.

`dialer` and `outbound` are our pulls; `inbound`, `serving` and `leases` are our peers'; `channel` and
`handshake` are both.
"""
