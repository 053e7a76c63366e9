"""The profile: how long each op of one graph takes on one device, and how fast its link is."""

from functools import cached_property
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from cohabit.planner.graph import Tensor, decode_as, fingerprint

FORMAT_VERSION = 5
"""Version 1 had a cost per script segment, and measured op times differently; 2 had no noise, 3 no window, 4 no time
of the host."""


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One direction of the link between host store and device memory."""

    latency_s: Annotated[float, Meta(ge=0)]
    bandwidth_bytes_per_s: Annotated[float, Meta(gt=0)]

    def seconds(self, nbytes: int) -> float:
        """Time of one transfer of `nbytes` with nothing else running."""
        return self.latency_s + nbytes / self.bandwidth_bytes_per_s


NOISY = 0.2
"""A profile with more noise was taken on a busy machine: its times are estimates."""


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """Measured costs. `op_seconds[i]` belongs to `graph.ops[i]`."""

    graph: str
    """Fingerprint of the graph that was measured."""
    device: str
    op_seconds: tuple[Annotated[float, Meta(ge=0)], ...]
    swap_in: Link
    swap_out: Link
    compute_slowdown: Annotated[float, Meta(ge=1)] = 1.0
    """Factor by which an op takes longer while a transfer is in flight."""
    swap_slowdown: Annotated[float, Meta(ge=1)] = 1.0
    """Factor by which a transfer takes longer while an op runs."""
    provisional: bool = False
    """From a single run, without slowdowns, to be replaced by a full measurement."""
    noise: float = 0.0
    """How much longer than the fastest run the median run took, as a share, or how much was subtracted from all ops'
    times, if that is more: other work slowed this one down."""
    host_s: float = 0.0
    """What an inference takes on the host of a device of its own, while that does not compute: copies of inputs and
    outputs, and launches. It is part of no plan's latency."""
    window_bytes: int = 0
    """Parameters that stream through so few bytes are copied, and read, in the processor's cache: link and slowdowns
    were measured so, and plans stream through no more. 0 where the size makes no difference."""
    encoded: tuple[tuple[str, Link], ...] | UnsetType = UNSET
    """The link for tensors that the host store has encoded, by codec: bytes are those in memory, and decoding is part
    of the time."""
    format_version: int = FORMAT_VERSION

    @cached_property
    def fingerprint(self) -> str:
        """Hex SHA-256 of the profile's canonical JSON. A whole number counts as the float that it is read back as."""
        return fingerprint(_decoder.decode(encode(self)))

    def link_of(self, tensor: Tensor) -> Link:
        """Return the link that a tensor is copied into memory over."""
        if tensor.codec is UNSET:
            return self.swap_in
        return self._link_by_codec.get(tensor.codec, self.swap_in)

    @cached_property
    def _link_by_codec(self) -> dict[str, Link]:
        return dict(self.encoded or ())

    def swap_in_seconds(self, tensor: Tensor) -> float:
        """Time to copy a tensor into memory, with nothing else running."""
        return self.link_of(tensor).seconds(tensor.nbytes)

    @cached_property
    def compute_s(self) -> float:
        """Time of one inference with every parameter resident."""
        return sum(self.op_seconds)


_decoder = msgspec.json.Decoder(Profile)


def encode(profile: Profile) -> bytes:
    return msgspec.json.encode(profile)


def decode(raw: bytes) -> Profile:
    """Read a profile. Raises FormatError."""
    return decode_as(raw, _decoder, "profile", FORMAT_VERSION)
