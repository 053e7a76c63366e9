"""Execution of tiled programs by several processes on torch.distributed.

from cohabit.runtime.tiling.execute import measured
from cohabit.runtime.tiling.worker import start
outputs = start(functools.partial(execute_program, ...), workers=4)
"""
