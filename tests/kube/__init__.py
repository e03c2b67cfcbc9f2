"""A Kubernetes API server for tests: in memory, over real HTTP, with faults that a test asks for.

Modelled: one revision for everything; paged lists at a revision; watches from a revision out of a bounded
log, with bookmarks, time-outs, initial events and 410 after compaction; selectors, with objects that enter
or leave one; conflicts, generations, finalizers, graceful deletion of pods; merge, strategic, JSON and
apply patches; CRDs with their structural schema; RBAC by token; discovery, both forms.
Not modelled: controllers, admission and defaulting, CEL, keyed-list ownership in apply, exec, logs,
impersonation. The real kubectl is its conformance client (tests/integration/cluster).
"""
