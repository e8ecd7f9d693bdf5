"""The answer of a report: what its sentences claim follows from intervals, audits and the machine's state."""

from dataclasses import replace
from pathlib import Path

import pytest
from synthetic import bare_row

from specbench.reporting.answer import _gaps, answer
from specbench.reporting.columns import DECODER
from specbench.reporting.compare import verdict
from specbench.reporting.row import Compared, OverAR, Quoted, ShownAudit, ShownScore, Stalled
from specbench.stats import Estimate


def row(label, speedup=None, low=None, high=None, lossless=True, quoted=None, window_cost=1.0, p=None, **more):
    p = p if p or low is None else 0.4 if low <= 1 <= high else 0.01
    total = None if speedup is None else Estimate(speedup, low, high)
    over = OverAR(total, p, 2.0, window_cost, 1.25, None, 9, "m-ar", ar_folder=Path("m-ar"))
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


@pytest.mark.parametrize(
    ("value", "low", "high", "text"),
    [
        (1.3, 1.1, 1.5, "sjd (window 16) is the fastest lossless decoder: 1.30 times as fast as AR [1.10–1.50] over 9"),
        (1.3, 0.9, 1.5, "No lossless decoder is shown to be faster than AR"),
        (0.8, 0.7, 0.9, "No lossless decoder is faster than AR"),
        (1.3, None, None, "too few for an interval"),
    ],
)
def test_faster_is_said_only_where_the_test_shows_it(value, low, high, text):
    assert text in answer([AR, row("sjd", value, low, high)])[0]


def test_a_headline_is_over_the_fastest_ar_and_says_what_an_eager_one_was():
    quoted = row("sjd", 0.55, 0.46, 0.65).quoted
    faster = replace(quoted, ar_run="m-ar-compiled", ar="float32, 1 thread, compiled")
    text = answer([AR, row("sjd", 1.3, 1.1, 1.5, quoted=faster)])[0]
    assert text.startswith("No lossless decoder is faster than the fastest AR (float32, 1 thread, compiled): the best")
    assert "reaches 0.55 [0.46–0.65] of its speed" in text, "the interval is that of the quoted number"
    note = "AR is not compiled here: compile before you quote this"
    eager = replace(quoted, speedup=Estimate(1.3, 0.46, 0.65), eager_ar=note)
    text = answer([AR, row("sjd", 1.3, 1.1, 1.5, quoted=eager)])[0]
    assert text.endswith("; AR is not compiled here: compile before you quote this.")


def test_the_report_calls_a_decoder_faster_only_where_compare_does():
    text = answer([AR, row("sjd", 1.26, 1.03, 1.56, p=0.0744)])[0]
    assert text.startswith("No lossless decoder is shown to be faster than AR: the best, sjd (window 16), is at 1.26")
    assert "[1.03–1.56, p = 0.074 in a paired t test]" in text, "the interval alone would say more"


def test_the_best_of_many_is_corrected_for_the_choice():
    several = [row(f"d{n}", 1.1 - n / 100, 1.01, 1.2, p=0.02 + n / 100) for n in range(5)]
    text = answer([AR, *several])[0]
    assert text.startswith("No lossless decoder is shown to be faster than AR: the best, d0 (window 16)")
    assert "[1.01–1.20, p = 0.100 in a paired t test as the best of 5]" in text
    assert answer([AR, several[0]])[0].startswith("d0 (window 16) is the fastest lossless decoder: 1.10 times")


def test_versions_that_differ_and_settings_that_were_changed_are_said():
    new = replace(row("sjd", 1.3, 1.2, 1.4), environment=["EPYC, python 3.12, specbench 0.4.0, git abc"])
    old = replace(AR, environment=["EPYC, python 3.12, specbench 0.3.0"], settings_changed=True)
    text = answer([old, new])
    assert "Decoded by several versions of specbench: 0.3.0 (ar); 0.4.0 (sjd)." in text
    assert "ar: its run.json was changed after it ran, and names other settings than its id." in text


def test_a_copy_of_a_run_is_said():
    assert "sjd (window 16): r/x copy is a copy of it and left out." in answer([AR, row("sjd", copies=["r/x copy"])])


def test_a_window_cheaper_than_a_token_is_no_headline():
    first, *rest = answer([AR, row("sjd", 2.97, window_cost=0.49), row("jacobi", 1.1, 1.05, 1.2)])
    assert first.startswith("jacobi (window 16) is the fastest lossless decoder")
    assert any(
        text.startswith("The speed-up of sjd (window 16) says nothing: its forwards took 0.49 times") for text in rest
    )


def test_ar_is_called_the_fastest_where_too_few_images_were_faster_with_it():
    text = answer([AR, row("jacobi", 0.6), row("sjd", 0.8)])[0]
    assert text.startswith(
        "AR was the fastest; the next lossless decoder, sjd (window 16), ran 0.80 times as fast in 9"
    )


def test_a_slower_decoder_that_is_shown_to_be_faster_than_ar_is_not_denied():
    text = answer([AR, row("sjd", 1.14, 1.04, 1.23), row("predictive", 1.22, 0.96, 1.57)])[0]
    assert "predictive (window 16) has the largest speed-up" in text and "not shown to be faster than AR" in text
    assert "sjd (window 16) is: 1.14 [1.04–1.23]" in text and "No lossless decoder" not in text


def test_a_lossy_decoder_is_named_as_such_and_only_above_the_lossless_one():
    sjd = row("sjd", 1.3, 1.2, 1.4)
    texts = answer([AR, sjd, row("gsd", 1.6, 1.5, 1.7, lossless=False)])
    assert texts[0].startswith("sjd") and texts[1] == "gsd (window 16) is lossy: 1.60 times as fast as AR [1.50–1.70]."
    assert not any("gsd" in text for text in answer([AR, sjd, row("gsd", 1.2, 1.1, 1.3, lossless=False)]))


def test_a_lossy_decoder_that_is_no_faster_is_not_called_the_fastest():
    [text] = answer([AR, row("gsd", 0.7, 0.6, 0.8, lossless=False)])
    assert text == "gsd (window 16) is lossy, and slower: 0.70 times as fast as AR [0.60–0.80]."
    [text] = answer([AR, row("gsd", 1.1, 0.9, 1.3, lossless=False)])
    assert text.startswith("gsd (window 16) is lossy, not shown to be faster: 1.10 times as fast as AR [")


def test_unequal_windows_are_told_but_not_those_of_a_sweep():
    rows = [row("sjd", 1.3, 1.2, 1.4), row("sjd++", 1.6, 1.5, 1.7, lossless=False)]
    rows[1] = replace(rows[1], options={"window": 96})
    assert "Windows differ: sjd 16, sjd++ 96. --window N gives all of them the same." in answer([AR, *rows])
    assert not any("Windows differ" in text for text in answer([AR, *rows, row("sjd++", 1.1, 1.0, 1.2)]))


def test_scores_that_agree_image_by_image_are_no_open_question(monkeypatch):
    def rows(*_):
        same = Compared("clip", Estimate(0.0, 0.0, 0.0), 1.0, None, 9)
        return [same, Compared("aesthetic", Estimate(0.1, -0.1, 0.3), 0.4, None, 9)]

    monkeypatch.setattr("specbench.reporting.answer.scores_beside", rows)
    scored = replace(AR, scores=[score("aesthetic", prompts_needed=321), score("fid", prompts_needed=9)])
    texts = answer([scored, row("predictive", 1.3, 1.2, 1.4)])
    assert "predictive (window 16) has AR's own scores, image by image, in clip." in texts
    assert any("aesthetic [" in text and "clip" not in text for text in texts)


def test_a_failed_audit_takes_the_title():
    cheat = row("cheat", 2.0, 1.9, 2.1, audit=audit("deviates"))
    texts = answer([AR, row("sjd", 1.3, 1.2, 1.4), cheat])
    assert texts[0].startswith("sjd") and "NOT LOSSLESS" in texts[1]


def test_a_window_that_is_not_free_says_what_a_free_one_would_bring():
    assert any("sjd would be 1.60 times" in text for text in answer([AR, row("sjd", 1.1, 1.0, 1.2, window_cost=1.5)]))
    assert len(answer([AR, row("sjd", 1.1, 1.05, 1.2)])) == 1
    wide = row("sjd", 1.1, 1.0, 1.2, window_cost=1.5, options={"window": 4000})
    assert any("A target forward of 256 tokens" in text for text in answer([AR, wide])), "an image has no more"


def test_the_machine_is_remarked_upon():
    texts = answer([replace(AR, stalled=Stalled(1, 8000.0), disturbed=1.8)])
    assert "1 of 9 images stalled" in texts[0] and "8.00 s" in texts[0] and "0.30 s" in texts[0]
    assert "took up to 1.8 CPU cores from these runs: repeat" in texts[1]
    stalls = [replace(AR, label=name, stalled=Stalled(1, ms)) for name, ms in zip("abc", (1, 9, 2), strict=True)]
    [text] = answer(stalls)
    assert text.startswith("b: 1 of 9 images stalled") and text.endswith("2 other decoders' images stalled, too.")
    [text] = answer([replace(AR, gpu_disturbed=["the driver held the GPU's clock back (heat) in 2 of 9 readings"])])
    assert "clock back (heat) in 2 of 9 readings" in text


def test_the_verdict_needs_the_corrected_p_value():
    speed = Compared("speedup", Estimate(1.3, 1.1, 1.5), 0.03, 0.04)
    score = Compared("clip", Estimate(-0.1, -0.2, -0.01), 0.04, 0.08)
    text = verdict([speed, score])
    assert text.startswith("B is faster than A: 1.30") and "No difference is shown in clip (-0.100" in text
    assert verdict([replace(speed, p_holm=0.06)]).startswith("No difference is shown in speed")
    assert verdict([replace(speed, estimate=None)]) == "Nothing could be compared."


@pytest.mark.parametrize(("folder", "out"), [("results", ""), ("my runs", " --out 'my runs'")])
def test_the_command_that_scores_names_the_folder_of_the_runs(folder, out):
    for prompts in ("parti", "/home/me/my.txt"):
        of_lumina = {"model": "lumina", "setting": {"prompts": prompts}, "scores": [score("hpsv2[v2.1]")]}
        (text,) = answer([row("ar", 1.0, options={}, folder=Path(folder, "lumina-ar-0"), **of_lumina)])
        assert text == f"Not scored by clip[b16+299]; to score them: specbench score{out}"


def test_a_gap_beyond_its_error_is_one_of_so_many_looked_at():
    def row(label, gap, **other):
        usual = {"label": label, "lossless": True, "nll_gap": gap and Estimate(gap, None, None), "n": 8}
        return bare_row(**usual | {"nll_gap_se": 0.006} | other)

    rows = [row("ar", 0.001), row("sjd", -0.015), row("gsd", 0.4, lossless=False), row("eagle", None, nll_gap_se=None)]
    (text,) = _gaps(rows)
    assert "1 of 2 lossless decoders: sjd (-0.015 ± 0.006)" in text and _gaps(rows[:1]) == []
    assert _gaps([replace(item, n=7) for item in rows]) == [], "an error from so few images says nothing"


def test_a_lossy_decoder_that_fails_its_audit_is_labelled_by_the_verdict():
    failed = audit("recorded p is not the model's")
    assert DECODER.cell(row("gsd", lossless=False, audit=failed)) == "gsd (recorded p is not the model's)"
    assert "NOT LOSSLESS" in DECODER.cell(row("sjd", audit=failed))
