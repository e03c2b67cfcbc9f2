"""The gateway's side of the picker: Envoy ext_proc as the Endpoint Picker Protocol uses it.

`events` plain values in and out, `session` the order of things (pure), `usage` what the answer's bytes
tell, `mutations` protobuf <-> plain values, `service` one RPC, `health`, `tls`, `server`. Nothing here
parses a prompt or picks an endpoint: a `RequestHandler` is injected.
"""

import os

# gRPC reads a connection in a thread of its "event engine" and hands what came to a second thread, which
# wakes the loop. Its older poller reads in that second one: a hand-off fewer for each message
# (docs/figures.md says what it saves). Looked at when `grpc` is imported, which only this package does.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")
