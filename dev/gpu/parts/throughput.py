"""Images per hour of `shapes`: batches against one image at a time."""

from throughput import timed_images

from parts.claims import Outcome, claim
from parts.scales import Scale
from specbench.models.catalog import find_model, load_model
from specbench.prompts import load_prompts
from specbench.specs.presets import resolve


def throughput(device: str, scale: Scale) -> Outcome:
    """Decode images of `shapes` one at a time and in batches that are refilled."""
    model, sampling = load_model("shapes", device), find_model("shapes").sampling()
    texts = [prompt.text for prompt in load_prompts("shapes").prompts]
    rows = []
    for batch in scale.batches:
        images = texts[: batch if batch < 16 else 2 * batch]
        timed_images(model, resolve("ar"), sampling, batch, images[:1], 99)
        row = timed_images(model, resolve("sjd"), sampling, batch, images, 0)
        rows.append({**row, "per_hour": 3.6e6 * row["images"] / row["wall_ms"]})
    lone, most = rows[0]["per_hour"], max(row["per_hour"] for row in rows)
    value = ", ".join(f"{row['per_hour']:,.0f} at {row['batch']}" for row in rows)
    claims = [claim("images per hour of shapes with SJD, by batch", value)]
    return [
        *claims,
        claim("best batch over one image at a time", f"{most / lone:.1f}x", "10x", most >= 10 * lone),
    ], rows
