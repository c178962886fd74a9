"""Pages that need a pretrained model: their tests are marked `real`, and skip where the model is not.

Models lie in the folder MIZARR_REAL_MODELS, or in ~/.cache/mizarr-real.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import needed_models

SECONDS = 1800
"""Limit of a page by the clock; it takes about a minute of processor time."""


def page_param(page: Path, name: str) -> Any:
    """A page as a parameter of a test, marked `real` if it needs a pretrained model."""
    marks = [pytest.mark.real, pytest.mark.timeout(SECONDS)] if needed_models(page) else []
    return pytest.param(page, id=name, marks=marks)


def link_models(page: Path, folder: Path) -> None:
    """Link the models that a page needs into a folder; skips the test if one is missing."""
    models = Path(os.environ.get("MIZARR_REAL_MODELS") or Path.home() / ".cache" / "mizarr-real").expanduser()
    for name in needed_models(page):
        if not (models / name).is_file():
            pytest.skip(f"needs {name} in {models}; another folder is named by MIZARR_REAL_MODELS")
        (folder / name).symlink_to(models / name)
