"""Conventions of figures, for those that are drawn by hand: see views/paper.py."""

from __future__ import annotations

from .views import paper

INK, FAINT, ACCENT, CONTROL = paper.INK, paper.FAINT, paper.ACCENT, paper.CONTROL
_figure, _fit, _footer, _integers = paper.blank, paper.fit, paper.footer, paper.integers
_style, _subtitle = paper.style, paper.subtitle
