"""vLLM on this CPU serves small checkpoints: audits by its address find what is wrong, and nothing else. It
concerns several modules: runs.engine, runs.token_import, checks.run_audit."""

import sys
from itertools import groupby
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "dev" / "engines"))
import run as engines

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not engines.PYTHON.exists(), reason="vLLM for CPUs is not installed: make test-engines"),
]
SERVERS = {key: [*cases] for key, cases in groupby(engines.CASES, lambda case: (case.model, case.rounded))}


@pytest.mark.parametrize("server", SERVERS, ids=str)
def test_what_vllm_serves_is_distinguished_from_what_it_should_serve(server, tmp_path):
    engines.prepared(tmp_path, [server[0]])
    with engines.serving(SERVERS[server][0], tmp_path) as address:
        for case in SERVERS[server]:
            row = engines.audited(case, address, tmp_path, tmp_path / case.wrong)
            assert row["sentence"].startswith(case.verdict), f"{case.wrong}: {row['sentence']}"
