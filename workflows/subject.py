"""The model a workflow is about, as far as it can be known without loading it: files, config, tokenizer.

Border: never imports torch; running the model is the capture node's business.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from ..stages.forward.architectures.points import STATE_ROOMS
from ..stages.forward.models.reference import ModelRef
from ..store.errors import ConfigError, PromptError, SourceChanged, TokenizerError
from ..store.runs.packed import PackedTokens

if TYPE_CHECKING:
    from ..stages.forward.architectures.architecture import Architecture
    from ..stages.forward.capture.capture import CaptureNode
    from ..stages.forward.models.files import ModelFiles
    from ..stages.forward.models.model import Model
    from ..stages.forward.models.source import ModelSource
    from ..stages.forward.runs.experiment import Experiment, ExperimentNode
    from ..stages.forward.text.tokens import Encoding, Tokenizer

__all__ = ["Need", "Subject", "answered", "read_texts", "shipped_facts", "shipped_prose"]

Need = Literal["any model", "attention", "weights", "states", "state of RWKV", "experts"]
"""attention: queries that choose keys. weights: how much positions read of each other, by attention or what
comes to the same. states: in every layer one that tokens write to."""
_NEEDS: Mapping[Need, tuple[str, Callable[[Architecture], bool]]] = {
    "any model": ("any model", lambda config: True),
    "attention": ("a model that attends", lambda config: config.attention_kind == "pattern"),
    "weights": (
        "a model that shows how much each position reads of each other one",
        lambda config: config.attention_kind is not None,
    ),
    "states": (
        "a recurrent model whose tokens write to a state in every layer",
        lambda config: any(
            len(config.layers_with(f"{room}_write")) == config.num_layers for room in STATE_ROOMS
        ),
    ),
    "experts": (
        "a mixture of experts",
        lambda config: bool(config.layers_with("expert_weights")),
    ),
    "state of RWKV": (
        "a recurrent model whose tokens write to a state of matrices (RWKV-5 to 7)",
        lambda config: any(point.kind == "rwkv_write" for point in config.hook_points),
    ),
}
SPECIMEN_FOLDER = Path(__file__).parents[1] / "stages" / "forward" / "specimen"


class Subject:
    """A model by name, or a loaded one that came from files, ready to tokenise for."""

    def __init__(self, model: ModelRef | Model | str) -> None:
        from ..stages.forward.models.files import resolve_runnable

        self.reference = ModelRef.of(model)
        loaded, self.dtype = self.reference.loaded, self.reference.dtype or "float32"
        if loaded is None:
            self.files: ModelFiles = self.reference.files()
            # Nodes get the snapshot found here, though the branch that was named may move meanwhile; the name
            # of the files carries trust, backend and adapter.
            self.reference = ModelRef(
                self.files.name,
                revision=self.files.revision,
                dtype=self.dtype,
                device=self.reference.device,
            )
        else:
            self.files = resolve_runnable(loaded.name, self.reference.revision)
            identity = loaded.require_identity()
            self.dtype = identity.dtype
            # A readout and a tokenizer come from the files, so the states they are put to must as well.
            self.files.require_identity(identity)
            held, words = loaded._tokenizer, self.files.tokenizer()
            if held and held.digest != (words and words.digest):
                raise SourceChanged(
                    f"expected the tokenizer of {loaded.name} as it was when the model was loaded, found "
                    f"another in {self.files.directory}; load the model again"
                )

    @property
    def name(self) -> str:
        """For titles: the last part of a path or hub id."""
        return Path(self.files.name).name

    @cached_property
    def config(self) -> Architecture:
        """The model without its weights, from its files."""
        return self.files.architecture()

    @property
    def about(self) -> dict[str, Any]:
        """What candle-mi's documents say of every model."""
        config = self.config
        return {
            "model_id": self.name,
            "n_layers": config.num_layers,
            "n_heads": config.attention_heads or None,
            "hidden_size": config.hidden_size,
        }

    def require(self, need: Need, question: str) -> None:
        """ConfigError for a model of which a question cannot be asked."""
        expected, is_met = _NEEDS[need]
        if not is_met(self.config):
            raise ConfigError(
                f"{question}: expected {expected}, found {self.name} ({self.config.model_type}); name "
                "another: model=…"
            )

    @property
    def attention_kind(self) -> str:
        """Variable that holds how much positions read of each other. Raises ConfigError as `require` does."""
        self.require("weights", "attention")
        return self.config.attention_kind or ""

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Raises TokenizerError for a model without one, as workflows start from text."""
        from ..stages.forward.text.world import WORLD

        found = self.files.tokenizer()
        if found is None:
            raise TokenizerError(
                f"expected a tokenizer.json, or an {WORLD}, in {self.files.directory}, found neither; "
                "workflows start from text, so add the file"
            )
        return found

    @cached_property
    def special_tokens(self) -> int:
        """How many tokens the tokenizer adds to every prompt (a BOS: 1)."""
        return sum(self.tokenizer.encode("a").special)

    def pack(self, texts: Sequence[str]) -> PackedTokens:
        """Texts as token ids with character offsets, special tokens at the empty span (0, 0). Raises
        PromptError for a text without a token of its own."""
        from ..stages.forward.text.prompts import pack_encodings

        return pack_encodings(self.tokenizer.encode_batch(texts))

    @cached_property
    def source(self) -> ModelSource:
        """The model as nodes work with it."""
        from ..stages.forward.models.source import ModelSource

        return ModelSource(self.reference, self.files)

    def on_model(self, experiment: Experiment) -> ExperimentNode:
        """The node that does an experiment on the model."""
        return experiment.on(self.source)

    def capture(self, tokens: PackedTokens, *hooks: str) -> CaptureNode:
        """The node that runs the model over these tokens and stores what the hook points (or globs) see."""
        from ..stages.forward.capture.capture import CaptureNode
        from ..stages.forward.hooks.spec import HookSpec

        spec = HookSpec()
        for hook in hooks:
            spec = spec.capture(hook)
        return CaptureNode(self.source, tokens, spec)

    def capture_weights(self, tokens: PackedTokens, layers: Sequence[int] | None = None) -> CaptureNode:
        """The node that stores how much positions read of each other, as `attention_kind`, in some layers or
        in all. Raises ConfigError for a model whose positions see later ones: what is asked of it looks back.
        """
        from ..stages.forward.architectures.points import BY_NAME

        if self.config.looks_ahead:
            raise ConfigError(
                "expected a model whose positions see no later ones, as questions about attention look back, "
                f"found {self.name}; capture {BY_NAME[self.attention_kind].path.format('*')!r} and read it "
                "with ds.mi.attn"
            )
        path, chosen = BY_NAME[self.attention_kind].path, ["*"] if layers is None else layers
        return self.capture(tokens, *(path.format(layer) for layer in chosen))

    def starts(self, text: str) -> npt.NDArray[np.int64]:
        """First character of every token of a text, without special tokens."""
        return np.array(
            [start for start, _ in self.tokenizer.encode(text, add_special=False).offsets], np.int64
        )

    @cached_property
    def mask(self) -> int | None:
        """The token at which the model says what is missing; None where it says what comes next, or has no
        such token."""
        return None if self.config.predicts_next else self.tokenizer.mask_id

    def asked(self, prompt: str) -> str:
        """A prompt as the model is asked: of one that fills in what is missing, with a mask behind it unless
        it has one."""
        if self.mask is None or self.mask in self.tokenizer.encode(prompt).ids:
            return prompt
        return f"{prompt} {self.tokenizer.pieces([self.mask])[0]}"

    def masked(self, prompt: Encoding, masks: int) -> list[int]:
        """Token ids of a prompt with masks to fill in: its own, or so many behind it, before what its
        tokenizer ends a text with. Raises ConfigError for a tokenizer without a mask."""
        if self.mask is None:
            raise ConfigError(
                f"expected a tokenizer with a mask to fill in, found none in that of {self.name}; name it in "
                "tokenizer_config.json: mask_token"
            )
        if self.mask in prompt.ids:
            return list(prompt.ids)
        end = next((n for n, special in enumerate(reversed(prompt.special)) if not special), 0)
        stop = len(prompt.ids) - end
        return [*prompt.ids[:stop], *[self.mask] * masks, *prompt.ids[stop:]]

    def read_at(self, ids: Sequence[int]) -> int:
        """The position whose logits say the answer to a prompt: its mask's (of some models the one before,
        `Architecture.mask_shift`), or the last one. Raises ConfigError for several masks."""
        place = self._asked_about(ids)
        return max(place - self.config.mask_shift, 0) if ids[place] == self.mask else place

    def _asked_about(self, ids: Sequence[int]) -> int:
        masks = [place for place, token in enumerate(ids) if token == self.mask]
        if len(masks) > 1:
            raise ConfigError(
                f"expected one mask in a prompt to {self.name}, found {len(masks)}; ask for one token at a "
                "time"
            )
        return masks[0] if masks else len(ids) - 1

    def answer_pieces(self, prompt: str, answer: str) -> list[int]:
        """All tokens of an answer as it follows a prompt, or stands at its mask; none for an empty one.

        Found by encoding both together; an answer that starts with a letter is set off by a space. Where the
        prompt's own tokens change with it, the answer is encoded by itself.
        """
        (found,) = self.pieces_of_answers([(prompt, answer)])
        return found

    def pieces_of_answers(self, asked: Sequence[tuple[str, str]]) -> list[list[int]]:
        """`answer_pieces` of many prompts and answers at once."""
        if self.mask is not None:
            return [self._filled(prompt, answer) if answer else [] for prompt, answer in asked]
        words = [
            answer if not answer[:1].isalnum() or prompt[-1:].isspace() else f" {answer}"
            for prompt, answer in asked
        ]
        befores = self.tokenizer.ids_of([prompt for prompt, _ in asked])
        boths = self.tokenizer.ids_of([prompt + word for (prompt, _), word in zip(asked, words, strict=True)])
        return [
            both[len(before) :]
            if both[: len(before)] == before and len(both) > len(before)
            else self.tokenizer.encode(word, add_special=False).ids
            for word, before, both in zip(words, befores, boths, strict=True)
        ]

    def _filled(self, prompt: str, answer: str) -> list[int]:
        """The tokens that stand where the mask of a prompt stood, once it is filled in."""
        asked = self.asked(prompt)
        before = self.tokenizer.encode(asked).ids
        place, start = self._asked_about(before), self.tokenizer.encode(asked).offsets
        first, last = start[place]
        mask = asked[first:last]
        text = asked[:first] + mask.replace(mask.strip(), answer.strip()) + asked[last:]
        both = self.tokenizer.encode(text).ids
        stop = len(both) - (len(before) - place - 1)
        if both[:place] == before[:place] and both[stop:] == before[place + 1 :] and stop > place:
            return both[place:stop]
        return self.tokenizer.encode(answer, add_special=False).ids

    def answer_id(self, prompt: str, answer: str) -> int:
        """The token with which `answer` begins (`answer_pieces`). Raises ConfigError for one of no token."""
        (found,) = self.answer_ids([(prompt, answer)])
        return found

    def answer_ids(self, asked: Sequence[tuple[str, str]]) -> list[int]:
        """`answer_id` of many prompts and answers at once."""
        found = self.pieces_of_answers(asked)
        for (prompt, answer), pieces in zip(asked, found, strict=True):
            if not pieces:
                raise ConfigError(
                    f"expected an answer of at least one token to {prompt!r}, found {answer!r}; give a word, "
                    "or no answers at all"
                )
        return [pieces[0] for pieces in found]


def shipped_facts() -> list[dict[str, Any]]:
    """Prompts and targets the specimen was tried on: [{"prompt": …, "target": …}, …]."""
    facts: list[dict[str, Any]] = json.loads((SPECIMEN_FOLDER / "facts.json").read_text("utf-8"))
    return facts


def answered(
    prompts: tuple[str, ...], answers: tuple[str, ...], limit: int = 0
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Prompts, and an answer for each or none at all; without prompts the first facts that ship (0: all)."""
    if prompts:
        return prompts, answers * (len(prompts) if len(answers) == 1 else 1)
    facts = shipped_facts()[: limit or None]
    return tuple(fact["prompt"] for fact in facts), tuple(fact["target"] for fact in facts)


def shipped_prose() -> str:
    """Prose the specimen never saw in training."""
    return (SPECIMEN_FOLDER / "prose.txt").read_text("utf-8")


def read_texts(path: str) -> list[str]:
    """Texts of documents, as `Corpus` reads them: a text file is one of them. The shipped prose for an empty
    path.

    Raises PromptError naming the file for anything that is no text, and for no document at all.
    """
    if not path:
        return [shipped_prose()]
    from ..stages.forward.text.corpora.corpus import Corpus
    from ..stages.forward.text.corpora.formats import Reading, read_documents

    texts = []
    for file in Corpus(path).files:
        for document in read_documents(file, Reading(whole=True)):
            if not isinstance(document.content, str):
                raise PromptError(f"expected texts in {str(file)!r}, found token ids; give their texts")
            texts.append(document.content)
    if not texts:
        raise PromptError(f"expected at least one text in {path!r}, found none")
    return texts
