"""A machine that plays user: everything a user may do to files, models and a store, in any order.

Every answer is compared with the same question put where nothing can be stale (see user_world.py). What is
allowed: the same numbers, or a `MizarrError` that the user's own deeds excuse: a damaged store, an edited
model, one opened to be read only. Anything else is a difference, an exception of another kind included. A
replay reads as a story: rules are what the user does, bundles what they hold.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, rule

import mizarr
from mizarr.store import Store, index as store_index, open_store
from mizarr.store.errors import MizarrError
from mizarr.store.files import local as store_files
from mizarr.workflows import build
from tests.contracts import user_world as world
from tests.contracts.user_world import Active, Ask, Capture, Components, Encoded, Graph, Lens, Loaded, Runs

COUNTS: Counter[str] = Counter()
"""Of every kind of action, answer and refusal, over all machines of this process."""
NAMES = st.sampled_from(("a", "b"))
SEEDS = st.integers(0, 3)
HOW = st.sampled_from(("in_place", "rename", "restored"))
IDS = st.lists(st.integers(1, 30), min_size=2, max_size=6).map(tuple)
PROMPTS = st.one_of(
    st.lists(IDS, min_size=1, max_size=4).map(tuple),
    st.lists(st.sampled_from(("w1 w2 w3", "w4 w5", "w6 w7 w8 w9")), min_size=1, max_size=3).map(tuple),
)
POINTS = st.sampled_from(
    (
        ("blocks.*.hook_resid_post",),
        ("blocks.0.hook_resid_post",),
        ("blocks.1.hook_resid_post", "blocks.0.mlp.hook_post"),
        ("blocks.1.attn.hook_pattern", "hook_embed"),
        ("blocks.*.attn.hook_q", "blocks.1.hook_mlp_out"),
    )
)
CHANGES = st.sampled_from(
    (
        (),
        (),
        (("blocks.0.hook_mlp_out", mizarr.Zero()),),
        (("blocks.0.hook_mlp_out", mizarr.Zero(positions=(0,))),),
        (("blocks.0.hook_resid_post", mizarr.Scale(0.5)),),
        (("blocks.1.attn.hook_z", mizarr.Scale(2.0, heads=(1,))),),
        (("blocks.0.attn.hook_scores", mizarr.Knockout(((-1, 0),))),),
        (("blocks.1.attn.hook_pattern", mizarr.Steer(((1, 0),), 3.0)),),
    )
)
CAPTURES = st.builds(
    Capture,
    PROMPTS,
    POINTS,
    st.sampled_from(("after", "before")),
    CHANGES,
    st.sampled_from((None, None, "float64")),
    st.sampled_from((None, None, "float16", "bfloat16")),
    st.sampled_from((None, 8, 16)),
    st.sampled_from((4, 2048)),
)


class Interrupted(BaseException):
    """What comes in the middle of a capture."""


class UserMachine(RuleBasedStateMachine):
    """One user, one store folder, two checkpoints, one dictionary, a prompts file and a module of stages."""

    models = Bundle("models")
    payloads = Bundle("payloads")
    dictionaries = Bundle("dictionaries")
    held = Bundle("held")
    plans = Bundle("plans")
    stages = Bundle("stages")

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="user-"))
        (self.root / "aside").mkdir()
        self.environment = mock.patch.dict(os.environ, {"MIZARR_CACHE": str(self.root / "cache")})
        self.environment.start()
        self.checkpoints = {
            name: world.Checkpoint(self.root / name).write(seed) for seed, name in enumerate("ab")
        }
        self.features = world.Features(self.root / "features").write(0)
        self.prompts = self.root / "prompts.txt"
        self.prompts.write_text(world.TEXTS[0])
        self.store = self.opened()
        self.is_damaged = False
        self.replacements = 0
        torch.set_num_threads(1)

    def teardown(self) -> None:
        """Leave nothing behind."""
        self.environment.stop()
        shutil.rmtree(self.root)

    # -- asking

    def opened(self, mode: Any = "a") -> Store:
        """The store's folder."""
        return open_store(self.root / "store", mode, durability="process")

    def ask(
        self,
        question: Any,
        model: world.Checkpoint | Loaded,
        *,
        excuse: str = "",
        through: Callable[[Any, Any, Store], Any] | None = None,
        dictionaries: tuple[Path, ...] = (),
        truly: Any = None,
    ) -> None:
        """Put a question to the store and hold the answer against the truth.

        excuse: what the user did that a refusal may name. through: how to ask, default here and now.
        dictionaries: folders any of which the answer may rightly be made of. truly: the question to put where
        nothing is stored, default the same.
        """
        what = type(question).__name__
        given = model.model if isinstance(model, Loaded) else str(model.path)
        waiting = [self.truth(truly or question, model, folder) for folder in dictionaries or (None,)]
        answer: world.Answer | None = None
        reason = ""
        try:
            answer = (through or (lambda q, m, s: q.answer(m, s)))(question, given, self.store)
        except MizarrError as error:
            reason = f"{type(error).__name__}: {error}"
        truths, refused = [], ""
        for truth in waiting:
            try:
                truths.append(truth.answer())
            except MizarrError as error:
                refused = str(error)
        if answer is None:
            COUNTS[f"{what}: refused, {reason.partition(':')[0]}"] += 1
            excuse = excuse or self.excuse(model) or refused
            assert excuse, f"{what} was refused, and nothing the user did excuses it: {reason}"
            return
        tolerance = getattr(question, "tolerance", 1e-5)
        told = [world.differences(truth, answer, tolerance) for truth in truths]
        COUNTS[f"{what}: {'answered' if [] in told else 'DIFFERENT'}"] += 1
        assert truths, f"{what} was answered, though it is refused where nothing is stored: {refused}"
        assert [] in told, f"{what} is not what a fresh computation gives: {min(told, key=len)}"

    def truth(self, question: Any, model: world.Checkpoint | Loaded, dictionary: Path | None = None) -> Any:
        """What a question is answered with where nothing can be stale, in the making."""
        where = model if isinstance(model, Loaded) else model.path
        return world.Truth(self.root / "aside", question, where, dictionary)

    def excuse(self, model: world.Checkpoint | Loaded) -> str:
        """What may be refused, in words; empty where everything must be answered."""
        if self.is_damaged:
            return "files of the store were damaged"
        if self.store.read_only:
            return "the store is read only"
        if isinstance(model, Loaded):
            if model.is_edited:
                return "the model was edited"
            if any((model.checkpoint.path / name).read_bytes() != data for name, data in model.told.items()):
                return "the model's files changed after it was loaded"
        return ""

    # -- questions by name

    @rule(name=NAMES, question=CAPTURES)
    def capture_by_name(self, name: str, question: Capture) -> None:
        self.ask(question, self.checkpoints[name])

    @rule(name=NAMES, prompts=PROMPTS)
    def principal_components_by_name(self, name: str, prompts: Any) -> None:
        self.ask(Components(prompts), self.checkpoints[name])

    @rule(name=NAMES, reads_file=st.booleans())
    def logit_lens_by_name(self, name: str, reads_file: bool) -> None:
        self.ask(Lens(("w1 w2 w3", "w4 w5"), self.prompts if reads_file else None), self.checkpoints[name])

    @rule(name=NAMES, experiment=st.deferred(lambda: EXPERIMENTS))
    def experiment_by_name(self, name: str, experiment: Any) -> None:
        self.ask(Ask(experiment), self.checkpoints[name])

    @rule(name=NAMES, kind=st.sampled_from((Encoded, Active, Graph)))
    def features_by_name(self, name: str, kind: Any) -> None:
        folder = self.features.path
        prompt = ((1, 2, 3), (4, 5, 6, 7)) if kind is Encoded else (1, 2, 3, 4)
        self.ask(kind(prompt, str(folder)), self.checkpoints[name], dictionaries=(folder,))

    @rule(name=NAMES, question=CAPTURES)
    def capture_in_another_process(self, name: str, question: Capture) -> None:
        self.ask(question, self.checkpoints[name], through=in_another_process)

    # -- models in memory

    @rule(target=models, name=NAMES)
    def load(self, name: str) -> Loaded:
        return Loaded.of(self.checkpoints[name])

    @rule(model=models, question=CAPTURES)
    def capture_with(self, model: Loaded, question: Capture) -> None:
        self.ask(replace(question, dtype=None), model)

    @rule(model=models, prompt=IDS, changes=CHANGES)
    def run_with(self, model: Loaded, prompt: Any, changes: Any) -> None:
        self.ask(Runs(prompt, changes), model)

    @rule(model=models, experiment=st.deferred(lambda: EXPERIMENTS))
    def experiment_with(self, model: Loaded, experiment: Any) -> None:
        self.ask(Ask(experiment), model)

    @rule(model=models)
    def logit_lens_with(self, model: Loaded) -> None:
        self.ask(Lens(("w1 w2 w3",)), model)

    @rule(
        model=models,
        tensor=st.integers(0, 18),
        how=st.sampled_from(("mul_", "data", "numpy", "assign", "setitem", "cast", "eps")),
    )
    def edit_in_memory(self, model: Loaded, tensor: int, how: str) -> None:
        edit(model.model, tensor, how)
        model.is_edited = True

    # -- payloads

    @rule(target=payloads, kind=st.sampled_from(("torch", "numpy", "list", "pairs")), seed=SEEDS)
    def make_payload(self, kind: str, seed: int) -> Payload:
        return Payload(kind, seed)

    @rule(payload=payloads)
    def write_into_payload(self, payload: Payload) -> None:
        payload.write()

    @rule(payload=payloads, name=NAMES)
    def capture_under_payload(self, payload: Payload, name: str) -> None:
        prompts, points = ((1, 2, 3),), ("blocks.1.hook_resid_post",)
        self.ask(
            Capture(prompts, points, changes=(payload.change,)),
            self.checkpoints[name],
            excuse="the payload was written to" if payload.is_written else "",
            truly=Capture(prompts, points, changes=(payload.as_made(),)),
        )

    @rule(payload=payloads, model=models)
    def run_under_payload(self, payload: Payload, model: Loaded) -> None:
        self.ask(
            Runs((1, 2, 3), (payload.change,)),
            model,
            excuse="the payload was written to" if payload.is_written else "",
            truly=Runs((1, 2, 3), (payload.as_made(),)),
        )

    # -- dictionaries in hand

    @rule(target=dictionaries)
    def open_dictionary(self) -> Any:
        copy = Path(tempfile.mkdtemp(dir=self.root)) / "features"
        shutil.copytree(self.features.path, copy)
        return mizarr.Dictionary.from_pretrained(str(self.features.path)), copy, self.replacements

    @rule(dictionary=dictionaries, name=NAMES, kind=st.sampled_from((Encoded, Active, Graph)))
    def features_with(self, dictionary: Any, name: str, kind: Any) -> None:
        opened, copy, replacements = dictionary
        prompt = ((1, 2, 3), (4, 5, 6, 7)) if kind is Encoded else (1, 2, 3, 4)
        self.ask(
            kind(prompt, opened),
            self.checkpoints[name],
            excuse=""
            if replacements == self.replacements
            else "the dictionary's files changed after it was opened",
            dictionaries=(copy, self.features.path),
        )

    # -- plans in hand

    @rule(target=plans, name=NAMES)
    def plan_a_lens(self, name: str) -> Any:
        copy = Path(tempfile.mkdtemp(dir=self.root)) / "model"
        shutil.copytree(self.checkpoints[name].path, copy)
        folder = self.checkpoints[name].path
        try:
            planned = build("logit_lens", model=str(folder), prompts=("w1 w2 w3",), top_k=2)
        except MizarrError as error:
            COUNTS[f"plan: refused, {type(error).__name__}"] += 1
            return None
        return planned, world.Checkpoint(copy), folder

    @rule(plan=plans)
    def run_what_was_planned(self, plan: Any) -> None:
        if plan is None:
            return
        planned, copy, folder = plan
        question = Lens(("w1 w2 w3",))
        same = same_files(copy.path, folder)
        self.ask(
            question,
            copy,
            excuse="" if same else "the model's files changed after this was planned",
            through=lambda _question, _model, store: Lens.of(planned.run(store)),
        )

    # -- datasets in hand

    @rule(target=held, name=NAMES, prompts=PROMPTS, segment=st.sampled_from((None, 8)))
    def hold_a_capture(self, name: str, prompts: Any, segment: int | None) -> Any:
        question = Capture(prompts, segment_tokens=segment)
        truth = self.truth(question, self.checkpoints[name]).answer()
        try:
            dataset = mizarr.capture(
                str(self.checkpoints[name].path),
                list(prompts),
                question.hooks,
                store=self.store,
                segment_tokens=segment,
                progress=False,
            )
        except MizarrError:
            if not self.excuse(self.checkpoints[name]):
                raise
            return None, truth
        return dataset, truth

    @rule(one=held, pickled=st.booleans())
    def read_what_is_held(self, one: Any, pickled: bool) -> None:
        dataset, truth = one
        if dataset is None:
            return
        try:
            found = world.values_of(pickle.loads(pickle.dumps(dataset)) if pickled else dataset)
        except (MizarrError, FileNotFoundError) as error:
            COUNTS[f"held: refused, {type(error).__name__}"] += 1
            return
        told = world.differences({name: truth[name] for name in set(truth) & set(found)}, found, among=True)
        COUNTS[f"held: {'DIFFERENT' if told else 'answered'}"] += 1
        assert not told, f"an opened dataset reads other numbers than it was opened with: {told}"

    # -- stages of one's own

    @rule(target=stages)
    def write_a_stage(self) -> Any:
        try:
            return own_stages(self.root)
        except MizarrError as error:
            COUNTS[f"own stage: refused, {type(error).__name__}"] += 1
            return None

    @rule(module=stages, what=st.sampled_from(("number", "table", "helper", "default", "far")), to=SEEDS)
    def edit_what_a_stage_reads(self, module: Any, what: str, to: int) -> None:
        if module is None:
            return
        if what == "number":
            module.FACTOR = float(to)
        elif what == "table":
            module.TABLE["shift"] = float(to)
        elif what == "helper":
            module.helper = (lambda x: x + 1.0) if to % 2 else (lambda x: x - 1.0)
        elif what == "far":
            module.inner = (lambda x: x * 3.0) if to % 2 else (lambda x: x * 5.0)
        else:
            module.scaled.__defaults__ = (float(to),)

    @rule(module=stages, name=NAMES)
    def compute_own_stage(self, module: Any, name: str) -> None:
        if module is None:
            return
        states = self.truth(Capture(((1, 2, 3),)), self.checkpoints[name]).answer()["resid_post"]
        truth = module.as_written(states)
        try:
            found = OwnStage(module).answer(str(self.checkpoints[name].path), self.store)
        except MizarrError as error:
            COUNTS[f"own stage: refused, {type(error).__name__}"] += 1
            return
        told = world.differences({"weighed": truth}, {"weighed": found["weighed"]}, 1e-4)
        COUNTS[f"own stage: {'DIFFERENT' if told else 'answered'}"] += 1
        assert not told, f"a stage of one's own is not what its function gives now: {told}"

    # -- files that change

    @rule(name=NAMES, seed=SEEDS, how=HOW)
    def replace_weights(self, name: str, seed: int, how: str) -> None:
        self.checkpoints[name].replace_weights(seed, how)

    @rule(name=NAMES, number=st.integers(0, len(world.CONFIGS) - 1), how=HOW)
    def replace_config(self, name: str, number: int, how: str) -> None:
        self.checkpoints[name].replace_config(number, how)

    @rule(name=NAMES, turn=st.sampled_from((0, 1, 5)), how=HOW)
    def replace_tokenizer(self, name: str, turn: int, how: str) -> None:
        self.checkpoints[name].replace_tokenizer(turn, how)

    @rule(text=st.sampled_from(world.TEXTS), how=HOW)
    def replace_prompts_file(self, text: str, how: str) -> None:
        world.replaced(self.prompts, text.encode(), how)

    @rule(seed=SEEDS, how=HOW)
    def replace_dictionary(self, seed: int, how: str) -> None:
        self.features.replace(seed, how)
        self.replacements += 1

    @rule(name=NAMES)
    def let_digests_be_remembered(self, name: str) -> None:
        """A file that has lain still for two seconds has its digest remembered: pretend that it has."""
        from mizarr.stages.forward.models.files import resolve

        later = time.time() + 10
        threading.Event().wait(0.01)  # a tick of the clock of the file system on either side
        with mock.patch.object(store_index.time, "time", return_value=later):
            resolve(self.checkpoints[name].path).identity()
        threading.Event().wait(0.01)

    # -- the store

    @rule()
    def delete_the_store(self) -> None:
        shutil.rmtree(self.root / "store")
        self.store, self.is_damaged = self.opened(), False

    @rule()
    def delete_the_index(self) -> None:
        for file in (self.root / "store").glob("index.sqlite*"):
            file.unlink()

    @rule(mode=st.sampled_from(("a", "a", "r")))
    def open_the_store_anew(self, mode: str) -> None:
        try:
            self.store = self.opened(mode)
        except MizarrError:
            assert self.is_damaged

    @rule(quota=st.sampled_from((0, 20_000, 10**9)))
    def collect_garbage(self, quota: int) -> None:
        with self.may_refuse("gc"):
            self.store.gc(grace=0.0, quota=quota)

    @rule()
    def verify_and_quarantine(self) -> None:
        with self.may_refuse("verify"):
            for damage in self.store.verify():
                self.store.quarantine(damage)

    @rule(seed=st.integers(0, 2**16), bit=st.integers(0, 7), times=st.integers(1, 3))
    def flip_bits_in_the_store(self, seed: int, bit: int, times: int) -> None:
        draw = random.Random(seed)
        found = [path for path in sorted((self.root / "store").rglob("*")) if path.is_file()]
        for path in draw.sample(found, min(times, len(found))):
            flipped(path, draw.random(), bit)
        self.is_damaged = True

    @rule(name=NAMES, question=CAPTURES, files=st.integers(1, 25))
    def kill_a_capture(self, name: str, question: Capture, files: int) -> None:
        with suppress(world.Killed, MizarrError):
            in_another_process(question, str(self.checkpoints[name].path), self.store, die_after=files)

    @rule(name=NAMES, question=CAPTURES, files=st.integers(1, 25))
    def interrupt_a_capture(self, name: str, question: Capture, files: int) -> None:
        with stops_after(files, interrupted), suppress(Interrupted, MizarrError):
            question.answer(str(self.checkpoints[name].path), self.store)

    @contextmanager
    def may_refuse(self, what: str) -> Any:
        """Refusing is no number; another exception is a fault."""
        try:
            yield
        except MizarrError as error:
            COUNTS[f"{what}: refused, {type(error).__name__}"] += 1

    @initialize()
    def begin(self) -> None:
        COUNTS["users"] += 1


def experiments() -> tuple[Any, ...]:
    """One small experiment of each kind; all on prompts of ids, so that tokenizers do not choose them."""
    from mizarr.stages.causal.continuation import Continuation
    from mizarr.stages.causal.grids.patching import ActivationPatching
    from mizarr.stages.causal.grids.patching_metrics import KL, LogitDifference
    from mizarr.stages.causal.knockout import EdgeKnockout, HeadKnockout
    from mizarr.stages.causal.steering import DoseResponse
    from mizarr.stages.forward.generation.continuations import GenerationSettings

    pair = {"clean": (1, 2, 3), "corrupted": (1, 5, 3), "kinds": ("resid_post",)}
    return (
        ActivationPatching(**pair, metrics=(LogitDifference(4, 5),)),
        ActivationPatching(**pair, metrics=(KL(),), layers=(1,)),
        EdgeKnockout(tokens=(1, 2, 3, 4), edges=((3, 1),)),
        HeadKnockout(tokens=(1, 2, 3, 4), layers=(0,)),
        DoseResponse(tokens=(1, 2, 3, 4), edges=((3, 1),), doses=(0.5, 2.0)),
        Continuation(((1, 2), (3, 4, 5)), GenerationSettings(max_tokens=3, eos=())),
        Continuation(((1, 2),), GenerationSettings(max_tokens=4, stop="w7", eos=())),
    )


EXPERIMENTS = st.sampled_from(experiments())


# -- deeds


def edit(model: mizarr.Model, number: int, how: str) -> None:
    """Change a loaded model in one of the ways a user knows."""
    from mizarr.stages.forward.networks.weights import Linear

    network = model.network
    tensors = list(world.tensors_of(model).values())
    tensor = tensors[number % len(tensors)]
    layer = network.weights.layers[number % 2]
    if how == "mul_":
        tensor.mul_(1.5)
    elif how == "data":
        tensor.data.add_(0.5)
    elif how == "numpy":
        tensor.numpy()[...] *= -1.0
    elif how == "setitem":
        tensor[0] = 0.25
    elif how == "assign":
        mlp = layer.channel_mixer.weights
        object.__setattr__(mlp, "down", Linear(mlp.down.weight * 2.0))
    elif how == "cast":
        mlp = layer.channel_mixer.weights
        object.__setattr__(mlp, "up", Linear(mlp.up.weight.to(torch.bfloat16).to(mlp.up.weight.dtype)))
    else:
        network.config = replace(network.config, norm_eps=0.7)


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


def same_files(one: Path, other: Path) -> bool:
    """Whether two folders hold the same."""
    return all((other / file.name).read_bytes() == file.read_bytes() for file in one.iterdir())


# -- other processes


def in_another_process(question: Any, model: str, store: Store, *, die_after: int | None = None) -> Any:
    """The answer of a process of its own.

    die_after: it is killed when it publishes its so many-th file. Raises MizarrError as there, `Killed` for
    its death.
    """
    found = world.Asked(_answer, question, model, store, die_after).given()
    if isinstance(found, MizarrError):
        raise found
    return found


def _answer(question: Any, model: str, store: Store, die_after: int | None) -> world.Answer:
    with stops_after(die_after, killed):
        found: world.Answer = question.answer(model, store)
    return found


def killed() -> None:
    """As by the kernel."""
    os.kill(os.getpid(), signal.SIGKILL)


def interrupted() -> None:
    """As by Ctrl-C."""
    raise Interrupted


@contextmanager
def stops_after(files: int | None, stop: Callable[[], None]) -> Any:
    """Within: `stop` is called in place of publishing the so many-th file and all that follow."""
    if files is None:
        yield
        return
    linked, left = store_files._linked, [files]

    def counted(temporary: Path, target: Path) -> bool:
        left[0] -= 1
        if left[0] < 0:
            stop()
        return linked(temporary, target)

    with mock.patch.object(store_files, "_linked", counted):
        yield
