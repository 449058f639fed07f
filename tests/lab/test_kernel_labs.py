"""The labs on int8, convolution, tuning and occupancy: their parts compute what they say, and verdicts follow."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F

from bagu.lab.core import Row
from bagu.lab.gpu import autotuning, fusion, implicit_gemm, occupancy
from bagu.lab.numerics import int8_matmul
from bagu.lab.parts.confidence import of_ratio, rank_correlation, ranks
from bagu.lab.parts.rounding_noise import mean_square_peak


def test_ranks_of_equal_values_are_shared() -> None:
    assert ranks([3.0, 1.0, 3.0, 2.0]).tolist() == [3.5, 1.0, 3.5, 2.0]


def test_rank_correlation_is_that_of_the_order() -> None:
    rising, falling = [1.0, 2.0, 3.0, 4.0, 5.0], [25.0, 16.0, 9.0, 4.0, 1.0]
    assert rank_correlation(rising, [x**3 for x in rising]).mean == pytest.approx(1)
    assert rank_correlation(rising, falling).mean == pytest.approx(-1)
    # Spearman's formula without ties: 1 - 6 sum d^2 / (n (n^2 - 1)), here d = 1, -1, 0, 1, -1
    found = rank_correlation(rising, [2.0, 1.0, 3.0, 5.0, 4.0])
    assert found.mean == pytest.approx(1 - 6 * 4 / (5 * 24)) and -1 < found.low < found.mean < found.high < 1
    assert rank_correlation(rising, [7.0] * 5).mean == 0
    assert rank_correlation([1.0, 2.0], [1.0, 2.0])[1:] == (-1, 1), "two points say nothing"


def test_a_ratio_has_the_interval_of_its_logarithms() -> None:
    assert of_ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0]) == pytest.approx((2, 2, 2))
    found = of_ratio([1.0, 4.0], [1.0, 1.0])
    assert found.mean == pytest.approx(2) and found.low * found.high == pytest.approx(4) and found.low < 1


def test_the_largest_of_normal_numbers() -> None:
    assert mean_square_peak(1) == pytest.approx(1, rel=1e-4)  # E[z^2]
    assert mean_square_peak(1, outliers=1, outlier_std=5.0) == pytest.approx(25, rel=1e-4)
    drawn = torch.randn(20_000, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn[:, 0] *= 3
    squares = drawn.abs().amax(1) ** 2
    error = float(squares.std()) / 20_000**0.5
    assert mean_square_peak(64, outliers=1, outlier_std=3.0) == pytest.approx(float(squares.mean()), abs=3 * error)


def test_a_hadamard_matrix_is_orthonormal() -> None:
    H = int8_matmul.hadamard(64, torch.empty(0, dtype=torch.float64))
    torch.testing.assert_close(H @ H.T, torch.eye(64, dtype=torch.float64))


@pytest.mark.parametrize("method", int8_matmul.METHODS)
@pytest.mark.parametrize("K", [64, 128])  # an even and an odd power of two
def test_a_transformation_keeps_the_product(method: str, K: int) -> None:
    x, w = (t.double() for t in int8_matmul.operands(8, 12, K, 2, 0, "cpu"))
    a, b = int8_matmul.transformed(method, x, w)
    torch.testing.assert_close(a @ b.T, x @ w.T)
    assert (method == "plain") == torch.equal(a, x)


@pytest.mark.parametrize("outliers", [0, 1, 5])
def test_the_error_of_int8_is_predicted(outliers: int) -> None:
    """By the mean of a few seeds: with one outlier channel a row's scale is one random number."""
    found = {}
    for method in int8_matmul.METHODS:
        rows = [int8_matmul.error_row(method, (256, 64, 512), outliers, seed, "cpu") for seed in range(3)]
        measured, guess = ([float(r[key]) for r in rows] for key in ("error_percent", "predicted_error_percent"))  # type: ignore[arg-type]
        found[method] = sum(measured) / 3
        if method == "rotate":  # an upper bound: a sum of a few outliers has lighter tails than a normal number
            assert 0.75 * guess[0] < found[method] < 1.05 * guess[0]
        else:
            assert found[method] == pytest.approx(guess[0], rel=0.1)
    assert (found["plain"] > 2 * found["rotate"]) == (outliers > 0)


def int8_rows(*, speedup: float, plain: float, rotate: float) -> list[Row]:
    rows: list[Row] = []
    for share, factors in ((0.0, (1.0, 1.0, 1.0)), (1.0, (plain, 1.5, rotate))):
        for method, factor in zip(int8_matmul.METHODS, factors, strict=True):
            rows += [
                {"part": "error", "method": method, "outlier_percent": share, "seed": seed,
                 "error_percent": factor * (1 + 0.01 * seed), "predicted_error_percent": factor}
                for seed in range(3)
            ]  # fmt: skip
    for method, times in (("bf16", 1.0), ("int8", speedup)):
        ends = {"speedup": times, "speedup_low": times - 0.05, "speedup_high": times + 0.05}
        rows.append({"part": "speed", "method": method, "size": 4096, "time_us": 1.0, "rate_top_per_s": 1.0, **ends})
    return rows


@pytest.mark.parametrize(
    ("numbers", "kind", "missing"),
    [
        ({"speedup": 2.0, "plain": 5.0, "rotate": 1.0}, "held", "nothing"),
        ({"speedup": 1.5, "plain": 5.0, "rotate": 1.0}, "holds only where", "twice as fast"),
        ({"speedup": 2.0, "plain": 5.0, "rotate": 4.0}, "holds only where", "a rotation restores"),
        ({"speedup": 1.5, "plain": 1.1, "rotate": 4.0}, "did not hold", "twice as fast, outliers harm, a rotation"),
    ],
)
def test_int8_matmul_flips(numbers: dict[str, float], kind: str, missing: str) -> None:
    found = int8_matmul.verdict(int8_rows(**numbers))
    assert found.kind == kind and f"Not as claimed: {missing}" in found.sentence_en


@pytest.mark.parametrize("kernel", [1, 3, 5])
def test_every_way_is_the_convolution(kernel: int) -> None:
    ways = implicit_gemm.ways(implicit_gemm.Point(2, 6, 8, kernel), "cpu")
    x = torch.randn(2, 6, 6, 8, generator=torch.Generator().manual_seed(0))
    assert ways["library"]().shape == x.shape and set(ways) == {"im2col", "product", "taps", "library"}
    for way in ways.values():
        torch.testing.assert_close(way(), ways["library"]())
    padded = F.pad(x, (0, 0, *[kernel // 2] * 4))
    last = implicit_gemm.unfolded(x, kernel).view(2, 6, 6, -1, 8)[:, :, :, -1]
    assert torch.equal(last, padded[:, kernel - 1 :, kernel - 1 :]), "the last tap is the lower right corner"


def conv_rows(kernel: int, *, im2col: float, taps: float, faster: float) -> list[Row]:
    ways = {"im2col": (im2col, 1.0), "product": (0.0, 2.0), "taps": (taps, faster), "library": (0.0, 3.0)}
    return [
        {"layer": f"64 at 8², {kernel}×{kernel}", "kernel": kernel, "way": way, "device": "cpu", "time_us": 1.0,
         "speedup_over_im2col": times, "speedup_low": times - 0.1, "speedup_high": times + 0.1, "image_bytes": 1000,
         "extra_bytes": 1000 * images, "predicted_extra_bytes": 0}
        for way, (images, times) in ways.items()
    ]  # fmt: skip


def test_implicit_gemm_flips() -> None:
    point = conv_rows(1, im2col=1, taps=1, faster=0.5)  # one tap: nothing to unfold
    good, slow = conv_rows(3, im2col=9.5, taps=2, faster=1.5), conv_rows(5, im2col=25, taps=2, faster=0.7)
    assert implicit_gemm.verdict(point + good).kind == "held"
    both = implicit_gemm.verdict(point + good + slow)
    assert both.kind == "holds only where" and "The copy is 50% of im2col's time" in both.sentence_en
    assert implicit_gemm.verdict(point + slow).kind == "did not hold"
    assert implicit_gemm.verdict(conv_rows(3, im2col=9, taps=9, faster=1.5)).kind == "did not hold", "it unfolds too"


def test_the_expected_best_of_some_points() -> None:
    times = [5.0, 1.0, 4.0, 2.0]
    for count in (1, 2, 3, 4):
        every = [min(some) for some in itertools.combinations(times, count)]
        assert autotuning.expected_best(times, count) == pytest.approx(sum(every) / len(every))


RATES = autotuning.Rates(call_s=2e-6, bandwidth=1e10)


def test_the_model_of_a_tile_has_a_least() -> None:
    """Small tiles make many calls; tiles beyond the L2 cache read their intermediates from memory."""
    small, middle, large = (autotuning.tile_model(4096, 1024, size, RATES) for size in (1 << 10, 1 << 15, 1 << 20))
    assert middle < small and middle < large


def tuning_rows(kernel: str, times: list[float], predicted: list[float]) -> list[Row]:
    """The first point is the default."""
    return [
        {"kernel": kernel, "point": f"point {i}" if i else "default", "time_us": time, "predicted_us": guess,
         "samples": 5, "found_speedup": 1.0, "search_s": 1.0}
        for i, (time, guess) in enumerate(zip(times, predicted, strict=True))
    ]  # fmt: skip


def test_autotuning_flips() -> None:
    ranked, wrong = [4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0]
    far, near = [2.0, 1.8, 1.5, 1.0], [1.03, 1.02, 1.01, 1.0]

    def kind(times: list[float], predicted: list[float]) -> str:
        rows = [row for name in "abc" for row in tuning_rows(name, times, predicted)]
        return autotuning.verdict(rows).kind

    assert kind(far, ranked) == "held"
    assert kind(far, wrong) == kind(near, ranked) == "holds only where"
    assert kind(near, wrong) == "did not hold"
    rows = tuning_rows("a", far, ranked)
    both = [autotuning.curve(rows, 0.25, by_model=m) for m in (False, True)]
    assert both == pytest.approx([sum(far) / 4, 1.0])


def test_autotuning_without_a_model_says_what_the_model_of_the_gpu_was_worth() -> None:
    rows = [{**row, "predicted_us": None} for n in "abc" for row in tuning_rows(n, [2.0, 1.8, 1.5, 1.0], [1.0] * 4)]
    found = autotuning.verdict(rows)
    assert found.kind == "holds only where"  # the defaults are far off; the model did not rank
    assert all(words in found.sentence_en for words in ("198 searches", "1.012", "0.38", "27%", "which is chance"))


def test_the_tiles_of_a_norm_are_tuned_by_the_selection() -> None:
    rows = autotuning.norm_rows(64, 64, RATES, quick=True)
    assert rows[0]["point"] == autotuning.DEFAULT and all(r["samples"] == 5 for r in rows)
    assert [r["predicted_us"] for r in rows[1:]] == [1e6 * autotuning.tile_model(64, 64, 1 << 10, RATES)]
    assert fusion.TILE_ELEMENTS not in autotuning.TILES or len({r["point"] for r in rows}) == len(rows)


def occupancy_rows(times: dict[str, list[float] | None]) -> list[Row]:
    """Settings of 4 to 1 stages: 25, 50, 75 and 100 % of the warps."""
    rows: list[Row] = []
    for kernel, taken in times.items():
        for i in range(4):
            rows.append(
                {"kernel": kernel, "setting": f"{4 - i} stages", "warps": 4, "tile": "64×64", "stages": 4 - i,
                 "register_limit": 255, "predicted_occupancy_percent": 25.0 * (i + 1),
                 "occupancy_percent": 25.0 * (i + 1), "time_us": None if taken is None else taken[i], "spills": 0,
                 "slower": None if taken is None else taken[i] / min(taken),
                 "slower_low": None if taken is None else taken[i] / min(taken)}
            )  # fmt: skip
    return rows


def test_occupancy_flips() -> None:
    rising, falling = [4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0]
    assert occupancy.verdict(occupancy_rows({"a": rising, "b": rising})).kind == "held"
    mixed = occupancy.verdict(occupancy_rows({"a": rising, "b": falling}))
    assert mixed.kind == "holds only where" and "b: rank correlation -1.00" in mixed.sentence_en
    assert occupancy.verdict(occupancy_rows({"a": falling, "b": falling})).kind == "did not hold"
    untimed = occupancy_rows({"a": None})
    assert occupancy.verdict(untimed).kind == "not decided" and "a GPU" in occupancy.verdict(untimed).takes_en
    assert occupancy.verdict([r | {"occupancy_percent": 50.0} for r in untimed]).kind == "did not hold"


def test_settings_that_differ_in_one_number_are_compared() -> None:
    rows = [occupancy.described(v, "sm_90") for v in occupancy.variants(quick=False)]
    more, less, total = occupancy.fewer_gives_more(rows)
    assert less == 0 and 0 < more < total
    assert total == 4 * 3 + sum(n * (n - 1) // 2 for n in _stages(rows))


def _stages(rows: list[Row]) -> list[int]:
    """How many settings of the convolution share a tile and warps."""
    names = [(r["tile"], r["warps"]) for r in rows if r["tile"] is not None]
    return [names.count(name) for name in dict.fromkeys(names)]


@pytest.mark.slow
def test_a_setting_changes_the_compiled_kernel() -> None:
    """Compiled for sm_90, in a process of its own because kernels cannot be compiled where TRITON_INTERPRET is set."""
    pytest.importorskip("triton")
    code = """
        import json
        from bagu.bench.kernel_view import inspect_launch
        from bagu.lab.gpu import occupancy as lab

        variant = next(v for v in lab.variants(quick=False) if v.args.get("STAGES") == 2 and v.warps == 4)
        launch = variant.changed(lab._offline("conv2d", lab.IMAGES, lab.POINTERS))
        found = inspect_launch(launch, lab.ARCH)
        print(json.dumps([found.warps, found.stages, found.shared, found.programs, *variant.predicted()]))
    """
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    warps, stages, shared, programs, _, predicted = json.loads(done.stdout)
    assert (warps, stages, shared) == (4, 2, predicted)
    assert programs == 32 * 28 * 28 // 64 * 256 // 64


def test_occupancy_draws_without_times() -> None:
    panels = occupancy.plot([occupancy.described(v, "sm_90") for v in occupancy.variants(quick=True)])
    assert [list(panel.ynames or ()) for panel in panels] == [
        ["8 warps, ≤ 64 registers", "8 warps, ≤ 32 registers"], ["64×64, 4 warps, 1 stage", "64×64, 4 warps, 2 stages"]
    ]  # fmt: skip
