"""Execution of tiled programs by several processes on torch.distributed.tensor.

from cohabit.runtime.tiling import execute, start
outputs = start(functools.partial(execute_program, ...), workers=4)
"""
