"""Methods paragraph of a paper and its BibTeX entries, made only from `run.json` and stored scores."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from specbench.errors import SpecbenchError, enumerated
from specbench.metrics.score_store import read_scores
from specbench.reporting.marks import natural
from specbench.specs.options import plain
from specbench.specs.presets import PRESETS, resolve
from specbench.specs.run_spec import OFF_IF_NONE, SAMPLING
from specbench.stats.intervals import FEW_UNITS
from specbench.store.run_info import RunInfo, read_info
from specbench.system.text_tables import tex

_SOURCE = re.compile(
    r"(?P<author>[^,]+), (?P<title>.+?)(?:, (?P<booktitle>[A-Z][\w-]+) (?P<year>\d{4}))?"
    r"(?: \(arXiv (?P<eprint>[\d.]+)\))?"
)
_SELF = (
    "@misc{specbench,\n  title = {{specbench: speculative and parallel decoders of autoregressive text-to-image "
    "models, measured}},\n  author = {{The specbench authors}},\n  note = {Version %s}\n}"
)
_NO_FILES = hashlib.sha256().hexdigest()  # `weights_sha256` of a plug-in's model without weight files


def paragraph_and_entries(folders: Sequence[Path]) -> tuple[str, str]:
    """Return a LaTeX paragraph that describes how the runs were made, and the BibTeX entries that it cites.

    The paragraph contains only stored facts; plug-in decoders have no entry.
    """
    stored = [read_info(folder) for folder in folders]
    infos = [info for info in stored if info.spec.tokens_sha256 is None]
    theirs = [rf"\texttt{{{tex(info.spec.decoder.name)}}}" for info in stored if info.spec.tokens_sha256]
    if not infos:
        what = "a methods paragraph describes only runs that specbench decoded"
        raise SpecbenchError(what, "omit these runs, whose tokens come from other programs")
    presets = {info.spec.decoder.name: PRESETS.get(info.spec.decoder.name) for info in infos}
    papers = {
        name: preset.paper if preset and not preset.own and preset.paper != "-" else None
        for name, preset in presets.items()
    }
    sentences = [
        *_each("Images were decoded with {}.", map(_model, infos)),
        *_each("Sampling used {}.", _samplings(infos)),
        *_each("The prompts were from {}.", map(_prompts, infos)),
        f"The decoders were {enumerated(_decoders(infos, papers))}.",
        *([f"The tokens of {enumerated(theirs)} were drawn by these programs on other machines."] if theirs else []),
        *_metrics(folders),
        *_each("We measured on {}.", (_machine(info) for info in infos)),
        _statistics(infos),
    ]
    version = str(infos[0].invocations[-1].versions.get("specbench"))
    cited = dict.fromkeys(text for text in papers.values() if text)
    entries = [_entry(_key(text), text) for text in cited]
    return " ".join(sentences) + "\n", "\n\n".join([*entries, _SELF % version]) + "\n"


def _each(sentence: str, texts: Iterable[str]) -> list[str]:
    """Return one `sentence` per distinct text."""
    return [sentence.format(text) for text in dict.fromkeys(texts)]


def _model(info: RunInfo) -> str:
    spec, commits = info.spec, info.commits or {}
    where = [f"{name} at commit {commit[:12]}" for name, commit in commits.items()]
    where += [info.source_text] if info.source_text else []
    where += [f"SHA-256 of its code {spec.model_code[:12]}"] if spec.model_code else []
    if spec.weights_sha256 != _NO_FILES:
        where.append(f"SHA-256 of the weights {spec.weights_sha256[:12]}")
    facts = tex("; ".join(where))
    images = "one image" if spec.batch == 1 else f"{spec.batch} images"
    compiled = ", with compiled steps" if info.compiled else ""
    return rf"\texttt{{{tex(spec.model)}}} ({facts}) in {tex(spec.dtype)}, {images} at a time{compiled}"


def _samplings(infos: Sequence[RunInfo]) -> list[str]:
    """Describe each sampling setting, with all its seeds."""
    seeds: dict[str, set[int]] = {}
    for info in infos:
        seeds.setdefault(_sampling(info), set()).add(info.spec.seed)
    return [
        f"{text}, seed{'s' if len(numbers) > 1 else ''} {enumerated(map(str, sorted(numbers)))}"
        for text, numbers in seeds.items()
    ]


def _sampling(info: RunInfo) -> str:
    sampling = info.spec.sampling
    parts = [f"classifier-free guidance {sampling.guidance:g}", f"temperature {sampling.temperature:g}"]
    parts += [f"top-$k$ {sampling.top_k}" if sampling.top_k else "no top-$k$"]
    parts += [f"top-$p$ {sampling.top_p:g}"] if sampling.top_p < 1 else []
    filters = {SAMPLING[name].name: getattr(sampling, name) for name in OFF_IF_NONE}
    parts += [f"{name} {value:g}" for name, value in filters.items() if value]
    parts += [tex(info.processors_text)] if info.processors_text else []
    return ", ".join(parts)


def _prompts(info: RunInfo) -> str:
    drawn = f"; drawn: {', '.join(info.drawn)}" if info.drawn else ""
    return tex(f"{info.spec.prompts} (SHA-256 {info.spec.prompts_sha256[:12]}{drawn})")


def _decoders(infos: Sequence[RunInfo], papers: Mapping[str, str | None]) -> Iterator[str]:
    """Describe each decoder with its options. Runs that differ in a single option share a description."""
    alike: dict[str, list[dict[str, str]]] = {}
    for info in infos:
        decoder, paper = info.spec.decoder, papers[info.spec.decoder.name]
        cited = rf"~\cite{{{_key(paper)}}}" if paper else ""
        exact = "lossless" if decoder.lossless else "lossy"
        name = rf"{exact} \texttt{{{tex(decoder.full_name)}}}{cited}"
        if (options := _options(info)) not in alike.setdefault(name, []):
            alike[name].append(options)
    for name, several in alike.items():
        names = dict.fromkeys(option for options in several for option in options)
        values = {name: list(dict.fromkeys(one[name] for one in several if name in one)) for name in names}
        complete = all(name in options for name in names for options in several)
        if not complete or sum(len(texts) > 1 for texts in values.values()) > 1:
            sets = [{option: [value] for option, value in options.items()} for options in several]
        else:
            sets = [values]
        for chosen in sets:
            description = ", ".join(
                tex(f"{option} = {enumerated(sorted(texts, key=natural))}") for option, texts in chosen.items()
            )
            yield f"{name} ({description})" if description else name


def _options(info: RunInfo) -> dict[str, str]:
    """Return the options that the user gave or that differ from the decoder's defaults, and the window."""
    decoder = info.spec.decoder
    usual = resolve(decoder.name).options if decoder.name in PRESETS else {}
    names = {"window", *(info.origins or ())}
    return {name: plain(value) for name, value in decoder.options.items() if name in names or usual.get(name) != value}


def _metrics(folders: Sequence[Path]) -> list[str]:
    """Describe the metrics of the stored scores by their identities, without parts of scores."""
    stored = (score for folder in folders for score in read_scores(folder))
    identities = {(str(score["metric"]), score["fingerprint"]): str(score["identity"]) for score in stored}
    texts = []
    for (name, _), identity in identities.items():
        if ":" not in name:
            facts = [f"{key} {value}" for key, value in json.loads(identity).items() if len(str(value)) <= 60]
            texts.append(rf"\texttt{{{tex(name)}}} ({tex(', '.join(facts))})")
    return [f"Scores are {enumerated(texts)}."] if texts else []


def _machine(info: RunInfo) -> str:
    call = info.invocations[-1]
    versions = {name: call.versions.get(name) for name in ("specbench", "torch", "transformers", "python")}
    facts = [f"{name} {value}" for name, value in versions.items() if value]
    revision = str(call.git.get("revision") or "")[:10]
    facts += [f"commit {revision}{' with changes' if call.git.get('dirty') else ''}"] if revision else []
    return rf"{tex(call.machine)} with {tex(', '.join(facts))}~\cite{{specbench}}"


def _statistics(infos: Sequence[RunInfo]) -> str:
    timed = "A speed-up is the ratio of the summed latencies of AR and of a decoder over the same images. "
    return (timed if any(info.spec.timed for info in infos) else "") + (
        rf"Intervals are 95\,\% confidence intervals over prompts, given for at least {FEW_UNITS} prompts. $p$-values "
        "are from paired tests; all scores that compare the same two runs are Holm-corrected together."
    )


def _key(paper: str) -> str:
    """Make a citation key: the method's name or first words, and the year or arXiv number if known."""
    source = _SOURCE.fullmatch(paper)
    title = source["title"] if source else paper
    number = (source["year"] or source["eprint"] or "") if source else ""
    name = title.partition(":")[0].replace("+", "p")  # distinguishes SJD++ from SJD
    return re.sub(r"[^a-z0-9]+", "-", f"{name}-{number}".lower()).strip("-")[:60]


def _entry(key: str, paper: str) -> str:
    source = _SOURCE.fullmatch(paper)
    found = source.groupdict() if source else {"title": paper}
    fields = {name: value if name == "eprint" else tex(value) for name, value in found.items() if value}
    if "author" in fields:
        fields["author"] = fields["author"].replace(" et al.", " and others")
    fields["title"] = f"{{{fields['title']}}}"  # braces keep capitals, which BibTeX's style "plain" changes
    fields |= {"archiveprefix": "arXiv"} if "eprint" in fields else {}
    kind = "inproceedings" if "booktitle" in fields else "misc"
    body = ",\n".join(f"  {name} = {{{value}}}" for name, value in fields.items())
    return f"@{kind}{{{key},\n{body}\n}}"
