"""Rewrite the generated blocks of the README and of docs/ from the code and from the results behind it.

A block stands between `<!-- begin:NAME ARGUMENT -->` and `<!-- end:NAME -->`; the argument is optional. `make docs`
runs this, and a test fails while a block is stale.
"""

import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from pathlib import Path

import click
import typer
from field_page import field_alone, field_tables
from markdown_blocks import ROOT, as_table, escape
from measured_blocks import drills, effects, gpu, paper_plan, printed_latencies, reference, results, schedules

from specbench import stats
from specbench.checks.audit_settings import AUDIT_SETTINGS, AuditSetting
from specbench.checks.losslessness import AUDIT_SAMPLES
from specbench.cli import build_app
from specbench.metrics.catalog import METRICS
from specbench.models.catalog import find_model
from specbench.models.catalog import models as all_models
from specbench.models.hub_downloads import REVISIONS
from specbench.models.hub_model import MODELS
from specbench.papers.listing import prompt_rows
from specbench.papers.table_files import load_tables, table_names
from specbench.prompts import load_prompts
from specbench.prompts import prompt_set_names as prompt_sets
from specbench.prompts.public import public_names
from specbench.runs.settings import OTHER_VARIABLES
from specbench.specs.components import CHOICES, Component
from specbench.specs.options import plain
from specbench.specs.presets import PRESETS, resolve
from specbench.specs.run_spec import FILTERS, SAMPLING
from specbench.store.schema import FILE_KINDS, column_facts
from specbench.system.plugins import load_object, plugins

sys.path.insert(0, str(ROOT / "tests" / "support"))
from planted_bugs import BUGS

_BLOCK = re.compile(r"(<!-- begin:([a-z-]+) ?(.*?) -->\n).*?(<!-- end:\2 -->)", re.DOTALL)


def pages() -> list[Path]:
    """Every text that may hold generated blocks."""
    return [
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "dev" / "notes").glob("*.md")),
        ROOT / "benchmarks" / "readings.md",
    ]


def refresh(page: Path) -> str:
    """The page's text with every block made anew."""

    def made(found: re.Match) -> str:
        begin, name, argument, end = found.groups()
        return begin + BLOCKS[name](page, argument) + "\n" + end

    return _BLOCK.sub(made, page.read_text())


GUIDES = {
    "audit": "lossless.md",
    "bench": "papers.md",
    "check": "extending.md#a-decoder-in-one-file",
    "check-head": "decoders.md#draft-heads",
    "forecast": "forecast.md",
    "import": "tokens.md",
    "merge": "workers.md",
    "run": "first-run.md",
    "status": "workers.md",
    "train-head": "decoders.md#draft-heads",
}
"""Commands that have a guide."""


def command_help(page: Path, argument: str) -> str:
    """Of every command the first line of its help and its guide; `--help` prints the rest."""
    first = {name: escape(_plain_help(command).split("\n\n")[0]) for name, command in _commands()}
    guides = {name: f" [Guide]({GUIDES[name]})" if name in GUIDES else "" for name in first}
    return "\n".join(f"- `specbench {name}`: {said}{guides[name]}" for name, said in first.items())


FOREIGN_VARIABLES = {
    "HF_HOME, HF_HUB_CACHE": "folder of the Hugging Face hub's downloads",
    "HF_ENDPOINT": "address of a mirror of the hub",
    "HF_TOKEN": "token for gated repositories, as stored by `hf auth login`",
    "HF_HUB_OFFLINE, TRANSFORMERS_OFFLINE": "if 1, download nothing",
    "HTTPS_PROXY, NO_PROXY": "proxy of downloads",
    "SSL_CERT_FILE": "certificates to verify servers",
    "OMP_NUM_THREADS": "maximum number of CPU threads",
    "CUDA_VISIBLE_DEVICES": "GPUs to use",
}
"""Variables of others that downloads and devices follow."""


def variables(page: Path, argument: str) -> str:
    """Every environment variable besides those of settings."""
    named = {**OTHER_VARIABLES, **FOREIGN_VARIABLES}
    return "\n".join(f"- `{name}`: {meaning}" for name, meaning in named.items())


_TITLE = re.compile(r"^(\w+(?: and \w+)?(?: et al\.)?), .+?((?:, \w+ 20\d\d)? \(arXiv [\d.]+\))$")
"""A paper with its title, which `list decoders` and the entries for BibTeX have."""


def decoders(page: Path, argument: str) -> str:
    """Every preset by its paper."""
    papers: dict[str, list[str]] = {}
    for name in _built_in():
        said = "; ".join(["lossless" if resolve(name).lossless else "lossy", *_unlike_sjd(name)])
        paper = _TITLE.sub(r"\1\2", PRESETS[name].paper)
        papers.setdefault(paper, []).append(f"    - `{name}` ({said}): {PRESETS[name].summary}")
    return "\n".join(
        line for paper, lines in papers.items() for line in [f"- {paper if paper != '-' else 'Baseline'}", *lines]
    )


def _unlike_sjd(name: str) -> list[str]:
    """The parts of a preset that are not those of `sjd`, and the defaults that are not those of its parts."""
    sjd, chosen = PRESETS["sjd"].choices, PRESETS[name].choices
    parts = [f"{kind} `{value}`" for kind, value in chosen.items() if _uses(name, kind) and value != sjd[kind]]
    usual = {option.name: option.default for kind in chosen for option in CHOICES[kind][chosen[kind]].options}
    given = [f"`--{key} {plain(value)}`" for key, value in resolve(name).options.items() if value != usual.get(key)]
    return [", ".join(some) for some in (parts, given) if some]


def components(page: Path, kind: str) -> str:
    """The values of one choice, for example of the verifier."""
    return "\n".join(
        f"- `{name}`{'' if component.lossless else ' (lossy)'}: {escape(component.summary)}"
        for name, component in _built_in_parts(kind)
    )


def models(page: Path, argument: str) -> str:
    """The models of the catalogue by licence: image tokens, parameters, weights."""
    licences: dict[str, list[str]] = {}
    for name in all_models():
        if name not in plugins("models"):
            model = find_model(name)
            parameters = "" if model.parameters is None else f", {model.parameters / 1e6:,.0f} M parameters"
            where = f", `{model.hub_id}`" if model.hub_id else ""
            line = f"    - `{name}`: {model.summary}; {model.tokens:,} tokens{parameters}{where}"
            licences.setdefault(model.licence, []).append(line)
    return "\n".join(line for licence, lines in licences.items() for line in [f"- {licence}", *lines])


def revisions(page: Path, argument: str) -> str:
    """The hub repositories that models and metrics are downloaded from, each with its pinned commit."""
    users: dict[str, list[str]] = {}
    for model in MODELS:
        for source in model.checkpoint.sources:
            users.setdefault(source.repo, []).append(f"`{model.name}`")
    for name, entry in METRICS.items():
        repositories = getattr(load_object(entry.target, name), "repositories", {}).values()
        for repo in repositories:
            users.setdefault(repo, []).append(f"`{name}`")
    order = sorted({*users, *REVISIONS}, key=lambda repo: (repo not in REVISIONS, repo.lower()))
    by = {repo: ", ".join(dict.fromkeys(users.get(repo, ["metrics"]))) for repo in order}
    pinned = [f"- `{repo}` ({by[repo]}): `{REVISIONS[repo]}`" for repo in order if repo in REVISIONS]
    others = ", ".join(f"`{repo}`" for repo in order if repo not in REVISIONS)
    return "\n".join([*pinned, f"- none known: {others}"])


def metrics(page: Path, argument: str) -> str:
    """The built-in metrics; variants of one are in one row, which says once what they have in common."""
    groups: dict[str, dict[str, list[str]]] = {}
    for name in METRICS:
        base, _, variant = name.rstrip("]").partition("[")
        base = name if base == "compbench" else base  # six scores, no variants of one
        groups.setdefault(base, {})[variant] = escape(METRICS[name].summary).split()

    def line(base: str, variants: dict[str, list[str]]) -> str:
        if len(variants) == 1:
            ((variant, words),) = variants.items()
            name = f"{base}[{variant}]" if variant and base[-1] != "]" else base
            return f"- `{name}`: {' '.join(words)}"
        texts = list(variants.values())
        first = _common(texts)
        last = _common([words[len(first) :][::-1] for words in texts])[::-1]
        last = [] if " ".join(last).count(")") > " ".join(last).count("(") else last
        own = (" ".join(words[len(first) : len(words) - len(last)]).strip(",;") for words in texts)
        parts = "; ".join(f"`[{variant}]` {said}".strip() for variant, said in zip(variants, own, strict=True))
        common = f"; all: {' '.join(last)}" * bool(last)
        return f"- `{base}`, {' '.join(first).rstrip(',:')}: {parts}{common}"

    return "\n".join(line(*group) for group in groups.items())


def _common(texts: Sequence[list[str]]) -> list[str]:
    """The words that all begin with."""
    same = takewhile(lambda words: len(set(words)) == 1, zip(*texts, strict=False))
    return [words[0] for words in same]


def prompts(page: Path, argument: str) -> str:
    """The shipped prompt sets with their sizes, and the public ones to be fetched with their categories."""
    shipped = [name for name in prompt_sets() if name not in public_names()]
    lines = [f"- in the package: {', '.join(f'`{name}` {len(load_prompts(name).prompts):,}' for name in shipped)}"]
    sizes = {row["name"]: row["prompts"] for row in prompt_rows()}
    whole = [name for name in public_names() if "/" not in name]
    for name in whole:
        parts = [one for one in public_names() if one.startswith(f"{name}/")]
        of = f", in {len(parts)} categories such as `{parts[0]}`" if parts else ""
        lines.append(f"- `{name}` {sizes[name]:,}{of}: `specbench fetch {name}`")
    return "\n".join(lines)


def tables(page: Path, argument: str) -> str:
    """The names of the papers' tables and figures, by paper."""
    papers = _by_paper(table_names())
    return "\n".join(f"- `{paper}`: {', '.join(_ranges(numbers))}" for paper, numbers in papers.items())


def readings(page: Path, argument: str) -> str:
    """Every choice of the papers' tables: setting, values, evidence and places."""
    found: dict[tuple[str, str], tuple[dict, dict]] = {}
    for table in load_tables():
        for row in table.rows:
            for line in row.chosen:
                chosen, _, reason = line.removeprefix("Chosen: ").partition(": ")
                setting, _, value = chosen.partition(" = ")
                values, places = found.setdefault((setting, reason), ({}, {}))
                values[value] = places[table.name] = None
    rows = [
        [f"`{setting}`", ", ".join(values), escape(reason), _places(places)]
        for (setting, reason), (values, places) in sorted(found.items())
    ]
    return as_table(["setting", "chosen", "evidence", "tables and figures"], rows)


def _places(names: Iterable[str]) -> str:
    """Names of tables by paper: `sjd` 1-5, 10, fig6."""
    return "; ".join(f"`{paper}` {', '.join(_ranges(numbers))}" for paper, numbers in _by_paper(names).items())


def _by_paper(names: Iterable[str]) -> dict[str, list[str]]:
    papers: dict[str, list[str]] = {}
    for name in names:
        paper, _, number = name.rpartition("-")
        papers.setdefault(paper, []).append(number)
    return papers


def _ranges(numbers: Sequence[str]) -> list[str]:
    """Three and more numbers in a row as one range."""
    runs: list[list[str]] = []
    for number in numbers:
        if runs and number.isdigit() and runs[-1][-1].isdigit() and int(number) == int(runs[-1][-1]) + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [text for run in runs for text in ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else run)]


NUMBERS = (
    *("nfe", "tokens_per_step", "step_compression", "step_ratio", "latency_ms", "speedup"),
    *("acceptance", "acceptance_length", "draft_tv"),
)
"""Numbers of the papers, by their columns in tables, files and Python."""


def paper_names(page: Path, argument: str) -> str:
    """What the papers' tables call the numbers that are measured here."""
    found: dict[str, dict[str, set[str]]] = {key: {} for key in NUMBERS}
    for table in load_tables():
        for column in table.columns if table.source.startswith(("Table", "Figure", "README")) else ():
            if column.key in found:
                paper = table.name.rpartition("-")[0]
                found[column.key].setdefault(column.header, set()).add(paper)
    rows = []
    for key, headers in found.items():
        name, _, meaning = stats.NUMBERS[key].definition.partition(": ")
        said = "; ".join(f"{header} ({', '.join(sorted(papers))})" for header, papers in headers.items())
        rows.append([name, f"`{key}`", escape(meaning.partition(";")[0].rstrip(".")), escape(said) or "-"])
    return as_table(["name", "column", "definition", "in the papers' tables"], rows)


FIRST_FUNCTIONS = ("run", "generate", "report", "samples", "load", "score", "compare", "columns", "audit")
"""Public functions in this order, before all others."""


def functions(page: Path, argument: str) -> str:
    """Return the public functions: required arguments and first sentence; commands by name only."""
    import specbench

    shown = []
    commands = {name.replace("-", "_") for name, _ in _commands()} & {*specbench.__all__} - {*FIRST_FUNCTIONS}
    named = ", ".join(f"`{name}`" for name in sorted(commands))
    shown.append(f"- {named}: as the [commands](commands.md#every-command) of these names")
    for name in (*FIRST_FUNCTIONS, *sorted(set(specbench.__all__) - {*FIRST_FUNCTIONS, *commands})):
        function = getattr(specbench, name)
        if inspect.isfunction(function):
            given = [each for each in inspect.signature(function).parameters.values() if each.kind != each.VAR_KEYWORD]
            taken = ", ".join([each.name for each in given if each.default is each.empty] + ["..."])
            said = (inspect.getdoc(function) or "").split("\n\n")[0]
            shown.append(f"- `{name}({taken})`: {escape(said)}")
    return "\n".join(shown)


def file(page: Path, argument: str) -> str:
    """A file of docs/, as code."""
    path = ROOT / "docs" / argument
    languages = {".py": "python", ".toml": "toml", ".jsonl": "json"}
    return f"```{languages.get(path.suffix, 'text')}\n{path.read_text().rstrip()}\n```"


def audit_settings(page: Path, argument: str) -> str:
    """What `specbench audit` decodes: how many settings, their ranges, and what they have besides."""
    usual = AUDIT_SAMPLES / sum(setting.share for setting in AUDIT_SETTINGS)
    layouts = [setting.layout for setting in AUDIT_SETTINGS]

    def span(numbers: Iterable[float]) -> str:
        return "{:,.0f} to {:,.0f}".format(*(end(some) for some in [list(numbers)] for end in (min, max)))

    also = Counter(kind for setting in AUDIT_SETTINGS for kind in _kinds(setting))
    return (
        f"{len(AUDIT_SETTINGS)} settings: grids of {span(one.height * one.width for one in layouts)} image tokens with "
        f"{span(one.v_image for one in layouts)} values, windows of {span(one.window for one in AUDIT_SETTINGS)}, "
        f"{span(round(usual * one.share, -2) for one in AUDIT_SETTINGS)} images. In brackets, settings with: "
        f"{', '.join(f'{kind} ({number})' for kind, number in also.most_common())}."
    )


def _kinds(setting: AuditSetting) -> list[str]:
    """What a setting of the audit has besides a grid and a window."""
    sampling, layout = setting.sampling, setting.layout
    has = {
        "forced tokens": len(layout.forced) > layout.height * layout.width,
        "guidance": sampling.guidance != 1.0,
        "temperature": sampling.temperature != 1.0,
        "entropy scale": sampling.entropy_scale is not None,
        **{SAMPLING[name].name: name in sampling.filters for name in FILTERS},
        "ties": bool(setting.grain),
        "drafts kept for several steps": bool(setting.shared),
        "one image at a time": setting.batch == 1,
        "continuous batching": bool(setting.rows),
        "traced": setting.trace,
        "a transformer": setting.model == "transformer",
    }
    return [kind for kind, there in has.items() if there]


def planted_bugs(page: Path, argument: str) -> str:
    """How many bugs the tests plant, by part of the code."""
    parts = Counter(bug.part for bug in BUGS)
    named = ", ".join(f"{part} {number}" for part, number in parts.most_common())
    more = sum(bug.times != 1 for bug in BUGS)
    return f"Tests plant {len(BUGS)} bugs into the code. The audit catches all, {more} only with more images: {named}."


EVERYWHERE = ("run_id", "model", "decoder")
"""Columns of all kinds of files, which the page explains once."""


def columns(page: Path, kind: str) -> str:
    """The declared columns of a kind of parquet file."""
    facts = column_facts(FILE_KINDS[kind])
    types = {field.name: str(field.type).replace("element: ", "").replace("item: ", "") for field in FILE_KINDS[kind]}
    types = {name: "list of scores" if "struct" in of else of for name, of in types.items()}
    units = {name: f" in {one['unit']}" if one["unit"] else "" for name, one in facts.items()}
    facts = {name: one for name, one in facts.items() if name not in EVERYWHERE}
    return "\n".join(f"- `{name}` `{types[name]}`{units[name]}: {one['meaning']}" for name, one in facts.items())


BLOCKS: dict[str, Callable[[Path, str], str]] = {
    "audit-settings": audit_settings,
    "command-help": command_help,
    "columns": columns,
    "components": components,
    "decoders": decoders,
    "drills": drills,
    "effects": effects,
    "field": field_tables,
    "field-alone": field_alone,
    "file": file,
    "functions": functions,
    "gpu": gpu,
    "metrics": metrics,
    "models": models,
    "variables": variables,
    "paper-names": paper_names,
    "paper-plan": paper_plan,
    "planted-bugs": planted_bugs,
    "printed-latencies": printed_latencies,
    "prompts": prompts,
    "reference": reference,
    "revisions": revisions,
    "results": results,
    "readings": readings,
    "schedules": schedules,
    "tables": tables,
}


def _commands() -> list[tuple[str, click.Command]]:
    """Every command and subcommand by its full name."""
    found = []
    for name, command in typer.main.get_command(build_app()).commands.items():
        parts = [(f"{name} {sub}", part) for sub, part in getattr(command, "commands", {}).items()]
        found += parts or [(name, command)]
    return found


def _built_in() -> list[str]:
    """Presets of the package, whatever plug-ins are installed."""
    return [name for name in PRESETS if all(_is_ours(part) for part in _parts(name))]


def _parts(name: str) -> list[Component]:
    return [CHOICES[kind][value] for kind, value in PRESETS[name].choices.items()]


def _uses(name: str, kind: str) -> bool:
    """Whether a preset's drafter leaves this choice any effect."""
    return kind not in CHOICES["drafter"][PRESETS[name].choices["drafter"]].ignores


def _built_in_parts(kind: str) -> list[tuple[str, Component]]:
    return [(name, component) for name, component in CHOICES[kind].items() if _is_ours(component)]


def _is_ours(component: Component) -> bool:
    return component.target.startswith("specbench.")


def _plain_help(command: click.Command) -> str:
    return re.sub(r"\[/?[a-z ]+\]", "", (command.help or "").split("\f")[0])


if __name__ == "__main__":
    for page in pages():
        page.write_text(refresh(page))
