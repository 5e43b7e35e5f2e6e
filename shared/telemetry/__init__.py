"""Metrics, spans and logs: best effort, never in the request path. The only importers of opentelemetry and prometheus_client."""
