"""How many requests are in flight: more while they are answered, half as many when a server says it
is too much.

Additive increase, multiplicative decrease (Chiu and Jain 1989), as TCP shares a line that nobody
knows the width of. A server that names a time to wait is obeyed by all. Knows no HTTP beyond the
headers that name such times.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from email.utils import parsedate_to_datetime

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
# what a server may count: x-ratelimit-remaining-requests, and so on
_LIMITS = (
    "requests",
    "tokens",
)


class RequestPacing:
    """Lets at most `limit` callers through at once, none before `pause_all_requests` is over.

    A decrease answers for all that was in flight when it came: their failures are one sign and not
    many.
    """

    def __init__(self, start: int = 4, most: int = 64) -> None:
        self.limit, self.most = float(start), most
        self._in_flight, self._round, self._resumes = 0, 0, 0.0
        self._free = threading.Condition()

    @contextmanager
    def wait_for_request_slot(self) -> Iterator[int]:
        """Waits for a turn. Yields the round that the turn is of, which `slower` takes."""
        with self._free:
            while (left := self._resumes - time.monotonic()) > 0 or self._in_flight >= int(
                self.limit
            ):
                # Without a time limit only where somebody is in flight, who notifies when it is
                # over.
                self._free.wait(left if left > 0 else None)
            self._in_flight += 1
            mine = self._round
        try:
            yield mine
        finally:
            with self._free:
                self._in_flight -= 1
                self._free.notify_all()

    def raise_in_flight_limit(self) -> None:
        with self._free:
            # about 1 more for each round of answers
            self.limit = min(float(self.most), self.limit + 1 / self.limit)
            self._free.notify_all()

    def halve_in_flight_limit(self, of_round: int) -> None:
        with self._free:  # no notify: a smaller limit lets nobody in
            if of_round == self._round:
                self.limit, self._round = max(1.0, self.limit / 2), self._round + 1

    def pause_all_requests(self, seconds: float) -> None:
        """Nobody sets out before so many seconds are over."""
        with self._free:
            self._resumes = max(self._resumes, time.monotonic() + seconds)


def retry_after_seconds(headers: Mapping[str, str]) -> float:
    """Seconds that a refusal asks to wait for; 0 where it names none."""
    if (exact := _parse_duration_seconds(headers.get("retry-after-ms", ""), "ms")) is not None:
        return exact
    said = headers.get("retry-after", "")
    if (seconds := _parse_duration_seconds(said, "s")) is not None:
        return seconds
    try:
        return max(0.0, parsedate_to_datetime(said).timestamp() - time.time())
    except (ValueError, TypeError):
        return 0.0


def rate_limit_reset_seconds(headers: Mapping[str, str]) -> float:
    """Seconds until a limit is renewed of which an answer says that nothing remains; 0 where
    something does."""
    waits = [0.0]
    for what in _LIMITS:
        if headers.get(f"x-ratelimit-remaining-{what}", "").strip() == "0":
            waits.append(
                _parse_duration_seconds(headers.get(f"x-ratelimit-reset-{what}", ""), "s") or 0.0
            )
    return max(waits)


def _parse_duration_seconds(text: str, unit: str) -> float | None:
    """`1.5`, in the unit, or `6m0.5s`; None for another text."""
    text = text.strip()
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]+)?", text):
        return float(text) * _UNITS[unit]
    parts = re.findall(r"([0-9]{1,9}(?:\.[0-9]+)?)(ms|[smhd])", text)
    if not parts or "".join(number + name for number, name in parts) != text:
        return None
    return sum(float(number) * _UNITS[name] for number, name in parts)
