"""Calls of CUDA's driver API without a torch binding: device memory outside torch, and pinned host memory.

Unlike errors of the runtime API, its errors are not reported again by a later call.
"""

import ctypes

_OUT_OF_MEMORY = 2
_PORTABLE, _MAPPED = 1, 2


class LibCudaError(RuntimeError):
    """A call failed; the text has CUDA's error name."""


class OutOfDeviceMemory(LibCudaError):
    """The device has no range of that size."""


class LibCuda:
    """Calls in the calling thread's current context. Raises OSError without a CUDA driver."""

    def __init__(self, library: ctypes.CDLL | None = None) -> None:
        self._library = ctypes.CDLL("libcuda.so.1") if library is None else library

    def allocate(self, nbytes: int) -> int:
        """Return the address of new device memory. Raises OutOfDeviceMemory."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def pin(self, address: int, nbytes: int) -> None:
        """Pin host memory and map it into the device's address space, for all contexts, at the same address."""
        flags = ctypes.c_uint(_PORTABLE | _MAPPED)
        self._call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(nbytes), flags)

    def unpin(self, address: int) -> None:
        self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    def _call(self, name: str, *arguments: object) -> None:
        status = int(getattr(self._library, name)(*arguments))
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(ctypes.c_int(status), ctypes.byref(text))
            error = OutOfDeviceMemory if status == _OUT_OF_MEMORY else LibCudaError
            raise error(f"{name}: {(text.value or b'unknown').decode()} ({status})")
