"""The parts of `benchmarks.soak_sidecar`: cases, servers clients with faults, the sidecar between them."""
