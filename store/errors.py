"""All errors that mizarr raises on purpose. Each is also a built-in exception, so either name catches it.

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
      NotFinite(ArithmeticError)        NaN or infinity in a forward pass, or in an array to be stored
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
    "run `mizarr verify --quarantine`, which sets damaged files aside, and repeat the command that computed "
    "them"
)
"""Advice in every message about damaged files."""


class MizarrError(Exception):
    """Base class of all errors of this package."""

    def __str__(self) -> str:
        # KeyError would otherwise print the repr of its message, quotes and escapes included.
        return " ".join(str(part) for part in self.args)


class ConfigError(MizarrError, ValueError):
    """A model configuration or a setting is missing, unknown or contradictory."""


class WeightsError(MizarrError, ValueError):
    """A weight tensor is missing, truncated, of the wrong shape or not finite."""


class TokenizerError(MizarrError, ValueError):
    """Text cannot be converted to the requested tokens."""


class PromptError(MizarrError, ValueError):
    """A prompt is empty, out of range or longer than the model's context."""


class DictionaryError(MizarrError, ValueError):
    """Transcoders or autoencoders cannot be read, or do not fit the model."""


class ModelNotFound(MizarrError, FileNotFoundError):
    """Unknown model name: no directory, not cached locally, not on the hub."""


class DownloadError(MizarrError, OSError):
    """A download from the hub failed; the part that arrived is kept, and the next attempt resumes."""


class HookPointNotFound(MizarrError, KeyError):
    """The model, or a stored run, does not have this hook point."""


class InterventionError(MizarrError, ValueError):
    """An intervention cannot be applied to the given model, hook point or positions."""


class ShapeError(MizarrError, ValueError):
    """Labelled arrays have dims or sizes that do not fit together."""


class NotFinite(MizarrError, ArithmeticError):
    """A forward pass or an array to be stored contains NaN or infinity."""


class StageError(MizarrError, ValueError):
    """A stage (cached analysis function) is declared or called in an invalid way."""


class SourceChanged(StageError):
    """Files, weights or functions changed since their key was computed; nothing is stored under that key."""


class PlanError(MizarrError, ValueError):
    """Planned computations cannot be carried out, for example because they exceed the memory limit."""


class MissingExtra(MizarrError, ImportError):
    """An optional dependency is missing; the message names the extra to install."""


class StoreError(MizarrError, OSError):
    """Base class of errors of a store."""


class StoreFormatError(StoreError):
    """The folder is no store, or has an unsupported format version."""


class ReadOnlyStore(StoreError):
    """The store cannot be written."""


class StoreUnreachable(StoreError):
    """An object store does not answer, or refuses the credentials; committed data stays."""


class StoreFull(StoreError):
    """Disk or quota is exhausted; committed segments stay and the run resumes."""


class EntryNotFound(StoreError, KeyError):
    """Nothing is stored under this key."""


class CorruptEntry(StoreError):
    """Bytes on disk differ from what was recorded when they were committed."""


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """Known name whose spelling is most similar to an unknown name; None without a similar spelling.

    Arguments:
        name: The unknown name.
        candidates: All known names.
    """
    matches = difflib.get_close_matches(str(name), list(candidates), n=1, cutoff=0.5)
    return matches[0] if matches else None


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """End of a message that suggests the most similar known name; empty if no spelling is similar.

    Arguments:
        name: The unknown name.
        candidates: All known names.

    >>> did_you_mean("pover", ["power", "axis"])
    "; did you mean 'power'?"
    """
    near = nearest(name, candidates)
    return f"; did you mean {near!r}?" if near else ""
