"""What a user does to what they hold: models, dictionaries, payloads, stages, files and stores of others."""

from __future__ import annotations

import importlib.util
import io
import json
import random
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load, save

import mizarr
from mizarr.store import Store
from mizarr.store.sealed import sealed
from tests.contracts import user_world as world

# -- models and dictionaries in memory


WRITES = ("mul_", "data", "numpy", "setitem", "copy_", "dlpack", "storage")
"""Ways to write to a tensor in place."""
EDITS = (*WRITES, "swap", "assign", "cast", "eps")
"""Ways to edit a loaded model."""
DICTIONARY_EDITS = (*WRITES, "swap", "assign", "layer")
"""Ways to edit a dictionary whose layers were opened."""


def write_to(tensor: torch.Tensor, how: str) -> None:
    """Change the numbers of a tensor in one of the ways a user knows."""
    if how == "mul_":
        tensor.mul_(1.5)
    elif how == "data":
        tensor.data.add_(0.5)
    elif how == "numpy":
        tensor.numpy()[...] *= -1.0
    elif how == "setitem":
        tensor[0] = 0.25
    elif how == "copy_":
        tensor.copy_(tensor.flip(0) + 1.0)
    elif how == "dlpack":
        torch.from_dlpack(tensor).sub_(0.75)
    elif how == "storage":
        torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).neg_()
    elif how == "swap":
        tensor.data = tensor.data * 2.0
    else:
        raise ValueError(how)


def edit(model: mizarr.Model, number: int, how: str) -> None:
    """Change a loaded model in one of `EDITS`."""
    from mizarr.stages.forward.networks.weights import Linear

    network = model.network
    tensors = list(world.tensors_of(model).values())
    mlp = network.weights.layers[number % 2].channel_mixer.weights
    if how == "assign":
        object.__setattr__(mlp, "down", Linear(mlp.down.weight * 2.0))
    elif how == "cast":
        object.__setattr__(mlp, "up", Linear(mlp.up.weight.to(torch.bfloat16).to(mlp.up.weight.dtype)))
    elif how == "eps":
        network.config = replace(network.config, norm_eps=0.7)
    else:
        write_to(tensors[number % len(tensors)], how)


def edit_dictionary(dictionary: mizarr.Dictionary, number: int, how: str) -> None:
    """Change an opened layer of a dictionary in one of `DICTIONARY_EDITS`."""
    layers = dictionary.layers
    features = dictionary.layer(layers[number % len(layers)])
    if how == "assign":
        object.__setattr__(features, "W_enc", features.W_enc * 2.0)
    elif how == "layer":
        dictionary._opened[features.layer] = replace(features, gain=3.0)
    else:
        tensors = (features.W_enc, features.W_dec[features.targets[0]], features.b_enc, features.b_dec)
        write_to(tensors[number % len(tensors)], how)


class Payload:
    """An intervention, and what the user still holds of what it was made of."""

    def __init__(self, kind: str, seed: int) -> None:
        values = np.random.default_rng(seed).standard_normal(16).astype(np.float32)
        self.kind, self.original, self.is_written = kind, values.copy(), False
        self.mine: Any = {"torch": torch.from_numpy(values), "list": values.tolist()}.get(kind, values)
        self.change = self._made(self.mine)

    def __repr__(self) -> str:
        return f"Payload({self.kind!r})"

    def _made(self, values: Any) -> tuple[str, Any]:
        if self.kind == "pairs":
            return "blocks.0.hook_resid_post", mizarr.AddAtPositions([(1, values)])
        return "blocks.0.hook_resid_post", mizarr.Add(values, positions=(1,))

    def as_made(self) -> tuple[str, Any]:
        """The same intervention, from values nobody else holds."""
        return self._made(self.original.copy())

    def write(self) -> None:
        """Write to what the intervention was made of."""
        self.mine[0] = float(self.mine[0]) + 3.0
        self.is_written = True


OWN = """\
from mizarr.pipeline import stage

FACTOR = 2.0
TABLE = {"shift": 1.0}


def inner(x):
    return x * 1.5


def helper(x):
    return inner(x)


def scaled(x, by=2.0):
    return x * by


@stage(inputs={"states": ("layer", "token", "hidden")}, outputs={"weighed": ("layer", "token", "hidden")})
def weighed(states):
    return (scaled(helper(states)) * FACTOR + TABLE["shift"]).rename("weighed")


def as_written(states):
    return scaled(helper(states)) * FACTOR + TABLE["shift"]
"""


class OwnStage:
    """The stage of a user's module, over a capture."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def answer(self, model: Any, store: Store) -> world.Answer:
        """By its node."""
        from mizarr.stages.forward.capture.capture import CaptureNode

        states = CaptureNode(model, [(1, 2, 3)], "blocks.*.hook_resid_post")["resid_post"]
        return world.run_node(self.module.weighed.on(states=states), store)


def own_stages(root: Path) -> Any:
    """A fresh module with a stage that has no version."""
    path = root / f"own_{len(list(root.iterdir()))}.py"
    path.write_text(OWN)
    described = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(described)
    sys.modules[path.stem] = module
    described.loader.exec_module(module)
    return module


def flipped(path: Path, place: float, bit: int) -> None:
    """One bit of a file."""
    data = bytearray(path.read_bytes())
    if data:
        data[int(place * len(data))] ^= 1 << bit
        path.write_bytes(data)


def stamps(folder: Path) -> dict[str, tuple[int, ...]]:
    """Inode, size and times of each file of a folder: any write moves them, also one of the same bytes."""
    states = {file.name: file.stat() for file in folder.iterdir()}
    return {
        name: (state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
        for name, state in states.items()
    }


# -- files of activations


@dataclass
class Foreign:
    """A file of activations that somebody else harvested: hook points of two layers, and token ids."""

    path: Path

    def write(self, seed: int, how: str = "in_place") -> Foreign:
        """Numbers chosen by `seed`; files of one kind are all of one size."""
        draw = np.random.default_rng(seed)
        arrays = {
            f"blocks.{layer}.hook_resid_post": draw.standard_normal((6, 4)).astype(np.float32)
            for layer in range(2)
        }
        arrays |= {"token_ids": np.arange(1, 7), "row_size": np.array([2, 4])}
        if self.path.suffix == ".safetensors":
            data = save(arrays)
        else:
            file = io.BytesIO()
            np.savez(file, **arrays)
            data = file.getvalue()
        if self.path.exists():
            world.replaced(self.path, data, how)
        else:
            self.path.write_bytes(data)
        return self

    def literally(self) -> world.Answer | None:
        """Its states, read by numpy or safetensors alone; None where those cannot read it."""
        data = self.path.read_bytes()
        try:
            if self.path.suffix == ".safetensors":
                arrays: Mapping[str, np.ndarray] = load(data)
            else:
                with np.load(io.BytesIO(data)) as file:
                    arrays = {name: file[name] for name in file.files}
        except Exception:  # noqa: BLE001 - other libraries raise whatever they like
            return None
        found = {
            re.fullmatch(r"blocks\.(\d)\.hook_resid_post", name): value for name, value in arrays.items()
        }
        layers = [(int(name[1]), value) for name, value in found.items() if name]
        if not layers:
            return None
        layers.sort(key=lambda pair: pair[0])
        return {"resid_post": np.stack([value for _, value in layers])}


# -- stores of others

OUT = ("../../../../stolen", "/tmp/stolen", "..", "a/../../../b", "", ".", "keys", "store.json", "x\x1b[2J")
"""Names that lead out of a folder, or to other files of a store."""
SAID = ("labels", "vocabularies", "provenance", "/coordinates/")
"""Files of what people say, which decides no number."""


@dataclass
class AnotherStore:
    """A store that somebody else filled, and what was done to it."""

    path: Path
    is_damaged: bool = False
    is_hostile: bool = False

    def files(self) -> list[Path]:
        """All its plain files."""
        return [path for path in sorted(self.path.rglob("*")) if path.is_file() and not path.is_symlink()]

    def flip_bits(self, draw: random.Random) -> None:
        """As a disk may."""
        self.is_damaged = True
        files = self.files()
        for path in draw.sample(files, min(3, len(files))):
            flipped(path, draw.random(), draw.randrange(8))

    def lead_out(self, draw: random.Random) -> None:
        """Names in its records lead elsewhere; each record is sound by its own check."""
        self.is_hostile = True
        jsons = [
            path
            for path in self.files()
            if path.suffix == ".json" and not any(said in str(path) for said in SAID)
        ]
        for path in draw.sample(jsons, min(3, len(jsons))):
            text = path.read_bytes()
            fields = json.loads(text)
            is_sealed = fields.pop("check", None) is not None
            places = list(_texts_in(fields))
            if not places:
                continue
            holder, key, is_key = draw.choice(places)
            name = draw.choice(OUT)
            if is_key:
                holder[name] = holder.pop(key)
            else:
                holder[key] = name
            path.write_bytes(sealed(fields) if is_sealed else json.dumps(fields).encode())

    def link(self, draw: random.Random, victim: Path) -> None:
        """A file or a folder of it is a link to somebody's files."""
        self.is_hostile = True
        places = [path for path in sorted(self.path.rglob("*")) if path.name != "store.json"]
        place = draw.choice(places)
        is_folder = place.is_dir()
        if is_folder:
            shutil.rmtree(place)
        else:
            place.unlink()
        place.symlink_to(victim if is_folder else victim / "secret", target_is_directory=is_folder)


def _texts_in(value: Any) -> Iterator[tuple[Any, Any, bool]]:
    """(container, key, whether the key itself) of every text in parsed JSON."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(pairs):
        if isinstance(key, str):
            yield value, key, True
        if isinstance(inner, str):
            yield value, key, False
        yield from _texts_in(inner)
