"""Attributes that OpenTelemetry's semantic conventions name, for the stages that have them. Ids and numbers, never text."""

from __future__ import annotations

from shared.messages.request import GenerateRequest
from shared.telemetry.telemetry import Attribute


def consumed(request: GenerateRequest, template: str) -> dict[str, Attribute]:
    """Of a stage that begins with a task from a NATS queue. `template`: its subject, with `*` for ids. `epoch`: which attempt it is."""
    return {
        "messaging.system": "nats",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.template": template,
        "messaging.message.conversation_id": request.request_id,
        "epoch": request.epoch,
    }
