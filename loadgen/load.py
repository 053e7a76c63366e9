"""Description of a load: rate, duration, models and limits. Importing it imports neither numpy nor a client."""

from collections.abc import Mapping
from typing import Literal

import msgspec


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One run's load. The defaults are those of the command line."""

    rate_per_s: float = 300.0
    duration_s: float = 20.0
    warmup_s: float = 2.0
    """Seconds of load before the measurement."""
    model_count: int | None = None
    """Number of ready models to use, the first ones by name; None for all."""
    weights: Mapping[str, float] = {}
    """Weights by model; empty to use the server's ready models."""
    zipf: float = 0.0
    """Without `weights`, the k-th model has the weight 1 / k**zipf."""
    seed: int = 0
    batch: int | tuple[int, ...] = 1
    """Rows of a request, or sizes to draw from."""
    cv: float = 1.0
    """Coefficient of variation of the gaps between arrivals: 1 is a Poisson process, 0 a constant gap."""
    bursts_s: tuple[float, float] | None = None
    """Seconds with arrivals and seconds without, in turn; None for arrivals at all times."""
    trace: str | None = None
    """CSV file with the arrivals, instead of drawn ones."""
    concurrency: int | None = None
    """Number of clients of a closed loop, each with one request at a time; None for an open loop."""
    inputs: str | None = None
    """File or folder with requests; None to draw their values from the models' metadata."""
    texts: tuple[int, int] | None = None
    """Prompt tokens and tokens to generate, of streamed requests to models that generate texts; None to send single
    steps."""
    verify: Literal["bits", "close"] | None = None
    """Compare answers to the same request with each other, bit by bit or up to rounding, and the first one, up to
    rounding, with the outputs in `inputs`."""
    shared_memory: Literal["system"] | None = None
    """Pass inputs in system shared memory, which needs the server on this machine; None to send them."""
    processes: int = 1
    """Number of sender processes, which divide the arrivals."""
    slo_s: float = 0.1
    """Maximum latency of a request that counts for goodput."""
    slo_percentile: float | None = None
    """Percentage of requests that must be answered within `slo_s`; None for no SLO."""
    timeout_s: float = 30.0
    max_in_flight: int = 10_000
