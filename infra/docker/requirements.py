"""Prints the dependencies of pyproject.toml, or those of one of its extras, a line each: so that an image caches them apart from the code."""

import sys
import tomllib
from pathlib import Path

path, name = sys.argv[1:]
project = tomllib.loads(Path(path).read_text())["project"]
print("\n".join(project["dependencies"] if name == "core" else project["optional-dependencies"][name]))
