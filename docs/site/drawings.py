"""The figures of the concepts, as SVG: boxes, arrows and words. Run it to draw them anew.

    python docs/site/drawings.py

Text and lines take the colour of the page they stand on (`currentColor`), so they are read on light and dark.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

FIGURES = Path(__file__).parents[1] / "figures"
BLUE, ORANGE = "#2b8ea3", "#c9702a"
STYLE = "<style>svg { color: #222222 } @media (prefers-color-scheme: dark) { svg { color: #dddddd } }</style>"
ARROW = (
    '<defs><marker id="{0}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto"><path d="M0 0L8 4L0 8z" fill="currentColor"/></marker></defs>'
)


def text(
    x: float, y: float, words: str, *, size: int = 13, bold: bool = False, anchor: str = "middle"
) -> str:
    """Words, centred at a point."""
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}"{weight}>{escape(words)}</text>'


def box(
    x: float, y: float, w: float, h: float, lines: Sequence[str], colour: str = "", *, dashed: bool = False
) -> str:
    """A box with lines of words, the first in bold; filled faintly with a colour."""
    fill = (
        f'fill="{colour}" fill-opacity="0.18" stroke="{colour}"'
        if colour
        else 'fill="none" stroke="currentColor"'
    )
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    top = y + h / 2 - 8.5 * (len(lines) - 1) + 4.5
    words = [text(x + w / 2, top + 17 * i, line, bold=i == 0) for i, line in enumerate(lines)]
    return (
        f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="6" {fill} stroke-width="1.4"{dash}/>'
        + "".join(words)
    )


def arrow(x1: float, y1: float, x2: float, y2: float, mark: str, *, dashed: bool = False) -> str:
    """A line with a head at its end."""
    dash = ' stroke-dasharray="4 4"' if dashed else ""
    return (
        f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="currentColor" stroke-width="1.3"{dash} '
        f'marker-end="url(#{mark})"/>'
    )


def svg(name: str, width: int, height: int, *parts: str) -> None:
    """Write a drawing."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'fill="currentColor" font-family="system-ui, DejaVu Sans, sans-serif">'
    )
    made = "\n".join((head, STYLE, ARROW.format(name), *parts, "</svg>"))
    (FIGURES / f"{name}.svg").write_text(made + "\n", "utf-8")


def keys() -> None:
    """What a key is made of, and what stays beside it."""
    inside = [
        ("model", "weights, config,", "dtype, pass"),
        ("prompt", "token ids", ""),
        ("hooks", "interventions", ""),
    ]
    parts = [
        box(20 + 150 * i, 20, 135, 74, [line for line in lines if line], BLUE)
        for i, lines in enumerate(inside)
    ]
    parts += [arrow(87 + 150 * i, 94, 235 + 5 * (i - 1), 128, "keys") for i in range(3)]
    parts += [
        box(160, 130, 155, 52, ["RunKey", "activations"], BLUE),
        arrow(237, 182, 237, 216, "keys"),
        box(160, 218, 155, 70, ["ResultKey", "stage, version,", "parameters"], BLUE),
        text(252, 206, "R, its content", size=11, anchor="start"),
        box(500, 20, 200, 268, [], ORANGE, dashed=True),
        text(600, 46, "beside it, in no key", bold=True),
        *(
            text(600, 84 + 31 * i, word)
            for i, word in enumerate(
                (
                    "what was captured",
                    "device, batch size",
                    "chunks, compression",
                    "workers, threads",
                    "library versions",
                    "host, time",
                    "texts, labels",
                )
            )
        ),
        text(
            20,
            320,
            "Whatever can change a number is on the left; whatever cannot is on the right.",
            size=12,
            anchor="start",
        ),
    ]
    svg("keys", 720, 334, *parts)


def planner() -> None:
    """A grid of patches as one tree: what is shared is computed once."""
    left, top, w, h = 110, 46, 30, 26
    parts = [text(left + 4 * w, 20, "positions →", size=12), text(40, top + 3 * h + 4, "layers", size=12)]
    parts += [text(90, top + (6 - i) * h - 8, str(i), size=11) for i in range(6)]
    for layer in range(6):
        for position in range(8):
            y = top + (5 - layer) * h
            patched = (layer, position) == (2, 3)
            reached = layer >= 2 and position >= 3 and not patched and not (layer == 2 and position > 3)
            colour = ORANGE if patched or reached else BLUE
            strength = 0.9 if patched else 0.45 if reached else 0.15
            parts.append(
                f'<rect x="{left + position * w}" y="{y}" width="{w - 3}" height="{h - 3}" rx="3" '
                f'fill="{colour}" fill-opacity="{strength}"/>'
            )
    rows = (
        (BLUE, 0.15, "computed once, shared by all runs"),
        (ORANGE, 0.9, "a state is replaced"),
        (ORANGE, 0.45, "what this run alone computes"),
    )
    for i, (colour, strength, words) in enumerate(rows):
        y = 66 + 34 * i
        parts.append(
            f'<rect x="400" y="{y}" width="22" height="18" rx="3" fill="{colour}" fill-opacity="{strength}"/>'
        )
        parts.append(text(432, y + 14, words, anchor="start"))
    parts += [
        text(400, 184, "36 runs, 61 % of the layer-positions", size=12, anchor="start"),
        text(400, 202, "of 36 forward passes, in one sweep", size=12, anchor="start"),
    ]
    svg("planner", 720, 222, *parts)


def segments() -> None:
    """A harvest: shards first, then their record."""
    parts = [text(20, 22, "tokens of all prompts, end to end", size=12, anchor="start")]
    states = (
        ("segment 0", "committed", BLUE),
        ("segment 1", "committed", BLUE),
        ("segment 2", "being written", ORANGE),
        ("segment 3", "not begun", ""),
    )
    for i, (name, state, colour) in enumerate(states):
        x = 20 + 172 * i
        parts.append(box(x, 34, 164, 54, [name, state], colour, dashed=not colour))
        if state == "committed":
            parts.append(box(x + 8, 120, 148, 62, ["shards", "written, synced"], BLUE))
            parts.append(arrow(x + 82, 182, x + 82, 214, "segments"))
            parts.append(box(x + 8, 216, 148, 62, ["record", "names and digests"], BLUE))
        elif colour:
            parts.append(box(x + 8, 120, 148, 62, ["shards", "some of them"], ORANGE, dashed=True))
            parts.append(text(x + 82, 240, "no record:", size=12))
            parts.append(text(x + 82, 258, "no reader sees it", size=12))
    parts.append(
        text(
            20,
            306,
            "Killed here, the same command goes on with segment 2; what is left of it is taken over.",
            size=12,
            anchor="start",
        )
    )
    svg("segments", 720, 320, *parts)


def cutoff() -> None:
    """A stage that ran again and gave the same bytes stops the re-run there."""
    parts = [
        box(20, 40, 150, 66, ["capture", "R = a91c…"], BLUE),
        arrow(170, 73, 212, 73, "cutoff"),
        box(214, 40, 180, 66, ["moments", "version 1 → 2: runs"], ORANGE),
        arrow(394, 73, 446, 73, "cutoff"),
        box(448, 20, 252, 46, ["R = 5d02… as before"], BLUE),
        box(448, 82, 252, 46, ["R = 77fe… another"], ORANGE),
        arrow(574, 128, 574, 168, "cutoff"),
        box(448, 170, 252, 56, ["components, figure", "run, for their input moved"], ORANGE),
        text(230, 192, "Above: components and figure stay cached,", size=12),
        text(230, 210, "as the key of what they read is R, not the run of it.", size=12),
    ]
    svg("cutoff", 720, 244, *parts)


if __name__ == "__main__":
    for draw in (keys, planner, segments, cutoff):
        draw()
