"""A plan as a report."""

from collections.abc import Iterator

from cohabit.page.document import (
    Box,
    Cell,
    Columns,
    FactTable,
    Figure,
    LaneChart,
    LaneRow,
    Lanes,
    Mark,
    MemoryOverTime,
    MemoryRegion,
    Phrase,
    Quantity,
    ReportDocument,
    Words,
    quantity,
    seconds,
    size,
)
from cohabit.planner.plan import Compute, SwapIn, SwapOut
from cohabit.planner.profile import Link
from cohabit.server.view.analysis import KINDS, LANES, Kind, Occupancy, PlanAnalysis, bytes_in_use

_LANES = (
    "What each lane does over time. The compute lane runs ops in order; the swap lanes copy parameters at the same"
    " time."
)
_MOST_ROWS = 25
_KIND_NAMES: dict[Kind, str] = {"resident": "resident parameter", "parameter": "parameter, swapped in"}
_LANE_MARKS = {
    "compute": Mark("compute", "op"),
    "swap_in": Mark("swap_in", "copy into device memory"),
    "swap_out": Mark("swap_out", "copy out of it"),
}


def plan_document(analysis: PlanAnalysis) -> ReportDocument:
    graph, memory = analysis.graph, analysis.plan.memory
    split: Phrase = ()
    if memory.partition_bytes:
        split = (size(memory.partition_bytes), " partition + ", size(memory.workspace_bytes), " workspace · ")
    counts = f"{len(graph.ops)} ops · {len(analysis.plan.steps)} steps · "
    return ReportDocument(
        title=f"{graph.name}, batch {graph.bucket}",
        subtitle=(size(analysis.memory_bytes), " of device memory: ", *split, counts, analysis.profile.device),
        sections=[
            Lanes("Lanes", _LANES, _chart(analysis)),
            Columns([[_traffic(analysis)], [_stalls(analysis), _provenance(analysis)]]),
        ],
        figures=list(_figures(analysis)),
    )


def _figures(analysis: PlanAnalysis) -> Iterator[Figure]:
    timeline, about, resident_s = analysis.timeline, analysis.plan.provenance, analysis.profile.compute_s
    latency_s, graph = timeline.latency_s, analysis.graph
    over = "with all parameters in memory"
    # The latency, and how it compares with its bounds.
    yield Figure(
        "latency",
        seconds(latency_s),
        (_above(latency_s, resident_s), f" over {over}"),
        "Predicted time of one inference, from its start until the outputs are complete.",
    )
    if about is not None:
        yield Figure(
            "gap to the bound",
            _above(latency_s, about.bound_s),
            ("bound ", seconds(about.bound_s)),
            "How far the latency is above a lower bound that holds for every plan in this memory.",
        )
    if timeline.period_s is not None:
        yield Figure(
            "back to back",
            seconds(timeline.period_s),
            ("per inference",),
            "Time per inference when one follows the other without a pause.",
        )
    # Causes of a higher latency.
    share = analysis.stall_s / latency_s if latency_s else 0.0
    yield Figure(
        "stalled",
        seconds(analysis.stall_s),
        (quantity(share, "share"), f" of it, {len(analysis.stalls)} stalls"),
        "Time in which the compute lane waits for copies.",
    )
    yield Figure(
        "slowed by copies",
        seconds(analysis.slowed_s),
        ("shared memory bandwidth",),
        "How much longer ops take because copies run at the same time.",
    )
    # Bytes: copied, resident, in use.
    yield Figure(
        "copied",
        size(timeline.link_bytes),
        (f"{len(analysis.traffic)} tensors, per inference",),
        "Bytes that each inference moves into and out of device memory.",
    )
    yield Figure(
        "resident parameters",
        size(analysis.resident_bytes),
        ("of ", size(graph.weight_bytes)),
        "Parameters that stay in device memory between inferences.",
    )
    yield Figure(
        "peak memory",
        size(analysis.peak_bytes),
        ("of ", size(analysis.memory_bytes)),
        "Most bytes that are in use at once.",
    )


def _above(latency_s: float, floor_s: float) -> Quantity:
    return quantity(latency_s / floor_s - 1 if floor_s > 0 else None, "share")


def _chart(analysis: PlanAnalysis) -> LaneChart:
    words = Words()
    rows = list(_lane_rows(analysis, words))
    marks = [_LANE_MARKS[lane] for lane, _ in LANES if analysis.spans_of(lane)]
    if analysis.stalls:
        marks.append(Mark("stall", "the compute lane waits"))
    if analysis.has_epilogue:
        marks.append(Mark("answer", "outputs complete"))
    return LaneChart(
        0.0,
        analysis.end_s,
        analysis.timeline.latency_s if analysis.has_epilogue else None,
        marks,
        rows,
        words.all,
        _memory(analysis, words),
    )


def _lane_rows(analysis: PlanAnalysis, words: Words) -> Iterator[LaneRow]:
    waited = {stall.step: stall.waits_for for stall in analysis.stalls}
    for lane, name in LANES:
        spans = analysis.spans_of(lane)
        boxes = [
            Box(_ns(span.start_s), _ns(span.end_s), lane, *_step(analysis, span.step, waited, words))
            for span in spans
        ]
        if lane == "compute":
            for stall in analysis.stalls:
                cause = None if stall.waits_for is None else analysis.name_of(stall.waits_for)
                why = f"{analysis.name_of(stall.step)} waits{f' for the {cause}' if cause else ''}"
                boxes.append(Box(_ns(stall.start_s), _ns(stall.end_s), "stall", words("stall", why)))
            boxes.sort(key=lambda box: box.start_s)
        busy_s = sum(span.end_s - span.start_s for span in spans)
        yield LaneRow(name, busy_s / analysis.end_s if spans and analysis.end_s else None, boxes)


def _step(
    analysis: PlanAnalysis, step: int, waited: dict[int, int | None], words: Words
) -> tuple[tuple[int, ...], int | None]:
    """Return a step's words, and its tensor if it copies one."""
    graph, number = analysis.graph, f"step {step}"
    match analysis.plan.steps[step]:
        case Compute(op=op):
            cause = waited.get(step)
            late = () if cause is None else (f"waited for the {analysis.name_of(cause)}",)
            return words(graph.ops[op].name, graph.ops[op].target, number, *late), None
        case SwapIn(tensor=tensor):
            kind = "swap-in, "
        case SwapOut(tensor=tensor):
            kind = "swap-out, "
        case drop:
            raise AssertionError(drop)
    return words(graph.tensors[tensor].name, (kind, size(graph.tensors[tensor].nbytes)), number), tensor


def _memory(analysis: PlanAnalysis, words: Words) -> MemoryOverTime:
    partition_bytes, nbytes = analysis.plan.memory.partition_bytes, analysis.memory_bytes
    regions = []
    if 0 < partition_bytes < nbytes:
        regions = [
            MemoryRegion("partition", 0, partition_bytes),
            MemoryRegion("workspace", partition_bytes, nbytes - partition_bytes),
        ]
    kinds = [kind for kind in KINDS if any(o.kind == kind for o in analysis.occupancies)]
    return MemoryOverTime(
        nbytes,
        regions,
        [Mark(kind, _KIND_NAMES.get(kind, kind)) for kind in kinds],
        [(_ns(time_s), [now[k] for k in kinds]) for time_s, now in bytes_in_use(analysis.occupancies)],
        [_occupied(analysis, o, words) for o in analysis.occupancies if o.nbytes],
        ("peak ", size(analysis.peak_bytes), " of ", size(nbytes)),
    )


def _occupied(analysis: PlanAnalysis, occupancy: Occupancy, words: Words) -> Box:
    graph, at = analysis.graph, occupancy.drawn_at
    if occupancy.kind == "scratch":
        name = f"scratch of {graph.ops[occupancy.what].name}"
    else:
        name = graph.tensors[occupancy.what].name
    start = at
    where = "in the pool, wherever the allocator puts it"
    if occupancy.has_address:
        region, partition_bytes = "partition", analysis.plan.memory.partition_bytes
        if at >= partition_bytes:
            region, start = "workspace", at - partition_bytes
        where = f"{region}, bytes {start:,} to {start + occupancy.nbytes:,}"
    return Box(
        _ns(occupancy.start_s),
        _ns(occupancy.end_s),
        occupancy.kind,
        words(name, (f"{_KIND_NAMES.get(occupancy.kind, occupancy.kind)}, ", size(occupancy.nbytes)), where),
        None if occupancy.kind == "scratch" else occupancy.what,
        at,
        at + occupancy.drawn_bytes,
    )


def _ns(time_s: float) -> float:
    """Round to nanoseconds: the document holds thousands of times."""
    return round(time_s, 9)


def _stalls(analysis: PlanAnalysis) -> FactTable:
    rows: list[list[Cell]] = [
        [
            seconds(stall.seconds),
            seconds(stall.start_s),
            analysis.name_of(stall.step).removeprefix("op "),
            "" if stall.waits_for is None else analysis.name_of(stall.waits_for),
        ]
        for stall in analysis.longest_stalls
    ]
    return FactTable(
        "Stalls",
        "The compute lane had nothing to run, because parameters had not arrived.",
        ["waits", "at", "op", "for"],
        rows[:_MOST_ROWS],
        "None: the compute lane never waits.",
        max(0, len(rows) - _MOST_ROWS),
    )


def _traffic(analysis: PlanAnalysis) -> FactTable:
    rows: list[list[Cell]] = []
    for row in analysis.traffic[:_MOST_ROWS]:
        tensor = analysis.graph.tensors[row.tensor]
        times = [quantity(count or None, "times") for count in (row.swapped_in, row.swapped_out)]
        rows.append([tensor.name, tensor.kind, size(tensor.nbytes), *times, size(row.nbytes)])
    return FactTable(
        "Copied bytes by tensor",
        "What one inference moves between host memory and device memory.",
        ["tensor", "kind", "size", "in", "out", "copied"],
        rows,
        "Nothing is copied: every parameter is resident.",
        max(0, len(analysis.traffic) - _MOST_ROWS),
    )


def _provenance(analysis: PlanAnalysis) -> FactTable:
    plan, profile, about = analysis.plan, analysis.profile, analysis.plan.provenance
    rows: list[list[Cell]] = []
    if about is not None:
        rows = [
            ["searcher", about.searcher],
            ["seed", str(about.seed)],
            ["evaluations", str(about.evaluations)],
            ["first plan", seconds(about.baseline_s)],
            ["lower bound", seconds(about.bound_s)],
        ]
    rows += [
        ["all resident", seconds(profile.compute_s)],
        ["device", profile.device],
        ["swap in", _link(profile.swap_in)],
        ["swap out", _link(profile.swap_out)],
        ["an op during a copy", ("takes ", quantity(profile.compute_slowdown, "times"), " as long")],
        ["a copy during an op", ("takes ", quantity(profile.swap_slowdown, "times"), " as long")],
        ["weights", analysis.graph.weights],
        ["graph", plan.graph],
        ["profile", plan.profile],
        ["plan", plan.fingerprint],
    ]
    return FactTable("How it was made", "", [], rows)


def _link(link: Link) -> Phrase:
    return quantity(link.bandwidth_bytes_per_s, "bytes/s"), " after ", seconds(link.latency_s)
