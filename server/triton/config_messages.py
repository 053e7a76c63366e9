"""Triton's ModelConfig messages, without importing gRPC.

The messages are a generated module in tritonclient's gRPC package, which imports the gRPC library. The module itself
needs only protocol buffers. It is loaded from its file under its own name, so that the package finds it later.
"""

# ruff: noqa: E402 - the import below finds what was loaded before it
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

_PACKAGE, _MODULE = "tritonclient.grpc", "model_config_pb2"


def _load() -> None:
    name = f"{_PACKAGE}.{_MODULE}"
    package = find_spec(_PACKAGE)
    if name in sys.modules or package is None or package.submodule_search_locations is None:
        return
    spec = spec_from_file_location(name, Path(package.submodule_search_locations[0]) / f"{_MODULE}.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


_load()

from tritonclient.grpc.model_config_pb2 import DataType as DataType
from tritonclient.grpc.model_config_pb2 import ModelConfig as ModelConfig
from tritonclient.grpc.model_config_pb2 import ModelDynamicBatching as ModelDynamicBatching
from tritonclient.grpc.model_config_pb2 import ModelInput as ModelInput
from tritonclient.grpc.model_config_pb2 import ModelInstanceGroup as ModelInstanceGroup
from tritonclient.grpc.model_config_pb2 import ModelOutput as ModelOutput
from tritonclient.grpc.model_config_pb2 import ModelQueuePolicy as ModelQueuePolicy
from tritonclient.grpc.model_config_pb2 import ModelSequenceBatching as ModelSequenceBatching
from tritonclient.grpc.model_config_pb2 import ModelWarmup as ModelWarmup
