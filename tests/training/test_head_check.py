"""`specbench check-head`: both kinds of head are measured, and what cannot be known is null."""

import json

import pytest

ASKED = ("check-head", "--model", "shapes", "--depths", "2")


@pytest.mark.parametrize(("kind", "depths"), [("eagle", ["1", "2", "1, x_t"]), ("vertical", ["1", "2"])])
def test_each_kind_of_head_is_measured_as_such_and_one_image_has_no_interval(kind, depths, cli):
    alone = json.loads(cli(*ASKED, "--kind", kind, "--images", "1", "--json").out)
    assert [row["depth"] for row in alone] == depths
    assert all(0 < row["tv"] < 1 and row["tv_low"] is None and row["tv_high"] is None for row in alone)
    two = json.loads(cli(*ASKED, "--kind", kind, "--images", "2", "--json").out)
    assert all(row["tv_low"] <= row["tv"] <= row["tv_high"] for row in two)


def test_an_unknown_kind_is_refused(cli):
    refused = cli(*ASKED, "--kind", "vertikal")
    assert refused.code == 2 and "unknown kind of draft head 'vertikal'" in refused.err
