"""Limit the number of requests that wait for answers.

The limit rises after answers and is halved after an overload: additive increase, multiplicative
decrease (Chiu and Jain 1989), as in TCP. If the server asks to wait, all requests wait.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from email.utils import parsedate_to_datetime

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
# quantities that a server may count: x-ratelimit-remaining-requests, and so on
_LIMITS = (
    "requests",
    "tokens",
)


class RequestPacing:
    """Let at most `limit` requests run at once, and none during `pause_all_requests`.

    `start` is the initial limit and `most` the largest. Requests that fail together halve the limit
    only once.
    """

    def __init__(self, start: int = 4, most: int = 64) -> None:
        self.limit = float(start)
        self.most = most
        self._in_flight = 0
        self._round = 0
        self._resumes = 0.0
        self._free = threading.Condition()

    @contextmanager
    def wait_request_slot(self) -> Iterator[int]:
        """Wait until a request may start. Yield the current round, for `halve_request_limit`.

        A round ends when the limit is halved. So requests of the same round halve it only once.
        """
        with self._free:
            while (remaining := self._resumes - time.monotonic()) > 0 or self._in_flight >= int(
                self.limit
            ):
                # Without a time limit only if a request is in flight, which notifies at its end.
                self._free.wait(remaining if remaining > 0 else None)
            self._in_flight += 1
            turn = self._round
        try:
            yield turn
        finally:
            with self._free:
                self._in_flight -= 1
                self._free.notify_all()

    def raise_request_limit(self) -> None:
        with self._free:
            # about 1 more for each round of answers
            self.limit = min(float(self.most), self.limit + 1 / self.limit)
            self._free.notify_all()

    def halve_request_limit(self, of_round: int) -> None:
        """Halve the limit after an overload, unless a request of the same round has halved it."""
        with self._free:  # no notify: a smaller limit admits nobody
            if of_round == self._round:
                self.limit, self._round = max(1.0, self.limit / 2), self._round + 1

    def pause_all_requests(self, seconds: float) -> None:
        """Start no request for this many seconds."""
        with self._free:
            self._resumes = max(self._resumes, time.monotonic() + seconds)


def retry_after_seconds(headers: Mapping[str, str]) -> float:
    """Return the number of seconds that a refusal asks to wait; 0 if it gives no time."""
    if (exact := _parse_duration_seconds(headers.get("retry-after-ms", ""), "ms")) is not None:
        return exact
    header = headers.get("retry-after", "")
    if (seconds := _parse_duration_seconds(header, "s")) is not None:
        return seconds
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    except (ValueError, TypeError):
        return 0.0


def read_reset_seconds(headers: Mapping[str, str]) -> float:
    """Return the seconds until exhausted rate limits are reset; 0 if no limit is exhausted."""
    waits = [0.0]
    for quantity in _LIMITS:
        if headers.get(f"x-ratelimit-remaining-{quantity}", "").strip() == "0":
            waits.append(
                _parse_duration_seconds(headers.get(f"x-ratelimit-reset-{quantity}", ""), "s")
                or 0.0
            )
    return max(waits)


def _parse_duration_seconds(text: str, unit: str) -> float | None:
    """Parse seconds from text such as `1.5` (in `unit`) or `6m0.5s`; None for any other text."""
    text = text.strip()
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]+)?", text):
        return float(text) * _UNITS[unit]
    parts = re.findall(r"([0-9]{1,9}(?:\.[0-9]+)?)(ms|[smhd])", text)
    if not parts or "".join(number + name for number, name in parts) != text:
        return None
    return sum(float(number) * _UNITS[name] for number, name in parts)
