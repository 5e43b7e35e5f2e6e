"""The engine: models, attention, sampling, the paged cache; and a simulated engine without torch. Knows nothing of NATS.

`load(config)` is the one door; only it decides whether torch is imported.
"""
