"""How slowly a client may send what its request is made of, by any protocol."""

PATIENCE_S = 30.0
LEAST_BYTES_PER_S = 4096
"""What a client has to send on average, after the first `PATIENCE_S`."""


def patience_s(received_bytes: int) -> float:
    """How long the whole may take of which so many bytes have come."""
    return PATIENCE_S + received_bytes / LEAST_BYTES_PER_S
