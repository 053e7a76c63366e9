"""What each of gRPC's calls needs a token for."""

from server.observe.access import Permission

_HEALTH_CALLS = frozenset({"ServerLive", "ServerReady", "Check", "Watch"})
_CONTROL_CALLS = frozenset(
    {
        "RepositoryModelLoad",
        "RepositoryModelUnload",
        "SystemSharedMemoryRegister",
        "SystemSharedMemoryUnregister",
        "CudaSharedMemoryRegister",
        "CudaSharedMemoryUnregister",
        "TraceSetting",
        "LogSettings",
    }
)


def permission_of(call: str) -> Permission:
    """What a call by its name needs."""
    if call in _HEALTH_CALLS:
        return Permission.HEALTH
    return Permission.CONTROL if call in _CONTROL_CALLS else Permission.INFERENCE
