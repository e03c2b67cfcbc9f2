"""How much memory KV pulls need: from a model's config.json to tiers, pods and an expected crossover."""
