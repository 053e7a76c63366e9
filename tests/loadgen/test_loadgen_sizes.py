import pytest

from loadgen.errors import UsageError
from loadgen.sizes import parse_memory


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("82MiB", 82 << 20), ("1.5GiB", 3 << 29), ("64KiB", 1 << 16), ("2MB", 2_000_000), ("30%", 300), ("512", 512)],
)
def test_memory_is_a_size_or_a_share(text: str, nbytes: int) -> None:
    assert parse_memory(text, weights_bytes=1000) == nbytes


@pytest.mark.parametrize("text", ["", "much", "-1MiB", "0", "5 TiB", "MiB"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="give a size such as 82MiB"):
        parse_memory(text, weights_bytes=1000)
