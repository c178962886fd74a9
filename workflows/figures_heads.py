"""The figure of where a marker looks, layer by layer.

Border: labelled results in, a `Figure` out; conventions and helpers are those of figures.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .figures import ACCENT, CONTROL, _figure, _footer, _integers, _style, _subtitle

if TYPE_CHECKING:
    import numpy.typing as npt
    import xarray as xr
    from matplotlib.figure import Figure

__all__ = ["scan_page"]

BLUE = "#1d5b7f"


def scan_page(
    found: xr.Dataset,
    condition: npt.NDArray[Any],
    names: Sequence[str],
    *,
    best: tuple[int, float],
    model: str,
    footer: str,
) -> Figure:
    """Attention from markers to targets by layer, a dot per sample; and how sure the difference is.

    found: as `layer_scan` gives it.  condition: int [sample], 0 or 1; names: of the two.  best: (layer, p).
    """
    layers = found["layer"].values
    weight = found["weight"].transpose("layer", "sample").values
    mean, std = (found[name].transpose("condition", "layer").values for name in ("mean", "std"))
    rng = np.random.default_rng(0)
    with _style():
        figure = _figure(12.0, 4.4)
        left, right = figure.subplots(1, 2, gridspec_kw={"width_ratios": [1.5, 1]})
        for which, (name, colour) in enumerate(zip(names, (BLUE, CONTROL), strict=True)):
            aside = 0.17 * (2 * which - 1)
            dots = weight[:, condition == which]
            places = layers[:, None] + aside + rng.uniform(-0.07, 0.07, dots.shape)
            left.plot(places.ravel(), dots.ravel(), ".", color=colour, ms=4, alpha=0.45, mew=0)
            style = {"color": colour, "lw": 1.6, "capsize": 3, "marker": "o", "ms": 5}
            left.errorbar(layers + aside, mean[which], yerr=std[which], label=name, **style)
        left.set(xlabel="layer", ylabel="attention, mean over heads and targets")
        left.set_ylim(bottom=min(0.0, float(weight.min())))
        left.set_title("From marker to target", pad=20)
        _subtitle(left, "small: samples; large: mean, with one standard deviation")
        left.legend(frameon=False)
        sure = -np.log10(np.maximum(found["p"].values, np.finfo(float).tiny))
        ahead = mean[0] > mean[1]
        right.bar(layers, sure, width=0.7, color=np.where(ahead, BLUE, CONTROL).tolist())
        for level in (0.05, 0.001):
            right.axhline(-np.log10(level), color="#d5d8df", lw=0.8, zorder=0)
            right.annotate(f" p = {level:g}", (layers[-1] + 0.5, -np.log10(level)), fontsize=7, va="center")
        right.set(xlabel="layer", ylabel="-log10 p", xlim=(layers[0] - 0.6, layers[-1] + 0.6))
        right.set_title("How sure the difference is", pad=20)
        verdict = (
            f"most sure: layer {best[0]}, p = {best[1]:.1e}" if best[1] < 1 else "In no layer is A ahead"
        )
        _subtitle(right, f"Welch's t test; grey: {names[0]} looks less. {verdict}")
        for axes in (left, right):
            _integers(axes.xaxis)
        if best[1] < 1:
            left.axvline(best[0], color=ACCENT, lw=0.8, alpha=0.6, zorder=0)
            right.axvline(best[0], color=ACCENT, lw=0.8, alpha=0.6, zorder=0)
        title = f"{model}: where a marker looks, {names[0]} against {names[1]}\n"
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
        _footer(figure, footer)
    return figure
