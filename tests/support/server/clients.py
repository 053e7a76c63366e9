"""tritonclient over either protocol behind one face, for tests that say the same of both."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from tests.support.server.server_http import Listening

PROTOCOLS = ("http", "grpc")


@dataclass(frozen=True)
class Client:
    """`api` is the tritonclient of one protocol, `raw` a client of it; answers come in HTTP's JSON forms."""

    protocol: str
    api: ModuleType
    raw: Any

    def input(self, name: str, array: np.ndarray[Any, Any], datatype: str) -> Any:
        made = self.api.InferInput(name, list(array.shape), datatype)
        made.set_data_from_numpy(array)
        return made

    def input_in(
        self, region: str, name: str, shape: Sequence[int], datatype: str, nbytes: int, offset: int = 0
    ) -> Any:
        made = self.api.InferInput(name, list(shape), datatype)
        made.set_shared_memory(region, nbytes, offset)
        return made

    def output_in(self, region: str, name: str, nbytes: int, offset: int = 0) -> Any:
        made = self.api.InferRequestedOutput(name)
        made.set_shared_memory(region, nbytes, offset)
        return made

    def status(self, error: Any) -> str:
        return str(error.status()).removeprefix("StatusCode.")

    def system_regions(self) -> dict[str, dict[str, Any]]:
        """Registered regions by name."""
        if self.protocol == "http":
            return {region["name"]: region for region in self.raw.get_system_shared_memory_status()}
        status = self.raw.get_system_shared_memory_status()
        return {
            name: {"name": r.name, "key": r.key, "offset": r.offset, "byte_size": r.byte_size}
            for name, r in status.regions.items()
        }


def connect(server: Listening, protocol: str) -> Client:
    if protocol == "http":
        return Client(protocol, triton_http, triton_http.InferenceServerClient(server.address))
    return Client(protocol, triton_grpc, triton_grpc.InferenceServerClient(server.grpc))
