"""NLL - H of stored tokens, teacher-forced: each token given all earlier tokens, even if its decoder used others.

    python dev/reference/teacher_forced.py zipar pjd ...      images of these decoders, 32 of each in turn

The tokens come from results/reference/images.parquet. Each image is written to teacher-forced.jsonl in that folder at
once, and a later call continues. At the end the column of headline.md is written again: NLL - H over the tokens that
the model can draw, the number of other tokens, and how many images have other tokens. Decoders of the common loop
record this p (`specbench audit --run --recompute` finds no difference); ZipAR and PJD record the p of their context.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "dev"))

from json_rows import read_rows  # noqa: E402 - found through the line above

from specbench.checks.teacher_forced import teacher_forced_values  # noqa: E402
from specbench.models.catalog import load_model  # noqa: E402
from specbench.prompts import load_prompts  # noqa: E402
from specbench.specs.run_spec import Sampling  # noqa: E402

RESULTS = ROOT / "results" / "reference"
FILE = RESULTS / "teacher-forced.jsonl"
AT_ONCE = 32
SAMPLING = Sampling(guidance=1.5, temperature=1.0, top_k=0, top_p=0.95)


def measure(images: pd.DataFrame, model) -> list[dict]:
    """One row per image of one decoder."""
    values = teacher_forced_values(model, images.assign(seed=0), SAMPLING)
    measured = []
    for number, image in enumerate(images.itertuples()):
        drawn = np.isfinite(values.logp[number])
        measured.append(
            {
                "decoder": image.decoder,
                "prompt_id": image.prompt_id,
                "sample": int(image.sample),
                "tokens": int(drawn.sum()),
                "excess": float((-values.logp[number] - values.entropy[number])[drawn].astype(float).sum()),
                "impossible": int((~values.possible[number]).sum()),
            }
        )
    return measured


def described(rows: list[dict]) -> str:
    """Format the mean excess in nats with its standard error over images, and the number of tokens of probability 0."""
    excess, tokens = (np.array([row[name] for row in rows], float) for name in ("excess", "tokens"))
    mean, n = excess.sum() / tokens.sum(), len(rows)
    error = np.sqrt(n / (n - 1) * np.square(excess - mean * tokens).sum()) / tokens.sum()
    text = f"{mean:+.3f} ± {error:.3f}"
    text = f"**{text}**" if abs(mean) > 1.96 * error else text
    zero = [row["impossible"] for row in rows if row["impossible"]]
    return text + (f"; {sum(zero)} impossible tokens in {len(zero)} of {n} images" if zero else f"; n={n}")


def rewrite(headline: str, rows: list[dict]) -> str:
    """`headline` with the teacher-forced value in the last column, and the decoder's own value in a further column."""
    by_name: dict[str, list[dict]] = {}
    for row in rows:
        by_name.setdefault(row["decoder"], []).append(row)
    lines = [[cell.strip() for cell in line.strip("| \n").split(" | ")] for line in headline.splitlines()]
    head = lines[0]
    if "in its own context" not in head:
        for line, new in zip(lines, ["in its own context", "---", *["="] * (len(lines) - 2)], strict=True):
            line.append(new)
    at = head.index("NLL - H, nats")
    for line in lines[2:]:
        if line[0] in by_name:
            recorded = line[at] if line[at + 1] == "=" else line[at + 1]
            line[at:] = [described(by_name[line[0]]), recorded]
            if any(row["impossible"] for row in by_name[line[0]]):
                line[head.index("audit")] = "impossible tokens"
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("decoders", nargs="*", help="names as in headline.md; without names only the table is written")
    parser.add_argument("--images", type=int, default=636, help="of each decoder, at most")
    options = parser.parse_args()
    torch.set_num_threads(1)
    texts = {prompt.id: prompt.text for prompt in load_prompts("shapes").prompts}
    stored = pd.read_parquet(RESULTS / "images.parquet", columns=["decoder", "prompt_id", "sample", "tokens"])
    stored["prompt"] = stored["prompt_id"].map(texts)
    done = {(row["decoder"], row["prompt_id"], row["sample"]) for row in read_rows(FILE)}
    model = load_model("shapes", "cpu", "float32")
    with FILE.open("a") as out:
        for start in range(0, options.images, AT_ONCE):
            for name in options.decoders:
                part = stored[stored.decoder == name].iloc[start : min(start + AT_ONCE, options.images)]
                keys = zip(part.decoder, part.prompt_id, part["sample"], strict=True)
                part = part[[key not in done for key in keys]]
                for row in measure(part, model) if len(part) else ():
                    out.write(json.dumps(row) + "\n")
                out.flush()
    table = RESULTS / "headline.md"
    table.write_text(rewrite(table.read_text(), read_rows(FILE)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
