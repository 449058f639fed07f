"""Planted rows flip the verdict of every lab, and each verdict is told in both languages.

The builders of rows are those of the labs' own tests, which check the sentences and the limits.
"""

from __future__ import annotations

import pytest

from bagu.lab import catalogue
from bagu.lab.core import Row
from bagu.lab.model import attention_complexity, flash_attention
from tests.lab import (
    test_ab_noise,
    test_claim_labs,
    test_constrained_decoding_lab,
    test_contamination_lab,
    test_context_labs,
    test_decoding_labs,
    test_dpo_reward_model,
    test_few_shot_noise,
    test_flop_rules,
    test_kernel_labs,
    test_kl_estimators,
    test_lab_attention_kinds,
    test_lab_positions,
    test_lab_verdicts,
    test_micro_labs,
    test_mixing_forgetting,
    test_normalization_lab,
    test_optimizers_lab,
    test_packing_lab,
    test_parallel_labs,
    test_pipeline_bubbles_lab,
    test_planner_labs,
    test_ppo_grpo,
    test_prenorm_postnorm,
    test_process_labs,
    test_quantization_error,
    test_quantization_quality,
    test_queueing_labs,
    test_retrieval_labs,
    test_reward_hacking,
    test_rollout_parity,
    test_serving_labs,
    test_tensor_parallel_lab,
    test_training_claims,
    test_triton_labs,
    test_tuning_labs,
)
from tests.lab.test_lab_run import check_pair

SQUARE = {way: float(power) for way, power in attention_complexity.CLAIMED.items()}
LINEAR = {way: 3 - power for way, power in SQUARE.items()}
BLOCKED = {way: 1.0 if way in flash_attention.BLOCKED else 2.0 for way in flash_attention.WAYS}
UNBLOCKED = {way: 3 - power for way, power in BLOCKED.items()}
FALLING, FLAT = (4.0, 2.0, 1.0), (1.0, 1.0, 1.0)
RISING = [4.0, 3.0, 2.0, 1.0]

pro = test_process_labs
ab, dec, ker, par, ser = test_ab_noise, test_decoding_labs, test_kernel_labs, test_parallel_labs, test_serving_labs
mix, opt, que, ver = test_mixing_forgetting, test_optimizers_lab, test_queueing_labs, test_lab_verdicts
hack, cont, norm = test_reward_hacking.ends, test_contamination_lab.contamination_row, test_normalization_lab.rank_row
bytes_: Row = {"model": "m", "sequences": 1, "measured_bytes": 100, "textbook_bytes": 150}

CELLS = [(name, normalized, ratio) for name in ("SGD", "Adam") for normalized in (False, True) for ratio in (1, 10)]


def ranked(vectors: float, joined: float) -> list[Row]:
    """Rankings whose gains over words have these lower ends."""
    gains = {"words": 0.0, "vectors": vectors, "by_rank": 0.0, "hybrid": joined}
    return [{"ranking": n, "mrr": 0.3 + g, "more_low": g, "more_high": g + 0.01} for n, g in gains.items()]


def chunked(middle: float, gain: float) -> list[Row]:
    """Shares found: 0.5 at the ends, `middle` at 256 tokens, where overlap gains this much."""
    plain = [
        {"size_tokens": size, "overlap_tokens": 0, "found": share, "high": share + 0.02}
        for size, share in ((32, 0.5), (256, middle), (1024, 0.5))
    ]
    return [*plain, {"size_tokens": 256, "overlap_tokens": 64, "overlap_gain": gain, "overlap_gain_low": gain}]


def scaled(name: str, normalized: bool, ratio: int, steps: int) -> Row:
    return {"optimizer": name, "normalized": normalized, "ratio": ratio, "steps": steps, "budget": 500}


def staged(sent: int) -> Row:
    return {"pipeline_bytes": sent, "pipeline_formula_bytes": 80, "data_bytes": 100}


def momentum(schedule: str, difference: float) -> Row:
    return {"schedule": schedule, "step": 9, "difference": difference, "classical_loss": 1.0, "torch_loss": 2.0}


# for each lab, rows for which the claim holds, and rows for which it does not
PLANTED: dict[str, tuple[list[Row], list[Row]]] = (
    {
        "ab_noise": (
            [ab.row(0.0, 5.0, 25.0), ab.row(5.0, 80.0, 90.0), ab.row(10.0, 80.0, 90.0)],
            [ab.row(0.0, 30.0, 35.0), ab.row(5.0, 40.0, 90.0), ab.row(10.0, 40.0, 90.0)],
        ),
        "attention_complexity": (ser.complexity_rows(SQUARE, SQUARE), ser.complexity_rows(LINEAR, LINEAR)),
        "attention_kinds": (
            test_lab_attention_kinds.made_up({}),
            test_lab_attention_kinds.made_up({"GQA": 3.0, "MQA": 3.0, "MLA": 3.0}),
        ),
        "autotuning": (
            [row for name in "abc" for row in ker.tuning_rows(name, [2.0, 1.8, 1.5, 1.0], RISING)],
            [row for name in "abc" for row in ker.tuning_rows(name, [1.03, 1.02, 1.01, 1.0], RISING[::-1])],
        ),
        "batch_invariance": (
            ser.invariance_rows({"fast": 0, "invariant": 0}),
            ser.invariance_rows({"fast": 3, "invariant": 1}),
        ),
        "batch_latency": (
            que.closed_rows({1: 100.0, 2: 195.0, 8: 750.0}, 0.005),
            que.closed_rows({1: 100.0, 2: 120.0, 8: 500.0}, 0.005),
        ),
        "batchnorm_layernorm": (
            [ver.norm_row(64, "counted", 0.5), ver.norm_row(64, "masked", 0.2)],
            [ver.norm_row(64, "counted", 0.5), ver.norm_row(64, "masked", 0.2, change=0.1)],
        ),
        "best_row": ([pro.luck_row(0.1)], [pro.luck_row(40.0)]),
        "constrained_decoding": (
            test_constrained_decoding_lab.rows_of(0.001),
            test_constrained_decoding_lab.rows_of(0.5),
        ),
        "contamination": (
            [cont("control", 0, 0.0, 0.9, 0.0), cont("verbatim", 4, 20.0, 0.001, 100.0)],
            [cont("control", 0, 0.0, 0.9, 0.0), cont("verbatim", 4, 20.0, 0.001, 0.0)],
        ),
        "continuous_batching": (ser.batching_rows({"equal": 1.6}, 0.5), ser.batching_rows({"equal": 1.6}, 1.1)),
        "decode_bandwidth": (dec.step_rows([1.2, 1.9]), dec.step_rows([9.0, 9.0])),
        "dpo_reward_model": (
            [test_dpo_reward_model.group_row("syntax", low=-3.0)],
            [test_dpo_reward_model.group_row("syntax", low=-20.0)],
        ),
        "feature_scaling": (
            [
                scaled(name, normalized, ratio, 10 if normalized or ratio == 1 else 90)
                for name, normalized, ratio in CELLS
            ],
            [scaled(name, normalized, ratio, 10) for name, normalized, ratio in CELLS],
        ),
        "few_shot_noise": (
            [test_few_shot_noise.spread_row("a", 100, 3.0, 5.0)],
            [test_few_shot_noise.spread_row("a", 100, 6.0, 5.0)],
        ),
        "flash_attention": (ser.flash_rows(BLOCKED, 0.5), ser.flash_rows(UNBLOCKED, 1.5)),
        "flop_rules": (test_flop_rules.rows(1, -1, -5), test_flop_rules.rows(40, -20, -50)),
        "forward_split": ([pro.split_row(0.8, 0.8)], [pro.split_row(0.8, 0.1)]),
        "fusion": (ver.fusion_rows(1 << 20, faster=2.4), ver.fusion_rows(64 << 20, faster=1.1)),
        "gradient_accumulation": (par.accumulation_rows(1e-15, 1e-15), par.accumulation_rows(0.3, 0.2)),
        "implicit_gemm": (
            ker.conv_rows(3, im2col=9.5, taps=2, faster=1.5),
            ker.conv_rows(5, im2col=25, taps=2, faster=0.7),
        ),
        "int8_matmul": (
            ker.int8_rows(speedup=2.0, plain=5.0, rotate=1.0),
            ker.int8_rows(speedup=1.5, plain=1.1, rotate=4.0),
        ),
        "invariance_cost": (par.invariance_rows([1.1, 1.2]), par.invariance_rows([2.0, 2.0])),
        "kl_estimators": (
            test_kl_estimators.rows_of(1.0, 0.01, 1.0, 0.5),
            test_kl_estimators.rows_of(1.0, 0.01, 0.5, 1.0),
        ),
        "kv_cache": (ser.cache_rows([1.0, 1.0], [5.0, 50.0]), ser.cache_rows([9.0, 9.0], [5.0, 5.0])),
        "kv_kinds": (dec.kind_rows([4, 2, 1], [8.0, 4.0, 2.0]), dec.kind_rows([4, 2, 1], [2.0, 4.0, 8.0])),
        "launch_overhead": (
            [ver.launch_row(1 << 20, host=20.0, kernel=3.0, call=21.0)],
            [ver.launch_row(1 << 24, host=20.0, kernel=15.0, call=35.0)],
        ),
        "layernorm_jacobian": (
            [
                {"place": p, "layer": n, "gradient": g ** (n - 1)}
                for p, g in (("post", 0.707), ("pre", 1.0))
                for n in (1, 9)
            ],
            [
                {"place": p, "layer": n, "gradient": g ** (n - 1)}
                for p, g in (("post", 0.9), ("pre", 0.9))
                for n in (1, 9)
            ],
        ),
        "layout_scaling": (
            test_planner_labs.scaling((8.0, 9.0), (4.0, 3.0)),
            test_planner_labs.scaling((8.0, 7.0), (4.0, 3.0)),
        ),
        "maximize_prediction": (pro.rule_rows(0.9, 0.0), pro.rule_rows(0.5, 0.3)),
        "memory_by_formula": ([bytes_ | {"planner_bytes": 105}], [bytes_ | {"planner_bytes": 200}]),
        "mixing_forgetting": (
            mix.rows({(100.0, 0): 1.0, (100.0, 5): 0.05, (100.0, 10): 0.02, (100.0, 100): -0.1}),
            mix.rows({(100.0, 0): 1.0, (100.0, 5): 0.5, (100.0, 10): 0.3, (100.0, 100): -0.1}),
        ),
        "momentum_forms": ([momentum("constant", 1e-15)], [momentum("cosine", 0.1)]),
        "normalization": (
            [norm("raw", 0, 0), norm("tokens", 0.1, 0.3), norm("characters", 0.1, 0.3)],
            [norm("raw", 0, 0), norm("tokens", -0.3, -0.1), norm("characters", -0.3, -0.1)],
        ),
        "numpy_lists": (ver.sum_times(1000, loop=2, type_=2, layout=8), ver.sum_times(10, loop=4, type_=2, layout=3)),
        "hybrid_search": (ranked(0.02, 0.05), ranked(-0.05, -0.01)),
        "chunk_size": (chunked(0.8, 0.01), chunked(0.2, -0.01)),
        "numpy_parallel": (
            [{"call": "dot", "cores": 2, "busy_cores": 1.9}],
            [{"call": "sort", "cores": 2, "busy_cores": 1.0}],
        ),
        "occupancy": (
            ker.occupancy_rows({"a": RISING, "b": RISING}),
            ker.occupancy_rows({"a": RISING[::-1], "b": RISING[::-1]}),
        ),
        "optimizers": (
            opt.problem("network", newton=(5, 100.0), adam=(50, 100.0), memory_available_bytes=1e15),
            opt.problem("network", newton=(60, 1.0), adam=(50, 100.0)),
        ),
        "packing": (
            test_packing_lab.rows(gains={"functions": 2.0, "modules": 1.2}, worse={}),
            test_packing_lab.rows(gains={"functions": 0.9, "modules": 1.0}, worse={}),
        ),
        "paging": (ser.paging_rows({"chat": 80}, 3.0), ser.paging_rows({"chat": 80}, 5.0)),
        "pipeline_bubbles": (
            test_pipeline_bubbles_lab.rows(0.25, 0.19, 0.1),
            test_pipeline_bubbles_lab.rows(0.5, 0.6, 0.1),
        ),
        "pipeline_bytes": ([staged(0)], [staged(80)]),
        "positions": (
            test_lab_positions.made_up(test_lab_positions.ALL_GOOD),
            test_lab_positions.made_up(test_lab_positions.ALL_GOOD | {"RoPE": 9.0, "ALiBi": 9.0, "T5": 9.0}),
        ),
        "ppo_grpo": (test_ppo_grpo.rows_of("bandit", 0.8, 0.6, 0.01), test_ppo_grpo.rows_of("bandit", 0.4, 0.6, 0.01)),
        "prefix_cache": (ser.prefix_rows(1.005, 1.8), ser.prefix_rows(1.1, 0.9)),
        "prenorm_postnorm": (test_prenorm_postnorm.rows(), test_prenorm_postnorm.rows(gradient=0.6)),
        "ps_compression": (
            [{"sent": "weights", "sort": "values", "left": 0.2}, {"sent": "keys", "sort": "keys", "left": 0.9}],
            [{"sent": "weights", "sort": "values", "left": 0.9}, {"sent": "keys", "sort": "keys", "left": 0.2}],
        ),
        "quantization_error": (
            test_quantization_error.rows_of(int8=FALLING, int4=FALLING, fp8=FALLING),
            test_quantization_error.rows_of(int8=FLAT, int4=FLAT, fp8=FLAT),
        ),
        "quantization_quality": (
            [test_quantization_quality.row(*r) for r in (("fp32", 32, 1.5), ("int8", 8, 1.501), ("int4", 4, 1.55))],
            [test_quantization_quality.row(*r) for r in (("fp32", 32, 1.5), ("int8", 8, 1.6), ("int4", 4, 1.55))],
        ),
        "quantile_signs": (pro.fall_rows(0.0), pro.fall_rows(5.0)),
        "queueing": (que.load_rows({1: 9.0, 16: 3.0}, 2.2), que.load_rows({1: 1.0, 16: 1.0}, 4.0)),
        "recomputation": (par.recompute_rows([1.3, 1.4]), par.recompute_rows([1.0, 2.0])),
        "reward_hacking": (
            hack("weak", "loose", loose=30.0, strict=-20.0) + hack("weak", "strict", loose=0.0, strict=30.0),
            hack("weak", "loose", loose=30.0, strict=20.0) + hack("weak", "strict", loose=0.0, strict=30.0),
        ),
        "ring_all_reduce": (par.ring_rows([1.0, 1.0], [2.0, 2.0]), par.ring_rows([3.0, 3.0], [2.0, 2.0])),
        "rollout_parity": ([test_rollout_parity.row_of("fp32", 1e-6)], [test_rollout_parity.row_of("fp32", 0.5)]),
        "rope_where": (
            [{"way": "q and k", "explained_share": 1.0}],
            [{"way": "embedding", "explained_share": 0.25}],
        ),
        "safe_softmax": ([ver.softmax_row("fp16", 1, 0)], [ver.softmax_row("fp16", 1, 9)]),
        "speculation": (
            [{"batch": 1, "drafts": 3, "rate": 0.8, "speedup": 2.0}],
            [{"batch": 1, "drafts": 3, "rate": 0.8, "speedup": 0.9}],
        ),
        "tensor_parallel": (
            test_tensor_parallel_lab.rows((20, 3, 2), (40, 5, 2)),
            test_tensor_parallel_lab.rows((20, 1, 2), (40, 2, 2)),
        ),
        "trees_or_gp": ([pro.error_row(200, 0.5, 1.0)], [pro.error_row(200, 2.0, 1.0)]),
        "what_limits": (test_planner_labs.shares(40), test_planner_labs.shares(80)),
        "zero_stages": (par.zero_rows((100, 150), (100, 155)), par.zero_rows((100, 100), (100, 300))),
    }
    | test_micro_labs.PLANTED
    | test_claim_labs.PLANTED
    | test_context_labs.PLANTED
    | test_training_claims.PLANTED
    | test_retrieval_labs.PLANTED
    | test_triton_labs.PLANTED
    | test_tuning_labs.PLANTED
)


@pytest.mark.parametrize("name", catalogue.names())
def test_planted_rows_flip_the_verdict(name: str) -> None:
    lab = catalogue.load(name)
    for rows, kind in zip(PLANTED[name], ("held", "did not hold"), strict=True):
        verdict = lab.verdict(rows)
        assert verdict.kind == kind
        check_pair(name, verdict.sentence_en, verdict.sentence_zh)
