"""Load, traces, benchmarks and the simulator: a black box towards the services except in bench, simulator, replay and similarity."""
