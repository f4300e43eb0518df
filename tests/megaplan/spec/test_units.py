"""Sizes are parsed exactly or refused; display never loses a sign or a unit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaplan.units import format_bytes, format_figure, format_gib, format_ns, parse_bytes, short_count


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GiB", 4 * 2**30),
        ("512 MiB", 512 * 2**20),
        ("80GB", 80 * 10**9),
        ("1.5KiB", 1536),
        ("0B", 0),
        ("7 b", 7),
        (" 1tib ", 2**40),
        ("0.5kB", 500),
    ],
)
def test_sizes_are_exact(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4", "has no unit"), ("", "is not a size"), ("GiB", "is not a size"), ("4 gigs", "unknown unit 'gigs'"),
        ("-4GiB", "is not a size"), ("1.5B", "not a whole number"), ("1e3MiB", "is not a size"), ("inf GiB", "is not a size"),
        ("4GiB 2MiB", "is not a size"), ("9" * 5000 + "B", "is not a size"),
    ],
)  # fmt: skip
def test_what_is_no_size_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_bytes(text)


@given(st.integers(min_value=0, max_value=2**50))
def test_whole_bytes_survive(size: int) -> None:
    assert parse_bytes(f"{size}B") == size


@given(st.integers(min_value=1, max_value=2**60))
def test_display_is_within_half_a_digit(size: int) -> None:
    number, unit = format_bytes(size).split()
    factor = parse_bytes(f"1{unit}")
    assert abs(float(number) * factor - size) <= 0.005 * factor + 1e-6 * size
    assert format_bytes(-size) == f"-{format_bytes(size)}"


def test_display_by_example() -> None:
    assert [format_bytes(size) for size in (0, 1023, 1024, 3 * 2**29, -(3 * 2**20))] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "1.50 GiB",
        "-3.00 MiB",
    ]
    assert format_gib(2**30) == "1.00"
    assert [short_count(count) for count in (512, 131_072, 4_726_404_962)] == ["512", "131.07 K", "4.73 B"]
    assert [format_ns(ns) for ns in (12, 1_500, 1_500_000, 2 * 10**9)] == ["12 ns", "1.50 µs", "1.50 ms", "2.00 s"]


def test_a_figure_has_three_digits_at_least() -> None:
    shown = {value: format_figure(value) for value in (0.012345, 6.0578, 999.4, 999.6, 2684.35, -1500.0, 0.0)}
    assert shown == {0.012345: "0.0123", 6.0578: "6.06", 999.4: "999", 999.6: "1,000", 2684.35: "2,684", -1500.0: "-1,500", 0.0: "0"}
