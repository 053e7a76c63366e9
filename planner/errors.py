"""The planner's errors.

CohabitError
├── FormatError            an invalid file: truncated, edited, or of a newer format
│   └── FingerprintMismatch  a plan or profile made for another graph, weights file or profile
├── InvalidGraph           a graph that breaks a rule of its format
├── InvalidPlan            the checker's findings
├── InfeasibleBudget       no plan exists in the given memory
├── UnsupportedProblem     a searcher cannot plan this kind of problem
└── UnknownSearcher        no searcher has this name
"""

from collections.abc import Sequence


class CohabitError(Exception):
    """Base class of all errors that Cohabit raises on purpose."""


class FormatError(CohabitError):
    """A graph, profile or plan file cannot be used; the message says why."""


class FingerprintMismatch(FormatError):
    """A plan or profile was made for another graph, weights file or profile."""

    def __init__(self, what: str, expected: str, found: str) -> None:
        super().__init__(f"{what} was made for {found[:12]}, but {expected[:12]} is in use; make it again")


class InvalidGraph(CohabitError):
    """A graph breaks a rule of its format, such as reading a tensor that nothing wrote."""


class InvalidPlan(CohabitError):
    """A plan that must not run. `violations` has one sentence per finding."""

    def __init__(self, violations: Sequence[str]) -> None:
        shown = "; ".join(violations[:3])
        more = f" (and {len(violations) - 3} more)" if len(violations) > 3 else ""
        super().__init__(f"plan refused: {shown}{more}")
        self.violations = tuple(violations)


class InfeasibleBudget(CohabitError):
    """No plan fits. `least_bytes` is the smallest sufficient budget, `op` the op that needs it.

    `op` is None if a layout holds whole models in memory. If several `models` share the budget, `model` needs most of
    it, in `bucket`.
    """

    def __init__(
        self,
        model: str,
        op: str | None,
        budget_bytes: int,
        least_bytes: int,
        models: int = 1,
        bucket: object | None = None,
    ) -> None:
        what = f"op {op} needs" if op is not None else "holding all parameters at once needs"
        at = "" if bucket is None else f" at batch {bucket_words(bucket)}"
        way_out = "raise the memory" if str(bucket) == "1" else "raise the memory or lower the batch"
        enough = f", which is enough for all {models} models" if models > 1 else ""
        super().__init__(
            f"{model}: {what} a budget of {format_bytes(least_bytes)}"
            f" ({least_bytes} bytes){at}{enough}, the budget is {format_bytes(budget_bytes)}"
            f" ({budget_bytes} bytes); {way_out}"
        )
        self.model = model
        self.op = op
        self.least_bytes = least_bytes


def bucket_words(bucket: object) -> str:
    """Return a bucket as text: `8`, or `8 with dynamic sizes 64, 1024` for `8x64x1024`."""
    batch, *sizes = str(bucket).split("x")
    return f"{batch} with dynamic sizes {', '.join(sizes)}" if sizes else batch


class UnsupportedProblem(CohabitError):
    """A searcher cannot plan this kind of problem; the message says which searcher can."""


class UnknownSearcher(CohabitError):
    """No searcher has this name."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        super().__init__(f"no searcher is called {name}; there are {', '.join(known)}")


def format_bytes(nbytes: float) -> str:
    """Format a byte count in binary units, such as `61.3 MiB`."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"
