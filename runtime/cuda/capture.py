"""Captures programs: kernels, copies and their order become one graph that a single launch replays."""

from runtime.cuda.api import CapturedGraph
from runtime.cuda.inference import issue_inference
from runtime.cuda.issue import Streams
from runtime.cuda.program import CudaProgram
from runtime.cuda.schedule import LINK_FREE, Commands
from runtime.errors import CaptureFailed


def capture(streams: Streams, program: CudaProgram) -> None:
    """Capture a program, in place; `admission.refused` says why not. No work may be in progress."""
    graphs = program.admission
    if graphs.refused is not None:
        return
    taken_bytes = _taken_bytes(streams)
    try:
        graphs.whole = _graph(streams, program, program.schedule.whole)
        graphs.rest = graphs.whole
        if program.schedule.rest is not program.schedule.whole:
            graphs.rest = _graph(streams, program, program.schedule.rest)
    except CaptureFailed as error:
        graphs.whole = graphs.rest = None
        graphs.refused = str(error)
    graphs.graph_bytes = max(0, _taken_bytes(streams) - taken_bytes)


def _taken_bytes(streams: Streams) -> int:
    """Of the whole device: what another process takes at the same moment is counted, too."""
    memory = streams.driver.memory()
    return memory.total_bytes - memory.free_bytes


def _graph(streams: Streams, program: CudaProgram, commands: Commands) -> CapturedGraph:
    driver = streams.driver
    frame = program.new_frame()
    events = [driver.event() for _ in range(commands.events)]
    events[LINK_FREE] = program.link_free
    perform = program.performing(driver, frame)
    with driver.on(streams.compute):
        return driver.capture(
            program.pool, lambda: issue_inference(streams, program, commands, events, frame, perform, None)
        )
