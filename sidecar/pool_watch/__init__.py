"""The pool as a Kubernetes API server tells it: a small reflector, and an InferencePool's endpoints on top.

The sidecar takes its allow-list from here and the picker its endpoints, so both see the same rows.
`resources`, `views` and `pool_view` are pure; `access` is the only module that knows the kubernetes
package, of which it takes configuration and credentials. Objects are cut down to the fields we read as
soon as they arrive; nothing keeps a whole one.
"""
