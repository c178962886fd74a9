"""The model of a workflow without its weights: files, config and tokenizer.

Border: never imports torch; nodes of the graph run the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from ..stages.forward.architectures.points import STATE_ROOMS
from ..stages.forward.models.files import SHIPPED
from ..stages.forward.models.reference import ModelRef
from ..stages.logits.lens import format_token
from ..store.errors import ConfigError, PromptError, SourceChanged, TokenizerError
from ..store.runs.packed import PackedTokens
from .general_facts import general_facts

if TYPE_CHECKING:
    from ..stages.forward.architectures.architecture import Architecture
    from ..stages.forward.capture.capture import CaptureNode
    from ..stages.forward.models.files import ModelFiles
    from ..stages.forward.models.model import Model
    from ..stages.forward.models.source import ModelSource
    from ..stages.forward.runs.experiment import Experiment, ExperimentNode
    from ..stages.forward.text.tokens import Encoding, Tokenizer

__all__ = ["FEWEST_KNOWN", "Need", "Subject", "answered", "read_texts", "shipped_facts", "shipped_prose"]

Need = Literal["any model", "attention", "weights", "states", "state of RWKV", "experts"]
"""What a workflow needs of a model. "attention": query-key attention. "weights": attention patterns, or
effective attention of a recurrence. "states": a recurrent state in every layer."""
_NEEDS: Mapping[Need, tuple[str, Callable[[Architecture], bool]]] = {
    "any model": ("any model", lambda config: True),
    "attention": ("a model with query-key attention", lambda config: config.attention_kind == "pattern"),
    "weights": (
        "a model with attention weights between positions",
        lambda config: config.attention_kind is not None,
    ),
    "states": (
        "a recurrent model with a state in every layer",
        lambda config: any(
            len(config.layers_with(f"{room}_write")) == config.num_layers for room in STATE_ROOMS
        ),
    ),
    "experts": (
        "a mixture-of-experts model",
        lambda config: bool(config.layers_with("expert_weights")),
    ),
    "state of RWKV": (
        "an RWKV model with matrix-valued states (RWKV-5 to 7)",
        lambda config: any(point.kind == "rwkv_write" for point in config.hook_points),
    ),
}
"""Need -> (its description in error messages, whether a model meets it)."""
FEWEST_KNOWN = 4
"""Smallest number of known general facts for a model to be asked about these alone, instead of about all: a
claim needs two to choose a cause on and two to score it on."""
SPECIMEN_FOLDER = Path(__file__).parents[1] / "stages" / "forward" / "specimen"


class Subject:
    """The model of a workflow without its weights: files, config and tokenizer, by name or from a loaded
    model."""

    known_facts: Sequence[bool] | None = None
    """Which of the general facts the model knows; None before `ModelWorkflow.choose_facts` has read it."""
    asks_general: bool = False
    """Whether the workflow has asked for `general_facts`."""

    def __init__(self, model: ModelRef | Model | str) -> None:
        """Raises SourceChanged if the files of a loaded model have changed since it was loaded."""
        from ..stages.forward.models.files import resolve_runnable

        self.reference = ModelRef.of(model)
        loaded, self.dtype = self.reference.loaded, self.reference.dtype or "float32"
        if loaded is None:
            self.files: ModelFiles = self.reference.files()
            # Nodes use the snapshot resolved here, even if the named branch moves later. The name of the
            # files includes trust_layout, backend and adapter.
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
            # Readout and tokenizer are read from the files, so the loaded weights must be those of the files.
            self.files.require_identity(identity)
            loaded_tokenizer, tokenizer = loaded._tokenizer, self.files.tokenizer()
            if loaded_tokenizer and loaded_tokenizer.digest != (tokenizer and tokenizer.digest):
                raise SourceChanged(
                    f"expected the tokenizer of {loaded.name} as it was when the model was loaded, found "
                    f"another in {self.files.directory}; load the model again"
                )

    @property
    def name(self) -> str:
        """Short name for titles: the last part of a path or hub id."""
        return Path(self.files.name).name

    @cached_property
    def config(self) -> Architecture:
        """Torch-free description of the model, from its files."""
        return self.files.architecture()

    @property
    def about(self) -> dict[str, Any]:
        """JSON fields that describe the model, named as in candle-mi's documents."""
        config = self.config
        return {
            "model_id": self.name,
            "n_layers": config.num_layers,
            "n_heads": config.attention_heads or None,
            "hidden_size": config.hidden_size,
        }

    def require(self, need: Need, question: str) -> None:
        """Raise ConfigError if the model does not have what a workflow needs.

        Arguments:
            need: what is needed.
            question: name of the workflow, for the message.
        """
        expected, is_met = _NEEDS[need]
        if not is_met(self.config):
            raise ConfigError(
                f"{question}: expected {expected}, found {self.name} ({self.config.model_type}); name "
                "another model: model=…"
            )

    @property
    def attention_kind(self) -> str:
        """Name of the captured variable with attention weights between positions: "pattern", or the effective
        attention of a recurrence. Raises ConfigError for a model with neither."""
        self.require("weights", "attention")
        return self.config.attention_kind or ""

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises TokenizerError for a model without one."""
        from ..stages.forward.text.world import WORLD

        tokenizer = self.files.tokenizer()
        if tokenizer is None:
            raise TokenizerError(
                f"expected a tokenizer.json, or an {WORLD}, in {self.files.directory}, found neither; "
                "workflows start from text, so add the file"
            )
        return tokenizer

    @property
    def facts(self) -> list[dict[str, Any]]:
        """Facts that the model is asked about by default: [{"prompt": …, "target": …}, …].

        For a model that ships with mizarr the shipped facts, for any other `general_facts`.
        """
        return shipped_facts() if self.files.name in SHIPPED else self.general_facts

    @property
    def general_facts(self) -> list[dict[str, Any]]:
        """General facts that the model knows (general_facts.py). All of them before it was measured which it
        knows, and if it knows fewer than FEWEST_KNOWN."""
        self.asks_general = True
        facts = list(general_facts())
        if self.known_facts is None or sum(self.known_facts) < FEWEST_KNOWN:
            return facts
        return [fact for fact, is_known in zip(facts, self.known_facts, strict=True) if is_known]

    @cached_property
    def general_ranks(self) -> ExperimentNode:
        """Node that ranks the answers of all general facts in the model; the axis `prompt` of its result has
        the order of `general_facts()`."""
        from ..stages.causal.answer_ranks import AnswerRanks

        facts = [(self.asked(fact["prompt"]), fact["target"]) for fact in general_facts()]
        prompts = self.tokenizer.ids_of([prompt for prompt, _ in facts], add_special=True)
        answers = self.answer_ids(facts)
        positions = [self.read_at(ids) for ids in prompts]
        return self.on_model(AnswerRanks(tuple(zip(map(tuple, prompts), answers, positions, strict=True))))

    @cached_property
    def special_tokens(self) -> int:
        """Number of special tokens that the tokenizer adds to every prompt, such as 1 for a BOS."""
        # Any text does: special tokens do not depend on it.
        return sum(self.tokenizer.encode("a").special)

    def pack(self, texts: Sequence[str]) -> PackedTokens:
        """Tokenise texts: token ids with character offsets; special tokens get the empty span (0, 0).

        Raises:
            PromptError: a text has no tokens besides special ones.
        """
        from ..stages.forward.text.prompts import pack_encodings

        return pack_encodings(self.tokenizer.encode_batch(texts))

    def fits(self, ids: Sequence[int]) -> bool:
        """Whether a prompt is no longer than the model's context."""
        return len(ids) <= self.config.context_length

    @cached_property
    def source(self) -> ModelSource:
        """The model as an input of graph nodes."""
        from ..stages.forward.models.source import ModelSource

        return ModelSource(self.reference, self.files)

    def on_model(self, experiment: Experiment) -> ExperimentNode:
        """The node that runs an experiment on the model."""
        return experiment.on(self.source)

    def capture(self, tokens: PackedTokens, *hooks: str) -> CaptureNode:
        """Node that runs the model on prompts and stores activations.

        Arguments:
            tokens: prompts.
            hooks: hook points, or globs of them.
        """
        from ..stages.forward.capture.capture import CaptureNode
        from ..stages.forward.hooks.spec import HookSpec

        spec = HookSpec()
        for hook in hooks:
            spec = spec.capture(hook)
        return CaptureNode(self.source, tokens, spec)

    def capture_weights(self, tokens: PackedTokens, layers: Sequence[int] | None = None) -> CaptureNode:
        """Node that runs the model on prompts and stores attention weights between positions
        (`attention_kind`).

        Arguments:
            tokens: prompts.
            layers: layers to store; None for all.

        Raises:
            ConfigError: the model has no causal mask; workflows on attention assume one.
        """
        from ..stages.forward.architectures.points import BY_NAME

        if self.config.looks_ahead:
            raise ConfigError(
                "expected a model with a causal mask, which workflows on attention assume, found "
                f"{self.name}, whose positions attend to later ones too; capture "
                f"{BY_NAME[self.attention_kind].path.format('*')!r} and read it with ds.mi.attn"
            )
        path = BY_NAME[self.attention_kind].path
        return self.capture(tokens, *(path.format(layer) for layer in (["*"] if layers is None else layers)))

    def token_texts(self, ids: Iterable[Any]) -> list[str]:
        """Decoded text of each token id."""
        return [self.tokenizer.decode_token(int(token)) for token in ids]

    def token_labels(self, ids: Iterable[Any]) -> list[str]:
        """Text of each token id with visible whitespace, such as "␣in", for tables, titles and axes."""
        return list(map(format_token, self.token_texts(ids)))

    def starts(self, text: str) -> npt.NDArray[np.int64]:
        """Character offset of every token of a text, int64 [token], without special tokens."""
        return np.array(
            [start for start, _ in self.tokenizer.encode(text, add_special=False).offsets], np.int64
        )

    @cached_property
    def mask(self) -> int | None:
        """Id of the mask token of a masked language model; None for models that predict the next token, or
        have no mask token or no language head."""
        is_masked = self.config.head.kind == "vocabulary" and not self.config.predicts_next
        return self.tokenizer.mask_id if is_masked else None

    def asked(self, prompt: str) -> str:
        """Prompt in the form that the model gets: for masked language models with a mask token appended,
        unless the prompt has one."""
        if self.mask is None or self.mask in self.tokenizer.encode(prompt).ids:
            return prompt
        return f"{prompt} {self.tokenizer.pieces([self.mask])[0]}"

    def masked(self, prompt: Encoding, masks: int) -> list[int]:
        """Token ids of a prompt with mask tokens to be filled in.

        Arguments:
            prompt: the tokenised prompt; one that contains a mask is returned unchanged.
            masks: number of masks to insert after the text, before final special tokens.

        Raises:
            ConfigError: the tokenizer has no mask token.
        """
        if self.mask is None:
            raise ConfigError(
                f"expected a mask token in the tokenizer of {self.name}, found none; name it as mask_token "
                "in its tokenizer_config.json"
            )
        if self.mask in prompt.ids:
            return list(prompt.ids)
        # Special tokens at the end, such as BERT's [SEP], stay behind the masks.
        reversed_special = enumerate(reversed(prompt.special))
        n_final_special = next((n for n, is_special in reversed_special if not is_special), 0)
        text_end = len(prompt.ids) - n_final_special
        return [*prompt.ids[:text_end], *[self.mask] * masks, *prompt.ids[text_end:]]

    def read_at(self, ids: Sequence[int]) -> int:
        """Position whose logits predict the answer: that of the mask (in some models the position before it,
        `Architecture.mask_shift`), or the last one. Raises ConfigError for several masks, or for a model
        without a language head."""
        self.config.require_vocabulary()
        position = self._answer_position(ids)
        return max(position - self.config.mask_shift, 0) if ids[position] == self.mask else position

    def _answer_position(self, ids: Sequence[int]) -> int:
        masks = [position for position, token in enumerate(ids) if token == self.mask]
        if len(masks) > 1:
            raise ConfigError(
                f"expected a prompt with one mask token for {self.name}, found {len(masks)}; leave one and "
                "write the other words out"
            )
        return masks[0] if masks else len(ids) - 1

    def answer_pieces(self, prompt: str, answer: str) -> list[int]:
        """Token ids of an answer after a prompt, or at its mask; empty for an empty answer.

        Prompt and answer are tokenised together, with a space before an answer that starts with a letter or
        digit. If this changes the prompt's own tokens, the answer is tokenised alone.

        Arguments:
            prompt: the prompt.
            answer: the answer.
        """
        (pieces,) = self.pieces_of_answers([(prompt, answer)])
        return pieces

    def pieces_of_answers(self, pairs: Sequence[tuple[str, str]]) -> list[list[int]]:
        """Token ids of each answer after its prompt, for many (prompt, answer) pairs at once; see
        `answer_pieces`. Raises ConfigError for a model without a language head."""
        self.config.require_vocabulary()
        if self.mask is not None:
            return [self._filled(prompt, answer) if answer else [] for prompt, answer in pairs]
        prompts = [prompt for prompt, _ in pairs]
        endings = [
            answer if not answer[:1].isalnum() or prompt[-1:].isspace() else f" {answer}"
            for prompt, answer in pairs
        ]
        whole_texts = [prompt + ending for prompt, ending in zip(prompts, endings, strict=True)]
        all_ids = zip(self.tokenizer.ids_of(prompts), self.tokenizer.ids_of(whole_texts), strict=True)
        pieces = []
        for ending, (prompt_ids, whole_ids) in zip(endings, all_ids, strict=True):
            answer_ids = whole_ids[len(prompt_ids) :]
            # A tokenizer may merge the end of the prompt with the beginning of the answer.
            if not answer_ids or whole_ids[: len(prompt_ids)] != prompt_ids:
                answer_ids = self.tokenizer.encode(ending, add_special=False).ids
            pieces.append(answer_ids)
        return pieces

    def _filled(self, prompt: str, answer: str) -> list[int]:
        """Token ids of an answer at the mask of its prompt; those of the answer alone if filling it in
        changes other tokens."""
        masked_text = self.asked(prompt)
        encoding = self.tokenizer.encode(masked_text)
        masked_ids, position = encoding.ids, self._answer_position(encoding.ids)
        start, end = encoding.offsets[position]
        # The mask token's span may include a space, which stays.
        mask = masked_text[start:end]
        filled_text = masked_text[:start] + mask.replace(mask.strip(), answer.strip()) + masked_text[end:]
        filled_ids = self.tokenizer.encode(filled_text).ids
        n_after_mask = len(masked_ids) - position - 1
        stop = len(filled_ids) - n_after_mask
        is_same_around = (
            filled_ids[:position] == masked_ids[:position] and filled_ids[stop:] == masked_ids[position + 1 :]
        )
        if is_same_around and stop > position:
            return filled_ids[position:stop]
        return self.tokenizer.encode(answer, add_special=False).ids

    def answer_id(self, prompt: str, answer: str) -> int:
        """First token id of an answer after a prompt (`answer_pieces`). Raises ConfigError for an empty
        answer.

        Arguments:
            prompt: the prompt.
            answer: the answer.
        """
        (token_id,) = self.answer_ids([(prompt, answer)])
        return token_id

    def answer_ids(self, pairs: Sequence[tuple[str, str]]) -> list[int]:
        """First token id of each answer after its prompt, for many (prompt, answer) pairs at once; see
        `answer_id`."""
        pieces_of_each = self.pieces_of_answers(pairs)
        for (prompt, answer), pieces in zip(pairs, pieces_of_each, strict=True):
            if not pieces:
                raise ConfigError(
                    f"expected an answer of at least one token to {prompt!r}, found {answer!r}; give a word, "
                    "or no answers at all"
                )
        return [pieces[0] for pieces in pieces_of_each]


def shipped_facts() -> list[dict[str, Any]]:
    """Facts that ship with mizarr, which the specimen was evaluated on: [{"prompt": …, "target": …}, …]."""
    facts: list[dict[str, Any]] = json.loads((SPECIMEN_FOLDER / "facts.json").read_text("utf-8"))
    return facts


def answered(
    subject: Subject, prompts: tuple[str, ...], answers: tuple[str, ...], limit: int = 0
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(prompts, answers) of the settings, or facts of the model; one answer per prompt, or no answers.

    Arguments:
        subject: the model.
        prompts: prompts; empty for the facts of the model (`Subject.facts`).
        answers: one answer per prompt, one for all, or none.
        limit: number of facts; 0 for all.
    """
    if prompts:
        return prompts, answers * (len(prompts) if len(answers) == 1 else 1)
    facts = subject.facts[: limit or None]
    return tuple(fact["prompt"] for fact in facts), tuple(fact["target"] for fact in facts)


def shipped_prose() -> str:
    """Prose that ships with mizarr and is not in the specimen's training data."""
    return (SPECIMEN_FOLDER / "prose.txt").read_text("utf-8")


def read_texts(path: str) -> list[str]:
    """Texts of all documents of a file or folder, as `Corpus` reads them; a plain text file is one document.

    path: file or folder; empty for the shipped prose.

    Raises:
        PromptError: a document contains token ids instead of text, or there is no document.
    """
    if not path:
        return [shipped_prose()]
    from ..stages.forward.text.corpora.corpus import Corpus
    from ..stages.forward.text.corpora.formats import Reading, read_documents

    texts = []
    for file in Corpus(path).files:
        for document in read_documents(file, Reading(whole=True)):
            if not isinstance(document.content, str):
                raise PromptError(
                    f"expected texts in {str(file)!r}, found token ids; name a file of texts, which the "
                    "workflow tokenizes itself"
                )
            texts.append(document.content)
    if not texts:
        raise PromptError(f"expected at least one text in {path!r}, found none; name another file or folder")
    return texts
