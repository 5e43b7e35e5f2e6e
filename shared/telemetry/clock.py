"""Clocks of two machines that disagree: whoever asks for /metrics says what time it is there, and the service compares."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

ASKED_AT = "x-slipstream-asked-at"
"""Header of a request: seconds since 1970 by the clock of whoever asks."""
SKEW_S = 2.0
"""Below this nothing in the system cares: deadlines travel as time left, and leases are timed by each reader's own clock."""
COMPLAIN_EVERY_S = 60.0

log = logging.getLogger(__name__)


class ClockCheck:
    """Says once a minute that the clocks differ. A message on its way makes a clock look late, never early: by less than SKEW_S."""

    def __init__(self, now_s: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._monotonic = monotonic
        self._complained_s = -math.inf

    def asked(self, at: str, who: str) -> None:
        """`at`: the header as it came; `who`: from where."""
        try:
            offset_s = self._now_s() - float(at)
        except ValueError:
            return  # not one of ours
        if not math.isfinite(offset_s) or abs(offset_s) < SKEW_S or self._monotonic() - self._complained_s < COMPLAIN_EVERY_S:
            return
        self._complained_s = self._monotonic()
        log.warning(
            "this machine's clock is %.0f s %s that of %s: logs and traces are dated wrongly",
            abs(offset_s),
            "ahead of" if offset_s > 0 else "behind",
            who,
            extra={"remedy": "chronyc makestep, or timedatectl set-ntp true"},
        )
