"""Profiles: measured op times of one graph on one device, and the speed of its link."""

from functools import cached_property
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from cohabit.planner.graph import Tensor, decode_as, fingerprint

FORMAT_VERSION = 5
"""Version 1 had a cost per script segment and measured op times differently. Version 2 lacked `noise`, 3
`window_bytes`, 4 `host_s`."""


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One direction of the link between host store and device memory."""

    latency_s: Annotated[float, Meta(ge=0)]
    bandwidth_bytes_per_s: Annotated[float, Meta(gt=0)]

    def seconds(self, nbytes: int) -> float:
        """Time of one transfer of `nbytes` while nothing else runs."""
        return self.latency_s + nbytes / self.bandwidth_bytes_per_s


NOISY = 0.2
"""Limit on `Profile.noise`: noisier profiles were taken on a busy machine, and their times are estimates."""


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True, weakref=True):
    """Measured costs. `op_seconds[i]` belongs to `graph.ops[i]`."""

    graph: str
    """Fingerprint of the measured graph."""
    device: str
    op_seconds: tuple[Annotated[float, Meta(ge=0)], ...]
    swap_in: Link
    swap_out: Link
    compute_slowdown: Annotated[float, Meta(ge=1)] = 1.0
    """Factor on the time of an op while a transfer is in flight."""
    swap_slowdown: Annotated[float, Meta(ge=1)] = 1.0
    """Factor on the time of a transfer while an op runs."""
    provisional: bool = False
    """Whether this is from a single run, without slowdowns; a full measurement replaces it."""
    noise: float = 0.0
    """Disturbance by other work. The largest of: the relative excess of the median run over the fastest, the fraction
    subtracted from all op times, and the fraction of the CPUs that other processes used during the measurement."""
    host_s: float = 0.0
    """Seconds of an inference in which the host works and a discrete device idles: copies of inputs and outputs, and
    launches. Not part of any plan's latency."""
    window_bytes: int = 0
    """Maximum bytes through which plans stream parameters, so that copies stay in the processor's cache until they are
    read. Link and slowdowns were measured under this limit. 0 if the size makes no difference."""
    encoded: tuple[tuple[str, Link], ...] | UnsetType = UNSET
    """Links for encoded tensors of the host store, by codec. Bytes are counted decoded, and times include decoding."""
    format_version: int = FORMAT_VERSION

    @cached_property
    def fingerprint(self) -> str:
        """Hex SHA-256 of the profile's canonical JSON, with whole numbers in float fields written as floats."""
        return fingerprint(_decoder.decode(encode(self)))

    def link_of(self, tensor: Tensor) -> Link:
        """Return the link over which a tensor is swapped in."""
        if tensor.codec is UNSET:
            return self.swap_in
        return self._link_by_codec.get(tensor.codec, self.swap_in)

    @cached_property
    def _link_by_codec(self) -> dict[str, Link]:
        return dict(self.encoded or ())

    def swap_in_seconds(self, tensor: Tensor) -> float:
        """Time to copy a tensor into memory while nothing else runs."""
        return self.link_of(tensor).seconds(tensor.nbytes)

    @cached_property
    def compute_s(self) -> float:
        """Time of one inference with every parameter resident."""
        return sum(self.op_seconds)


_decoder = msgspec.json.Decoder(Profile)


def encode(profile: Profile) -> bytes:
    return msgspec.json.encode(profile)


def decode(raw: bytes) -> Profile:
    """Decode a profile. Raises FormatError."""
    return decode_as(raw, _decoder, "profile", FORMAT_VERSION)
