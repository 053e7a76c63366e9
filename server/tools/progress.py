"""What a terminal shows while plans are searched for: one line, which tells how good the best plan is so far."""

import signal
import time
from types import FrameType, TracebackType

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

_REFRESHES_PER_S = 8


class Watch:
    """A line that keeps itself up to date on a terminal, and nothing elsewhere.

    Meanwhile the first interrupt asks searches to be content with what they have; the second ends the command.
    """

    def __init__(self, console: Console) -> None:
        self.is_stopped = False
        self._console = console
        self._line = _Line()
        self._live = Live(
            self._line, console=console, refresh_per_second=_REFRESHES_PER_S, transient=True, auto_refresh=True
        )
        self._shown = console.is_terminal

    def __enter__(self) -> "Watch":
        self._interrupt = signal.signal(signal.SIGINT, self._stop)
        if self._shown:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._interrupt)
        if self._shown:
            self._live.stop()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.is_stopped = True
        self._console.print(
            "stopping; the best plans so far are kept. Interrupt again to leave at once", markup=False
        )
        signal.signal(number, signal.default_int_handler)

    def doing(self, what: str) -> None:
        """Show something that has no numbers yet."""
        self._line.start(what)

    def searched(self, evaluations: int, best_s: float, bound_s: float) -> None:
        self._line.state = (evaluations, best_s, bound_s)


class _Line:
    def __init__(self) -> None:
        self._spinner = Spinner("dots")
        self.start("starting")

    def start(self, what: str) -> None:
        self.what = what
        self.started_s = time.monotonic()
        self.state: tuple[int, float, float] | None = None

    def __rich__(self) -> Spinner:
        self._spinner.update(text=Text(self._text(), no_wrap=True, overflow="ellipsis"))
        return self._spinner

    def _text(self) -> str:
        elapsed_s = time.monotonic() - self.started_s
        if self.state is None:
            return f"{self.what}  {elapsed_s:.0f} s"
        evaluations, best_s, bound_s = self.state
        return (
            f"{self.what}  best {milliseconds(best_s)}  bound {milliseconds(bound_s)}  gap {gap(best_s, bound_s)}"
            f"  {evaluations} evaluations  {elapsed_s:.0f} s"
        )


def milliseconds(seconds: float) -> str:
    """Three or four digits: 0.123 ms, 12.3 ms, 1234 ms."""
    value = seconds * 1e3
    return f"{value:.{3 if value < 1 else 2 if value < 100 else 1 if value < 1000 else 0}f} ms"


def round_time(seconds: float) -> str:
    """For axes: 0, 0.2 ms, 50 ms, 1500 ms."""
    return f"{seconds * 1e3:.10g} ms" if seconds else "0"


def gap(latency_s: float, floor_s: float) -> str:
    """How far one time is above another."""
    return percent(latency_s / floor_s - 1) if floor_s > 0 else "-"


def percent(share: float) -> str:
    return f"{share * 100:.1f} %" if share < 10 else f"{share * 100:.0f} %"
