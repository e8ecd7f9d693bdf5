"""`specbench audit --run`: verdicts, recomputed values, bad input, exit codes, and the verdict in reports."""

import json
import shutil
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from planted_bugs import RECORDING_FAULTS, plant

from specbench import api
from specbench.checks.run_audit import CONSISTENT, DEVIATES, IMPOSSIBLE, OTHERS, PRINTED_ORDERS, UNLIKELY, audit_run
from specbench.checks.teacher_forced import Rounding, Values, rounding_explains
from specbench.cli.checks import decided_by
from specbench.decoding.noise import Noise
from specbench.decoding.sampling import Target
from specbench.errors import GATE, MISSING_PREREQUISITE
from specbench.models import catalog
from specbench.store.run_store import AUDIT_JSON, RunStore, read_audit

IMAGES = 8


def decoded(out, decoder, **settings):
    usual = {"limit": IMAGES, "batch": IMAGES, "cfg": 1.0, "temperature": 2.0, "top_p": 1.0}
    (folder,) = api.run(decoder=[decoder], out=str(out), threads=1, quiet=True, **usual | settings).folders
    return folder


@contextmanager
def planted(seam, fault):
    with pytest.MonkeyPatch.context() as patch:
        plant(patch, seam, fault)
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A lossless run, a lossy one, one that samples from a sharpened p, one that records that p as well, and ZipAR."""
    out = tmp_path_factory.mktemp("runs")
    made = {"sjd": decoded(out, "sjd"), "amplify": decoded(out, "amplify:k=8"), "zipar": decoded(out, "zipar")}
    with planted(Noise.run_race, lambda plain, self, p, *where: plain(self, p**20, *where)):
        made["sharpened"] = decoded(tmp_path_factory.mktemp("sharpened"), "ar")

    with planted(Target.__call__, lambda plain, self, logits, positions: plain(self, logits * 20.0, positions)):
        made["lying"] = decoded(tmp_path_factory.mktemp("lying"), "ar")
    return made


@pytest.fixture
def folder_of(runs, tmp_path):
    """A copy of a run, as an audit writes into it."""
    return lambda name: shutil.copytree(runs[name], tmp_path / runs[name].name)


def test_a_lossless_run_is_consistent_and_says_how_much_it_could_have_seen(folder_of):
    audit = audit_run(folder_of("sjd"))
    assert (audit["verdict"], audit["failed"], audit["images"]) == ("consistent", False, IMAGES)
    assert 0.03 < audit["detectable"] < 0.2
    orders = {"token id", "p descending", "p/q descending", "q/q of the step before, descending"}
    assert set(audit["by_order"]) == orders


def test_a_verdict_that_cannot_be_stored_is_still_returned(folder_of, capsys):
    folder = folder_of("sjd")
    (folder / "audit.json").mkdir()
    assert audit_run(folder)["verdict"] == "consistent"
    assert "warning: the verdict is not stored: cannot write" in capsys.readouterr().err


def test_a_lossy_run_deviates_with_order_place_and_bound(folder_of):
    """`amplify` favours drafts: the order by p/q shows it far better than those that need p alone."""
    folder = folder_of("amplify")
    audit, asked = audit_run(folder), audit_run(folder, recompute=True, keep=False)
    assert asked["order"] == audit["order"] and asked["tv_low"] == pytest.approx(audit["tv_low"], abs=1e-3)
    assert audit["deviates"] and not audit["failed"]  # it never claimed to be lossless
    assert audit["order"] == "p/q descending" and 0.005 < audit["tv"] < audit["tv_high"]
    assert audit["place"] or audit["entropy"]


def test_recomputed_values_are_those_recorded_also_in_pieces(folder_of, monkeypatch):
    folder = folder_of("sjd")
    audit = audit_run(folder, recompute=True)
    assert audit["verdict"] == "consistent" and audit["unavailable"] == []
    assert set(audit["agreement"]) == {"log p", "u by token id", "u by p descending", "entropy"}
    for agreement in audit["agreement"].values():
        assert agreement["mean"] < 1e-4 and agreement["beyond"] == 0
    assert audit["impossible_tokens"] == 0
    monkeypatch.setattr("specbench.checks.teacher_forced._CHUNK", 512 * 50)  # 50 columns at a time, one image
    pieces = audit_run(folder, recompute=True)
    assert pieces["tv"] == pytest.approx(audit["tv"], abs=1e-3)
    assert pieces["agreement"]["u by p descending"]["beyond"] == 0


SAMPLED = {"limit": 2, "batch": 2, "cfg": 1.5, "temperature": 1.0, "top_k": 60, "top_p": 0.95}


@pytest.mark.parametrize(("decoder", "changed"), [
    ("sjd", {}), pytest.param("ar", {"cfg": 7.0, "limit": 4, "batch": 4}, marks=pytest.mark.slow),
    ("ar", {"top_k": 1}), pytest.param("ar", {"cfg": 7.0, "temperature": 0.3}, marks=pytest.mark.slow),
])  # fmt: skip
def test_rounding_is_no_verdict(decoder, changed, tmp_path):
    """Guidance of 7 multiplies the rounding of bfloat16 by 9: log p recomputed in other shapes is 0.1 nats off. Sharp
    sampling leaves most tokens as they are and makes another token the likeliest now and then."""
    audit = audit_run(decoded(tmp_path, decoder, **SAMPLED | {"dtype": "bfloat16"} | changed), recompute=True)
    assert (audit["verdict"], audit["failed"]) == (CONSISTENT, False)
    if "limit" in changed:
        assert audit["agreement"]["log p"]["mean"] > 0.02 and audit["impossible_tokens"] > 0


@pytest.mark.parametrize("fault", RECORDING_FAULTS)
def test_a_run_that_records_another_p_than_the_models_is_a_verdict(fault, tmp_path, cli):
    with planted(*RECORDING_FAULTS[fault]):
        folder = decoded(tmp_path, "sjd", **SAMPLED)
    outcome = cli("audit", "--run", folder, "--recompute")
    assert outcome.code == GATE and OTHERS in outcome.out and f"{folder.name} ({OTHERS}: " in outcome.err
    assert OTHERS in cli("report", folder).out


TEMPERATURE = (Target.__call__, lambda plain, self, logits, *rest: plain(self, logits.float() / 1.3, *rest))


@pytest.mark.parametrize(("fault", "decoder", "changed"), [
    (RECORDING_FAULTS["cache"], "sjd", {}),
    (TEMPERATURE, "ar", {"cfg": 7.0, "limit": 6, "batch": 6, "top_k": 0, "top_p": 1.0}),
])  # fmt: skip
def test_bfloat16_does_not_hide_another_p(fault, decoder, changed, tmp_path):
    with planted(*fault):
        folder = decoded(tmp_path, decoder, **SAMPLED | {"dtype": "bfloat16"} | changed)
    assert audit_run(folder, recompute=True)["verdict"] == OTHERS


@pytest.mark.parametrize(("verdict", "sentence"), [
    (CONSISTENT, "p 0.12"), (UNLIKELY, "33 nats"), (DEVIATES, "p 1e-05 by token id"),
    (IMPOSSIBLE, "530 tokens of probability 0"), (OTHERS, "log p: 2.00% of the tokens"),
])  # fmt: skip
def test_the_number_that_decides_is_reported(verdict, sentence):
    log_p = {"differs": verdict == OTHERS, "rounding": None, "beyond": 0.02, "mean": 0.3}
    row = {"verdict": verdict, "p_value": 1e-5 if verdict == DEVIATES else 0.12, "level": 0.001, "order": "token id"}
    row |= {"causes": [{"nats": 33.2}] * (verdict == UNLIKELY), "impossible_tokens": 530, "agreement": {"log p": log_p}}
    assert decided_by(row) == sentence


def audit_of_changed(folder, monkeypatch, change):
    """Audit of a run whose rows were changed; in a file that would not pass its digest."""
    plain = RunStore.samples

    def changed(self, columns):
        rows = plain(self, columns)
        change(rows)
        return rows

    monkeypatch.setattr(RunStore, "samples", changed)
    return audit_run(folder, recompute=True, keep=False)


def test_one_image_of_another_run_is_found_under_the_rounding_of_bfloat16(tmp_path, monkeypatch):
    """Its tokens are impossible more often than rounding makes them, though the mean over the images hides it."""
    folder = decoded(tmp_path, "ar", **SAMPLED | {"dtype": "bfloat16", "cfg": 7.0, "limit": 6, "batch": 6})

    def copy_tokens(rows):
        rows.at[0, "tokens"] = rows.at[1, "tokens"]

    assert audit_of_changed(folder, monkeypatch, copy_tokens)["failed"]


def test_an_image_without_records_does_not_keep_the_others_from_being_compared(folder_of, monkeypatch):
    def forget(rows):
        for name in ("u_id", "u_p", "logp", "entropy"):
            rows.at[0, name] = None

    audit = audit_of_changed(folder_of("sjd"), monkeypatch, forget)
    assert set(audit["agreement"]) == {"log p", "u by token id", "u by p descending", "entropy"} and not audit["failed"]


def test_wrong_entropies_are_found_in_float32(folder_of, monkeypatch):
    def change(rows):
        rows["entropy"] = [entropy + 0.1 for entropy in rows["entropy"]]

    assert audit_of_changed(folder_of("sjd"), monkeypatch, change)["verdict"] == OTHERS


def test_many_impossible_tokens_in_addition_to_the_control_are_not_explained():
    """Images that no control was taken of have their own allowance, which all of them together do not."""
    images, slots = 100, 240
    free, none = np.ones((images, slots), bool), Values({}, np.zeros(0))
    rounding = Rounding(free[:16], none, none._replace(possible=np.ones((16, slots), bool)))
    assert rounding_explains(np.eye(images, slots, dtype=bool)[:20], free[:20], rounding)
    assert not rounding_explains(np.arange(slots) < np.full((images, 1), 12), free, rounding)


def test_tokens_that_the_target_cannot_draw_are_a_verdict(tmp_path, cli):
    outcome = cli("audit", "--run", decoded(tmp_path, "add", **SAMPLED), "--recompute")
    assert outcome.code == 0  # it never claimed to be lossless
    assert IMPOSSIBLE in outcome.out and "have probability 0 given all tokens before them" in outcome.err


def test_a_decoder_that_records_another_p_is_found_out_by_recomputing(folder_of, cli):
    folder = folder_of("lying")
    assert audit_run(folder)["verdict"] == "consistent"
    outcome = cli("audit", "--run", folder, "--recompute", "--json")
    assert outcome.code == GATE
    (audit,) = json.loads(outcome.out)
    assert audit["failed"] and audit["agreement"]["u by p descending"]["beyond"] > 0.2


def test_a_run_without_recorded_values_names_the_flag_that_helps(folder_of, cli):
    folder = folder_of("zipar")
    cli("audit", "--run", folder).refused("--recompute", alone=True)
    assert audit_run(folder, recompute=True)["images"] == IMAGES


def test_a_model_that_is_not_here_gets_the_line_that_fetches_it(folder_of, monkeypatch, tmp_path, cli):
    folder = folder_of("sjd")
    gone = replace(catalog.find_model("shapes"), weights=(tmp_path / "network.safetensors",))
    monkeypatch.setattr("specbench.checks.run_audit.recorded_model", lambda *asked, **also: gone)
    cli("audit", "--run", folder, "--recompute").refused("is not on this disk", code=MISSING_PREREQUISITE)


def test_other_weights_than_the_runs_are_refused_after_the_verdicts_of_runs_before(folder_of, cli):
    folder = folder_of("sjd")
    path = folder / "run.json"
    info = json.loads(path.read_text())
    info["spec"]["weights_sha256"] = "0" * 64
    path.write_text(json.dumps(info))
    messages = cli("audit", "--run", folder_of("amplify"), "--run", folder, "--recompute").err
    assert messages.index("p recomputed in float32") < messages.index("differ from the run's weights")


def test_rows_that_were_decoded_before_the_values_were_kept_are_null_and_left_out(folder_of):
    folder = folder_of("sjd")
    store = RunStore(folder)
    (old, *_) = store._samples.read().to_pylist()
    store._samples.append([old | dict.fromkeys(PRINTED_ORDERS)])
    assert audit_run(folder)["images"] == IMAGES - 1


def test_reports_and_cards_carry_the_verdict(folder_of, cli):
    folder = folder_of("sharpened")
    before = cli("report", folder).out
    assert "NOT LOSSLESS" not in before and "deviates" not in before
    outcome = cli("audit", "--run", folder)
    assert outcome.code == GATE and outcome.err.count("\n") == 1 and folder.name in outcome.err
    assert "deviates" in outcome.out
    report = cli("report", folder).out
    assert "no, TV ≥ " in report or "yes, TV ≥ " in report
    tables = [line for line in report.splitlines() if line.startswith("| ar")]
    assert tables and all("NOT LOSSLESS" in line for line in tables) and "NOT LOSSLESS" in cli("show", folder).out
    (row,) = json.loads(cli("report", folder, "--format", "json").out)
    assert row["audit"]["failed"] and row["audit"]["current"]


def test_a_verdict_on_other_images_is_out_of_date_and_a_damaged_one_is_named(folder_of, cli):
    folder = folder_of("amplify")
    audit_run(folder)
    (folder / AUDIT_JSON).write_text(json.dumps(read_audit(folder) | {"fingerprint": "0" * 16}))
    assert "out of date" in cli("report", folder).out
    (folder / AUDIT_JSON).write_text("{}")
    cli("report", folder).refused(AUDIT_JSON)
