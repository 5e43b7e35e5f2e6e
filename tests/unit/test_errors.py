"""The error tree: as drawn, with a code each."""

import re

import pytest

from shared import errors
from shared.errors import STATUS_BY_CODE, SlipstreamError


def family(root: type[SlipstreamError]) -> list[type[SlipstreamError]]:
    return [root, *(each for child in root.__subclasses__() if child.__module__.startswith("shared.errors.") for each in family(child))]


def drawn() -> dict[str, str]:
    """Class → parent, read off the drawing in the docstring."""
    assert errors.__doc__
    parents: dict[str, str] = {}
    path: list[str] = []
    for line in errors.__doc__.splitlines():
        if match := re.match(r"^((?:[│ ]  )*(?:[├└]─ )?)([A-Z]\w+)(?= {2,}|$)", line):
            depth = len(match[1]) // 3
            path[depth:] = [match[2]]
            parents[match[2]] = path[depth - 1] if depth else ""
    return parents


def test_the_drawing_is_the_tree() -> None:
    tree = {error.__name__: error.__bases__[0].__name__ if error is not SlipstreamError else "" for error in family(SlipstreamError)}
    assert drawn() == tree


def test_every_code_is_its_own() -> None:
    codes = [error.code for error in family(SlipstreamError)]
    assert sorted(codes) == sorted(set(codes))
    assert all(re.fullmatch(r"[a-z_]{3,64}", code) for code in codes)


def test_codes_lead_to_statuses() -> None:
    assert {error.code: error.status for error in family(SlipstreamError)}.items() <= STATUS_BY_CODE.items()


@pytest.mark.parametrize(
    ("name", "exit_code"), [("ConfigError", 2), ("EnvironmentFault", 3), ("ModelFault", 3), ("BusClosed", 70), ("KvError", 1)]
)
def test_exit_codes_are_the_documented_ones(name: str, exit_code: int) -> None:
    error: type[SlipstreamError] = getattr(errors, name)
    assert error.exit_code == exit_code


def test_an_error_says_what_and_how_to_mend_it() -> None:
    error = errors.ConfigError("SS_HTTP_PORT", "many", "not a number", remedy="Set a port")
    assert str(error) == error.message == "SS_HTTP_PORT='many': not a number"
    assert (error.variable, error.remedy) == ("SS_HTTP_PORT", "Set a port")


def test_a_prompt_is_never_in_a_message() -> None:
    error = errors.ModelNotFound("x" * 500, ["a", "b"])
    assert len(error.message) < 150
    assert error.message.endswith("served: a, b")
