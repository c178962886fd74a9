"""Every error mizarr raises on purpose, each also a built-in so that it is caught by either name.

Messages have three parts: what was expected, what was found, what to do next. The command line prints them as
one line and exits with code 2.

    MizarrError
      ConfigError(ValueError)           config.json, unknown families, settings that contradict each other
      WeightsError(ValueError)          missing, truncated, misshapen or non-finite tensors
      TokenizerError(ValueError)        no tokenizer, a word that is not one token, a span outside the text
      PromptError(ValueError)           empty prompt, token id out of range, prompt longer than the context
      DictionaryError(ValueError)       transcoders or autoencoders: unknown layout, misfit with a model
      ModelNotFound(FileNotFoundError)  neither a directory, nor in the local cache, nor on the hub
      DownloadError(OSError)            the hub did not deliver
      HookPointNotFound(KeyError)       a hook point the model, or a stored run, does not have
      InterventionError(ValueError)     an intervention that cannot be applied as asked
      ShapeError(ValueError)            labelled arrays whose dims or sizes do not fit
      StageError(ValueError)            a stage declared or called in a way it cannot run
        SourceChanged                   files, weights or functions are no longer what a key was made of
      PlanError(ValueError)             a plan that cannot be carried out, e.g. does not fit the memory given
      MissingExtra(ImportError)         an optional dependency is needed; names the extra
      StoreError(OSError)
        StoreFormatError                written in another format, or not a store at all
        ReadOnlyStore                   the store cannot be written
        StoreUnreachable                an object store does not answer, or not to us
        StoreFull                       disk or quota is exhausted; what was committed stays
        EntryNotFound(KeyError)         no entry under that key
        CorruptEntry                    bytes on disk differ from what was recorded
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

REPAIR = (
    "run `mizarr verify --quarantine`, which sets aside what is damaged; the next capture or compute makes "
    "just that again"
)
"""What to do about bytes that are not what was committed."""


class MizarrError(Exception):
    """Base of every error raised on purpose."""

    def __str__(self) -> str:
        # KeyError would otherwise print the repr of its message, quotes and escapes included.
        return " ".join(str(part) for part in self.args)


class ConfigError(MizarrError, ValueError):
    """A model configuration or a setting is missing, unknown or contradictory."""


class WeightsError(MizarrError, ValueError):
    """A weight tensor is missing, truncated, of the wrong shape or not finite."""


class TokenizerError(MizarrError, ValueError):
    """Text cannot be turned into the tokens asked for."""


class PromptError(MizarrError, ValueError):
    """A prompt is empty, out of range or longer than the model's context."""


class DictionaryError(MizarrError, ValueError):
    """Transcoders or autoencoders cannot be read, or do not fit what they are used with."""


class ModelNotFound(MizarrError, FileNotFoundError):
    """No model under that name: not a directory, not in the local cache, not on the hub."""


class DownloadError(MizarrError, OSError):
    """The hub did not deliver what was asked; what arrived is kept and resumed."""


class HookPointNotFound(MizarrError, KeyError):
    """The model, or a stored run, has no such hook point."""


class InterventionError(MizarrError, ValueError):
    """An intervention cannot be applied as asked."""


class ShapeError(MizarrError, ValueError):
    """Labelled arrays have dims or sizes that do not fit together."""


class NotFinite(MizarrError, ArithmeticError):
    """A pass, or what is to be stored of it, gave NaN or infinity."""


class StageError(MizarrError, ValueError):
    """A stage is declared or called in a way it cannot run."""


class SourceChanged(StageError):
    """Files, weights or functions are no longer what a key was made of; nothing is kept under that key."""


class PlanError(MizarrError, ValueError):
    """A plan cannot be carried out, for example because it does not fit the memory given."""


class MissingExtra(MizarrError, ImportError):
    """An optional dependency is needed; the message names the extra to install."""


class StoreError(MizarrError, OSError):
    """Base of what can go wrong with a store on disk."""


class StoreFormatError(StoreError):
    """The folder is not a store, or one of another format."""


class ReadOnlyStore(StoreError):
    """The store cannot be written."""


class StoreUnreachable(StoreError):
    """An object store does not answer, or not to these credentials; what was committed stays."""


class StoreFull(StoreError):
    """Disk or quota is exhausted; committed segments stay and the run resumes."""


class EntryNotFound(StoreError, KeyError):
    """No entry under that key."""


class CorruptEntry(StoreError):
    """Bytes on disk differ from what was recorded when they were committed."""


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate spelled most like `name`, or None if nothing comes close."""
    found = difflib.get_close_matches(str(name), list(candidates), n=1, cutoff=0.5)
    return found[0] if found else None
