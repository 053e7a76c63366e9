"""Captures programs: kernels, copies and their order become one graph that a single launch replays.

The copies between inferences, epilogue and residents, are two more graphs: issued one by one they would take the host
longer than the link.
"""

import logging
from collections.abc import Sequence

from cohabit.runtime.cuda.api import CapturedGraph
from cohabit.runtime.cuda.inference import issue_inference
from cohabit.runtime.cuda.issue import Streams
from cohabit.runtime.cuda.joining import Copy
from cohabit.runtime.cuda.program import CudaProgram
from cohabit.runtime.errors import CaptureFailed

_log = logging.getLogger("cohabit.cuda")


def capture(streams: Streams, program: CudaProgram) -> None:
    """Capture a program, in place; `admission.refused` says why not. No work may be in progress."""
    driver, admission, frame = streams.driver, program.admission, program.new_frame()
    if admission.refused is not None:
        return
    perform = program.performing(driver, frame)
    taken_bytes = _taken_bytes(streams)
    try:
        with driver.on(streams.compute):
            admission.graph = driver.capture(
                program.pool, lambda: issue_inference(streams, program, frame, perform)
            )
    except CaptureFailed as error:
        admission.refused = str(error)
    else:
        _capture_copies(streams, program)
    admission.graph_bytes = max(0, _taken_bytes(streams) - taken_bytes)


def _capture_copies(streams: Streams, program: CudaProgram) -> None:
    admission = program.admission
    try:
        admission.epilogue = _captured(streams, program, program.schedule.epilogue)
        admission.residents = _captured(streams, program, program.schedule.residents)
    except CaptureFailed as error:
        fields = {"model": program.graph.name, "batch": str(program.bucket), "reason": str(error)}
        _log.warning("copies between inferences are issued one by one", extra={"fields": fields})


def _captured(streams: Streams, program: CudaProgram, copies: Sequence[Copy]) -> CapturedGraph | None:
    """The copies as a graph; None where there are none."""
    if not copies:
        return None

    def issue() -> None:
        for copy in copies:
            program.copies[copy]()

    with streams.driver.on(streams.swap_in):
        return streams.driver.capture(program.pool, issue)


def _taken_bytes(streams: Streams) -> int:
    """Of the whole device: what another process takes at the same moment is counted, too."""
    memory = streams.driver.memory()
    return memory.total_bytes - memory.free_bytes
