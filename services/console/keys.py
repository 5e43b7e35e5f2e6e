"""`slipstream keys`: API keys. The file keeps their hashes alone, so a key is shown once."""

from __future__ import annotations

import getpass
import hashlib
import os
import re
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from services.console.terminal import Terminal
from services.console.usage import Parser, UsageFault
from shared.errors import ConfigError, EnvironmentFault

_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")


def run(argv: Sequence[str]) -> int:
    """The command."""
    options = _parser().parse_args(argv)
    if not _TENANT.fullmatch(options.tenant):
        raise ConfigError("--tenant", options.tenant, "1 to 64 of A-Z a-z 0-9 . _ -")
    if options.verb == "hash":
        key = getpass.getpass("key: ") if sys.stdin.isatty() else sys.stdin.readline()
        if not re.fullmatch(r"[ -~]+", key.strip()):
            raise UsageFault(
                "no key came from stdin: of characters that a header can hold",
                remedy="For example: slipstream keys hash < FILE",
            )
        sys.stdout.write(key_line(options.tenant, key) + "\n")
        return 0
    return _new(options.tenant, options.file)


def _parser() -> Parser:
    parser = Parser(prog="slipstream keys", description="Make an API key, or hash one that exists already.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    new = verbs.add_parser("new", help="make a key")
    new.add_argument("--file", type=Path, metavar="FILE", help="add its hash to this key file (made if need be, 0600)")
    hashed = verbs.add_parser("hash", help="read a key from stdin, print its line for a key file")
    for verb in (new, hashed):
        verb.add_argument("--tenant", default="default", help="whose key it is; tenants share no cached blocks (default: default)")
    return parser


def key_line(tenant: str, key: str) -> str:
    """What stands in a key file: `tenant:sha256 of the key`."""
    return f"{tenant}:{hashlib.sha256(key.strip().encode()).hexdigest()}"


def _new(tenant: str, file: Path | None) -> int:
    key = f"ss-{secrets.token_urlsafe(32)}"
    line = key_line(tenant, key)
    note = Terminal(sys.stderr)
    if file:
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            with os.fdopen(descriptor, "w") as out:
                out.write(line + "\n")
        except OSError as error:
            raise EnvironmentFault(f"{file}: {error.strerror}", remedy="Name a file that you may write: --file PATH") from error
        note.say(f"added to {file} for tenant {tenant}; shown this once:")
    else:
        note.say(f"for a key file: {line}\nshown this once:")
    sys.stdout.write(key + "\n")
    return 0
