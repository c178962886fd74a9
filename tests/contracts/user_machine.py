"""A machine that plays user: everything a user may do to files, models and a store, in any order.

Every answer is compared with the same question put where nothing can be stale (see user_world.py). What is
allowed: the same numbers, or a `MizarrError` that the user's own deeds excuse: a damaged store, an edited
model, a setting of torch that is refused. Anything else is a difference, an exception of another kind
included. A replay reads as a story: rules are what the user does, bundles what they hold.

Two rules surround the next question: `set_torch` lasts until it is called again, and `let_happen_meanwhile`
lets something happen, once, at a random line of the product: an interrupt, or files that change. Files that
change while a question is answered may be answered as before or as after, never as a mixture.
"""

from __future__ import annotations

import functools
import gc
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, rule

import mizarr
from mizarr.store import Store, index as store_index, open_store
from mizarr.store.errors import MizarrError, SourceChanged
from mizarr.store.files import local as store_files
from mizarr.workflows import build
from tests.contracts import user_world as world
from tests.contracts.user_deeds import (
    DICTIONARY_EDITS,
    EDITS,
    AnotherStore,
    Foreign,
    OwnStage,
    Payload,
    edit,
    edit_dictionary,
    flipped,
    own_stages,
    stamps,
)
from tests.contracts.user_world import Active, Ask, Capture, Components, Encoded, Graph, Lens, Loaded, Runs
from tests.interrupts import AtLine, interrupt
from tests.torch_settings import LEFT_ALONE, PUT_BACK, REFUSED

SECRET = b"what nobody else may read" * 3
COUNTS: Counter[str] = Counter()
"""Of every kind of action, answer and refusal, over all machines of this process."""
NAMES = st.sampled_from(("a", "b"))
SEEDS = st.integers(0, 3)
HOW = st.sampled_from(("in_place", "rename", "restored"))
IDS = st.lists(st.integers(1, 30), min_size=2, max_size=6).map(tuple)
AROUND = {" ".join(case): make for case, make in {**PUT_BACK, **REFUSED, **LEFT_ALONE}.items()}
"""Settings of torch and numpy by name; see torch_settings.py."""
MODES = {" ".join(case) for case in REFUSED}
PRODUCT = {
    str(path)
    for room in ("store", "pipeline", "stages", "workflows")
    for path in (Path(mizarr.__file__).parent / room).rglob("*.py")
}
"""Files at whose lines something may happen."""
MEANWHILE = ("interrupt", "interrupt", "weights", "config", "dictionary", "activations", "prompts")
LONGEST = 600
"""Seconds that one question takes at most: longer is a lock that nobody gives back."""
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


def does(**strategies: Any) -> Callable[[Any], Any]:
    """A rule that counts how often it is played."""

    def counted(function: Any) -> Any:
        @functools.wraps(function)
        def played(self: Any, *args: Any, **kwargs: Any) -> Any:
            COUNTS[f"step: {function.__name__}"] += 1
            return function(self, *args, **kwargs)

        return rule(**strategies)(played)

    return counted


class UserMachine(RuleBasedStateMachine):
    """One user, one store folder, two checkpoints, one dictionary, a prompts file and a module of stages."""

    models = Bundle("models")
    payloads = Bundle("payloads")
    dictionaries = Bundle("dictionaries")
    held = Bundle("held")
    plans = Bundle("plans")
    stages = Bundle("stages")
    others = Bundle("others")

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
        self.activations = {
            kind: Foreign(self.root / f"activations.{kind}").write(0) for kind in ("safetensors", "npz")
        }
        self.victim = self.root / "victim"
        self.victim.mkdir()
        (self.victim / "secret").write_bytes(SECRET)
        self.around: Any = nullcontext
        self.has_mode = False
        self.meanwhile: tuple[Callable[[], object], int, bool] | None = None
        self.store = self.opened()
        self.is_damaged = False
        self.replacements = 0
        self.edited: set[int] = set()
        torch.set_num_threads(1)

    def teardown(self) -> None:
        """Leave nothing behind."""
        self.environment.stop()
        shutil.rmtree(self.root)

    # -- asking

    def opened(self, mode: Any = "a") -> Store:
        """The store's folder."""
        return open_store(self.root / "store", mode, durability="process")

    @contextmanager
    def asking(self, what: str) -> Iterator[list[str]]:
        """The user's settings of torch around a call, and what happens meanwhile.

        Yields a list that gets the reason where the call was refused or interrupted, which ends here.
        """
        told: list[str] = []
        meanwhile, self.meanwhile = self.meanwhile, None
        tracer = meanwhile and AtLine(PRODUCT, meanwhile[1], meanwhile[0], once_each=True)
        try:
            with time_limit(LONGEST, what), self.around(), traced(tracer):
                yield told
        except MizarrError as error:
            told.append(f"{type(error).__name__}: {error}")
        except KeyboardInterrupt:
            place = tracer.place if tracer else "nowhere"
            told.append(f"interrupted: at {place}")
            expect_no_thread(place)
        assert not any("\n" in reason for reason in told), f"a refusal of more than one line: {told}"
        if tracer and tracer.place:
            COUNTS[f"meanwhile: {'files changed' if meanwhile[2] else 'interrupted'}"] += 1

    def judge(
        self,
        what: str,
        deed: Callable[[], world.Answer],
        truths: Callable[[], list[Any]],
        *,
        excuse: Callable[[], str],
        tolerance: float = 1e-5,
        among: bool = False,
    ) -> None:
        """Do something that has an answer, and hold it against the truth.

        truths: computations under way, of any of which the answer may be; asked again behind the deed where
        files changed meanwhile. excuse: what a refusal may be due to. among: the answer need not hold all.
        """
        changes = self.meanwhile is not None and self.meanwhile[2]
        waiting = truths()
        answer: world.Answer | None = None
        with self.asking(what) as told:
            answer = deed()
        waiting += truths() if changes else []
        found, refused = [], ""
        for truth in waiting:
            try:
                found.append(truth.answer())
            except MizarrError as error:
                refused = str(error)
        if answer is None:
            COUNTS[f"{what}: refused, {told[0].partition(':')[0]}"] += 1
            excused = excuse() or refused or told[0].startswith("interrupted") or changes
            excused = excused or (
                self.has_mode and "which may change results and cannot be switched off" in told[0]
            )
            assert excused, f"{what} was refused, and nothing the user did excuses it: {told[0]}"
            return
        if among:
            found = [{name: truth[name] for name in set(truth) & set(answer)} for truth in found]
        told = [world.differences(truth, answer, tolerance, among=among) for truth in found]
        COUNTS[f"{what}: {'answered' if [] in told else 'DIFFERENT'}"] += 1
        assert found, f"{what} was answered, though it is refused where nothing is stored: {refused}"
        assert [] in told, f"{what} is not what a fresh computation gives: {min(told, key=len)}"

    def ask(
        self,
        question: Any,
        model: world.Checkpoint | Loaded,
        *,
        excuse: str = "",
        through: Callable[[Any, Any, Store], Any] | None = None,
        dictionaries: tuple[Path, ...] = (),
        truly: Any = None,
        what: str = "",
        among: bool = False,
    ) -> None:
        """Put a question to the store and hold the answer against the truth.

        excuse: what the user did that a refusal may name. through: how to ask, default here and now.
        dictionaries: folders any of which the answer may rightly be made of. truly: the question to put where
        nothing is stored, default the same.
        """
        given = model.model if isinstance(model, Loaded) else str(model.path)
        self.judge(
            what or type(question).__name__,
            lambda: (through or (lambda q, m, s: q.answer(m, s)))(question, given, self.store),
            lambda: [self.truth(truly or question, model, folder) for folder in dictionaries or (None,)],
            excuse=lambda: excuse or self.excuse(model),
            tolerance=getattr(question, "tolerance", 1e-5),
            among=among,
        )

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

    @does(name=NAMES, question=CAPTURES)
    def capture_by_name(self, name: str, question: Capture) -> None:
        self.ask(question, self.checkpoints[name])

    @does(name=NAMES, prompts=PROMPTS)
    def principal_components_by_name(self, name: str, prompts: Any) -> None:
        self.ask(Components(prompts), self.checkpoints[name])

    @does(name=NAMES, reads_file=st.booleans())
    def logit_lens_by_name(self, name: str, reads_file: bool) -> None:
        self.ask(Lens(("w1 w2 w3", "w4 w5"), self.prompts if reads_file else None), self.checkpoints[name])

    @does(name=NAMES, experiment=st.deferred(lambda: EXPERIMENTS))
    def experiment_by_name(self, name: str, experiment: Any) -> None:
        self.ask(Ask(experiment), self.checkpoints[name])

    @does(name=NAMES, kind=st.sampled_from((Encoded, Active, Graph)))
    def features_by_name(self, name: str, kind: Any) -> None:
        folder = self.features.path
        prompt = ((1, 2, 3), (4, 5, 6, 7)) if kind is Encoded else (1, 2, 3, 4)
        self.ask(kind(prompt, str(folder)), self.checkpoints[name], dictionaries=(folder,))

    @does(name=NAMES, question=CAPTURES)
    def capture_in_another_process(self, name: str, question: Capture) -> None:
        self.ask(question, self.checkpoints[name], through=in_another_process)

    # -- models in memory

    @does(target=models, name=NAMES)
    def load(self, name: str) -> Loaded:
        return Loaded.of(self.checkpoints[name])

    @does(model=models, question=CAPTURES)
    def capture_with(self, model: Loaded, question: Capture) -> None:
        self.ask(replace(question, dtype=None), model)

    @does(model=models, prompt=IDS, changes=CHANGES)
    def run_with(self, model: Loaded, prompt: Any, changes: Any) -> None:
        self.ask(Runs(prompt, changes), model)

    @does(model=models, experiment=st.deferred(lambda: EXPERIMENTS))
    def experiment_with(self, model: Loaded, experiment: Any) -> None:
        self.ask(Ask(experiment), model)

    @does(model=models)
    def logit_lens_with(self, model: Loaded) -> None:
        self.ask(Lens(("w1 w2 w3",)), model)

    @does(
        model=models,
        tensor=st.integers(0, 18),
        how=st.sampled_from(EDITS),
    )
    def edit_in_memory(self, model: Loaded, tensor: int, how: str) -> None:
        edit(model.model, tensor, how)
        model.is_edited = True

    @does(name=NAMES, tensor=st.integers(0, 18), how=st.sampled_from(EDITS), question=CAPTURES)
    def edit_what_a_node_loaded(self, name: str, tensor: int, how: str, question: Capture) -> None:
        """The model that a node loaded by name is kept for the next question by that name."""
        from mizarr.stages.forward.capture.capture import CaptureNode

        node = CaptureNode(str(self.checkpoints[name].path), [(1, 2, 3)], "blocks.0.hook_resid_post")
        try:
            model = node.source.load()
        except SourceChanged:  # an earlier edit, unless answers were cached and nobody loaded it since
            model = node.source.load()
        edit(model, tensor, how)
        # An interrupted question may not have noticed the edit yet: the next one does.
        is_interrupted = self.meanwhile is not None and not self.meanwhile[2]
        self.ask(question, self.checkpoints[name], excuse="the model of this name was edited")
        later = "the question before was interrupted" if is_interrupted else ""
        self.ask(question, self.checkpoints[name], excuse=later)

    # -- payloads

    @does(target=payloads, kind=st.sampled_from(("torch", "numpy", "list", "pairs")), seed=SEEDS)
    def make_payload(self, kind: str, seed: int) -> Payload:
        return Payload(kind, seed)

    @does(payload=payloads)
    def write_into_payload(self, payload: Payload) -> None:
        payload.write()

    @does(payload=payloads, name=NAMES)
    def capture_under_payload(self, payload: Payload, name: str) -> None:
        prompts, points = ((1, 2, 3),), ("blocks.1.hook_resid_post",)
        self.ask(
            Capture(prompts, points, changes=(payload.change,)),
            self.checkpoints[name],
            excuse="the payload was written to" if payload.is_written else "",
            truly=Capture(prompts, points, changes=(payload.as_made(),)),
        )

    @does(payload=payloads, model=models)
    def run_under_payload(self, payload: Payload, model: Loaded) -> None:
        self.ask(
            Runs((1, 2, 3), (payload.change,)),
            model,
            excuse="the payload was written to" if payload.is_written else "",
            truly=Runs((1, 2, 3), (payload.as_made(),)),
        )

    # -- dictionaries in hand

    @does(target=dictionaries)
    def open_dictionary(self) -> Any:
        copy = Path(tempfile.mkdtemp(dir=self.root)) / "features"
        shutil.copytree(self.features.path, copy)
        return mizarr.Dictionary.from_pretrained(str(self.features.path)), copy, self.replacements

    @does(dictionary=dictionaries, name=NAMES, kind=st.sampled_from((Encoded, Active, Graph)))
    def features_with(self, dictionary: Any, name: str, kind: Any) -> None:
        opened, copy, replacements = dictionary
        prompt = ((1, 2, 3), (4, 5, 6, 7)) if kind is Encoded else (1, 2, 3, 4)
        is_edited = id(opened) in self.edited
        is_replaced = replacements != self.replacements
        self.ask(
            kind(prompt, opened),
            self.checkpoints[name],
            excuse="the dictionary was edited, or its files changed" if is_edited or is_replaced else "",
            dictionaries=(copy, self.features.path),
        )

    @does(
        dictionary=dictionaries,
        number=st.integers(0, 7),
        how=st.sampled_from(DICTIONARY_EDITS),
        name=NAMES,
        kind=st.sampled_from((Encoded, Active, Graph)),
    )
    def edit_dictionary(self, dictionary: Any, number: int, how: str, name: str, kind: Any) -> None:
        """Answers are those of its files, or refused, as its name is in the key."""
        with suppress(MizarrError):  # files that were replaced meanwhile are not opened
            edit_dictionary(dictionary[0], number, how)
        self.edited.add(id(dictionary[0]))
        self.features_with(dictionary, name, kind)

    # -- around and meanwhile

    @does(setting=st.sampled_from(("", *AROUND)))
    def set_torch(self, setting: str) -> None:
        """Every question from now on is asked under a setting of torch or numpy, or under none."""
        self.around, self.has_mode = AROUND.get(setting, nullcontext), setting in MODES

    @does(kind=st.sampled_from(MEANWHILE), line=st.integers(1, 2500), name=NAMES, seed=SEEDS, how=HOW)
    def let_happen_meanwhile(self, kind: str, line: int, name: str, seed: int, how: str) -> None:
        """At the `line`-th line of the product that the next question runs."""
        deeds: dict[str, Callable[[], object]] = {
            "interrupt": interrupt,
            "weights": lambda: self.checkpoints[name].replace_weights(seed, how),
            "config": lambda: self.checkpoints[name].replace_config(seed % len(world.CONFIGS), how),
            "dictionary": lambda: self.replace_dictionary(seed, how),
            "activations": lambda: [each.write(seed, how) for each in self.activations.values()],
            "prompts": lambda: world.replaced(self.prompts, world.TEXTS[seed % 3].encode(), how),
        }
        self.meanwhile = deeds[kind], line, kind != "interrupt"

    # -- files of activations

    @does(kind=st.sampled_from(("safetensors", "npz")), seed=SEEDS, how=HOW)
    def replace_activations(self, kind: str, seed: int, how: str) -> None:
        self.activations[kind].write(seed, how)

    @does(kind=st.sampled_from(("safetensors", "npz")), place=st.floats(0, 0.999), bit=st.integers(0, 7))
    def flip_a_bit_of_activations(self, kind: str, place: float, bit: int) -> None:
        """Numbers of safetensors have no checksum: another bit is another file. All else is refused."""
        flipped(self.activations[kind].path, place, bit)

    @does(kind=st.sampled_from(("safetensors", "npz")))
    def import_activations(self, kind: str) -> None:
        """What is stored is what numpy or safetensors read in the file, before or after it changed."""
        file = self.activations[kind]

        def imported() -> world.Answer:
            found = mizarr.import_activations(file.path, model="theirs", store=self.store)
            return {"resid_post": found["resid_post"].values}

        before = file.path.read_bytes()
        clean = [Foreign(self.root / f"clean.{kind}").write(seed).path.read_bytes() for seed in range(4)]
        self.judge(
            "Import",
            imported,
            lambda: [world.Known(file.literally(), "no other library reads it")],
            excuse=lambda: (
                self.excuse(self.checkpoints["a"])
                or ("" if before in clean else "a bit of the file was flipped")
            ),
        )

    @does(name=NAMES, prompts=PROMPTS, kind=st.sampled_from(("safetensors", "npz")))
    def import_an_export(self, name: str, prompts: Any, kind: str) -> None:
        """A capture, written to a file and imported again, is the capture."""
        path = Path(tempfile.mkdtemp(dir=self.root)) / f"exported.{kind}"

        def through(question: Capture, model: Any, store: Store) -> world.Answer:
            spec = question.hooks
            found = mizarr.capture(model, list(prompts), spec, store=store, progress=False)
            mizarr.export(found, path)
            again = mizarr.import_activations(path, model="theirs", store=store)
            return {"resid_post": again["resid_post"].values}

        question = Capture(prompts)
        self.ask(question, self.checkpoints[name], through=through, what="Import of an export", among=True)

    # -- stores of others

    @does(target=others, name=NAMES, question=CAPTURES)
    def fill_another_store(self, name: str, question: Capture) -> AnotherStore:
        other = AnotherStore(Path(tempfile.mkdtemp(dir=self.root)) / "store")
        store = open_store(other.path, durability="process")
        with suppress(MizarrError):
            question.answer(str(self.checkpoints[name].path), store)
            Components(((1, 2, 3), (4, 5, 6))).answer(str(self.checkpoints[name].path), store)
        return other

    @does(
        other=others,
        seed=st.integers(0, 2**16),
        how=st.sampled_from(("flip_bits", "lead_out", "lead_out", "link")),
    )
    def tamper_with_another_store(self, other: AnotherStore, seed: int, how: str) -> None:
        draw = random.Random(seed)
        if how == "link":
            other.link(draw, self.victim)
        else:
            getattr(other, how)(draw)

    @does(other=others, codec=st.sampled_from((None, None, "zstd", "none")), is_whole=st.booleans())
    def merge(self, other: AnotherStore, codec: str | None, is_whole: bool) -> None:
        """All of another store, or one record, comes into this one; nothing outside is touched or read."""
        outside = self.outside()
        was_sound = not self.is_damaged
        changes = self.meanwhile is not None and self.meanwhile[2]
        with self.asking("merge") as told:
            source = open_store(other.path, mode="r")
            records = list(source.records())
            source.copy_to(self.store, None if is_whole else records[:1], codec=codec)
        COUNTS[f"merge: {'refused, ' + told[0].partition(':')[0] if told else 'done'}"] += 1
        excused = other.is_damaged or other.is_hostile or self.excuse(self.checkpoints["a"]) or self.has_mode
        assert not told or excused or changes or told[0].startswith("interrupted"), told
        # What was to happen meanwhile may itself have replaced files of a model or dictionary.
        assert changes or self.outside() == outside, "a merge touched what is no part of the store"
        for path in (self.root / "store").rglob("*"):
            assert not path.is_symlink(), f"a link came into the store: {path}"
            assert not path.is_file() or SECRET not in path.read_bytes(), (
                f"a victim's file was copied: {path}"
            )
        if was_sound and not other.is_hostile:
            left = open_store(self.root / "store", mode="r").verify()
            assert not left, f"a merge left damage: {left}"
        # Records that are sound by their own check may contradict what lies beside them: refused, not served.
        self.is_damaged |= other.is_hostile

    def outside(self) -> dict[str, Any]:
        """All that lies beside the store and the caches, and when it was changed."""
        left_out = ("store", "cache", "aside")
        stolen = Path("/tmp/stolen")
        found: dict[str, Any] = {str(stolen): stolen.exists()}
        for top in self.root.iterdir():
            for path in [top, *top.rglob("*")] if top.name not in left_out else []:
                state = path.lstat()
                found[str(path)] = state.st_mtime_ns if path.is_file() else path.is_dir()
        return found

    # -- plans in hand

    @does(target=plans, name=NAMES)
    def plan_a_lens(self, name: str) -> Any:
        copy = Path(tempfile.mkdtemp(dir=self.root)) / "model"
        shutil.copytree(self.checkpoints[name].path, copy)
        folder = self.checkpoints[name].path
        try:
            planned = build("logit_lens", model=str(folder), prompts=("w1 w2 w3",), top_k=2)
        except MizarrError as error:
            COUNTS[f"plan: refused, {type(error).__name__}"] += 1
            return None
        return planned, world.Checkpoint(copy), folder, stamps(folder)

    @does(plan=plans)
    def run_what_was_planned(self, plan: Any) -> None:
        if plan is None:
            return
        planned, copy, folder, stamps_when_planned = plan
        question = Lens(("w1 w2 w3",))
        was_written = stamps(folder) != stamps_when_planned
        self.ask(
            question,
            copy,
            excuse="the model's files were written after this was planned" if was_written else "",
            through=lambda _question, _model, store: Lens.of(planned.run(store)),
        )

    # -- datasets in hand

    @does(target=held, name=NAMES, prompts=PROMPTS, segment=st.sampled_from((None, 8)))
    def hold_a_capture(self, name: str, prompts: Any, segment: int | None) -> Any:
        question = Capture(prompts, segment_tokens=segment)
        model, dataset = self.checkpoints[name], None
        changes = self.meanwhile is not None and self.meanwhile[2]
        truths = [self.truth(question, model).answer()]
        with self.asking("hold") as told:
            dataset = mizarr.capture(
                str(model.path),
                list(prompts),
                question.hooks,
                store=self.store,
                segment_tokens=segment,
                progress=False,
            )
        if changes:
            truths.append(self.truth(question, model).answer())
        excused = changes or self.has_mode or self.excuse(model) or "".join(told).startswith("interrupted")
        assert dataset is not None or excused, told
        return dataset, truths

    @does(one=held, pickled=st.booleans())
    def read_what_is_held(self, one: Any, pickled: bool) -> None:
        dataset, truths = one
        if dataset is None:
            return
        try:
            found = world.values_of(pickle.loads(pickle.dumps(dataset)) if pickled else dataset)
        except (MizarrError, FileNotFoundError) as error:
            COUNTS[f"held: refused, {type(error).__name__}"] += 1
            return
        told = [
            world.differences({name: truth[name] for name in set(truth) & set(found)}, found, among=True)
            for truth in truths
        ]
        COUNTS[f"held: {'answered' if [] in told else 'DIFFERENT'}"] += 1
        assert [] in told, f"an opened dataset reads other numbers than it was opened with: {told}"

    # -- stages of one's own

    @does(target=stages)
    def write_a_stage(self) -> Any:
        try:
            return own_stages(self.root)
        except MizarrError as error:
            COUNTS[f"own stage: refused, {type(error).__name__}"] += 1
            return None

    @does(module=stages, what=st.sampled_from(("number", "table", "helper", "default", "far")), to=SEEDS)
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

    @does(module=stages, name=NAMES)
    def compute_own_stage(self, module: Any, name: str) -> None:
        if module is None:
            return
        model = self.checkpoints[name]
        states = self.truth(Capture(((1, 2, 3),)), model).answer()["resid_post"]
        truth = {"weighed": module.as_written(states)}
        changes = self.meanwhile is not None and self.meanwhile[2]
        if changes:  # its truth is of the model as it is now
            self.meanwhile = None
        self.judge(
            "own stage",
            lambda: {"weighed": OwnStage(module).answer(str(model.path), self.store)["weighed"]},
            lambda: [world.Known(truth, "")],
            excuse=lambda: "what a stage reads may have no digest",
            tolerance=1e-4,
        )

    # -- files that change

    @does(name=NAMES, seed=SEEDS, how=HOW)
    def replace_weights(self, name: str, seed: int, how: str) -> None:
        self.checkpoints[name].replace_weights(seed, how)

    @does(name=NAMES, number=st.integers(0, len(world.CONFIGS) - 1), how=HOW)
    def replace_config(self, name: str, number: int, how: str) -> None:
        self.checkpoints[name].replace_config(number, how)

    @does(name=NAMES, turn=st.sampled_from((0, 1, 5)), how=HOW)
    def replace_tokenizer(self, name: str, turn: int, how: str) -> None:
        self.checkpoints[name].replace_tokenizer(turn, how)

    @does(text=st.sampled_from(world.TEXTS), how=HOW)
    def replace_prompts_file(self, text: str, how: str) -> None:
        world.replaced(self.prompts, text.encode(), how)

    @does(seed=SEEDS, how=HOW)
    def replace_dictionary(self, seed: int, how: str) -> None:
        self.features.replace(seed, how)
        self.replacements += 1

    @does(name=NAMES)
    def let_digests_be_remembered(self, name: str) -> None:
        """A file that has lain still for two seconds has its digest remembered: pretend that it has."""
        from mizarr.stages.forward.models.files import resolve

        later = time.time() + 10
        threading.Event().wait(0.01)  # a tick of the clock of the file system on either side
        with mock.patch.object(store_index.time, "time", return_value=later):
            resolve(self.checkpoints[name].path).identity()
        threading.Event().wait(0.01)

    # -- the store

    @does()
    def delete_the_store(self) -> None:
        shutil.rmtree(self.root / "store")
        self.store, self.is_damaged = self.opened(), False

    @does()
    def delete_the_index(self) -> None:
        for file in (self.root / "store").glob("index.sqlite*"):
            file.unlink()

    @does(mode=st.sampled_from(("a", "a", "r")))
    def open_the_store_anew(self, mode: str) -> None:
        try:
            self.store = self.opened(mode)
        except MizarrError:
            assert self.is_damaged

    @does(quota=st.sampled_from((0, 20_000, 10**9)))
    def collect_garbage(self, quota: int) -> None:
        with self.may_refuse("gc"):
            self.store.gc(grace=0.0, quota=quota)

    @does()
    def verify_and_quarantine(self) -> None:
        with self.may_refuse("verify"):
            for damage in self.store.verify():
                self.store.quarantine(damage)

    @does(seed=st.integers(0, 2**16), bit=st.integers(0, 7), times=st.integers(1, 3))
    def flip_bits_in_the_store(self, seed: int, bit: int, times: int) -> None:
        draw = random.Random(seed)
        found = [path for path in sorted((self.root / "store").rglob("*")) if path.is_file()]
        for path in draw.sample(found, min(times, len(found))):
            flipped(path, draw.random(), bit)
        self.is_damaged = True

    @does(name=NAMES, question=CAPTURES, files=st.integers(1, 25))
    def kill_a_capture(self, name: str, question: Capture, files: int) -> None:
        with suppress(world.Killed, MizarrError):
            in_another_process(question, str(self.checkpoints[name].path), self.store, die_after=files)

    @does(name=NAMES, question=CAPTURES, files=st.integers(1, 25))
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


# -- around a call


@contextmanager
def traced(tracer: AtLine | None) -> Iterator[None]:
    """Within: lines are counted, if there is a tracer."""
    if tracer is None:
        yield
        return
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        yield
    finally:
        sys.settrace(before)


@contextmanager
def time_limit(seconds: int, what: str) -> Iterator[None]:
    """Within: an alarm rings behind so many seconds. Raises AssertionError."""

    def rang(*_: Any) -> None:
        raise AssertionError(f"{what} is not done in {seconds} s: something waits for a lock")

    before = signal.signal(signal.SIGALRM, rang)
    # pytest-timeout may have an alarm of its own under way.
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    begun = time.monotonic()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, max(1.0, left - (time.monotonic() - begun)) if left else 0)
        signal.signal(signal.SIGALRM, before)


def expect_no_thread(place: str) -> None:
    """Whatever was started before an interrupt ends within ten seconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        gc.collect()
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("mizarr")]
        if not left:
            return
        time.sleep(0.01)
    raise AssertionError(f"threads are left of an interrupt at {place}: {left}")


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
    linked, left = store_files._link_new, [files]

    def counted(temporary: Path, target: Path) -> bool:
        left[0] -= 1
        if left[0] < 0:
            stop()
        return linked(temporary, target)

    with mock.patch.object(store_files, "_link_new", counted):
        yield
