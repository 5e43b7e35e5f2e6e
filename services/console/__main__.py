"""Entry point: finds the command's module, turns errors into one line and the documented exit code.

Exit codes: 0 done · 1 failed · 2 usage or a bad setting · 3 the machine is not as it must be · 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.metadata import version

from services.console.usage import Parser, check_text
from shared.errors import SlipstreamError

COMMANDS = {
    "up": "start the stack and stay with it; Ctrl-C drains and stops it",
    "down": "stop the running stack",
    "status": "who is there, and how loaded they are",
    "top": "the running stack, live: workers, queues, tiers, latencies",
    "trace": "one request's way through the services, drawn",
    "doctor": "what is wrong, and what to do: environment, stack, cache",
    "logs": "the services' logs, merged",
    "config": "every setting of a service: its value, and where it comes from",
    "completion": "completion for bash, zsh or fish",
    "chat": "ask one question, or talk",
    "models": "list models; convert and verify one ahead",
    "keys": "make an API key, or hash one for a key file",
    "secrets": "make the passwords and nats.conf of a stack in containers",
    "nats": "look at the services over NATS: ls, info, ping, stats, req, url",
    "bench": "measure: stack, kv, context, kv-accuracy, router",
}
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        check_text(arguments)
        if not arguments or arguments[0] not in COMMANDS:
            return _root(arguments)
        command = importlib.import_module(f"services.console.{arguments[0]}")
        code: int = command.run(arguments[1:])
        sys.stdout.flush()
        return code
    except SlipstreamError as error:
        print_fault(error)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output went away (`slipstream status | head`): nobody is left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def print_fault(error: SlipstreamError) -> None:
    """Cause and remedy, on stderr."""
    print(f"✘ {error.message}", file=sys.stderr)
    for line in error.remedy.splitlines():
        print(f"  {line}", file=sys.stderr)


def _root(arguments: list[str]) -> int:
    width = max(map(len, COMMANDS))
    parser = Parser(
        prog="slipstream",
        usage="slipstream COMMAND [options]     (slipstream COMMAND --help tells more)",
        description="Large language models as independent services over NATS.",
        epilog="commands:\n" + "\n".join(f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"slipstream {version('slipstream')}")
    if not arguments:
        parser.print_help()
        return 0
    if not arguments[0].startswith("-"):
        close = get_close_matches(arguments[0], COMMANDS, n=1)
        parser.error(f"no command {arguments[0]!r}" + (f"; did you mean {close[0]}?" if close else ""))
    parser.parse_args(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
