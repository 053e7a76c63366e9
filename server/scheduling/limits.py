"""How many requests of a model are let in: at most so many at once, and so many per second."""

from collections.abc import Callable

from server.errors import RateLimited
from server.scheduling.policy import Policy


class Admission:
    """One model's count of requests under way, and its bucket of tokens."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._under_way = 0
        self._tokens = float(policy.burst)
        self._filled_s = 0.0

    def enter(self, model: str, now_s: float, backlog_s: Callable[[float], float]) -> None:
        """Let a request in. Raises RateLimited; `backlog_s` says when it is worth another try."""
        most, rate_per_s = self.policy.concurrency, self.policy.rate_per_s
        if most is not None and self._under_way >= most:
            raise RateLimited(
                f"model '{model}' has {self._under_way} requests under way, its config allows {most}",
                backlog_s(now_s),
            )
        if rate_per_s is not None:
            self._fill(rate_per_s, now_s)
            if self._tokens < 1.0:
                raise RateLimited(
                    f"model '{model}' gets more than the {rate_per_s:g} requests per second that its config allows",
                    (1.0 - self._tokens) / rate_per_s,
                )
            self._tokens -= 1.0
        self._under_way += 1

    def leave(self, count: int = 1) -> None:
        """Requests were answered, refused or cancelled."""
        self._under_way -= count

    def _fill(self, rate_per_s: float, now_s: float) -> None:
        passed_s = max(now_s - self._filled_s, 0.0)
        self._tokens = min(self._tokens + passed_s * rate_per_s, float(self.policy.burst))
        self._filled_s = now_s
