"""The message bus: one contract (`base`), NATS (`nats`, the only importer of nats) and an in-memory twin (`memory`) for tests."""
