"""Captures programs: kernels, copies and their order become one graph that a single launch replays."""

from runtime.binding.slots import Frame
from runtime.cuda.inference import issue_inference
from runtime.cuda.issue import Lanes
from runtime.cuda.lower import LINK_FREE, Commands
from runtime.cuda.program import CudaProgram
from runtime.cuda.surface import Graph
from runtime.errors import CaptureFailed


def capture(lanes: Lanes, program: CudaProgram) -> None:
    """Capture a program, in place; `ready.refused` says why not. Nothing may be under way."""
    graphs = program.ready
    if graphs.refused is not None:
        return
    taken_bytes = _taken_bytes(lanes)
    try:
        graphs.whole = _graph(lanes, program, program.schedule.whole)
        graphs.rest = graphs.whole
        if program.schedule.rest is not program.schedule.whole:
            graphs.rest = _graph(lanes, program, program.schedule.rest)
    except CaptureFailed as error:
        graphs.whole = graphs.rest = None
        graphs.refused = str(error)
    graphs.graph_bytes = max(0, _taken_bytes(lanes) - taken_bytes)


def _taken_bytes(lanes: Lanes) -> int:
    """Of the whole device: what another process takes at the same moment is counted, too."""
    memory = lanes.driver.memory()
    return memory.total_bytes - memory.free_bytes


def _graph(lanes: Lanes, program: CudaProgram, commands: Commands) -> Graph:
    driver = lanes.driver
    frame: Frame = [None] * program.frame_slots
    events = [driver.event() for _ in range(commands.events)]
    events[LINK_FREE] = program.link_free
    perform = program.performing(driver, frame)
    with driver.on(lanes.compute):
        return driver.capture(
            program.pool, lambda: issue_inference(lanes, program, commands, events, frame, perform, None)
        )
