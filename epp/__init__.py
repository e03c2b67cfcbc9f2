"""The Endpoint Picker: which endpoint serves a request, and which peer its KV blocks come from."""
