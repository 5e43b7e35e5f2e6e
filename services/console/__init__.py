"""The `slipstream` command: starts, watches and stops a stack, and talks to a running one.

One file a command, imported only when it is called (`__main__.COMMANDS`), so that `slipstream --help` costs nothing.

Subjects in: event.load.*, $SRV.*, bucket ss_workers. Subjects out: generate (as a client), $SRV.PING, $SRV.INFO, $SRV.STATS.
"""
