"""Notices about models for the log, `cohabit check` and `cohabit import`."""

import logging
from collections.abc import Sequence

import torch

from cohabit.planner.errors import format_bytes
from cohabit.planner.profile import NOISY
from cohabit.runtime.lowering import packing
from cohabit.runtime.lowering.allowed_ops import draws
from cohabit.runtime.lowering.lower import Lowered
from cohabit.runtime.lowering.rewrites.linear_forms import Form, forms_of
from cohabit.server.config.config import ServeConfig
from cohabit.server.deploy.model import Model

_log = logging.getLogger("cohabit.models")


def warn_of_interaction(lowered: Lowered) -> None:
    """Log the reason if a model's requests cannot be padded or batched."""
    if lowered.interaction is not None:
        fields = {"model": lowered.name, "reason": lowered.interaction, "batch_sizes": list(lowered.batches)}
        _log.warning(
            "rows of a batch influence one another; requests run alone, at planned batch sizes only",
            extra={"fields": fields},
        )


def warn_of_validation(lowered: Lowered) -> None:
    """Log the rewrites that were left out because outputs differed from the archive's."""
    for left_out in () if lowered.validation is None else lowered.validation.left_out:
        text = f"served without a rewrite that changes the model's outputs: {left_out}"
        _log.warning(text, extra={"fields": {"model": lowered.name, "rewrite": left_out.rewrite}})


def stored_words(lowered: Lowered) -> str | None:
    """Return the stored size of encoded weights and its cost in accuracy, as text; None for unencoded weights."""
    encoding, nbytes = lowered.encoding, lowered.manifest.file_bytes
    if encoding is None and nbytes >= lowered.weight_bytes:
        return None
    stored = f"{format_bytes(nbytes)} of {format_bytes(lowered.weight_bytes)} are stored and copied"
    if encoding is None:
        return f"{stored}, in 16 bits where that is exact"
    costs = "; ".join(map(str, encoding.outputs))
    if encoding.unchecked is not None:
        costs = f"outputs were not compared: {encoding.unchecked}"
    kept = f"; {', '.join(encoding.kept)} stay exact, which change outputs too much" if encoding.kept else ""
    return f"{stored}, in {encoding.codec}; beside exact weights, {costs}{kept}"


def log_stored(lowered: Lowered) -> None:
    """Log the stored size of a model's weights, if they are encoded."""
    if (words := stored_words(lowered)) is not None:
        _log.info("weights take fewer bytes", extra={"fields": {"model": lowered.name, "weights": words}})


CHANGES_ARE_LOST = "the program changes them in place, which callers do not see; return them as outputs instead"


def warn_of_changed_inputs(lowered: Lowered) -> None:
    """Log the inputs that a model's program changes in place."""
    if lowered.changed_inputs:
        names = ", ".join(lowered.changed_inputs)
        _log.warning(f"inputs {names}: {CHANGES_ARE_LOST}", extra={"fields": {"model": lowered.name}})


def random_ops(lowered: Lowered) -> list[str]:
    """Return the names of a model's operators that draw random numbers."""
    calls = [i for trace in lowered.traces.values() for i in trace.instructions]
    return sorted({str(i.target) for i in calls if draws(i.target, i.args, i.kwargs)})


def linear_forms(lowered: Lowered) -> dict[Form, int]:
    """Return the number of linear layers per form, in the largest bucket."""
    return forms_of(call.target for call in lowered.traces[max(lowered.buckets)].instructions)


FORGOTTEN_EVAL = (
    "its dropout is in training mode; if that is not meant, call .eval() of the module before torch.export.export"
)


def is_training(random: Sequence[str]) -> bool:
    """Whether random operators include dropout, which draws numbers only in training mode."""
    return any("dropout" in name for name in random)


def warn_of_random_ops(lowered: Lowered) -> None:
    """Log a model's operators that draw random numbers: equal requests get different answers."""
    if random := random_ops(lowered):
        fields = {"model": lowered.name, "operators": random}
        hint = f"; {FORGOTTEN_EVAL}" if is_training(random) else ""
        _log.warning(
            f"the model draws random numbers; equal requests have different answers{hint}", extra={"fields": fields}
        )


def warn_of_noise(models: Sequence[Model], *, measured_again: bool) -> None:
    """Log, in one line, the models with noisy measurements, and when these are repeated."""
    noise = {m.key.name: m.noise for m in models}
    if noisy := {name: share for name, share in noise.items() if share > NOISY}:
        when = "once it is quiet" if measured_again else "at the next start after `cohabit cache remeasure MODEL`"
        fields = {"models": sorted(noisy), "noise": round(max(noisy.values()), 2), "limit": NOISY}
        _log.warning(f"a busy machine disturbed measurements; they are made again {when}", extra={"fields": fields})


def warn_without_packing(config: ServeConfig) -> None:
    """Log the reason if weights cannot be packed on the CPU."""
    if config.device == "cpu" and (reason := packing.unavailable()) is not None:
        fields = {"torch": str(torch.__version__), "reason": reason}
        _log.warning("weights are not packed, which makes kernels slower", extra={"fields": fields})
