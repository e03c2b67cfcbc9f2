"""One module an API: its JSON fields to the prompt that an engine would make of them.

Rule: exactly the engine's tokens, or `NoPrompt` with a reason. Semantics: vLLM 0.32. What an engine
refuses may be either, since no block comes of it. Inputs are decoded JSON of any shape; they are
never changed, and nothing but `NoPrompt` is raised.
"""
