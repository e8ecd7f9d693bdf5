"""The answer of a report: what its sentences claim follows from intervals, audits and the machine's state."""

from dataclasses import replace
from pathlib import Path

import pytest
from synthetic import bare_row

from specbench.reporting.answer import answer
from specbench.reporting.columns import DECODER
from specbench.reporting.compare import CONSTANT_NOTE, FEW_NOTE, verdict
from specbench.reporting.row import Compared, OverAR, OverFastest, Quoted, ShownAudit, ShownScore, Stalled
from specbench.stats import Estimate


def row(label, speedup=None, low=None, high=None, lossless=True, quoted=None, window_cost=1.0, p=None, **more):
    p = p if p or low is None else 0.4 if low <= 1 <= high else 0.01
    total = None if speedup is None else Estimate(speedup, low, high)
    over = OverAR(total, p, 2.0, window_cost, 1.25, None, 9, "m-ar", ar_folder=Path("m-ar"), equal_forwards=1.4)
    quoted = quoted or (total and Quoted(total, p, 9, "m-ar", "float32, 1 thread", None))
    usual = {"run_id": f"m-{label}", "folder": Path(f"nowhere/m-{label}"), "options": {"window": 16}, "n": 9}
    usual |= {"latency_ms": Estimate(400.0, None, None), "latency_p50_ms": Estimate(300.0, None, None)}
    usual |= {"model": "m", "nfe": Estimate(128.0), "tokens_per_step": Estimate(2.0)}
    return bare_row(**usual | {"decoder": label, "label": label, "lossless": lossless, "over_ar": over,
                               "quoted": quoted} | more)  # fmt: skip


def audit(verdict):
    return ShownAudit(verdict, True, None, None, None, 9, False, True)


def score(metric, **more):
    return ShownScore.of({"metric": metric, "fingerprint": "f", "value": 1.0, "low": None, "high": None, "n": 9} | more)


AR = row("ar", 1.0, 1.0, 1.0, options={})


SJD = row("sjd", 1.3, 1.2, 1.4)
SENTENCES = {
    "the fastest": (
        [row("sjd", 1.3, 1.1, 1.5)],
        ["^sjd (window 16) is the fastest lossless decoder: 1.30 times as fast as AR [1.10–1.50] over 9"],
    ),
    "not shown": ([row("sjd", 1.3, 0.9, 1.5)], ["^No lossless decoder is shown to be faster than AR"]),
    "slower": ([row("sjd", 0.8, 0.7, 0.9)], ["^No lossless decoder is faster than AR"]),
    "few images": ([row("sjd", 1.3)], ["^too few for an interval"]),
    "few images, slower": (
        [row("jacobi", 0.6), row("sjd", 0.8)],
        ["^AR was the fastest lossless decoder; the next, sjd (window 16), ran 0.80 times as fast in 9"],
    ),
    "compare's test decides, not the interval": (
        [row("sjd", 1.26, 1.03, 1.56, p=0.0744)],
        ["^No lossless decoder is shown to be faster than AR: the best, sjd (window 16), runs 1.26 times as fast",
         "[1.03–1.56, p = 0.074 in a paired t test]"],
    ),
    "the largest speed-up is not the shown one": (
        [row("sjd", 1.14, 1.04, 1.23), row("predictive", 1.22, 0.96, 1.57)],
        ["^predictive (window 16) has the largest speed-up", "not shown to be faster than AR",
         "sjd (window 16) is faster: 1.14 [1.04–1.23]", "!No lossless decoder"],
    ),
    "a lossy one above": (
        [SJD, row("gsd", 1.6, 1.5, 1.7, lossless=False)],
        ["^sjd", "gsd (window 16) is lossy: 1.60 times as fast as AR [1.50–1.70]."],
    ),
    "a lossy one below": ([SJD, row("gsd", 1.2, 1.1, 1.3, lossless=False)], ["!gsd"]),
    "a slower lossy one": (
        [row("gsd", 0.7, 0.6, 0.8, lossless=False)],
        ["^gsd (window 16) is lossy, and slower: 0.70 times as fast as AR [0.60–0.80]."],
    ),
    "a lossy one that is not shown": (
        [row("gsd", 1.1, 0.9, 1.3, lossless=False)],
        ["^gsd (window 16) is lossy, not shown to be faster: 1.10 times as fast as AR ["],
    ),
    "a failed audit": ([SJD, row("cheat", 2.0, 1.9, 2.1, audit=audit("deviates"))], ["^sjd", "NOT LOSSLESS"]),
    "a copy": ([row("sjd", copies=["r/x copy"])], ["sjd (window 16): r/x copy is a copy of this run and is omitted."]),
    "a window cheaper than a token": (
        [row("sjd", 2.97, window_cost=0.49), row("jacobi", 1.1, 1.05, 1.2)],
        ["^jacobi (window 16) is the fastest lossless decoder",
         "The speed-up of sjd (window 16) is meaningless: its forwards took 0.49 times"],
    ),
    "a window that is not free": ([row("sjd", 1.1, 1.0, 1.2, window_cost=1.5)], ["sjd would be 1.40 times"]),
    "an image has no more": (
        [row("sjd", 1.1, 1.0, 1.2, window_cost=1.5, options={"window": 4000})], ["A target forward of 256 tokens"]
    ),
    "unequal windows": (
        [SJD, row("sjd++", 1.6, 1.5, 1.7, lossless=False, options={"window": 96})],
        ["Windows differ: sjd 16, sjd++ 96. --window N gives all decoders the same window."],
    ),
    "a sweep": (
        [SJD, row("sjd++", 1.6, 1.5, 1.7, lossless=False, options={"window": 96}), row("sjd++", 1.1, 1.0, 1.2)],
        ["!Windows differ"],
    ),
    "versions and changed settings": (
        [row("sjd", 1.3, 1.2, 1.4, environment=["EPYC, python 3.12, specbench 0.4.0, git abc"]),
         row("ar", options={}, environment=["EPYC, python 3.12, specbench 0.3.0"], settings_changed=True)],
        ["Decoded by several versions of specbench: 0.4.0 (sjd); 0.3.0 (ar).",
         "ar: its run.json was edited after the run, so the settings do not match the run id."],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SENTENCES)
def test_each_sentence_is_said_if_it_is_true(case):
    rows, expected = SENTENCES[case]
    texts = answer(rows if AR.label in [row.label for row in rows] else [AR, *rows])
    for text in expected:  # "^": in the first sentence, "!": in none
        said = [text.lstrip("^!") in sentence for sentence in texts]
        assert said[0] if text[0] == "^" else any(said) != (text[0] == "!"), texts
    assert len(answer([AR, row("sjd", 1.1, 1.05, 1.2)])) == 1


def test_a_headline_is_over_the_fastest_ar_and_says_what_an_eager_one_was():
    quoted = row("sjd", 0.55, 0.46, 0.65).over_fastest.quoted
    faster = replace(quoted, ar_run="m-ar-compiled", ar="float32, 1 thread, compiled")
    text = answer([AR, row("sjd", 1.3, 1.1, 1.5, quoted=faster)])[0]
    assert text.startswith("No lossless decoder is faster than the fastest AR (float32, 1 thread, compiled): the best")
    assert "runs 0.55 [0.46–0.65] times as fast" in text, "the interval of the quoted number"
    few = replace(faster, speedup=Estimate(0.55, None, None))
    text = answer([AR, row("sjd", 1.3, 1.1, 1.5, quoted=few)])[0]
    assert text.startswith("The fastest AR (float32, 1 thread, compiled) was the fastest lossless decoder; the next")
    note = "AR is not compiled: before you quote the speed-up, run with --compile on"
    eager = replace(quoted, speedup=Estimate(1.3, 0.46, 0.65), eager_ar=note)
    text = answer([AR, row("sjd", 1.3, 1.1, 1.5, quoted=eager)])[0]
    assert text.endswith("; AR is not compiled: before you quote the speed-up, run with --compile on.")


def test_the_best_of_many_is_corrected_for_the_choice():
    several = [row(f"d{n}", 1.1 - n / 100, 1.01, 1.2, p=0.02 + n / 100) for n in range(5)]
    text = answer([AR, *several])[0]
    assert text.startswith("No lossless decoder is shown to be faster than AR: the best, d0 (window 16)")
    assert "[1.01–1.20, p = 0.100 in a paired t test as the best of 5]" in text
    assert answer([AR, several[0]])[0].startswith("d0 (window 16) is the fastest lossless decoder: 1.10 times")


def test_scores_that_agree_image_by_image_are_no_open_question(monkeypatch):
    def rows(*_):
        same = Compared("clip", Estimate(0.0), 1.0, None, 9, note=f"edited 29 Nov 22:01; {CONSTANT_NOTE}")
        few = Compared("dpg", Estimate(0.1), None, None, 3, note=FEW_NOTE)
        unclear = Compared("aesthetic", Estimate(0.1, -0.1, 0.3), 0.4, None, 9)
        return [same, few, unclear, replace(unclear, name="geneval", n=12)]

    monkeypatch.setattr("specbench.reporting.answer.scores_beside", rows)
    scored = replace(AR, scores=[score("aesthetic", prompts_needed=321), score("fid", prompts_needed=9)])
    texts = answer([scored, row("predictive", 1.3, 1.2, 1.4)])
    assert "predictive (window 16) and AR have the same clip for every prompt." in texts
    assert "Not tested: dpg of predictive (window 16) (too few prompts)." in texts
    assert any("aesthetic [" in text and "clip" not in text and "dpg" not in text for text in texts)
    assert any("No difference from AR's scores is shown over 9 to 12 images:" in text for text in texts)


def test_open_scores_state_the_range_of_images_and_which_version_is_meant(monkeypatch):
    def rows(*_):
        gap = Estimate(0.1, -0.1, 0.3)
        return [Compared("grey", gap, 0.4, None, n, fingerprint=made) for made, n in (("aa", 10), ("bb", 20))]

    monkeypatch.setattr("specbench.reporting.answer.scores_beside", rows)
    scored = replace(AR, scores=[replace(score("grey", prompts_needed=321), fingerprint="aa")])
    [text] = [text for text in answer([scored, row("predictive", 1.3, 1.2, 1.4)]) if "No difference" in text]
    assert "shown over 10 to 20 images: predictive (window 16) in grey (aa) [-0.100 to 0.300], grey (bb) [" in text
    assert "up to 321 prompts" in text


def test_a_batch_needs_no_advice_to_add_the_ar_that_is_there():
    batched = replace(SJD, over_ar=OverAR(speedup_note="batch 4: latency is not measured"), over_fastest=OverFastest())
    texts = answer([replace(AR, over_ar=OverAR(), over_fastest=OverFastest()), batched])
    assert texts == ["No speed-up can be given: batch 4: latency is not measured."]


def test_the_machine_is_remarked_upon():
    texts = answer([row("ar", stalled=Stalled(1, 8000.0), disturbed=1.8, options={})])
    assert "1 of 9 images stalled" in texts[0] and "8.00 s" in texts[0] and "0.30 s" in texts[0]
    assert "used up to 1.8 CPU cores that these runs needed: repeat" in texts[1]
    stalls = [
        row(name, decoder="ar", stalled=Stalled(1, ms), options={}) for name, ms in zip("abc", (1, 9, 2), strict=True)
    ]
    [text] = answer(stalls)
    assert text.startswith("b: 1 of 9 images stalled") and text.endswith("Images of 2 other decoders also stalled.")
    [text] = answer([row("ar", gpu_disturbed=["the driver lowered the GPU's clock (heat) in 2 of 9 readings"])])
    assert "clock (heat) in 2 of 9 readings" in text


def test_the_verdict_needs_the_corrected_p_value_and_labels_a_decoder_that_fails_its_audit():
    speed = Compared("speedup", Estimate(1.3, 1.1, 1.5), 0.03, 0.04)
    text = verdict([speed, Compared("clip", Estimate(-0.1, -0.2, -0.01), 0.04, 0.08)])
    assert text.startswith("B is faster than A: 1.30") and "No difference is shown in clip (-0.100" in text
    assert verdict([replace(speed, p_holm=0.06)]).startswith("No difference is shown in speed")
    assert verdict([replace(speed, estimate=None)]) == "Nothing could be compared."
    failed = audit("recorded p is not the model's")
    assert DECODER.cell(row("gsd", lossless=False, audit=failed)) == "gsd (recorded p is not the model's)"
    assert "NOT LOSSLESS" in DECODER.cell(row("sjd", audit=failed))
