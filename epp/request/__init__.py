"""Understanding requests: body to prompt, prompt to the engine's token ids. It decides nothing."""
