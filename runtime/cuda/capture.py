"""Captures programs: kernels, copies and their order become one graph, replayed by a single launch.

The copies of initial residents are a second graph: issuing them one by one would take the host longer than the link
takes. A bucket with dynamic sizes has a graph of its largest shapes from the start. Smaller shapes get graphs of their
own: their first request is issued kernel by kernel, the second is captured, which takes about as long.
"""

import logging

from cohabit.runtime.cuda.buffers import Shapes
from cohabit.runtime.cuda.driver import CudaGraph
from cohabit.runtime.cuda.issue import Streams, issue_inference
from cohabit.runtime.cuda.program import CudaProgram, SizedGraph
from cohabit.runtime.errors import CaptureFailed, MemoryExceeded

_log = logging.getLogger("cohabit.cuda")
MOST_SIZED = 32
"""Maximum graphs of smaller shapes per program. The least recently used are released."""
MOST_SIZED_BYTES = 64 << 20
"""Maximum device memory, outside the arena, of a program's graphs of smaller shapes."""
_MOST_SEEN = 1024
"""Maximum smaller shapes remembered from their first request."""


def capture(streams: Streams, program: CudaProgram) -> None:
    """Capture a program, in place, or set `admission.refused` to the reason. No work may be in progress.

    Raises MemoryExceeded if the graph gets no memory.
    """
    admission = program.admission
    if admission.refused is not None:
        return
    taken_bytes = _taken_bytes(streams)
    try:
        admission.graph = _captured(streams, program)
        admission.residents = _captured_residents(streams, program)
    except CaptureFailed as error:
        if admission.graph is None:
            admission.refused = str(error)
        else:
            _warn(program, "residents are copied one by one", error)
    admission.graph_bytes = max(0, _taken_bytes(streams) - taken_bytes)


def is_wanted(program: CudaProgram, shapes: Shapes) -> bool:
    """Whether to capture smaller shapes: they came before, and the program can be captured."""
    admission = program.admission
    if admission.graph is None or admission.sized_refused:
        return False
    if shapes in admission.seen:
        return True
    admission.seen[shapes] = None
    if len(admission.seen) > _MOST_SEEN:
        del admission.seen[next(iter(admission.seen))]
    return False


def capture_sized(streams: Streams, program: CudaProgram, shapes: Shapes) -> None:
    """Capture a program for the buffers' current smaller shapes, and release graphs beyond the limits."""
    admission, taken_bytes = program.admission, _taken_bytes(streams)
    del admission.seen[shapes]
    try:
        graph = _captured(streams, program)
    except (CaptureFailed, MemoryExceeded) as error:
        admission.sized_refused = True
        _warn(program, "smaller shapes are issued op by op", error)
        return
    nbytes = max(0, _taken_bytes(streams) - taken_bytes)
    sized = admission.sized
    sized[shapes] = SizedGraph(graph, tuple(program.buffers.outputs), nbytes)
    while len(sized) > MOST_SIZED or (len(sized) > 1 and sum(s.nbytes for s in sized.values()) > MOST_SIZED_BYTES):
        streams.driver.release([sized.pop(next(iter(sized))).graph])


def _captured(streams: Streams, program: CudaProgram) -> CudaGraph:
    driver, frame = streams.driver, program.new_frame()
    perform = program.performing(driver, frame)
    with driver.on(streams.compute):
        return driver.capture(program.pool, lambda: issue_inference(streams, program, frame, perform))


def _captured_residents(streams: Streams, program: CudaProgram) -> CudaGraph | None:
    """Return the copies of initial residents as a graph; None if there are none."""
    copies = program.schedule.residents
    if not copies:
        return None

    def issue() -> None:
        for copy in copies:
            program.copies[copy]()

    with streams.driver.on(streams.swap_in):
        return streams.driver.capture(program.pool, issue)


def _warn(program: CudaProgram, what: str, error: Exception) -> None:
    fields = {"model": program.graph.name, "batch": str(program.bucket), "reason": str(error)}
    _log.warning(what, extra={"fields": fields})


def _taken_bytes(streams: Streams) -> int:
    """Return the device memory of this process, or of all if the driver does not report it per process."""
    memory = streams.driver.memory()
    used_bytes = memory.process_bytes
    return memory.total_bytes - memory.free_bytes if used_bytes is None else used_bytes
