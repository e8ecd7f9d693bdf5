"""One stored image: the columns of a sample row, and how a Generation or a failure becomes one. Raw facts
only."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from specbench.decoding.generation import ORDERS, SPANS, Generation
from specbench.prompts import Request
from specbench.store.run_info import SCHEMA_VERSION
from specbench.system.json_values import parse_json

Key = tuple[str, int]
KEY = ("prompt_id", "sample")
AR_SPANS = ("prefill", "target", "draft", "verify", "host")
"""Spans of the `ar` latency; `e2e` is all of them."""

_FACT = r'"(?:[^"\\]|\\.)*": (?:null|-?[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)'
_FACTS = rf"^\{{(?:{_FACT}(?:, {_FACT})*)?\}}$"

_ARRAYS = ("tokens", "forced", "logp", "entropy", "top1", "committed_step", "drafted", "tested", "accepted")

LENGTHS = (
    ("tokens", "forced", "logp", "entropy", "top1", "committed_step", *ORDERS),
    ("drafted", "tested", "accepted"),
)
"""Columns whose lists are equally long in a row: by stream slot, and by window offset."""

OWNER = ("run_id", "model", "decoder")
"""Columns of every file that say whose row it is."""


def column_facts(schema: pa.Schema) -> dict[str, dict[str, str]]:
    """`unit` and `meaning` of each declared column."""
    return json.loads(schema.metadata[b"specbench.columns"])


def _declared(kind: str, text: str) -> pa.Schema:
    """Schema of a kind of file from a table `name | type | unit | meaning`; the file's metadata keep all of it."""
    lines = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line]
    about = {name: {"unit": unit, "meaning": meaning} for name, _, unit, meaning in lines}
    metadata = {"specbench.kind": kind, "specbench.columns": json.dumps(about, ensure_ascii=False)}
    return pa.schema([(name, _arrow_type(of)) for name, of, _, _ in lines], metadata)


def _arrow_type(name: str) -> pa.DataType:
    if name.startswith("list<"):
        return pa.list_(_arrow_type(name[5:-1]))
    return pa.struct(_SCORE) if name == "score" else pa.type_for_alias(name)


_OWNER = """
run_id         | string      |        | id of the run
model          | string      |        | its model, as `spec.model` of `run.json`
decoder        | string      |        | name of its decoder's preset
"""
_SCORE = [("metric", pa.string()), *((name, pa.float64()) for name in ("value", "low", "high")), ("n", pa.int64())]
_SCORE += [("fingerprint", pa.string())]

SAMPLES = _declared(
    "images",
    f"""
schema         | int16       |        | schema version
prompt_id      | string      |        | id of the prompt
sample         | int64       |        | number of the image among those of its prompt, from 0
prompt         | string      |        | text of the prompt
category       | string      |        | category of the prompt
meta           | string      | JSON   | what else the prompt set knows
seed           | int64       |        | random seed of the run
status         | string      |        | `ok` or `failed`
error          | string      |        | why it failed
started_at     | string      | UTC    | when it was begun, ISO 8601
image          | string      |        | path inside the run folder; null where the model cannot make pictures
nfe            | int64       |        | target forwards after prefill; a guidance pair counts once
prefills       | int64       |        | prefill forwards
batch          | int64       | images | images decoded together; an image's time is its share of the batch's
encode_ms      | double      | ms     | prompt to embeddings
prefill_ms     | double      | ms     | prompt into the KV cache
target_ms      | double      | ms     | target forwards with guidance
draft_ms       | double      | ms     | drafting
verify_ms      | double      | ms     | sampling, verification, refinement, commit, and the recording of every step
host_ms        | double      | ms     | waiting for the host between steps
render_ms      | double      | ms     | tokens to pixels
ar_ms          | double      | ms     | latency: `prefill`, `target`, `draft`, `verify` and `host`; null unless alone
e2e_ms         | double      | ms     | latency with `encode` and `render`; null likewise
facts          | string      | JSON   | further numbers, below
tokens         | list<int32> |        | [N] tokens, forced ones included
forced         | list<bool>  |        | [N] true where the grammar left no choice
logp           | list<float> | nats   | [N] log p of the token given its prefix; -inf outside the support of p
entropy        | list<float> | nats   | [N] entropy of p
top1           | list<float> |        | [N] largest probability of p
committed_step | list<int32> |        | [N] target forward that committed the token, from 1
drafted        | list<int64> | tokens | [W] drafts at each window offset, without forced slots
tested         | list<int64> | tokens | [W] of these, drafts that verification reached
accepted       | list<int64> | tokens | [W] of these, drafts that were accepted
attempts       | int64       |        | how often the call that wrote the row tried the image
machine        | string      | JSON   | other load of the machine, below
u_id           | list<float> |        | [N] Rosenblatt transform, tokens by id; null for ZipAR and PJD, as the next 3
u_p            | list<float> |        | [N] the same, ordered by p, largest first
u_pq           | list<float> |        | [N] the same, by p/q; NaN in slots without a tested draft, null without any
u_qq           | list<float> |        | [N] the same, by q over the slot's q one step before; NaN or null likewise
image_sha256   | string      |        | SHA-256 of the image file; null where there is none
{_OWNER}""",
)
"""Columns of `samples/*.parquet`; all but `schema`, the key, `prompt`, `seed`, `status`, `started_at` and `OWNER` may
be null. The store itself fills in `OWNER`. For what older versions lack see `run_info.SCHEMA_VERSION`."""

TRACES = _declared(
    "traces",
    f"""
prompt_id      | string      |        | id of the prompt
sample         | int64       |        | number of the image
started_at     | string      | UTC    | as in the sample row
draft_tv       | list<float> |        | [N] total variation between p and q of the slot's tested draft, NaN without one
draft_top1     | list<float> |        | [N] largest probability of q, likewise
{_OWNER}""",
)
"""Columns of `traces/*.parquet`, which `run --trace` keeps; an image's row is the one with the `started_at` of its
sample row."""


IMAGE_SCORES = _declared(
    "image scores",
    f"""
metric         | string      |        | the metric
fingerprint    | string      |        | hash of what the columns of an image depend on
prompt_id      | string      |        | id of the prompt
sample         | int64       |        | number of the image
started_at     | string      | UTC    | as in the sample row: an image that was decoded again is scored again
category       | string      |        | category of the prompt
value          | double      |        | the image's score; 1 or 0: right or wrong; null for distances of distributions
feature        | list<float> |        | what distances of distributions are computed from
details        | string      | JSON   | what else the metric keeps
{_OWNER}""",
)
"""Columns of `image_scores/<metric>-<fingerprint>/*.parquet`, of all metrics."""

RUN_SCORES = _declared(
    "run scores",
    f"""
metric         | string      |        | the metric, or `metric:part` for a category
value          | double      |        | the score; null where there is none
low            | double      |        | lower end of its 95 % interval
high           | double      |        | upper end
n              | int64       | images | number of images that were scored
note           | string      |        | warning for readers of the number
fingerprint    | string      |        | hash of what the score depends on
identity       | string      | JSON   | what it depends on: digests, versions, preprocessing, reference images
images         | int64       | images | images of the run that could be scored
cut            | double      |        | share of their captions longer than the metric reads; null where unknown
edited         | string      | UTC    | newest change of a plug-in's code; null for metrics of specbench
{_OWNER}""",
)
"""Columns of `scores/<metric>-<fingerprint>.parquet`, a score per row."""


REPORT = _declared(
    "report",
    f"""
label                | string       |          | the decoder with components and options that differ from its preset
{_OWNER}folder               | string       |          | the run's folder
source               | string       |          | checkpoint that is not the official one
processors           | string       |          | logits processors of the checkpoint
lossless             | bool         |          | whether every component is lossless
options              | string       | JSON     | value of every option of the decoder
setting              | string       | JSON     | what makes the run, without model and decoder
steps                | string       |          | `eager`, or what of a step was compiled and how
n                    | int64        | images   | decoded images
failed               | int64        | images   | images that failed
nfe                  | double       | forwards | target forwards per image after prefill
tokens_per_step      | double       | tokens   | committed tokens over target forwards, both summed over all images
step_compression     | double       | tokens   | tokens per target forward of an image, mean over images
latency_ms           | double       | ms       | prefill to last token, mean over images decoded alone
latency_median_ms    | double       | ms       | the same, median
latency_e2e_ms       | double       | ms       | the same with text encoding and image decoding, mean
step_ms              | double       | ms       | time of a step after prefill
latency_p50          | string       | JSON     | median latency with its 95 % interval, ms
latency_p95          | string       | JSON     | 95th percentile of latency, likewise
slowest_category     | string       | JSON     | category of the longest mean latency, likewise
tokens_per_step_p50  | string       | JSON     | median over images, with its 95 % interval
tokens_per_step_p95  | string       | JSON     | what 95 % of the images exceed, likewise
fewest_tokens_category | string     | JSON     | category of the fewest tokens per step, likewise
imported             | string       |          | digest of the file of another program's tokens
throughput           | double       | images/s | images per second of a batch
images_per_hour      | double       | images/h | the same per hour
stalled              | string       | JSON     | number of images that stalled, and the slowest
disturbed            | double       | cores    | needed cores that other processes took, mean over images
gpu_disturbed        | list<string> |          | what disturbed the GPU
over_floor           | double       |          | decode time over the roofline time of its target forwards
roofline_note        | string       |          | why there is none
floor                | string       | JSON     | inputs of the roofline
speedup              | double       |          | AR's time over the run's, same prompts and seeds
speedup_low          | double       |          | lower end of its 95 % interval
speedup_high         | double       |          | upper end
speedup_p            | double       |          | p-value of no speed-up
step_ratio           | double       |          | AR's target forwards over the run's
window_cost          | double       |          | time of a target forward over AR's
overhead             | double       |          | step over target-forward time, relative to AR
speedup_e2e          | double       |          | speed-up with text encoding and image decoding
pairs                | int64        | images   | images in common with AR
baseline             | string       |          | id of the AR run
speedup_note         | string       |          | why there is no speed-up, or over which images it is
speedup_fastest      | double       |          | speed-up over the fastest AR configuration
speedup_fastest_low  | double       |          | lower end of its 95 % interval
speedup_fastest_high | double       |          | upper end
fastest_ar           | string       |          | the fastest AR configuration
eager_ar             | string       |          | what must be said of an AR that was not compiled
quoted               | string       | JSON     | speed-up over the fastest AR of the run's number format
acceptance           | double       |          | accepted over tested drafts
acceptance_by_offset | list<double> |          | acceptance at each draft depth
rounds               | double       | forwards | target forwards with drafts to verify, per image
acceptance_length    | double       | tokens   | accepted drafts per round
draft_ms             | double       | ms       | drafting per image
acceptance_by_sibling | list<double> |          | acceptance by place among siblings of a draft tree
draft_tv_by_depth    | list<double> |          | total variation between p and q by depth
theorem2_bound       | double       |          | Cool-SD's bound on the distance to exact sampling
top1                 | double       |          | largest probability of p, mean over tokens
draft_tv             | double       |          | traced runs: total variation between p and q, mean over tested drafts
draft_tv_by_offset   | list<double> |          | the same by draft depth
draft_top1           | double       |          | traced runs: largest probability of q
logp_mean            | double       | nats     | log p of free tokens, mean
logp_std             | double       | nats     | its standard deviation
entropy_mean         | double       | nats     | entropy of p at free tokens, mean
perplexity           | double       |          | exp of minus the mean log p
image_perplexity     | double       |          | perplexity of each image, mean over images
nll_gap              | double       | nats     | minus mean log p, less mean entropy of p; 0 if sampling is exact
nll_gap_se           | double       | nats     | its standard error over images
zero_probability     | int64        | tokens   | tokens of target probability 0
stage2_nfe           | double       | forwards | target forwards of the second stage, per image
stage2_acceptance    | double       |          | acceptance of the second stage
stage2_ms            | double       | ms       | time of the second stage
both_stages_ms       | double       | ms       | latency with the second stage
intervals            | string       | JSON     | 95 % intervals of the numbers, by name
beside_ar            | string       | JSON     | token statistics minus those of AR over common images
real                 | list<string> |          | numbers whose difference from AR is real
scores               | list<score>  |          | scores with 95 % intervals and what identifies their computation
audit                | string       | JSON     | verdict of `audit --run`
drawn                | list<string> |          | which prompts of the set, where not all
model_edited         | string       |          | when the code of a plug-in's model was edited
untimed              | string       | JSON     | images by versions whose times are left out
versions             | string       |          | versions whose times count, where there are several
one_by_one           | int64        | images   | images decoded in smaller batches than the run's
copies               | list<string> |          | folders with a copy of the run
load                 | list<double> |          | load average at the start of each call
environment          | list<string> |          | machine and versions
against              | string       | JSON     | with `--baseline`: numbers against it
fails                | list<string> |          | gates of `--fail-if` that the run fails
""",
)
"""Columns of a report, a row per run."""

LONG_REPORT = _declared(
    "numbers",
    f"""
label                | string       |          | as in the report
{_OWNER}number               | string       |          | column of the report, or name of a score
fingerprint          | string       |          | of a score: hash of what it depends on
value                | double       |          | the number; null where it is missing
low                  | double       |          | lower end of its 95 % interval
high                 | double       |          | upper end
n                    | int64        | images   | images behind it
unit                 | string       |          | unit of the value, empty for a ratio
""",
)
"""Columns of a report in long form, a row per run and number."""

FILE_KINDS = {
    "samples/*.parquet": SAMPLES,
    "traces/*.parquet": TRACES,
    "image_scores/*/*.parquet": IMAGE_SCORES,
    "scores/*.parquet": RUN_SCORES,
    "report --to FILE.parquet": REPORT,
    "report --long --to FILE.parquet": LONG_REPORT,
}
"""Every kind of parquet file by where it is; no glob of the one matches files of another."""


def sample_row(base: Mapping[str, object], generation: Generation, timed: bool) -> dict[str, object]:
    """The row of a decoded image. `timed`: the run's batch is 1, so its spans are latencies."""
    spans = generation.spans_ms
    arrays = {name: np.asarray(getattr(generation, name)).tolist() for name in _ARRAYS}
    return {
        **base,
        "status": "ok",
        "image": f"images/{image_name(base['prompt_id'], base['sample'])}" if generation.image is not None else None,
        "nfe": generation.nfe,
        "prefills": generation.prefills,
        "batch": generation.batch,
        **{f"{span}_ms": spans.get(span) for span in SPANS},
        "ar_ms": sum(spans.get(span, 0.0) for span in AR_SPANS) if timed else None,
        "e2e_ms": sum(spans.values()) if timed else None,
        "facts": json.dumps(
            {name: float(value) if math.isfinite(value) else None for name, value in generation.facts.items()}
        ),
        **arrays,
        **{name: u.tolist() for name, u in generation.uniforms.items()},
    }


def trace_row(base: Mapping[str, object], generation: Generation) -> dict[str, object]:
    """What a traced image has beside its row."""
    arrays = {name: getattr(generation, name).tolist() for name in ("draft_tv", "draft_top1")}
    return {name: base[name] for name in (*KEY, "started_at")} | arrays


def failed_row(base: Mapping[str, object], error: str) -> dict[str, object]:
    """The row of an image that could not be decoded: its error, and no numbers."""
    return {**base, "status": "failed", "error": error}


def read_facts(texts: pa.Array | pa.ChunkedArray) -> pa.Table:
    """The numbers in the column `facts`, a float64 column each, null where an image has none.

    Raises:
        ValueError: a text is not a JSON object of numbers.
    """
    if not len(texts):
        return pa.table({})
    texts = pc.fill_null(texts, "{}")
    if not pc.all(pc.match_substring_regex(texts, _FACTS)).as_py():  # others may kill Arrow's reader, "null" does
        raise ValueError("not a JSON object of numbers")
    every = (texts.combine_chunks() if isinstance(texts, pa.ChunkedArray) else texts).cast(pa.string())
    [lines] = pc.binary_join(pa.ListArray.from_arrays([0, len(every)], every), "\n")
    found = pa.json.read_json(pa.BufferReader(lines.as_buffer()))
    return found.cast(pa.schema([(name, pa.float64()) for name in found.column_names]))


def read_meta(text: object) -> dict[str, object]:
    """The object in the column `meta`, empty where it is null.

    Raises:
        ValueError: not a JSON object.
    """
    found = parse_json(text) if isinstance(text, str) else {}
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found


def read_metas(texts: pa.ChunkedArray) -> list[dict[str, object]]:
    """`read_meta` of a column."""
    return [read_meta(text) for text in texts.to_pylist()]


def read_machines(texts: pa.ChunkedArray) -> list[dict[str, object]]:
    """The readings in the column `machine`, of the images that have one.

    Raises:
        ValueError: a text is not an object of numbers (or null), and of texts for the host and what slowed its GPU.
    """
    found = [parse_json(text) for text in pc.drop_null(texts).to_pylist()]
    for one in found:
        if not isinstance(one, dict):
            raise ValueError("not a JSON object")
        named = {"host": str, "gpu_slowed": str | list}
        for name, value in one.items():
            if value is not None and not isinstance(value, named.get(name, int | float)):
                raise ValueError(name)
            if name.endswith(("cores", "others")) and value is not None and not 0 <= value < math.inf:
                raise ValueError(name)
    return found


def with_facts(rows: pa.Table) -> pa.Table:
    """Replace the column `facts` by a column for each number in it that is not named like another column.

    Raises:
        ValueError: a text is not a JSON object of numbers.
    """
    noted, rows = read_facts(rows["facts"]), rows.drop_columns("facts")
    for name in noted.column_names:
        if name not in rows.column_names:
            rows = rows.append_column(name, noted[name])
    return rows


def base_row(
    request: Request, seed: int, started_at: str, machine: Mapping[str, object] | None = None
) -> dict[str, object]:
    """The columns that do not depend on what came out."""
    return {
        "schema": SCHEMA_VERSION,
        "prompt_id": request.prompt_id,
        "sample": request.sample,
        "prompt": request.text,
        "category": request.category,
        "meta": json.dumps(request.meta),
        "seed": seed,
        "started_at": started_at,
        "attempts": 1,
        "machine": None if machine is None else json.dumps(machine),
    }


def image_name(prompt_id: str, sample: int) -> str:
    """File name of an image: the id itself where it is short and plain, else a slug and a hash of it."""
    if re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,59}", prompt_id):
        return f"{prompt_id}-{sample}.png"
    slug = re.sub(r"[^a-z0-9]+", "-", prompt_id.lower())[:40].strip("-")
    digest = hashlib.sha256(prompt_id.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{slug}~{digest}-{sample}.png"
