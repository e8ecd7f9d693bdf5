"""Count token-identical images: batch 4 against batch 1, and predictive sampling against AR.

Noise is addressed, so a batch can change an image only through the rounding of its kernels. The counts and
the first differing tokens go to results/speed/same_images.json.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path

import numpy as np
import torch
from rich.progress import track

from specbench.decoding.loop import decode
from specbench.models.catalog import find_model, load_model
from specbench.prompts import Request, load_prompts
from specbench.specs.presets import resolve
from specbench.system import environment

PAIRS = (("ar", 4, "ar", 1), ("sjd", 4, "sjd", 1), ("gsd", 4, "gsd", 1), ("predictive", 1, "ar", 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=64, help="number of prompts of the set `shapes`")
    parser.add_argument("--out", type=Path, default=Path("results/speed"), help="folder of the JSON file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, sampling = load_model("shapes"), find_model("shapes").sampling()
    requests = [Request(prompt.text, prompt.id, 0) for prompt in load_prompts("shapes").prompts[: options.prompts]]
    decoded: dict[tuple[str, int], np.ndarray] = {}
    for decoder, batch in track(dict.fromkeys([pair[i : i + 2] for pair in PAIRS for i in (0, 2)]), "decoding"):
        batches = [requests[start : start + batch] for start in range(0, len(requests), batch)]
        images = [image for rows in batches for image in decode(model, rows, resolve(decoder), sampling, 0, False)]
        decoded[decoder, batch] = np.stack([image.tokens for image in images])
    rows = []
    for preset, batch, other, other_batch in PAIRS:
        same = decoded[preset, batch] == decoded[other, other_batch]
        first = [int(row.argmin()) for row in same if not row.all()]
        name = f"{preset} at batch {batch} against {other} at batch {other_batch}"
        rows.append({"pair": name, "images": len(same), "same": int(same.all(1).sum()), "first_difference": first})
        print(f"{name}: {rows[-1]['same']} of {len(same)} images the same")
    document = {
        "command": shlex.join(["python", *sys.argv]),
        "weights_sha256": model.weights_sha256,
        **environment.environment_facts(),
        "rows": rows,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "same_images.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
