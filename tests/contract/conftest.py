"""Fixtures of the contract suites."""

from tests.support.model_fixture import smollm2_folder

__all__ = ["smollm2_folder"]
