"""The gateway's side of the picker: Envoy ext_proc as the Endpoint Picker Protocol uses it.

`events` plain values in and out, `session` the order of things (pure), `usage` what the answer's bytes
tell, `mutations` protobuf <-> plain values, `service` one RPC, `health`, `tls`, `server`. Nothing here
parses a prompt or picks an endpoint: a `RequestHandler` is injected.
"""
