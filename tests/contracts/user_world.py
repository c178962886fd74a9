"""What a user has on disk, what they ask of it, and what the answer must be.

A `Checkpoint` and a `Features` are folders whose content is chosen by number and may be replaced in every way
a file can be. A question is a frozen dataclass: `answer(model, store)` gives named numpy arrays. The truth is
the same question put, in a process of its own, to an empty store and copies of the folders under names
nobody has seen before, and for captures a plain forward pass as well: nothing that outlives a call can have a
part in it.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import pickle
import shutil
import tempfile
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save, save_file

import mizarr
from mizarr.store import Store, open_store
from mizarr.store.errors import MizarrError
from tests.conftest import TINY
from tests.layer_parts import part_of
from tests.random_dictionaries import save_random_plt

Answer = dict[str, np.ndarray]
SHAPE = {**TINY, "max_position_embeddings": 32}
CONFIGS: tuple[dict[str, Any], ...] = (
    {},
    {"rms_norm_eps": 0.5},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 20.0}},
)
"""Of one shape, so that any weights fit any of them, and far enough apart to tell."""
TEXTS = ("w1 w2 w3\nw4 w5", "w9 w2 w3\nw4 w6", "w7 w7 w7\nw1 w5")
"""Of a prompts file; all of one size."""
TOLERANCE = {"float32": 1e-5, "float64": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
"""Of the scale of what is compared, by the dtype it was stored or computed in."""


# -- files


def replaced(path: Path, data: bytes, how: str) -> None:
    """Put other bytes where a file is: `in_place`, by `rename`, or with its time of change `restored`."""
    before = path.stat()
    if how == "rename":
        aside = path.with_name(path.name + ".new")
        aside.write_bytes(data)
        aside.replace(path)
        return
    with path.open("r+b") as file:
        file.write(data)
        file.truncate()
    if how == "restored":
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def weights_file(seed: int) -> bytes:
    """A checkpoint's model.safetensors; all of one size."""
    from mizarr.stages.forward.architectures.known import from_hf_config
    from mizarr.stages.forward.networks.weights import expected_tensors

    draw = np.random.default_rng(seed)
    shapes = expected_tensors(from_hf_config(SHAPE))
    return bytes(save({name: draw.standard_normal(size, dtype=np.float32) for name, size in shapes.items()}))


def tokenizer_file(turn: int) -> str:
    """A tokenizer.json of the words w0 to w30, numbered from w<turn> on."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = {"<unk>": 0} | {f"w{(n + turn) % 31}": n + 1 for n in range(31)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    return str(tokenizer.to_str())


@dataclass
class Checkpoint:
    """A model's folder, its weights, configuration and tokenizer chosen by number."""

    path: Path

    def write(self, seed: int) -> Checkpoint:
        """Make the folder."""
        self.path.mkdir(parents=True)
        (self.path / "model.safetensors").write_bytes(weights_file(seed))
        (self.path / "config.json").write_text(json.dumps(SHAPE))
        (self.path / "tokenizer.json").write_text(tokenizer_file(0))
        return self

    def replace_weights(self, seed: int, how: str) -> None:
        """Other weights of the same size in the same file."""
        replaced(self.path / "model.safetensors", weights_file(seed), how)

    def replace_config(self, number: int, how: str) -> None:
        """Another of `CONFIGS`."""
        replaced(self.path / "config.json", json.dumps(SHAPE | CONFIGS[number]).encode(), how)

    def replace_tokenizer(self, turn: int, how: str) -> None:
        """The same words under other ids."""
        replaced(self.path / "tokenizer.json", tokenizer_file(turn).encode(), how)


@dataclass
class Features:
    """A dictionary's folder: skip transcoders of both layers, chosen by number."""

    path: Path

    def write(self, seed: int) -> Features:
        """Make the folder."""
        save_random_plt(self.path, layers=2, hidden=16, features=8, seed=seed)
        return self

    def replace(self, seed: int, how: str) -> None:
        """Other features of the same size in the same files."""
        with tempfile.TemporaryDirectory() as folder:
            other = save_random_plt(Path(folder) / "d", layers=2, hidden=16, features=8, seed=seed)
            for file in sorted(other.glob("*.safetensors")):
                replaced(self.path / file.name, file.read_bytes(), how)


@dataclass
class Loaded:
    """A model in memory, and the small files as they were when it was loaded."""

    model: mizarr.Model
    checkpoint: Checkpoint
    told: Mapping[str, bytes]
    """All its files as they were read."""
    is_edited: bool = False

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Loaded:
        """Load a checkpoint."""
        files = {path.name: path.read_bytes() for path in checkpoint.path.iterdir()}
        return cls(mizarr.Model.from_pretrained(checkpoint.path), checkpoint, files)

    def saved(self, folder: Path) -> Path:
        """The model as it is now, in a folder of its own."""
        folder.mkdir(parents=True)
        for name, data in self.told.items():
            (folder / name).write_bytes(data)
        config = json.loads(self.told["config.json"]) | {"rms_norm_eps": self.model.config.norm_eps}
        (folder / "config.json").write_text(json.dumps(config))
        save_file(
            {name: tensor.detach().numpy().copy() for name, tensor in tensors_of(self.model).items()},
            folder / "model.safetensors",
        )
        return folder


def tensors_of(model: mizarr.Model) -> dict[str, Any]:
    """Checkpoint name -> tensor of a loaded model, as its forward pass reads it."""
    weights, tensors = model.network.weights, model.config.tensors
    outside = tensors.outside
    found = {outside["embed"].name: weights.embed, outside["final_norm"].name: weights.final_norm.weight}
    for number, layer in enumerate(weights.layers):
        for weight in tensors.layers[number]:
            found[tensors.in_layer(number, weight)] = part_of(layer, weight).weight
    return found


# -- questions


def values_of(dataset: Any) -> Answer:
    """Every variable and coordinate that holds numbers or words, in memory."""
    return {str(name): np.asarray(array.values) for name, array in dataset.variables.items()}


def run_node(node: Any, store: Store) -> Answer:
    """A node's result."""
    from mizarr.pipeline import run

    run(node, store, quiet=True)
    return values_of(node.open(store))


@dataclass(frozen=True)
class Capture:
    """Activations of prompts, under interventions."""

    prompts: tuple[Any, ...]
    points: tuple[str, ...] = ("blocks.*.hook_resid_post",)
    when: str = "after"
    changes: tuple[tuple[str, Any], ...] = ()
    dtype: str | None = None
    storage_dtype: str | None = None
    segment_tokens: int | None = None
    batch_tokens: int = 2048

    @property
    def hooks(self) -> mizarr.HookSpec:
        """As a spec."""
        spec = mizarr.HookSpec()
        for point in self.points:
            spec = spec.capture(point, when=self.when)
        for point, change in self.changes:
            spec = spec.intervene(point, change)
        return spec

    @property
    def tolerance(self) -> float:
        """Of the coarsest dtype on the way."""
        return (
            max(TOLERANCE[name] for name in (self.dtype, self.storage_dtype) if name)
            if (self.dtype or self.storage_dtype)
            else TOLERANCE["float32"]
        )

    def answer(self, model: Any, store: Store) -> Answer:
        """By `mizarr.capture`."""
        dataset = mizarr.capture(
            model,
            list(self.prompts),
            self.hooks,
            store=store,
            dtype=self.dtype if isinstance(model, str) else None,
            storage_dtype=self.storage_dtype,
            segment_tokens=self.segment_tokens,
            batch_tokens=self.batch_tokens,
            progress=False,
        )
        return values_of(dataset[sorted(dataset.data_vars)])

    def by_forward(self, model: mizarr.Model) -> Answer:
        """By one plain pass per prompt."""
        spec, found = self.hooks, {}
        caches = [model.forward(prompt, spec) for prompt in self.prompts]
        for capture in model.bind(spec).captures:
            rows = []
            for cache in caches:
                value = cache.require(capture.point, when=capture.when)[0]
                if "query_position" in capture.point.dims:
                    value = value[:, *np.tril_indices(value.shape[-1])].T
                elif "head" in capture.point.dims[1]:
                    value = value.transpose(0, 1)
                rows.append(value.float().numpy())
            found.setdefault(capture.variable, []).append(np.concatenate(rows))
        return {name: np.stack(held) if capture_has_layers(name) else held[0] for name, held in found.items()}


def capture_has_layers(variable: str) -> bool:
    """Whether a stored variable has a layer axis."""
    from mizarr.stages.forward.architectures.points import BY_NAME

    return bool(BY_NAME[variable.removesuffix("__pre")].per_layer)


@dataclass(frozen=True)
class Runs:
    """`mizarr.run` over a list of runs; an intervention and a point for each."""

    prompt: tuple[int, ...]
    changes: tuple[tuple[str, Any], ...]

    def answer(self, model: Any, store: Store | None) -> Answer:
        """Logits of every run."""
        loaded = mizarr.Model.from_pretrained(model) if isinstance(model, str) else model
        asked = [
            mizarr.Run(list(self.prompt), mizarr.HookSpec().intervene(point, change))
            for point, change in self.changes
        ]
        found = mizarr.run(loaded, [mizarr.Run(list(self.prompt)), *asked], store=store)
        return {f"run {i}": each.logits.numpy() for i, each in enumerate(found)}


@dataclass(frozen=True)
class Ask:
    """An experiment on a model."""

    experiment: Any

    def answer(self, model: Any, store: Store) -> Answer:
        """By its node."""
        return run_node(self.experiment.on(model), store)


@dataclass(frozen=True)
class Components:
    """Stages over a capture: principal components by way of moments."""

    prompts: tuple[Any, ...]

    def answer(self, model: Any, store: Store) -> Answer:
        """What does not depend on a sign."""
        from mizarr.stages.forward.capture.capture import CaptureNode
        from mizarr.stages.geometry.pca import moments, principal_components

        states = CaptureNode(model, list(self.prompts), "blocks.*.hook_resid_post")["resid_post"]
        found = run_node(principal_components.on(summary=moments.on(states=states), n_components=2), store)
        return {name: found[name] for name in ("explained_variance", "mean", "n")}


@dataclass(frozen=True)
class Lens:
    """The workflow `logit_lens`, over texts or over the lines of a file."""

    texts: tuple[str, ...]
    prompts_file: Path | None = None

    def settled(self) -> Lens:
        """The same of the texts the file holds now."""
        if self.prompts_file is None:
            return self
        return Lens(tuple(self.prompts_file.read_text().split("\n")))

    def answer(self, model: Any, store: Store) -> Answer:
        """Its result, and what words it would show."""
        from mizarr.workflows.subject import read_texts

        texts = self.texts
        if self.prompts_file is not None:
            texts = tuple(read_texts(str(self.prompts_file))[0].split("\n"))
        done = mizarr.compute("logit_lens", store=store, model=model, prompts=texts, top_k=2)
        return self.of(done)

    @staticmethod
    def of(done: Any) -> Answer:
        """What a workflow that has run says."""
        return values_of(done.result("lens")) | {"word": np.array(done.vocabulary)}


@dataclass(frozen=True)
class Encoded:
    """What is active of a dictionary in a corpus."""

    prompts: tuple[Any, ...]
    dictionary: Any

    def answer(self, model: Any, store: Store) -> Answer:
        """By `encode_corpus`."""
        from mizarr.stages.features.corpus.encode import encode_corpus

        found = encode_corpus(opened(self.dictionary), model, list(self.prompts), store=store, progress=False)
        return values_of(found)


@dataclass(frozen=True)
class Active:
    """What is active of a dictionary in a prompt, as the workflows ask."""

    prompt: tuple[int, ...]
    dictionary: Any

    def answer(self, model: Any, store: Store) -> Answer:
        """By the experiment."""
        from mizarr.stages.features.effects.activity import FeatureActivity

        features = opened(self.dictionary)
        asked = FeatureActivity(tokens=self.prompt, dictionary=features.name, features=features.identity)
        return run_node(asked.on(model), store)


@dataclass(frozen=True)
class Graph:
    """The attribution graph of a prompt."""

    prompt: tuple[int, ...]
    dictionary: Any

    def answer(self, model: Any, store: Store) -> Answer:
        """Its weights and what its nodes are."""
        found = mizarr.attribution_graph(
            model, opened(self.dictionary), list(self.prompt), store=store, max_n_logits=2
        )
        return values_of(found.dataset)


def opened(dictionary: Any) -> mizarr.Dictionary:
    """A dictionary by name, or one in hand."""
    if isinstance(dictionary, str):
        return mizarr.Dictionary.from_pretrained(dictionary)
    return dictionary


# -- the truth


class Truth:
    """Questions put to a process of its own, copies of the files, and an empty store.

    What was asked before of the very same bytes is remembered: by their digest, never by a name.
    """

    def __init__(
        self, root: Path, question: Any, model: Path | Loaded, dictionary: Path | None = None
    ) -> None:
        """Starts to compute; `answer` waits for it."""
        self.folder = Path(tempfile.mkdtemp(dir=root, prefix="aside-"))
        name = self.folder / "model"
        if isinstance(model, Loaded):
            model.saved(name)
        else:
            shutil.copytree(model, name)
        if dictionary is not None:
            shutil.copytree(dictionary, self.folder / "features")
            question = replace(question, dictionary="features")
        question = question.settled() if isinstance(question, Lens) else question
        self.key = _digest(self.folder, question)
        if dictionary is not None:
            question = replace(question, dictionary=str(self.folder / "features"))
        self.asked = None if self.key in _TRUTHS else Asked(_true_answer, question, str(name))

    def answer(self) -> Answer:
        """The answer. Raises the MizarrError it was refused with."""
        try:
            if self.asked is not None:
                _TRUTHS[self.key] = self.asked.given()
        finally:
            shutil.rmtree(self.folder)
        found = _TRUTHS[self.key]
        if isinstance(found, MizarrError):
            raise found
        return found


@dataclass(frozen=True)
class Known:
    """A truth that needs no computation; None where there is none, for this reason."""

    value: Answer | None
    reason: str

    def answer(self) -> Answer:
        """The answer. Raises a MizarrError where there is none."""
        if self.value is None:
            raise MizarrError(self.reason)
        return self.value


_TRUTHS: dict[str, Any] = {}


def _digest(folder: Path, question: Any) -> str:
    """Of the bytes a question is about."""
    state = hashlib.sha256(pickle.dumps(question))
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            state.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode())
            state.update(path.read_bytes())
    return state.hexdigest()


def _true_answer(question: Any, model: str) -> Answer:
    store = open_store(Path(model).parent / "store", durability="process")
    found: Answer = question.answer(model, store)
    if isinstance(question, Capture):
        plain = question.by_forward(mizarr.Model.from_pretrained(model, dtype=question.dtype or "float32"))
        told = differences(plain, found, question.tolerance, among=True)
        assert not told, f"a capture into an empty store is not the forward pass: {told}"
    return found


class Killed(Exception):
    """A process did not live to answer."""


_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["tests.contracts.user_world", "tests.contracts.user_preload"]  # imports without a computation
)


class Asked:
    """A function called in a process of its own, forked where nothing has been computed yet."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._pipe, there = _CONTEXT.Pipe(duplex=False)
        self._process = _CONTEXT.Process(target=_work, args=(there, function, args))
        self._process.start()
        there.close()

    def given(self) -> Any:
        """What it gave, a MizarrError as a value. Raises `Killed` for the death of the process."""
        try:
            found = self._pipe.recv()
        except EOFError:
            self._process.join()
            raise Killed(f"exit code {self._process.exitcode}") from None
        finally:
            self._pipe.close()
        self._process.join()
        if isinstance(found, str):
            raise AssertionError(found)
        return found


def _work(pipe: Any, function: Callable[..., Any], args: Any) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        found = function(*args)
    except MizarrError as error:
        found = type(error)(str(error))
    except Exception:  # noqa: BLE001 - told to whoever asked, in another process
        found = traceback.format_exc()
    pipe.send(found)


def differences(
    expected: Mapping[str, np.ndarray],
    found: Mapping[str, np.ndarray],
    tolerance: float = 1e-5,
    *,
    among: bool = False,
) -> list[str]:
    """What differs, in words; nothing where every array is the same within `tolerance` of its scale.

    among: what is expected may be part of what is found.
    """
    told = []
    if set(expected) - set(found) or (set(found) - set(expected) and not among):
        told.append(f"expected {', '.join(sorted(expected))}, found {', '.join(sorted(found))}")
    for name in sorted(set(expected) & set(found)):
        one, other = np.asarray(expected[name]), np.asarray(found[name])
        if one.shape != other.shape:
            told.append(f"{name}: expected shape {one.shape}, found {other.shape}")
        elif one.dtype.kind == "f":
            wide = one.astype(np.float64), other.astype(np.float64)
            scale = float(np.max(np.abs(wide[0]), initial=0.0, where=np.isfinite(wide[0])))
            same = np.isclose(*wide, rtol=0, atol=tolerance * max(scale, 1.0), equal_nan=True)
            if not same.all():
                apart = np.abs(wide[0] - wide[1])
                most = float(np.max(apart, initial=0.0, where=np.isfinite(apart)))
                told.append(f"{name}: {int((~same).sum())} of {same.size} numbers differ by up to {most:.3g}")
        elif not np.array_equal(one, other):
            told.append(f"{name}: expected {one.ravel()[:6].tolist()}, found {other.ravel()[:6].tolist()}")
    return told
