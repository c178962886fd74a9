"""The wheel: the modules and data of the tree, nothing else, and enough to work without the checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import mizarr

ROOT = Path(mizarr.__file__).parent
ROOMS = ("store", "pipeline", "stages", "workflows")
LEFT_BEHIND = (".*", "__pycache__", "build", "dist", "*.egg-info", "activations")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy: setuptools leaves folders where it works."""
    source = tmp_path_factory.mktemp("source") / "mizarr"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*LEFT_BEHIND))
    target = tmp_path_factory.mktemp("wheel")
    quick = ["--no-deps", "--no-build-isolation", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "wheel", *quick, "--wheel-dir", str(target), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    return next(target.glob("mizarr-*.whl"))


def belongs(path: Path) -> bool:
    """Modules and data; neither bytecode nor design notes."""
    return path.suffix != ".pyc" and path.name != "DESIGN.md"


def test_the_wheel_holds_the_modules_and_data_of_the_tree_and_nothing_else(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}
    info = {name for name in names if ".dist-info/" in name}
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*") if path.is_file()]
    wanted = [ROOT / "__init__.py", ROOT / "py.typed", *(path for path in files if belongs(path))]
    assert names - info == {f"mizarr/{path.relative_to(ROOT)}" for path in wanted}
    assert {Path(name).name for name in info} >= {"LICENSE-MIT", "LICENSE-APACHE", "entry_points.txt"}


def test_the_wheel_works_away_from_the_checkout(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "HOME": str(tmp_path)}
    code = (
        "import mizarr\nprint(mizarr.__file__)\n"
        "from mizarr.workflows.cli import run\nassert run(['models', 'inspect', 'specimen', '--json']) == 0"
    )
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert run.returncode == 0, run.stderr
    where, report = run.stdout.split("\n", 1)
    assert where.startswith(str(tmp_path)), "the checkout was imported instead of the wheel"
    assert json.loads(report)["name"] == "specimen"
