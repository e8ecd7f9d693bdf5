"""Every format names writers that exist, and is found by its names."""

import pytest
from refusals import refused

from specbench.errors import enumerated
from specbench.system.table_formats import FORMATS, format_name, formats_with, writer

OUTPUTS = ("report", "tables", "comparison", "over")


@pytest.mark.parametrize(("output", "name"), [(output, name) for output in OUTPUTS for name in formats_with(output)])
def test_each_named_writer_is_there(output, name):
    assert callable(writer(output, name))


def test_a_format_is_one_of_those_that_the_output_has_and_no_two_share_an_ending():
    assert format_name("report", "csv") == "csv" and format_name("comparison", "TeX") == "latex"
    refused("unknown format 'csv' \\(valid: json, latex, markdown\\)", format_name, "comparison", "csv")
    assert enumerated(formats_with("over")) == "markdown, latex and json"
    assert enumerated(formats_with("columns"), "or") == "markdown or latex"
    endings = [ending for known in FORMATS.values() for ending in known.endings]
    assert len(set(endings)) == len(endings)
