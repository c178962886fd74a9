"""Progress: what is counted, and who hears of it."""

from __future__ import annotations

import threading

from mizarr.pipeline import Progress, progress
from mizarr.pipeline.progress import clock, short


def test_counts_add_up_from_any_thread():
    with Progress(quiet=True) as bars:
        task = bars.task("capture", total=4000, unit="tokens")
        threads = [threading.Thread(target=lambda: [task.advance() for _ in range(1000)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert task.done == 4000


def test_quiet_says_nothing(capsys):
    with Progress(quiet=True) as bars:
        bars.task("capture", total=2).advance(2)
    assert capsys.readouterr() == ("", "")


def test_a_file_gets_a_line_now_and_then_and_stdout_stays_clean(capsys, monkeypatch):
    monkeypatch.setattr(progress, "_LINE_EVERY", 0.0)
    with Progress() as bars:
        bars.task("capture", total=2000, unit="tokens").advance(1000)
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("capture: 1k / 2k tokens, ") and "left" in err


def test_a_terminal_gets_a_bar(monkeypatch, capsys):
    import sys

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Progress() as bars:
        task = bars.task("verify", total=10, unit="files")
        task.advance(4)
        assert bars._bars.tasks[0].completed == 4
    assert bars._bars is None


def test_numbers_are_short():
    assert [short(n) for n in (7, 1234, 1.5e6, 2e12)] == ["7", "1.23k", "1.5M", "2T"]
    assert [clock(s) for s in (7.4, 723, 10800)] == ["0:07", "12:03", "3:00:00"]
