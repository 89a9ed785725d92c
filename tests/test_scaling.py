"""The scaling curve of planning and index, from a thousand shards to a million.

A benchmark, not a timed test: it asserts only that every size goes through, and prints the curve.
Run on request: ``pytest -m benchmark -s tests/test_scaling.py``; ``scripts/bench scale`` is the
same.
"""

import pytest

from megatron_uring.bench import report, scale


@pytest.mark.benchmark
@pytest.mark.timeout(1800)
def test_scaling_curve(tmp_path):
    points = scale.measure(str(tmp_path))
    report.print_scale(points)
    assert [point["reason"] for point in points] == [""] * len(scale.SIZES) * len(scale.SHAPES)


@pytest.mark.parametrize("shape", scale.SHAPES)
def test_memory_grows_with_the_shards_and_not_with_their_square(tmp_path, shape):
    """Pairs of all shards with all of a key would need a hundred times as much."""
    small, large = (scale.measure_apart(shape, size, str(tmp_path)) for size in (10_000, 100_000))
    grown = large["peak_bytes"] - large["import_bytes"]
    assert small["reason"] == large["reason"] == ""
    assert grown < 100_000 * 1000  # bytes for each shard
