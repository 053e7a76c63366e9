"""Searches for a plan of a step in a process of low priority, while the loop goes on.

The process is this module, run by `python -m`: it reads a request, and writes a plan. It imports the searchers, whose
compiled loops take memory that a loop in little memory does not have.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Final

import msgspec

from cohabit.planner.errors import CohabitError
from cohabit.planner.graph import Graph
from cohabit.planner.memory import Memory
from cohabit.planner.plan import Plan
from cohabit.planner.plan import decode as decode_plan
from cohabit.planner.plan import encode as encode_plan
from cohabit.planner.profile import Profile
from cohabit.runtime.errors import UnusableTraining

_MOST_S: Final = 30.0
"""Seconds after which the best plan so far is taken."""
_LOWEST_PRIORITY: Final = 19
_ROOT: Final = str(Path(__file__).parents[4])
"""Folder from which this package is imported."""


class SearchRequest(msgspec.Struct, frozen=True):
    searcher: str
    graph: Graph
    profile: Profile
    memory: Memory


class BackgroundSearch:
    """A search that is under way."""

    def __init__(self, request: SearchRequest) -> None:
        """Start it. Raises OSError if there can be no further process."""
        path = os.pathsep.join(filter(None, [_ROOT, os.environ.get("PYTHONPATH")]))
        self._plan, self._errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        with tempfile.TemporaryFile() as given:
            given.write(msgspec.json.encode(request))
            given.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__],
                stdin=given,
                stdout=self._plan,
                stderr=self._errors,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # an interrupt of the loop is not the search's
            )

    def poll(self) -> Plan | None:
        """Return the plan once it is found. Raises UnusableTraining, with the reason, if there is none."""
        status = self._process.poll()
        if status is None:
            return None
        if status:
            lines = _read(self._errors).decode(errors="replace").split("\n")
            reason = next((line for line in reversed(lines) if line.strip()), f"it ended with status {status}")
            raise UnusableTraining(reason)
        return decode_plan(_read(self._plan))

    def close(self) -> None:
        """End it, if it has not ended."""
        self._process.kill()
        self._process.wait()
        self._plan.close()
        self._errors.close()


def _read(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


def main() -> None:
    from cohabit.planner.problem import Limit, Problem
    from cohabit.planner.schedule.serial import serial_schedule
    from cohabit.planner.schedule.write import write
    from cohabit.planner.search.driver import search

    os.nice(_LOWEST_PRIORITY)
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=SearchRequest)
    problem = Problem(request.graph, request.profile, request.memory, objective="period")
    try:
        plan = search(problem, request.searcher, limit=Limit(seconds=_MOST_S))
        serial = write(problem, serial_schedule(problem), plan.pool_bytes)
    except CohabitError as error:
        sys.exit(str(error))
    if plan.steps == serial.steps:
        sys.exit(f"the rule of {request.searcher} needs more memory")
    sys.stdout.buffer.write(encode_plan(plan))


if __name__ == "__main__":
    main()
