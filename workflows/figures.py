"""Figures of workflow results, drawn with matplotlib when it is there.

Border: labelled results in, a `Figure` out; knows no store and no model. Importing this module does not
import matplotlib; drawing without it raises MissingExtra. Figures are built without pyplot: no global state,
no window.

Every figure carries a footer with the keys of the results it shows, and the same keys in the file's metadata.
"""

from __future__ import annotations

import os
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..stages.lens import format_probability, format_token
from ..store.errors import MissingExtra

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.figure import Figure

__all__ = ["answers_by_layer", "helix_page", "lens_heatmap", "save"]

DRAWING = 2
"""Moves when figures change their looks, so that files drawn before are drawn anew."""

INK, FAINT, ACCENT, CONTROL = "#1f2430", "#8a90a0", "#c2410c", "#9aa1b1"
STYLE: Any = {
    "font.size": 9,
    "font.family": "DejaVu Sans",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#c5c9d3",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": "#5b6270",
    "ytick.color": "#5b6270",
    "axes.grid": False,
    "figure.facecolor": "white",
    # Prompts are prose: a dollar sign is a dollar sign.
    "text.parse_math": False,
}


def lens_heatmap(
    lens: xr.Dataset, tokens: Sequence[str], vocabulary: Sequence[str], *, model: str, footer: str
) -> Figure:
    """Most likely next token of every layer at every position, coloured by its probability.

    lens: of one prompt, top_id and top_logprob [layer, position, rank], target_id [position].  tokens: the
    prompt's own, one per position.  vocabulary: strings by token id.  A frame marks what did come next.
    """
    top = lens["top_id"].isel(rank=0).transpose("layer", "position").values
    probability = np.exp(lens["top_logprob"].isel(rank=0).transpose("layer", "position").values)
    target = lens["target_id"].values
    n_layers, n_positions = top.shape
    names = [format_token(token) for token in tokens]
    with _style():
        width = min(15.0, max(6.5, 1.9 + 0.82 * n_positions))
        figure = _figure(width, max(3.4, 2.1 + 0.34 * n_layers))
        room = max(4, int(11 * (width - 1.9) / n_positions))
        axes = figure.add_subplot()
        image = axes.imshow(probability, cmap="YlGnBu", vmin=0, vmax=1, aspect="auto", origin="lower")
        for layer in range(n_layers):
            for position in range(n_positions):
                token = _fit(format_token(vocabulary[top[layer, position]]), room)
                is_dark = probability[layer, position] > 0.55
                is_right = top[layer, position] == target[position]
                axes.text(
                    position,
                    layer,
                    token,
                    ha="center",
                    va="center",
                    fontsize=8,
                    color="white" if is_dark else INK,
                    fontweight="bold" if is_right else "normal",
                )
                if is_right:
                    axes.add_patch(_frame(position, layer))
        axes.set_xticks(range(n_positions), [_fit(name, 12) for name in names], rotation=35, ha="right")
        axes.set_yticks(range(n_layers), [str(layer) for layer in lens["layer"].values])
        axes.tick_params(length=0)
        for side in axes.spines.values():
            side.set_visible(False)
        axes.set_ylabel("layer (residual stream after it)")
        axes.set_xlabel("token read")
        axes.set_title(f"What each layer of {model} would say next", pad=22, fontsize=12)
        known = " Framed: what does come next." if (target >= 0).any() else ""
        _subtitle(axes, f"Logit lens: most likely token, shaded by its probability.{known}")
        bar = figure.colorbar(image, ax=axes, fraction=0.03, pad=0.02)
        bar.set_label("probability")
        bar.outline.set_visible(False)
        _footer(figure, footer)
    return figure


_LINES = 60  # prompts up to which each has a line of its own


def answers_by_layer(lens: xr.Dataset, labels: Sequence[str], *, model: str, footer: str) -> Figure:
    """Probability of each prompt's answer by layer: a thin line per prompt, bands for many; and their median.

    lens: target_logprob, target_rank [layer, prompt], natural order of layers.  labels: one per prompt.
    """
    probability = np.exp(lens["target_logprob"].transpose("layer", "prompt").values)
    rank = lens["target_rank"].transpose("layer", "prompt").values
    layers = lens["layer"].values
    with _style():
        figure = _figure(9.5, 4.2)
        left, right = figure.subplots(1, 2, gridspec_kw={"width_ratios": [1.25, 1]})
        if len(labels) <= _LINES:
            left.plot(layers, probability, color="#7aa6c2", lw=0.9, alpha=0.75)
            _subtitle(left, f"{len(labels)} prompts (thin) and their median (thick)")
        else:
            for low, high, shade in ((5, 95, "#dbe7ef"), (25, 75, "#a9c7da")):
                left.fill_between(layers, *np.percentile(probability, (low, high), axis=1), color=shade, lw=0)
            _subtitle(left, f"{len(labels)} prompts: middle half, middle nine tenths, median")
        left.plot(layers, np.median(probability, axis=1), color=ACCENT, lw=2.2)
        best = np.argsort(-probability[-1])[:3] if len(labels) <= _LINES else np.array([], int)
        _label_ends(left, layers[-1], [(probability[-1, i], labels[i]) for i in best])
        left.set(xlabel="layer", ylabel="probability of the answer", ylim=(-0.02, 1.02))
        left.set_title("Where the answer appears", pad=22)
        share = [(rank <= k).mean(axis=1) for k in (10, 5, 1)]
        for values, k, shade in zip(share, (10, 5, 1), ("#c9dbe6", "#7aa6c2", "#1d5b7f"), strict=True):
            right.fill_between(layers, values, color=shade, lw=0, label=f"top {k}")
        right.set(xlabel="layer", ylabel="share of prompts", ylim=(0, 1.02))
        right.set_title("Answer among the most likely tokens", pad=22)
        _subtitle(right, model)
        right.legend(frameon=False, loc="upper left")
        for axes in (left, right):
            axes.set_xlim(layers[0], layers[-1])
            _integers(axes.xaxis)
        _footer(figure, footer)
    return figure


def helix_page(
    geometry: xr.Dataset, control: xr.Dataset, by_layer: xr.Dataset, *, model: str, footer: str
) -> Figure:
    """One page: the curve of one layer in three dims and one by one, its cosines, and all layers with
    controls.

    geometry, control: `count_geometry` of one layer, true and shuffled counts.
    by_layer: explained_variance_ratio [layer, component], r2 [layer, counts].
    """
    layer = int(geometry["layer"])
    with _style():
        figure = _figure(13.5, 8.2)
        grid = figure.add_gridspec(2, 3, height_ratios=[1.25, 1])
        shades = _curve(figure.add_subplot(grid[0, 0], projection="3d"), geometry)
        _components(figure.add_subplot(grid[0, 1]), geometry)
        _cosine_matrix(figure, figure.add_subplot(grid[0, 2]), geometry)
        _ringing(figure.add_subplot(grid[1, 0]), geometry, control)
        _variance(figure.add_subplot(grid[1, 1]), by_layer, layer)
        _decodability(figure.add_subplot(grid[1, 2]), by_layer, layer)
        bar = figure.colorbar(shades, ax=figure.axes[0], fraction=0.035, pad=0.08, shrink=0.7)
        bar.set_label("characters since the line began")
        bar.outline.set_visible(False)
        tokens = int(geometry["n"].sum())
        figure.suptitle(
            f"Where in its line is a token? Mean states of {model} after layer {layer}, "
            f"{tokens:,} tokens by character count\n",
            x=0.01,
            ha="left",
            fontsize=13,
            fontweight="bold",
        )
        _footer(figure, footer)
    return figure


def save(figure: Figure, path: Path, *, recipe: str, footer: str) -> Path:
    """Write a PNG whose metadata names recipe and keys of what it shows; the folder is made if need be.

    Written beside and moved, so that a file under that name is always whole.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with _style(), warnings.catch_warnings():
        # Vocabularies hold every script of the world, fonts do not; a missing glyph is drawn as a box.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        metadata = {"Software": "mizarr", "Description": footer, "Comment": f"recipe {recipe}"}
        figure.savefig(temporary, dpi=160, format="png", metadata=metadata)
    temporary.replace(path)
    return path


def _curve(axes: Any, geometry: xr.Dataset) -> Any:
    points = geometry["projection"].transpose("count", "component").values
    points = np.pad(points, ((0, 0), (0, max(0, 3 - points.shape[1]))))
    counts = geometry["count"].values
    axes.plot(*points[:, :3].T, color=FAINT, lw=0.8, alpha=0.7)
    shades = axes.scatter(*points[:, :3].T, c=counts, cmap="viridis", s=22, depthshade=False)
    ratio = geometry["explained_variance_ratio"].values
    for name, i in (("x", 0), ("y", 1), ("z", 2)):
        share = ratio[i] if i < len(ratio) else 0.0
        getattr(axes, f"set_{name}label")(f"PC{i + 1}  {share:.0%}", labelpad=-8, fontsize=8)
        getattr(axes, f"set_{name}ticklabels")([])
        side = getattr(axes, f"{name}axis")
        side.pane.set_facecolor("#f8f9fb")
        side.pane.set_edgecolor("#d5d8df")
        side.line.set_color("#c5c9d3")
        side._axinfo["grid"].update(color="#e6e8ed", linewidth=0.6)
        side.set_tick_params(length=0, width=0)
    axes.view_init(elev=22, azim=-58)
    axes.set_box_aspect((1, 1, 0.8), zoom=1.1)
    axes.set_title("Mean state at each count", pad=20)
    return shades


def _components(axes: Any, geometry: xr.Dataset) -> None:
    values = geometry["projection"].transpose("component", "count").values[:4]
    counts = geometry["count"].values
    scale = np.abs(values).max() or 1.0
    for i, row in enumerate(values):
        axes.axhline(-2.2 * i, color="#e3e5ea", lw=0.8)
        axes.plot(
            counts, row / scale - 2.2 * i, color=["#1d5b7f", "#c2410c", "#4d7c0f", "#7e22ce"][i], lw=1.6
        )
    axes.set_yticks([-2.2 * i for i in range(len(values))], [f"PC{i + 1}" for i in range(len(values))])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("characters since the line began")
    axes.set_title("The same, one component at a time", pad=20)
    _subtitle(axes, "common scale")


def _cosine_matrix(figure: Any, axes: Any, geometry: xr.Dataset) -> None:
    counts = geometry["count"].values
    edge = (counts[0] - 0.5, counts[-1] + 0.5)
    image = axes.imshow(
        geometry["cosine"].values, cmap="RdBu_r", vmin=-1, vmax=1, origin="lower", extent=(*edge, *edge)
    )
    axes.set(xlabel="count", ylabel="count")
    centred = "centred " if geometry.attrs.get("centred", 1) else ""
    axes.set_title("Cosine between means", pad=20)
    _subtitle(axes, f"of {centred}mean states at two counts")
    bar = figure.colorbar(image, ax=axes, fraction=0.045, pad=0.03, ticks=[-1, 0, 1])
    bar.outline.set_visible(False)


def _ringing(axes: Any, geometry: xr.Dataset, control: xr.Dataset) -> None:
    axes.axhline(0, color="#d5d8df", lw=0.8)
    axes.plot(control["offset"], control["ringing"], color=CONTROL, lw=1.4, ls="--")
    axes.plot(geometry["offset"], geometry["ringing"], color="#1d5b7f", lw=2)
    axes.set(xlabel="characters apart", ylabel="mean cosine", ylim=(-1, 1.05))
    axes.set_title("Ringing", pad=20)
    _subtitle(axes, "solid: true counts; dashed: counts shuffled among tokens")


def _variance(axes: Any, by_layer: xr.Dataset, chosen: int) -> None:
    ratio = by_layer["explained_variance_ratio"].transpose("layer", "component").values
    layers = by_layer["layer"].values
    bottom = np.zeros(len(layers))
    shades = ["#1d3f5e", "#1d5b7f", "#3f86a6", "#7aa6c2", "#a9c8d9", "#d2e3ec"]
    for i in range(min(ratio.shape[1], len(shades))):
        axes.bar(layers, ratio[:, i], bottom=bottom, color=shades[i], width=0.78, label=f"PC{i + 1}")
        bottom += ratio[:, i]
    axes.set(xlabel="layer", ylabel="share of variance", ylim=(0, 1.02))
    axes.set_title("Variance of the means by component", pad=20)
    _subtitle(axes, f"layer {chosen} shown above")
    axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True)
    _integers(axes.xaxis)


def _decodability(axes: Any, by_layer: xr.Dataset, chosen: int) -> None:
    layers = by_layer["layer"].values
    r2 = by_layer["r2"]
    axes.axhline(0, color="#d5d8df", lw=0.8)
    axes.plot(layers, r2.sel(counts="shuffled"), color=CONTROL, lw=1.4, ls="--", marker="o", ms=3)
    axes.plot(layers, r2.sel(counts="true"), color="#1d5b7f", lw=2, marker="o", ms=4)
    axes.axvline(chosen, color=ACCENT, lw=0.8, alpha=0.6)
    axes.set(xlabel="layer", ylabel="R² on held-out prompts", ylim=(min(-0.1, float(r2.min()) * 1.1), 1.02))
    axes.set_title("Can the count be read off linearly?", pad=20)
    _subtitle(axes, "solid: true counts; dashed: shuffled counts")
    _integers(axes.xaxis)


def _label_ends(axes: Any, x: float, ends: Sequence[tuple[float, str]]) -> None:
    """Names at the right end of lines, pushed apart so that none covers another."""
    last = 2.0
    for y, text in sorted(ends, reverse=True):
        last = min(y, last - 0.055)
        axes.annotate(
            f" {text} {format_probability(y)}", (x, last), fontsize=7, va="center", annotation_clip=False
        )


def _frame(x: float, y: float) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.47, y - 0.45), 0.94, 0.9, fill=False, ec=ACCENT, lw=1.6)


def _integers(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _subtitle(axes: Any, text: str) -> None:
    # In points, not in shares of the axes: in tall ones that would run into the title.
    axes.annotate(
        text, (0, 1), xytext=(0, 5), xycoords="axes fraction", textcoords="offset points",
        fontsize=8, color="#5b6270", va="bottom", annotation_clip=False,
    )  # fmt: skip


def _footer(figure: Any, text: str) -> None:
    text = "\n".join(textwrap.wrap(text, int(20 * figure.get_figwidth())))
    figure.supxlabel(text, x=0.99, ha="right", fontsize=6.5, color=FAINT)


def _fit(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _style() -> Any:
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise MissingExtra(
            "figures need matplotlib, which is not installed; pip install 'mizarr[plots]', "
            "or ask for tables only: figures=False"
        ) from error
    return mpl.rc_context(STYLE)
