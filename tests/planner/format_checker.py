"""A checker written from docs/plan-format.md alone, on parsed JSON; the numbers are that page's rules.

It imports nothing of Cohabit's. Waits are kept as one set of ended steps for each step, stays as plain records, and
every stay is compared with every other: slow, and unlike the checker in `planner.check`.
"""

import hashlib
import json
from dataclasses import dataclass, field
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
class Use:
    """Bytes that were somebody's, and the steps that used them."""

    region: str
    start: int
    end: int
    steps: set[int]

    def meets(self, other: "Use") -> bool:
        return (
            self.region == other.region
            and self.start < other.end
            and other.start < self.end
            and self.start < self.end
            and other.start < other.end
        )


@dataclass
class Copy(Use):
    """A tensor in memory."""

    brought: set[int] = field(default_factory=set)
    """The step that brought it, if one did, and those that changed it."""


def check_plan(graph: Json, plan: Json) -> None:
    """Raise Broken unless the plan, which names this graph, may run."""
    _names(graph, plan)
    _Walk(graph, plan).run()


def _rule(number: int, holds: bool, what: object = "") -> None:
    if not holds:
        raise Broken(f"{number}: {what}")


def _names(graph: Json, plan: Json) -> None:
    tensors, ops = range(len(graph["tensors"])), range(len(graph["ops"]))
    for placement in (*plan["inputs"], *plan["residents"]):
        _rule(1, placement["tensor"] in tensors)
    for i, step in enumerate(plan["steps"]):
        for earlier in step.get("after", ()):
            _rule(1, 0 <= earlier < i and plan["steps"][earlier]["type"] != "drop", f"{i} waits for {earlier}")
        if step["type"] != "compute":
            _rule(1, step["tensor"] in tensors)
            continue
        _rule(1, step["op"] in ops)
        op = graph["ops"][step["op"]]
        _rule(2, len(step["outputs"]) == len(op["writes"]))
        _rule(2, op["scratch_bytes"] == 0 or step["scratch"] is not None)


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
        self.gone: list[Use] = []
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
        _rule(5, min(self.plan["partition_bytes"], self.plan["workspace_bytes"]) >= 0)
        kinds = [t["kind"] for t in self.tensors]
        self.host = {t: None for t, kind in enumerate(kinds) if kind in ("parameter", "state")}
        inputs = [p["tensor"] for p in self.plan["inputs"]]
        _rule(3, sorted(inputs) == [t for t, kind in enumerate(kinds) if kind == "input"])
        residents = [p["tensor"] for p in self.plan["residents"]]
        _rule(4, len(set(residents)) == len(residents))
        for p in self.plan["inputs"]:
            _rule(3, self.plan["workspace_bytes"] == 0 or p["address"]["region"] == "workspace")
        for p in self.plan["residents"]:
            _rule(4, kinds[p["tensor"]] in ("parameter", "state") and p["address"]["region"] == "partition")
        self.unsaved = {t for t in residents if kinds[t] == "state"}
        for p in (*self.plan["inputs"], *self.plan["residents"]):
            self.bring(None, p["tensor"], p["address"])

    def compute(self, i: int, step: Json) -> None:
        op = self.ops[step["op"]]
        for t in op["reads"]:
            self.read(i, t)
        for t in op["mutates"]:
            for out in self.swap_outs.get(t, ()):
                _rule(15, self.has_ended(out, i), f"step {i} changes {t} while {out} copies it")
            self.changes[t] += 1
            self.here[t].brought.add(i)
            if self.tensors[t]["kind"] == "state":
                self.unsaved.add(t)
            self.host.pop(t, None)
        for t, address in zip(op["writes"], step["outputs"], strict=True):
            self.bring(i, t, address)
        if op["scratch_bytes"]:
            self.gone.append(self.take(i, step["scratch"], op["scratch_bytes"], 1))
        self.in_order(step["op"])
        self.issued.add(step["op"])

    def swap_in(self, i: int, step: Json) -> None:
        t = step["tensor"]
        _rule(10, t in self.host, f"step {i}")
        made_by = self.host[t]
        _rule(14, made_by is None or self.has_ended(made_by, i), f"step {i}")
        self.bring(i, t, step["address"])

    def swap_out(self, i: int, step: Json) -> None:
        t = step["tensor"]
        _rule(9, self.tensors[t]["kind"] != "parameter", f"step {i}")
        self.read(i, t)
        self.host[t] = i
        self.swap_outs.setdefault(t, []).append(i)
        self.unsaved.discard(t)

    def drop(self, i: int, step: Json) -> None:
        _rule(8, step["tensor"] in self.here, f"step {i}")
        _rule(11, step["tensor"] not in self.unsaved, f"step {i}")
        self.gone.append(self.here.pop(step["tensor"]))

    def read(self, i: int, t: int) -> None:
        _rule(8, t in self.here, f"step {i} needs {t}")
        for j in self.here[t].brought:
            _rule(12, self.has_ended(j, i), f"step {i} reads what {j} makes")
        self.here[t].steps.add(i)

    def bring(self, i: int | None, t: int, address: Json) -> None:
        _rule(8, t not in self.here, f"step {i} brings {t}")
        use = self.take(i, address, self.tensors[t]["nbytes"], self.tensors[t]["alignment"])
        self.here[t] = Copy(use.region, use.start, use.end, use.steps, set(use.steps))

    def take(self, i: int | None, address: Json, nbytes: int, alignment: int) -> Use:
        """Bytes for something that step i writes; None at the start."""
        start = address["offset"]
        use = Use(address["region"], start, start + nbytes, set() if i is None else {i})
        _rule(5, start >= 0 and use.end <= self.plan[f"{use.region}_bytes"], f"step {i}")
        _rule(6, start % alignment == 0, f"step {i}")
        for t, copy in self.here.items():
            _rule(7, not use.meets(copy), f"step {i} and {t}")
        for old in self.gone:
            if use.meets(old) and i is not None:
                for j in old.steps - {i}:
                    _rule(13, self.has_ended(j, i), f"step {i} overwrites what {j} uses")
                _rule(7, i not in old.steps)
        return use

    def in_order(self, k: int) -> None:
        for t in {*self.ops[k]["reads"], *self.ops[k]["writes"]}:
            due = sum(t in op["mutates"] for op in self.ops[: k + 1])
            mutated = any(t in op["mutates"] for op in self.ops)
            _rule(17, not mutated or self.changes[t] == due, f"op {k}")

    def answer(self, kinds: tuple[str, ...]) -> None:
        """Outputs of these kinds are in memory, and arrived before the last compute ended."""
        for t in self.graph["outputs"]:
            if self.tensors[t]["kind"] in kinds:
                _rule(18, t in self.here, f"output {t}")
                for j in self.here[t].brought:
                    last = self.last_compute
                    _rule(18, last is None or j == last or self.has_ended(j, last), f"output {t}")

    def end(self) -> None:
        others = ("state", "input", "activation")
        self.answer(others if self.last_compute is not None else (*others, "parameter"))
        _rule(16, self.issued == set(range(len(self.ops))))
        for p in self.plan["residents"]:
            copy = self.here.get(p["tensor"])
            _rule(19, copy is not None)
            assert copy is not None
            _rule(19, (copy.region, copy.start) == (p["address"]["region"], p["address"]["offset"]))
        _rule(20, self.unsaved <= {p["tensor"] for p in self.plan["residents"]})

    def has_ended(self, j: int, i: int) -> bool:
        return bool(self.ended[i] >> j & 1)
