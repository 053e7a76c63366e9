"""The progress line of a search, which an interrupt ends early."""

import signal
import time
from types import FrameType

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from cohabit.server.format import gap, milliseconds


class SearchProgress:
    """A context manager that shows one line on a terminal, and nothing elsewhere.

    The first interrupt sets `is_stopped`, so that searches return their best plan; the second ends the command.
    """

    def __init__(self, console: Console) -> None:
        self.is_stopped = False
        self._console = console
        self._spinner = Spinner("dots")
        self._live = Live(self, console=console, refresh_per_second=8, transient=True)
        self.doing("starting")

    def __enter__(self) -> "SearchProgress":
        self._interrupt = signal.signal(signal.SIGINT, self._stop)
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._interrupt)
        self._live.stop()

    def doing(self, what: str) -> None:
        """Show a new stage, without numbers."""
        self._what = what
        self._started_s = time.monotonic()
        self._numbers = ""

    def searched(self, evaluations: int, best_s: float, bound_s: float) -> None:
        """Show the state of a search: candidates so far, the best latency and the lower bound."""
        self._numbers = (
            f"best {milliseconds(best_s)}  bound {milliseconds(bound_s)}  gap {gap(best_s, bound_s)}"
            f"  {evaluations} evaluations  "
        )

    def __rich__(self) -> Spinner:
        text = f"{self._what}  {self._numbers}{time.monotonic() - self._started_s:.0f} s"
        self._spinner.update(text=Text(text, no_wrap=True, overflow="ellipsis"))
        return self._spinner

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.is_stopped = True
        self._console.print("stopping; the best plans so far are kept. Interrupt again to exit now", markup=False)
        signal.signal(number, signal.default_int_handler)
