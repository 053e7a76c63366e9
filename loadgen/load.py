"""What load to send: rate, duration, models and limits. Importing this imports neither numpy nor a client."""

from collections.abc import Mapping
from typing import Literal

import msgspec


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One run's load. The defaults are those of the command line."""

    rate_per_s: float = 300.0
    duration_s: float = 20.0
    warmup_s: float = 2.0
    """Requests before the measured ones."""
    model_count: int | None = None
    """Number of ready models to load, the first ones; None for all."""
    weights: Mapping[str, float] = {}
    """Models by name with their weights; empty to take those that the server has ready."""
    zipf: float = 0.0
    """Without `weights`, the k-th model has the weight 1 / k**zipf."""
    seed: int = 0
    batch: int | tuple[int, ...] = 1
    """Rows of a request, or sizes of which each request draws one."""
    cv: float = 1.0
    """Coefficient of variation of the gaps between arrivals: 1 is a Poisson process, 0 a constant gap."""
    bursts_s: tuple[float, float] | None = None
    """Seconds with arrivals and seconds without, in turn; None for arrivals at all times."""
    trace: str | None = None
    """CSV file with the arrivals, in the place of drawn ones."""
    concurrency: int | None = None
    """Number of clients of a closed loop, each with one request at a time. None for an open loop."""
    inputs: str | None = None
    """File or folder with requests; None to draw their values from the models' metadata."""
    texts: tuple[int, int] | None = None
    """Tokens of the prompt, and tokens to generate: models that generate texts are asked for such ones, streamed. None
    to send single steps."""
    verify: Literal["bits", "close"] | None = None
    """Compare answers: those of one request with each other, in every bit or but for rounding; and the first one, but
    for rounding, with the outputs that `inputs` gives."""
    shared_memory: Literal["system"] | None = None
    """Pass inputs in system shared memory, which needs the server on this machine; None to send them."""
    processes: int = 1
    """Processes that send, each a share of the arrivals."""
    slo_s: float = 0.1
    """Latency that goodput counts up to."""
    slo_percentile: float | None = None
    """Percentage of requests that have to be answered within `slo_s`; None if the run cannot miss it."""
    timeout_s: float = 30.0
    max_in_flight: int = 10_000
