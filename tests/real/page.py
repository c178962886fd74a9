"""docs/real-models.md: what every workflow finds in pretrained models. `make real` writes it.

    python -m tests.real.page [FOLDER] [--limit SECONDS] [--workflows A,B]

Every workflow runs at its defaults, about one model after another, into one store in FOLDER (asking.py);
what is stored there is not computed again, so that an interrupted run goes on where it was. The page is made
of the stored answers alone: claims stand as the workflows say them.
"""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mizarr.store.errors import DownloadError
from mizarr.workflows import WORKFLOWS, kind_of
from tests.real.asking import Asked, Record
from tests.real.dictionary import CONTEXT, STEPS, UNTRAINED, WIDTH_FACTOR, K, Training
from tests.real.models import MODELS, SMOLLM2, fetch
from tests.real.processes import ROOT

PAGE = ROOT / "docs" / "real-models.md"
FIGURES = "figures/real"
"""Folder of the figures, from the folder of the page."""
SAE_LAYER, SAE_WIDTH = 15, 576
"""Layer of SmolLM2 on which an SAE is trained, in its middle, and the width of its stream."""
LIMIT = 600
"""Processor seconds that a workflow may take."""
LARGEST = 150_000
"""Bytes of a figure on the page."""
SPECIAL = re.compile(r"([\\`*_{}\[\]<>|$~&])")
"""Characters that Markdown may read as markup."""

HEAD = """# What two small pretrained models answer

`make real` asks every workflow of mizarr, at its defaults, about {models}. This page is written from the
stored results alone: claims are those of the workflows, word by word, and what was not measured is said to be
not measured. Only which figures are shown was chosen by hand.

How to read a claim: the *effect* is what an intervention, or a choice of places, changes. The *null* is what
random causes of equal size change: their number, their median, and the range of 95 % of them. *p* is the
share of such random causes that change as much. A claim whose p is above 0.05 is called *no more than
chance*. Places are chosen on some prompts and scored on others where the claim says *held-out prompts*.
Questions without a claim describe the model: they say what is there, not what depends on it.

*Seconds* and *memory* are the processor time, user and system, and the peak resident memory of the process
that asked. Results that several workflows share, such as which facts the model knows, count for the first of
them that was asked.

"""


@dataclass(frozen=True)
class Drawing:
    """A figure on the page."""

    model: str
    """Name of the model's file."""
    workflow: str
    """Workflow that draws it."""
    figure: str
    """First letters of the figure's file name."""
    says: str
    """What the figure shows, for its caption and for readers who do not see it."""


DRAWINGS = (
    Drawing(SMOLLM2.file, "logit_lens", "logit_lens_0", "Most likely token after each layer, at each token."),
    Drawing(
        SMOLLM2.file,
        "head_detection",
        "head_detection",
        "Scores of every head as previous-token, duplicate-token and induction head.",
    ),
    Drawing(
        SMOLLM2.file,
        "activation_patching",
        "activation_patching_0",
        "Share of the clean prediction that a patch of each layer and position recovers.",
    ),
    Drawing(SMOLLM2.file, "ablation", "ablation", "Change of the answer without each head and each layer."),
    Drawing(
        SMOLLM2.file,
        "attention_knockout",
        "attention_knockout",
        "KL divergence of the next token when the last token cannot attend to one key, by layer.",
    ),
)


@dataclass(frozen=True)
class Subject:
    """A model on the page: its names, and what its workflows answered."""

    title: str
    """Name in prose."""
    description: str
    """Architecture, file and checksum, in one sentence."""
    asked: Asked
    """The model, and the folder of its records and answers."""

    def record(self, workflow: str) -> Record | None:
        """Record of the processes that asked a workflow; None before the first."""
        return self.asked.record(workflow)

    def answer(self, workflow: str) -> dict[str, Any] | None:
        """JSON document of a workflow; None without an answer."""
        record = self.record(workflow)
        return None if record is None or record.outcome != "answered" else self.asked.answer(workflow)


def literal(text: str) -> str:
    """A text as Markdown shows it, on one line."""
    return SPECIAL.sub(r"\\\1", " ".join(text.split()))


def capital(text: str) -> str:
    """The text with a capital first letter."""
    return text[:1].upper() + text[1:]


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; columns whose name begins with ">" are aligned right."""
    rules = ["---:" if name.startswith(">") else "---" for name in columns]
    lines = [[name.removeprefix(">") for name in columns], rules, *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def number(value: float | None, unit: str = "") -> str:
    """A number of a claim, with its sign; a dash for one that is not defined."""
    return "–" if value is None else f"{value:+.3g} {unit}".strip()


def null_of(finding: dict[str, Any]) -> str:
    """The null distribution of a claim, short."""
    null, unit = finding["null"], finding["unit"]
    if not null["draws"]:
        return "not measured"
    low, high = number(null["low_95"]), number(null["high_95"], unit)
    return f"{null['draws']}: median {number(null['median'])}, {low} to {high}"


def costs(record: Record) -> tuple[str, str]:
    """Processor seconds and peak memory of a workflow."""
    least = "at least " if record.is_lower_bound else ""
    return f"{least}{record.processor_seconds:.0f}", f"{record.peak_bytes / 1e6:,.0f} MB"


def found(answer: dict[str, Any]) -> tuple[str, str, str, str]:
    """What a workflow found: a sentence, effect, null and p-value of its first claim."""
    findings = answer.get("findings") or []
    if not findings:
        names = ("not_claimed", "summary", "descriptive")
        reasons = [answer[name] for name in names if isinstance(answer.get(name), str) and answer[name]]
        return literal(reasons[0] if reasons else ""), "", "", ""
    first = findings[0]
    spread = first["interval_95"]
    interval = f" ({number(spread[0])} to {number(spread[1])})" if spread else ""
    verdict = "" if first["verdict"] == "beyond chance" else f": **{first['verdict']}**"
    more = f" *First of {len(findings)} claims.*" if len(findings) > 1 else ""
    p = f"{first['null']['share_as_large']:.2g}" if first["null"]["draws"] else "–"
    effect = f"{number(first['effect'], first['unit'])}{interval}"
    return f"{literal(capital(first['claim']))}{verdict}.{more}", literal(effect), literal(null_of(first)), p


def in_short(subject: Subject) -> str:
    """Section of a model: its answers as a table, a row per question."""
    rows = []
    for workflow in WORKFLOWS:
        record, answer = subject.record(workflow), subject.answer(workflow)
        if record is not None and answer is not None:
            link = f"[{literal(answer['question'])}](#{anchor(answer['question'])})"
            rows.append((link, *found(answer), *costs(record)))
    columns = ("question", "found", "effect (95 % interval)", "null", ">p", ">seconds", ">memory")
    return f"## {subject.title} in short\n\n{table(columns, rows)}\n"


def anchor(heading: str) -> str:
    """Name by which GitHub and Sphinx link to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def chance(subjects: Sequence[Subject]) -> str:
    """How many claims there are, and how many would be beyond chance if no cause had an effect."""
    findings = [
        finding
        for subject in subjects
        for workflow in WORKFLOWS
        for finding in (subject.answer(workflow) or {}).get("findings") or []
        if finding["null"]["draws"]
    ]
    beyond = sum(finding["verdict"] == "beyond chance" for finding in findings)
    by_chance = sum(finding["chance"] for finding in findings)
    return (
        f"Of {len(findings)} claims on this page {beyond} are beyond chance. If no cause had any effect, "
        f"about {by_chance:.0f} would be.\n\n"
    )


def answered(workflow: str, subjects: Sequence[Subject], folder: Path) -> str:
    """Section of a question: what each model answered; empty without an answer."""
    parts = []
    for subject in subjects:
        answer = subject.answer(workflow)
        if answer is not None:
            parts.append(f"**{subject.title}.** {' '.join(sentences(answer))}\n\n")
            claims = [literal(finding["sentence"]) for finding in answer.get("findings") or []]
            parts.append("".join(f"* {claim}\n" for claim in claims) + ("\n" if claims else ""))
            if caption := answer.get("findings_caption"):
                parts.append(f"*{literal(caption)}*\n\n")
            parts += drawn(workflow, subject, folder)
    if not parts:
        return ""
    heading = f"### {literal(kind_of(workflow).question)}\n\n"
    # The settings that are not defaults name folders of this machine.
    names = {text.partition("=")[0]: None for s in subjects for text in s.asked.settings.get(workflow, ())}
    options = "".join(f" --set {name}=FOLDER" for name in names)
    return f"{heading}`mizarr compute {workflow}{options}`\n\n{''.join(parts)}"


def sentences(answer: dict[str, Any]) -> Iterator[str]:
    """What an answer says besides its claims."""
    names = ("caution", "descriptive", "summary", "knowledge", "not_claimed")
    # `summary` of some documents is a mapping of numbers.
    yield from (literal(answer[name]) for name in names if answer.get(name) and isinstance(answer[name], str))


def drawn(workflow: str, subject: Subject, folder: Path) -> Iterator[str]:
    """Figures of a workflow, copied to a folder, as Markdown."""
    for drawing in DRAWINGS:
        if (drawing.workflow, drawing.model) == (workflow, subject.asked.name):
            path = subject.asked.draw(workflow, drawing.figure)
            if path is not None:
                copy = folder / FIGURES / f"{workflow}.png"
                shrink(path, copy)
                yield f"![{subject.title}: {drawing.says}]({FIGURES}/{copy.name})\n\n"
                yield f"*{drawing.says}*\n\n"


def shrink(source: Path, target: Path) -> None:
    """Copy a PNG; one above LARGEST bytes with 256 colours."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.stat().st_size <= LARGEST:
        shutil.copyfile(source, target)
        return
    from PIL import Image

    with Image.open(source) as image:
        image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(target, optimize=True)


def trained(trainings: Sequence[Training]) -> str:
    """Section on SAEs: figures of the trained one and of the untrained one; empty if none was trained."""
    rows = []
    for training in trainings:
        record, figures = training.record, training.figures
        if record is None or figures is None:
            continue
        loss = figures["loss"]["places"]["all"]
        rows.append(
            (
                "untrained (1 step)" if training.steps == UNTRAINED else f"trained ({training.steps} steps)",
                f"{1 - figures['fvu'][0]:.3f}",
                f"{figures['l0'][0]:.1f}",
                f"{100 * figures['dead'][0]:.0f} %",
                f"{loss['ce_replaced']:.3f}",
                f"{100 * loss['ce_recovered_mean']:.1f} %",
                f"{100 * loss['ce_recovered_zero']:.1f} %",
                *costs(record),
            )
        )
    if not rows:
        return ""
    columns = ("SAE", ">explained variance", ">L0", ">dead", ">loss", ">recovered", ">recovered, zero")
    first, loss = trainings[0], trainings[0].figures["loss"]  # type: ignore[index]
    mean = loss["places"]["all"]["ce_mean"]
    return (
        f"## A sparse autoencoder of layer {first.layer} of {first.asked.name}\n\n"
        f"`mizarr train` on the residual stream after layer {first.layer}: "
        f"{WIDTH_FACTOR * first.width:,} features, {K} of them active per token, on prompts of {CONTEXT} "
        "tokens of a novel by Dickens. All figures are of held-out prompts "
        f"({loss['tokens']:,} tokens). *Loss* is that of the model whose stream is "
        f"replaced by the reconstruction; it is {loss['clean']:.3f} nats unchanged and {mean:.3f} with the "
        "mean stream. *Recovered*: share of the cost of this mean ablation that the reconstruction avoids; "
        "*zero*: of zero ablation. The untrained SAE is the control: the same random start, after one "
        f"step.\n\n{table((*columns, '>seconds', '>memory'), rows)}\n"
    )


def unanswered(subjects: Sequence[Subject]) -> str:
    """Sections of the questions that were refused, and of those that ended otherwise."""
    rows: dict[str, list[tuple[str, ...]]] = {"refused": [], "other": []}
    for workflow in WORKFLOWS:
        outcomes: dict[tuple[str, str, str], list[str]] = {}
        for subject in subjects:
            record = subject.record(workflow)
            if record is None:
                outcomes.setdefault(("other", "not asked", ""), []).append(subject.title)
            elif record.outcome != "answered":
                kind = "refused" if record.outcome == "refused" else "other"
                reason = record.message.replace(record.model, "the model")
                outcomes.setdefault((kind, record.outcome, reason), []).append(subject.title)
        for (kind, outcome, reason), titles in outcomes.items():
            names = "both" if len(titles) == len(subjects) > 1 else ", ".join(titles)
            about = (f"`{workflow}`", names, *([outcome] if kind == "other" else []), literal(reason))
            rows[kind].append(about)
    text = (
        "## What was refused, and why\n\nThese questions make no sense for the model at the defaults; each "
    )
    text += (
        f"ends with exit code 2 and this line.\n\n{table(('workflow', 'model', 'reason'), rows['refused'])}\n"
    )
    if rows["other"]:
        columns = ("workflow", "model", "outcome", "last line")
        text += "## What has no answer\n\nFailures, and processes that were stopped, are not hidden.\n\n"
        text += f"{table(columns, rows['other'])}\n"
    return text


def measured_on(subjects: Sequence[Subject], remark: str) -> str:
    """Section on the models' files, the machine and the versions; remark: a sentence on how costs were
    measured, such as on a machine with other work, or ""."""
    records = [
        record for subject in subjects for workflow in WORKFLOWS if (record := subject.record(workflow))
    ]
    machines = dict.fromkeys(record.machine for record in records)
    versions = dict.fromkeys(", ".join(f"{a} {b}" for a, b in r.versions.items()) for r in records)
    lines = [f"* {subject.title}: {subject.description}." for subject in subjects]
    total = sum(record.processor_seconds for record in records)
    lines += [f"* Machine: {literal(machine)}." for machine in machines]
    lines += [f"* Versions: {literal(version)}." for version in versions]
    lines.append(f"* All processes together: {total / 60:.0f} minutes of processor time.")
    if remark:
        lines.append(f"* {remark}")
    n_sources = len({record.sources for record in records})
    if n_sources > 1:
        lines.append(
            f"* The answers come from {n_sources} states of mizarr's sources; `make real` asks again what an "
            "older state answered."
        )
    return "## Models, machine, versions\n\n" + "\n".join(lines) + "\n\n"


def write(
    subjects: Sequence[Subject], page: Path, trainings: Sequence[Training] = (), remark: str = ""
) -> None:
    """Write the page, and its figures beside it, from what is stored; remark: see `measured_on`."""
    models = " and ".join(subject.title for subject in subjects)
    parts = [HEAD.format(models=models), chance(subjects), measured_on(subjects, remark)]
    parts += map(in_short, subjects)
    parts.append(trained(trainings))
    parts.append("## Question by question\n\n")
    parts += [answered(workflow, subjects, page.parent) for workflow in WORKFLOWS]
    parts.append(unanswered(subjects))
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("".join(parts).rstrip("\n") + "\n", "utf-8")


def main() -> None:
    """Ask what was not asked yet, and write the page."""
    parser = argparse.ArgumentParser(description="What every workflow finds in pretrained models.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path("build/real"), help="store and records")
    parser.add_argument("--limit", type=int, default=LIMIT, help="processor seconds per workflow")
    parser.add_argument("--workflows", default=",".join(WORKFLOWS), help="names, separated by commas")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to write")
    parser.add_argument("--remark", default="", help="a sentence on how costs were measured")
    options = parser.parse_args()
    # As by Ctrl-C: the process that is asked ends with this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        paths = [fetch(model) for model in MODELS]
    except DownloadError as error:
        sys.exit(str(error))
    subjects = [
        Subject(
            model.title,
            f"{model.description}; `{model.file}`, SHA-256 `{model.sha256}`",
            Asked(options.folder, str(path), options.limit),
        )
        for model, path in zip(MODELS, paths, strict=True)
    ]
    trainings = [Training(subjects[0].asked, SAE_LAYER, SAE_WIDTH, steps) for steps in (STEPS, UNTRAINED)]
    if options.workflows == ",".join(WORKFLOWS):
        for training in trainings:
            if (record := training.train()) is not None:
                print(f"{training.name} {record.outcome}, {record.processor_seconds:.0f} s", file=sys.stderr)
    if trainings[0].figures is not None:
        settings = {"sae_features": (f"dictionary={trainings[0].dictionary.absolute()}",)}
        subjects[0] = replace(subjects[0], asked=replace(subjects[0].asked, settings=settings))
    for subject in subjects:
        for workflow in options.workflows.split(","):
            record = subject.asked.ask(workflow)
            line = f"{subject.title}: {workflow} {record.outcome}, {record.processor_seconds:.0f} s"
            print(f"{line} {record.message}".rstrip(), file=sys.stderr, flush=True)
    write(subjects, options.page, trainings, options.remark)
    print(options.page)


if __name__ == "__main__":
    main()
