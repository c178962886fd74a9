"""First lines of couplets and conditions of the recurrent feedback experiment: published ones, and for the
specimen.

The published ones are from the experiment "anacrousis" of the Rust library candle-mi on Llama 3.2 1B, with 28
conditions. Its score also counts a second line that ends on the last word of the first.

Border: texts, words and numbers, and the definition of a rhyme; reads no files.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ....store.errors import ConfigError
from .couplets import FAMILIES, family_of

__all__ = ["PRESETS", "Condition", "FirstLine", "RhymePreset", "block_of", "conditions_of", "last_word"]


@dataclass(frozen=True)
class FirstLine:
    """First line of a couplet."""

    number: int
    """Number of the line, from 1."""
    text: str
    """The line."""
    target: str
    """Last word of the line."""
    family: tuple[str, ...]
    """Words that rhyme with the last word, including itself."""

    def rhymes(self, word: str) -> bool:
        """Whether a word is in the rhyme family."""
        return word in self.family

    def rhymes_without_target(self, word: str) -> bool:
        """Whether a word is in the rhyme family and differs from the line's last word."""
        return word in self.family and word != self.target


@dataclass(frozen=True)
class Condition:
    """An experimental condition: which layers are run twice, and with what feedback."""

    name: str
    """Name of the condition, as published."""
    block: tuple[int, int] = (0, 0)
    """First and last layer of the block."""
    depth: int = 1
    """Number of times that the block runs; 1 for a plain pass."""
    strength: float | None = None
    """Strength of the feedback; None for a condition without feedback."""
    sustained: bool = False
    """Whether feedback is given at every generated token, instead of at the first line's end only."""

    @property
    def short(self) -> str:
        """Short name for axes: block and strength, with "+" for feedback at every token: "4-5: 100+"."""
        layers = "{}-{}".format(*self.block)
        if self.depth == 1:
            return "plain"
        return (
            f"{layers} again"
            if self.strength is None
            else f"{layers}: {self.strength:g}{'+' * self.sustained}"
        )

    @property
    def description(self) -> str:
        """The condition in words: "layers 4 to 5 with feedback of strength 100 at every token"."""
        start, end = self.block
        if self.depth == 1:
            return "a plain pass"
        layers = f"layers {start} to {end}" if end > start else f"layer {start}"
        if self.strength is None:
            return f"{layers} run {self.depth} times"
        often = "at every token" if self.sustained else "at the first line's end"
        return f"{layers} with feedback of strength {self.strength:g} {often}"


@dataclass(frozen=True)
class RhymePreset:
    """First lines and conditions of the experiment for one model."""

    model: str
    """Name of the model."""
    lines: tuple[FirstLine, ...]
    """First lines of couplets."""
    blocks: tuple[str, ...]
    """Blocks of layers, "first-last"; each is repeated without feedback and with every strength."""
    strengths: tuple[float, ...]
    """Strengths of feedback at the first line's end."""
    sustained: tuple[str, tuple[float, ...]]
    """Block and strengths of feedback at every generated token."""
    condition: str
    """Name of the selected condition."""
    looked_at: int
    """Number of conditions compared on these lines when this condition was selected."""
    selection: str
    """Sentence for captions that says how the condition was selected."""


def last_word(text: str) -> str:
    """Last word of the first line, in lower case and without trailing punctuation; "" for an empty line."""
    line = text.split("\n", 1)[0].split()
    return line[-1].rstrip(string.punctuation).lower() if line else ""


def block_of(text: str) -> tuple[int, int]:
    """Parse a block of layers: "8-15" -> (8, 15). Raises ConfigError for another form, or layers out of
    order."""
    first, _, last = text.partition("-")
    if not (first.isdigit() and last.isdigit() and int(first) <= int(last)):
        raise ConfigError(f"expected a block of layers as first-last, such as '8-15', found {text!r}")
    return int(first), int(last)


def conditions_of(
    blocks: Sequence[str], strengths: Sequence[float], sustained: tuple[str, Sequence[float]], depth: int
) -> Iterator[Condition]:
    """Yields all conditions: a plain pass; each block run repeatedly without and with feedback; one block
    with feedback at every token.

    Arguments:
        blocks: blocks of layers, "first-last".
        strengths: strengths of feedback for each block.
        sustained: block and strengths of sustained feedback.
        depth: number of times that a block runs.
    """
    yield Condition("baseline")
    for block in blocks:
        yield Condition(f"double_pass_{block}", block_of(block), depth)
        for strength in strengths:
            yield Condition(f"unembed_{block}_s={strength:.1f}", block_of(block), depth, strength)
    block, levels = sustained
    for strength in levels:
        yield Condition(f"sustained_{block}_s={strength:.1f}", block_of(block), depth, strength, True)


def _lines(*rows: tuple[int, str, str, str]) -> tuple[FirstLine, ...]:
    return tuple(
        FirstLine(number, text, target, tuple(family.split())) for number, text, target, family in rows
    )


# fmt: off
ANACROUSIS = _lines(
    (1, "The moon casts silver light,", "light",
     ("light night bright sight might flight right tight white bite kite quite knight "
     "delight blight plight slight fright height")),
    (2, "The children laugh and play,", "play",
     ("play day way say stay sway ray bay may lay pay gray away display pray stray clay hay "
     "decay delay")),
    (3, "The thunder makes a sound,", "sound",
     ("sound ground found round bound around mound pound hound wound profound abound "
     "astound")),
    (4, "The clouds bring heavy rain,", "rain",
     ("rain pain gain main vain plain chain train brain strain remain again drain lane "
     "crane bane wane reign feign")),
    (5, "The old clock measures time,", "time",
     "time rhyme climb crime dime lime mime prime chime sublime paradigm thyme"),
    (6, "The geese fly through the air,", "air",
     ("air there fair care bare dare rare share stare where pair aware compare despair "
     "prayer hair chair bear wear spare snare glare")),
    (7, "The sunset gleams like gold,", "gold",
     "gold old bold cold fold hold told sold mold behold unfold rolled controlled"),
    (8, "The embers feed the fire,", "fire",
     ("fire hire wire desire tire inspire acquire higher entire admire liar dire sire pyre "
     "mire conspire expire")),
    (9, "The castle walls of stone,", "stone",
     ("stone bone tone lone zone throne phone own known blown grown shown moan groan clone "
     "drone")),
    (10, "I wandered through a dream,", "dream",
     "dream stream seem team beam cream gleam scheme theme extreme esteem scream steam"),
    (11, "The silence felt so strange,", "strange", "strange change range arrange exchange grange"),
    (12, "I never knew such love,", "love", "love above dove of shove glove thereof"),
    (13, "She spoke the honest truth,", "truth", "truth youth tooth booth smooth sleuth ruth uncouth"),
    (14, "He traveled all the world,", "world",
     "world curled unfurled whirled hurled swirled pearled furled twirled"),
    (15, "The seeds lay in the earth,", "earth",
     "earth birth worth mirth berth girth dearth rebirth hearth"),
)
# fmt: on
# Lines after the rules of tests/specimen_training/couplets.py, in frames outside the training data; one per
# rhyme family.
SPECIMEN = tuple(
    FirstLine(number, text, last_word(text), FAMILIES[family_of(last_word(text))])
    for number, text in enumerate(
        (
            "In the poor lady they read right",
            "We heard the present letter of Pip say dead",
            "A hand and a last fire sang fall",
            "Pip wrote to the gentleman: day",
            "The honest brother said be",
            "When Joe saw the boy, it was grow",
            "When Darnay saw the child, it was knew",
            "When Estella saw the lady, it was hair",
            "We heard the dark fire of Joe say four",
            "Oliver wrote to the morning: cry",
            "The certain morning said until",
            "We heard the long lady of Lucie say hold",
        ),
        1,
    )
)

PRESETS: Mapping[str, RhymePreset] = {
    "specimen": RhymePreset(
        "specimen-rwkv",
        SPECIMEN,
        blocks=("4-5", "2-5"),
        strengths=(50.0, 100.0, 200.0),
        sustained=("4-5", (50.0, 100.0)),
        condition="sustained_4-5_s=100.0",
        looked_at=1,
        selection="its block and strength were chosen on other lines, by the effect of feeding another "
        "line's rhyme",
    ),
    "anacrousis": RhymePreset(
        "meta-llama/Llama-3.2-1B",
        ANACROUSIS,
        blocks=("12-15", "10-15", "8-15", "14-15"),
        strengths=(1.0, 2.0, 5.0, 10.0, 20.0),
        sustained=("14-15", (0.5, 1.0, 2.0)),
        condition="unembed_8-15_s=2.0",
        looked_at=27,
        selection="published as the best of 27 conditions on these very lines; p-values are corrected for "
        "that choice",
    ),
}
