"""Captures programs: kernels, copies and their order become one graph that a single launch replays."""

from runtime.cuda.api import CapturedGraph
from runtime.cuda.inference import issue_inference
from runtime.cuda.issue import Streams
from runtime.cuda.program import CudaProgram
from runtime.errors import CaptureFailed


def capture(streams: Streams, program: CudaProgram) -> None:
    """Capture a program, in place; `admission.refused` says why not. No work may be in progress."""
    admission = program.admission
    if admission.refused is not None:
        return
    taken_bytes = _taken_bytes(streams)
    try:
        admission.graph = _graph(streams, program)
    except CaptureFailed as error:
        admission.refused = str(error)
    admission.graph_bytes = max(0, _taken_bytes(streams) - taken_bytes)


def _taken_bytes(streams: Streams) -> int:
    """Of the whole device: what another process takes at the same moment is counted, too."""
    memory = streams.driver.memory()
    return memory.total_bytes - memory.free_bytes


def _graph(streams: Streams, program: CudaProgram) -> CapturedGraph:
    driver, commands = streams.driver, program.schedule.commands
    frame = program.new_frame()
    events = [driver.event() for _ in range(commands.events)]
    perform = program.performing(driver, frame)
    with driver.on(streams.compute):
        return driver.capture(
            program.pool, lambda: issue_inference(streams, program, commands, events, frame, perform, None)
        )
