"""Resize: F.interpolate where it computes the same, else weighted sums of selected rows and columns."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cohabit.server.importing.onnx.known import sym_int
from cohabit.server.importing.onnx.registry import NodeCall, Value, operator_of

_LINEAR = ("", "", "", "linear", "bilinear", "trilinear")
"""F.interpolate's names of linear interpolation, by the number of dimensions."""


@operator_of("Resize")
def _resize(call: NodeCall) -> Value:
    x, mode = call.tensor(), call.attr("mode", "nearest")
    scales = call.sizes("scales", 2) or None
    wanted = None if scales else call.sizes("sizes", 3)
    axes = [axis % x.dim() for axis in call.attr("axes") or range(x.dim())]
    call.require(call.attr("keep_aspect_ratio_policy", "stretch") == "stretch", "keep_aspect_ratio_policy")
    rule = call.attr("coordinate_transformation_mode", "half_pixel")
    rule = "half_pixel" if rule == "half_pixel_symmetric" and scales is None else rule
    call.require(rule in _SOURCES, f"coordinate_transformation_mode={rule}")
    call.require(not call.attr("antialias", 0), "antialias")
    call.require(not call.attr("exclude_outside", 0), "exclude_outside")
    # The size of each resized dimension, and its scale.
    resized: dict[int, tuple[Any, Any]] = {}
    for index, axis in enumerate(axes):
        size = x.shape[axis]
        if wanted is not None:
            if wanted[index] != size:
                resized[axis] = wanted[index], wanted[index] / size
        elif scales is not None and scales[index] != 1.0:
            scale = scales[index]
            resized[axis] = size * int(scale) if scale == int(scale) else sym_int(size * scale), scale
    if not resized:
        return x
    given = None if scales is None else [resized[axis][1] if axis in resized else 1.0 for axis in range(2, x.dim())]
    whole = _interpolated(call, x, mode, rule, [resized.get(a, (x.shape[a],))[0] for a in range(2, x.dim())], given)
    if whole is not None and min(resized) >= 2:
        return whole
    a = call.attr("cubic_coeff_a", -0.75)
    call.require(mode != "cubic", f"mode=cubic with coordinate_transformation_mode={rule} and cubic_coeff_a={a}")
    for axis, (new, scale) in resized.items():
        x = _along(
            call, x, axis, mode, _SOURCES[rule](torch.arange(new, dtype=torch.float32), x.shape[axis], new, scale)
        )
    return x


def _interpolated(
    call: NodeCall, x: Tensor, mode: str, rule: str, new: list[Any], scales: list[float] | None
) -> Tensor | None:
    """Resize an image with F.interpolate; None if it has other rules."""
    if not 3 <= x.dim() <= 5:
        return None
    given: dict[str, Any] = {"size": new} if scales is None else {"scale_factor": scales}
    if mode == "nearest":
        rounded = call.attr("nearest_mode", "round_prefer_floor")
        doubles = scales is not None and all(scale in (1.0, 2.0) for scale in scales)
        if (rule == "asymmetric" and rounded == "floor") or (
            rule == "half_pixel" and doubles and rounded.startswith("round")
        ):
            return F.interpolate(x, **given, mode="nearest")
        return None
    corners = rule == "align_corners"
    same = corners or rule == "half_pixel" or (rule == "pytorch_half_pixel" and all(n != 1 for n in new))
    if mode == "linear" and same:
        return F.interpolate(x, **given, mode=_LINEAR[x.dim()], align_corners=corners)
    if mode == "cubic" and same and x.dim() == 4 and call.attr("cubic_coeff_a", -0.75) == -0.75:
        return F.interpolate(x, **given, mode="bicubic", align_corners=corners)
    return None


_SOURCES: dict[str, Callable[[Tensor, Any, Any, Any], Tensor]] = {
    "half_pixel": lambda n, old, new, scale: (n + 0.5) / scale - 0.5,
    "pytorch_half_pixel": lambda n, old, new, scale: (n + 0.5) / scale - 0.5 if new > 1 else n * 0,
    "align_corners": lambda n, old, new, scale: n * ((old - 1) / (new - 1)) if new > 1 else n * 0,
    "asymmetric": lambda n, old, new, scale: n / scale,
    "tf_half_pixel_for_nn": lambda n, old, new, scale: (n + 0.5) / scale,
}
"""Places in the old dimension, by the places in the new one, both sizes and the scale."""
_ROUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round_prefer_floor": lambda place: torch.ceil(place - 0.5),
    "round_prefer_ceil": lambda place: torch.floor(place + 0.5),
}


def _along(call: NodeCall, x: Tensor, axis: int, mode: str, place: Tensor) -> Tensor:
    """Resize one dimension, given the place in it of each new element."""
    size = x.shape[axis]

    def at(index: Tensor) -> Tensor:
        return x.index_select(axis, index.clamp(0, size - 1).long())

    if mode == "nearest":
        return at(_ROUNDED[call.attr("nearest_mode", "round_prefer_floor")](place))
    shape = [-1, *[1] * (x.dim() - 1 - axis)]
    place = place.clamp(0, size - 1)
    low = torch.floor(place)
    share = (place - low).reshape(shape).to(x.dtype)
    return at(low) * (1 - share) + at(low + 1) * share
