"""The same fleet with real vLLM engines on the CPU: `make demo ENGINE=vllm`.

What differs from the emulated fleet and nothing else: how an engine is started (`parts`, `site`, `weights`),
what it says of a request (`accounts`), and the rows that can be shown on it (`rows`).
"""
