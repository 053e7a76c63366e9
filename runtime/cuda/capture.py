"""Captures programs: kernels, copies and their order become one graph that a single launch replays."""

from cohabit.runtime.cuda.inference import issue_inference
from cohabit.runtime.cuda.issue import Streams
from cohabit.runtime.cuda.program import CudaProgram
from cohabit.runtime.errors import CaptureFailed


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
    admission.graph_bytes = max(0, _taken_bytes(streams) - taken_bytes)


def _taken_bytes(streams: Streams) -> int:
    """Of the whole device: what another process takes at the same moment is counted, too."""
    memory = streams.driver.memory()
    return memory.total_bytes - memory.free_bytes
