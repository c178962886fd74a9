"""Every family that is known by name: model_type -> how its config.json is read, and how it is described.

The one table of families, of all kinds of architecture; which kind a family is, nobody outside asks. A family
is listed in the table of its kind (families.py, and the other …_families.py).

Border: never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ....store.errors import ConfigError, nearest
from .architecture import Architecture
from .attending.families import ATTENDING
from .attending.family import described_attending
from .attending.reading import read_attending
from .attending.towers import TOWERS, read_tower, text_section
from .carrying.families import CARRYING
from .families import FAMILIES, described, read_family
from .hybrid_families import HYBRIDS, HybridFamily
from .linear_families import KIN, LINEAR
from .pairs.families import PAIRS, PairFamily
from .recurrent_families import RECURRENT
from .rwkv_families import RWKV, read_rwkv
from .transformer import ConfigReader
from .zamba_families import ZAMBA

__all__ = ["KNOWN", "KnownFamily"]

TensorShapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class KnownFamily:
    """A family known by name.

    read: its architecture, from a config.json and the shapes of its tensors by name. described: it in words,
    a column each. reads_tensors: whether config.json alone does not say enough.
    """

    read: Callable[[ConfigReader, TensorShapes], Architecture]
    described: Mapping[str, str]
    reads_tensors: bool = False


def _transformer(model_type: str) -> KnownFamily:
    family = FAMILIES[model_type]
    return KnownFamily(
        lambda reader, shapes: read_family(reader, model_type, family), described(model_type, family)
    )


def _attending(model_type: str) -> KnownFamily:
    family = ATTENDING[model_type]
    return KnownFamily(
        lambda reader, shapes: read_attending(reader, family, shapes),
        described_attending(model_type, family),
        reads_tensors=family.reads_tensors,
    )


def _tower(model_type: str) -> KnownFamily:
    tower = TOWERS[model_type]

    def read(reader: ConfigReader, shapes: TensorShapes) -> Architecture:
        section = text_section(reader, shapes)
        text = section.raw["model_type"]
        if text not in KNOWN or text in TOWERS:
            near = nearest(str(text), KNOWN)
            raise ConfigError(
                f"{section.source}: expected model_type to be that of a text model known here, found {text!r}"
                + (f"; nearest is {near!r}" if near else "")
            )
        return read_tower(KNOWN[text].read(section, {}), shapes)

    told = f"{tower.examples}, of which the text model runs"
    as_text = f"as `{tower.text}`"
    return KnownFamily(read, _row(model_type, told, as_text, as_text, as_text, as_text), reads_tensors=True)


def _rwkv(model_type: str, generation: int, examples: str) -> KnownFamily:
    activation = "token-shifted squared ReLU"
    return KnownFamily(
        read_rwkv,
        _row(
            model_type, examples, "layer norm", activation, f"none: the state of RWKV-{generation}", "untied"
        ),
        reads_tensors=True,
    )


def _hybrid(model_type: str, family: HybridFamily) -> KnownFamily:
    row = _row(model_type, family.examples, "RMS", family.mlp, family.mixers, family.head)
    return KnownFamily(family.config, row, family.reads_tensors)


def _pair(family: PairFamily) -> KnownFamily:
    return KnownFamily(family.read, family.described, reads_tensors=True)


def _row(model_type: str, examples: str, norm: str, mlp: str, attention: str, head: str) -> dict[str, str]:
    """The columns of `described`."""
    found = {"model_type": model_type, "examples": examples, "norm": norm, "mlp": mlp}
    return found | {"attention": attention, "head": head}


OF_MIXERS = HYBRIDS | LINEAR | KIN | ZAMBA | RECURRENT | CARRYING
KNOWN: dict[str, KnownFamily] = {
    **{model_type: _transformer(model_type) for model_type in FAMILIES},
    **{model_type: _attending(model_type) for model_type in ATTENDING},
    **{model_type: _pair(family) for model_type, family in PAIRS.items()},
    **{model_type: _tower(model_type) for model_type in TOWERS},
    **{model_type: _rwkv(model_type, *told) for model_type, told in RWKV.items()},
    **{model_type: _hybrid(model_type, family) for model_type, family in OF_MIXERS.items()},
}
"""Every family known by name."""
