"""The CUDA backend. Only `driver`, `pools` and `libcuda` touch torch.cuda, ctypes or NVML."""
