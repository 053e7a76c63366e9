"""The CUDA backend. Only `driver` and `pools` touch torch.cuda, ctypes or NVML."""
