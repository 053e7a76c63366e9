"""A checker written from docs/plan-format.md alone, on parsed JSON; the numbers are that page's rules.

It imports nothing of Cohabit's. Waits are kept as one set of ended steps for each step, copies as plain records, and
every copy is compared with every other: slow, and unlike the checker in `planner.check`.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


class Broken(Exception):
    """A rule does not hold; the message begins with its number."""


def graph_fingerprint(graph: Json) -> str:
    return canonical({**graph, "name": ""})


def canonical(data: Json) -> str:
    """Only for what has no floating-point numbers in it."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass
class Copy:
    """A tensor in memory, or one that was."""

    region: str | None
    """None where it is counted."""
    start: int
    end: int
    counted_bytes: int
    brought: set[int]
    """The step that brought it, if one did, and those that changed it."""
    steps: set[int]
    """Those, and all that used it."""

    def meets(self, other: "Copy") -> bool:
        return (
            self.region is not None
            and self.region == other.region
            and self.start < other.end
            and other.start < self.end
            and self.start < self.end
            and other.start < other.end
        )


def check_plan(graph: Json, plan: Json) -> None:
    """Raise Broken unless the plan, which names this graph, may run."""
    _names(graph, plan)
    _Walk(graph, plan).run()


def _rule(number: int, holds: bool, what: object = "") -> None:
    if not holds:
        raise Broken(f"{number}: {what}")


def _names(graph: Json, plan: Json) -> None:
    tensors, ops = range(len(graph["tensors"])), range(len(graph["ops"]))
    for placement in plan["residents"]:
        _rule(1, placement["tensor"] in tensors)
    for i, step in enumerate(plan["steps"]):
        for earlier in step.get("after", ()):
            _rule(1, 0 <= earlier < i and plan["steps"][earlier]["type"] != "drop", f"{i} waits for {earlier}")
        if step["type"] == "compute":
            _rule(1, step["op"] in ops)
        else:
            _rule(1, step["tensor"] in tensors)
    for placed in (*plan["residents"], *(s for s in plan["steps"] if s["type"] == "swap_in")):
        is_weight = graph["tensors"][placed["tensor"]]["kind"] in ("parameter", "state")
        _rule(2, placed["address"] is None or is_weight)


def _rounded(nbytes: int, multiple: int) -> int:
    while nbytes % multiple:
        nbytes += 1
    return nbytes


def _ended(plan: Json) -> list[int]:
    """For each step, the steps that have ended when it starts, as the bits of an integer."""
    latest: dict[str, int] = {}
    ended: list[int] = []
    for i, step in enumerate(plan["steps"]):
        waits = list(step.get("after", ()))
        if step["type"] in latest:
            waits.append(latest[step["type"]])
        known = 0
        for j in waits:
            known |= ended[j] | 1 << j
        ended.append(known)
        if step["type"] != "drop":
            latest[step["type"]] = i
    return ended


class _Walk:
    def __init__(self, graph: Json, plan: Json) -> None:
        self.graph, self.plan = graph, plan
        self.tensors, self.ops = graph["tensors"], graph["ops"]
        self.ended = _ended(plan)
        self.here: dict[int, Copy] = {}
        self.gone: list[Copy] = []
        self.left: dict[int, Copy] = {}  # the last copy of each tensor that was counted
        self.scratch: list[tuple[int, int]] = []  # bytes, and the step that uses them
        self.read_by_ops: set[int] = set()
        self.host: dict[int, int | None] = {}  # up-to-date host copies, and the swap-out that made each
        self.swap_outs: dict[int, list[int]] = {}
        self.unsaved: set[int] = set()
        self.changes = [0] * len(self.tensors)
        self.issued: set[int] = set()
        self.last_compute = max((i for i, s in enumerate(plan["steps"]) if s["type"] == "compute"), default=None)

    def run(self) -> None:
        self.start()
        for i, step in enumerate(self.plan["steps"]):
            getattr(self, step["type"])(i, step)
            if i == self.last_compute:
                self.answer(("parameter",))
        self.end()

    def start(self) -> None:
        memory, pool = self.plan["memory"], self.plan["pool_bytes"]
        _rule(3, memory["partition_bytes"] >= 0 and 0 <= pool <= memory["workspace_bytes"])
        kinds = [t["kind"] for t in self.tensors]
        self.host = {t: None for t, kind in enumerate(kinds) if kind in ("parameter", "state")}
        residents = [p["tensor"] for p in self.plan["residents"]]
        _rule(4, len(set(residents)) == len(residents))
        for p in self.plan["residents"]:
            _rule(4, kinds[p["tensor"]] in ("parameter", "state"))
            if p["address"] is None:
                _rule(4, memory["counted"] or self.tensors[p["tensor"]]["nbytes"] == 0)
            else:
                _rule(4, p["address"]["region"] == "partition")
        self.unsaved = {t for t in residents if kinds[t] == "state"}
        for t, kind in enumerate(kinds):
            if kind == "input":
                self.bring(None, t, None)
        for p in self.plan["residents"]:
            self.bring(None, p["tensor"], p["address"])
        self.fits(None, 0)

    def compute(self, i: int, step: Json) -> None:
        op = self.ops[step["op"]]
        for t in op["reads"]:
            self.read(i, t)
            self.read_by_ops.add(t)
        for t in op["mutates"]:
            for out in self.swap_outs.get(t, ()):
                _rule(17, self.has_ended(out, i), f"step {i} changes {t} while {out} copies it")
            self.changes[t] += 1
            self.here[t].brought.add(i)
            if self.tensors[t]["kind"] == "state":
                self.unsaved.add(t)
            self.host.pop(t, None)
        for t in op["writes"]:
            self.bring(i, t, None)
        scratch = _rounded(op["scratch_bytes"], 256)
        if scratch or any(self.here[t].counted_bytes for t in op["writes"]):
            self.fits(i, scratch)
        self.scratch.append((scratch, i))
        self.in_order(step["op"])
        self.issued.add(step["op"])

    def swap_in(self, i: int, step: Json) -> None:
        t = step["tensor"]
        _rule(12, t in self.host, f"step {i}")
        made_by = self.host[t]
        _rule(16, made_by is None or self.has_ended(made_by, i), f"step {i}")
        for j in self.left[t].steps if step["address"] is None and t in self.left else ():
            _rule(16, self.has_ended(j, i), f"step {i} returns to what {j} uses")
        self.bring(i, t, step["address"])
        if self.here[t].counted_bytes:
            self.fits(i, 0)

    def swap_out(self, i: int, step: Json) -> None:
        t = step["tensor"]
        _rule(11, self.tensors[t]["kind"] != "parameter", f"step {i}")
        self.read(i, t)
        self.host[t] = i
        self.swap_outs.setdefault(t, []).append(i)
        self.unsaved.discard(t)

    def drop(self, i: int, step: Json) -> None:
        t = step["tensor"]
        _rule(10, t in self.here, f"step {i}")
        _rule(13, t not in self.unsaved, f"step {i}")
        is_resident = any(p["tensor"] == t for p in self.plan["residents"])
        _rule(9, self.here[t].region is not None or not is_resident or t in self.read_by_ops, f"step {i}")
        if self.here[t].region is None:
            self.left[t] = self.here[t]
        self.gone.append(self.here.pop(t))

    def read(self, i: int, t: int) -> None:
        _rule(10, t in self.here, f"step {i} needs {t}")
        for j in self.here[t].brought:
            _rule(14, self.has_ended(j, i), f"step {i} reads what {j} makes")
        self.here[t].steps.add(i)

    def bring(self, i: int | None, t: int, address: Json | None) -> None:
        """Put a tensor in memory, which step i writes; None at the start."""
        _rule(10, t not in self.here, f"step {i} brings {t}")
        nbytes, alignment = self.tensors[t]["nbytes"], self.tensors[t]["alignment"]
        by = set() if i is None else {i}
        if address is None:
            self.here[t] = Copy(None, 0, 0, _rounded(nbytes, alignment), by, set(by))
            return
        start = address["offset"]
        new = Copy(address["region"], start, start + nbytes, 0, by, set(by))
        _rule(5, start >= 0 and new.end <= self.plan["memory"][f"{new.region}_bytes"], f"step {i}")
        _rule(5, new.region == "partition" or nbytes == 0 or start >= self.plan["pool_bytes"], f"step {i}")
        _rule(6, start % alignment == 0, f"step {i}")
        for other, copy in self.here.items():
            _rule(7, not new.meets(copy), f"step {i} and {other}")
        for old in self.gone:
            if new.meets(old) and i is not None:
                for j in old.steps:
                    _rule(15, self.has_ended(j, i), f"step {i} overwrites what {j} uses")
        self.here[t] = new

    def fits(self, i: int | None, scratch_bytes: int) -> None:
        """All counted bytes that may be in use when step i has taken its own are at most the pool."""
        taken = sum(copy.counted_bytes for copy in self.here.values()) + scratch_bytes
        if i is not None:
            for old in self.gone:
                if not all(self.has_ended(j, i) for j in old.steps):
                    taken += old.counted_bytes
            taken += sum(nbytes for nbytes, j in self.scratch if not self.has_ended(j, i))
        _rule(8, taken <= self.plan["pool_bytes"], f"step {i} makes it {taken} bytes")

    def in_order(self, k: int) -> None:
        for j, op in enumerate(self.ops[:k]):
            _rule(18, op["writes"] or op["mutates"] or j in self.issued, f"op {k} is issued before op {j}")
        for t in {*self.ops[k]["reads"], *self.ops[k]["writes"]}:
            due = sum(t in op["mutates"] for op in self.ops[: k + 1])
            mutated = any(t in op["mutates"] for op in self.ops)
            _rule(19, not mutated or self.changes[t] == due, f"op {k}")

    def answer(self, kinds: tuple[str, ...]) -> None:
        """Outputs of these kinds are in memory, and arrived before the last compute ended."""
        for t in self.graph["outputs"]:
            if self.tensors[t]["kind"] in kinds:
                _rule(20, t in self.here, f"output {t}")
                for j in self.here[t].brought:
                    last = self.last_compute
                    _rule(20, last is None or j == last or self.has_ended(j, last), f"output {t}")

    def end(self) -> None:
        others = ("state", "input", "activation")
        self.answer(others if self.last_compute is not None else (*others, "parameter"))
        _rule(18, self.issued == set(range(len(self.ops))))
        for p in self.plan["residents"]:
            copy = self.here.get(p["tensor"])
            _rule(21, copy is not None)
            assert copy is not None
            where = p["address"]
            _rule(21, where is None or (copy.region, copy.start) == (where["region"], where["offset"]))
        residents = {p["tensor"] for p in self.plan["residents"]}
        last = self.last_compute
        for i, step in enumerate(self.plan["steps"]):
            if step["type"] == "swap_in" and step["tensor"] not in residents:
                _rule(23, last is None or self.has_ended(i, last), f"step {i} may last into the next inference")
        _rule(22, self.unsaved <= residents)

    def has_ended(self, j: int, i: int) -> bool:
        return bool(self.ended[i] >> j & 1)
