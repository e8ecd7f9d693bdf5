"""Definitions of derived numbers, one function each. The first paragraph of a docstring is printed under tables.

`rows` are stored sample rows with status "ok" (see `specbench.store.schema.SAMPLES`) after `condense`, which sums lists
by token over each image. A number that cannot be computed is None, never 0. Token statistics cover free positions only,
not tokens forced by the grammar.
"""

from specbench.stats.drafts import (
    acceptance,
    acceptance_by_offset,
    acceptance_by_sibling,
    acceptance_length,
    both_stages_ms,
    draft_ms,
    draft_top1,
    draft_tv,
    draft_tv_by_depth,
    draft_tv_by_offset,
    round_totals,
    rounds,
    stage2_acceptance,
    stage2_ms,
    stage2_nfe,
    theorem2_bound,
)
from specbench.stats.intervals import (
    Difference,
    Estimate,
    difference_to_show,
    holm,
    mean_difference,
    mean_interval,
    mean_of_estimates,
    prompts_for_change,
    prompts_needed,
    proportion_interval,
    ratio_of_totals,
    speed_difference,
    without_few,
)
from specbench.stats.speed import (
    SpeedUp,
    floor_ms,
    images_per_hour,
    latency_e2e_ms,
    latency_median_ms,
    latency_ms,
    nfe,
    overhead,
    paired,
    roofline_ratio,
    speed_up,
    speedup,
    stalled,
    step_compression,
    step_ms,
    step_ratio,
    throughput,
    tokens_per_second,
    window_cost,
)
from specbench.stats.tokens import (
    TokenStats,
    as_frame,
    condense,
    logp_mean,
    logp_std,
    nll_gap,
    perplexity,
    token_stats,
    top1,
)
