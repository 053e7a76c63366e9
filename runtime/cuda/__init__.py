"""The CUDA backend. `driver` is the only file that touches torch.cuda, ctypes or NVML."""
