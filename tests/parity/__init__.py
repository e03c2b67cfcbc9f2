"""Parity: the router's token ids are the engine's, request by request, for whole families of models.

`families` makes model directories (tokenizer and chat template, all written for these tests),
`corpus` makes the requests, `ours` is what the router says. What a real vLLM said is recorded in
tests/data/parity; tests/engine asks one again.
"""
