"""Admission control per model: a concurrency limit and a rate limit."""

from collections.abc import Callable

from cohabit.server.errors import RateLimited
from cohabit.server.scheduling.policy import Policy


class Admission:
    """One model's count of requests in flight, and its token bucket."""

    def __init__(self) -> None:
        self._in_flight = 0
        self._tokens = 1.0
        self._filled_s = 0.0

    def enter(self, model: str, policy: Policy, now_s: float, backlog_s: Callable[[float], float]) -> None:
        """Admit a request. Raises RateLimited; `backlog_s` estimates when a retry can succeed."""
        limit, rate_per_s = policy.concurrency, policy.rate_per_s
        if limit is not None and self._in_flight >= limit:
            raise RateLimited(
                f"model '{model}' has {self._in_flight} requests under way, its config allows {limit}",
                backlog_s(now_s),
            )
        if rate_per_s is not None:
            passed_s = max(now_s - self._filled_s, 0.0)
            self._tokens = min(self._tokens + passed_s * rate_per_s, float(policy.burst))
            self._filled_s = now_s
            if self._tokens < 1.0:
                raise RateLimited(
                    f"model '{model}' gets more than the {rate_per_s:g} requests per second that its config allows",
                    (1.0 - self._tokens) / rate_per_s,
                )
            self._tokens -= 1.0
        self._in_flight += 1

    def leave(self, count: int = 1) -> None:
        """Count requests that were answered, refused or cancelled."""
        self._in_flight -= count
