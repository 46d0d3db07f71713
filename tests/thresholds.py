"""Thresholds measured by hand on SmolLM2 in bf16, for tests that need some and calibrate none."""

from __future__ import annotations

import math
from dataclasses import replace

from coordinator.verification.pooled import (
    COMPARISONS,
    LOGPROB_GAP,
    PROOF_EXPONENT,
    PROOF_MANTISSA,
    SEED_MARGIN,
    STRIKE,
    PooledClass,
    PooledTest,
)
from coordinator.verification.thresholds import ChunkThresholds, Thresholds

BY_HAND_POOLED = replace(
    COMPARISONS,
    near_tie_share=0.3,
    tests=(
        PooledTest(
            PROOF_MANTISSA, STRIKE, 0.001, (PooledClass(8, 1.54, 2.64, 5.93), PooledClass(32, 1.02, 1.73, 4.16))
        ),
        PooledTest(PROOF_EXPONENT, STRIKE, 0.001, (PooledClass(8, 2.0, 7.08, 24.7), PooledClass(32, 0.0, 2.7, 16.4))),
        PooledTest(
            LOGPROB_GAP, STRIKE, 0.001, (PooledClass(8, 0.0136, 0.0597, 0.26), PooledClass(32, 0.0291, 0.056, 0.137))
        ),
        PooledTest(
            SEED_MARGIN, STRIKE, 0.001, (PooledClass(8, 0.0, 0.00534, 0.0562), PooledClass(32, 0.0, 0.00326, 0.0286))
        ),
        *COMPARISONS.tests,
    ),
    source=(
        "SmolLM2-135M-Instruct, bf16 prefill, against honest rollouts at temperature 1 of vLLM 0.32.0 CPU bf16, and of "
        "transformers in bf16 and float32, 32 side by side with a KV cache: 64 rollouts of each, 6,226 tokens. Largest "
        "honest means of chunks of 8 / 32 tokens: mantissa error 2.15 / 1.45, exponent mismatches 5.3 / 2.0; of rollouts: "
        "log-prob gap 0.043 / 0.046, seed margin 0.0025 / 0.0020. Two standard errors and 15 % above are admitted. Near "
        "ties: 62 of 206 went to the second best."
    ),
)

BY_HAND = Thresholds(
    chunks=(
        ChunkThresholds(1, 20, 12, 6.5, 5.0),
        ChunkThresholds(5, 20, 12, 6.0, 4.0),
        ChunkThresholds(16, 16, 10, 4.5, 3.0),
        ChunkThresholds(32, 14, 8, 3.6, 3.0),
    ),
    logprob_gap_median_max=0.06,
    logprob_gap_max=0.8,
    seed_margin_max=0.6,
    seed_margin_mean_max=0.01,
    eos_logprob_min=math.log(1e-9),
    source=(
        "SmolLM2-135M-Instruct, vLLM 0.32.0 CPU bf16, 16 sequences at once, against the bf16 prefill; 288 rollouts, "
        "4,423 tokens at temperature 1. Largest seen, chunks of 3-4 / 5-8 / 32 tokens: 9 / 12 / 8 exponent and "
        "4 / 5 / 3 sign mismatches, mantissa mean 5.2 / 4.7 / 2.8 and median 4 / 3 / 2; log-prob gap median 0.045 "
        "(64 tokens), 0.139 (3 tokens), largest 0.47; seed margin mean 0.0021, largest 0.36."
    ),
    pooled=BY_HAND_POOLED,
)
