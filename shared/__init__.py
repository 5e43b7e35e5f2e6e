"""What every Slipstream process shares: messages, bus, telemetry, KV arithmetic, the engine. Imports no service."""
