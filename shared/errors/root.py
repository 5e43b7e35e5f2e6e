"""The root of the tree, and what stands directly below it."""

from __future__ import annotations

from typing import ClassVar


class SlipstreamError(Exception):
    """The root. `code` is the stable word on wires and in logs; `remedy` says what a person can do."""

    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy


class ConfigError(SlipstreamError):
    """A setting that cannot be used. Names the variable, not only the value."""

    code = "bad_config"
    exit_code = 2

    def __init__(self, variable: str, value: object, reason: str, *, remedy: str = "") -> None:
        super().__init__(f"{variable}={value!r}: {reason}", remedy=remedy)
        self.variable = variable
        self.value = value


class EnvironmentFault(SlipstreamError):
    """The machine is not as it must be: a port taken, NATS without JetStream, no room on a disk."""

    code = "environment"
    exit_code = 3


class ModelFault(EnvironmentFault):
    """A model that is absent, truncated, corrupt, or of an architecture that is not served."""

    code = "model_fault"


class EngineError(SlipstreamError):
    """A forward pass failed. Only the requests of that batch are affected."""

    code = "engine_error"
