"""The emulated engine: OpenAI API, continuous batching in model time, a paged KV cache of real bytes.

It stands in for vLLM with our plugin where there is no accelerator: same events, metrics, wire keys
and transport; computing is a sleep. Nothing outside `deploy` imports it.
"""
