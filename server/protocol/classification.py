"""Triton's classification extension: the largest values of an output, as strings with their indices."""

import numpy as np

from cohabit.server.ipc.model import Array, TensorSpec
from cohabit.server.protocol.datatypes import BF16, float32_of_bf16


def classify(array: Array, tensor: TensorSpec, classes: int, batched: bool) -> Array:
    """Return `value:index` or `value:index:label` of the largest values, a row of bytes objects per sample.

    Indices count a sample's values in memory order. Among equal values, the lower index comes first.
    """
    values = float32_of_bf16(array) if tensor.datatype == BF16 else array
    rows = values.reshape(values.shape[0], -1) if batched else values.reshape(1, -1)
    count = min(classes, rows.shape[1])
    classified = np.empty((rows.shape[0], count), object)
    form = "%f:%d" if rows.dtype.kind == "f" else "%d:%d"
    for row, texts in zip(rows, classified, strict=True):
        texts[:] = [(form % (row[index], index) + _label(tensor, index)).encode() for index in _largest(row, count)]
    return classified if batched else classified.reshape(count)


def _label(tensor: TensorSpec, index: int) -> str:
    known = index < len(tensor.labels) and tensor.labels[index]
    return f":{tensor.labels[index]}" if known else ""


def _largest(row: Array, count: int) -> Array:
    """Return the indices of the largest values, descending; NaN counts as the smallest."""
    if count == 0:
        return np.empty(0, np.intp)
    keys = np.where(np.isnan(row), -np.inf, row) if row.dtype.kind == "f" else row
    threshold = np.partition(keys, -count)[-count]
    candidates = np.flatnonzero(keys >= threshold)[::-1]
    ascending = np.argsort(keys[candidates], kind="stable")  # reversed below, which puts the lower index first
    return candidates[ascending[::-1]][:count]
