"""What does the recurrent state of another prompt change in the answer?

States of a clean prompt put into a corrupted one.

As causal/activation_patching.py, of the one thing that hands a prompt on to later tokens: the
state behind a token of the corrupted prompt is replaced by that of the clean prompt, layer by layer and
position by position, and goes on from there. A state remembers: behind the place where two prompts differ
it holds that difference at every later position, where a residual state holds it at one.

Two things limit what a cell can bring back: the token shift hands the token before on beside the state, and
every other layer keeps the state of the corrupted prompt. `window` puts neighbouring layers in together.

Told is the layer whose state behind the subject's last token recovers most on other shipped pairs, scored on
the pairs shown and more of them, beside states of unrelated prompts at the same place.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...stages.forward.architectures.points import STATE_ROOMS
from ..causal.activation_patching import ActivationPatchingTrace
from ..causal.patched_pairs import ActivationPatchingTraceSettings
from ..material.places import in_every_layer
from ..settings import MODEL_HELP, RECURRENT, setting

__all__ = ["StatePatching", "StatePatchingSettings"]

MEMORIES = tuple(f"{room}_state_seq" for room in STATE_ROOMS)
"""What recurrences remember, behind each token."""


@dataclass(frozen=True)
class StatePatchingSettings(ActivationPatchingTraceSettings):
    """What `--set` can change."""

    model: str = setting(RECURRENT, MODEL_HELP)
    kinds: tuple[str, ...] = setting(
        (), "what is patched by position; none: states; also resid_post, attn_out, mlp_out"
    )


class StatePatching(ActivationPatchingTrace):
    """One grid of states per pair."""

    name = "state_patching"
    question = "What does the recurrent state of another prompt change in the answer?"
    needs = "states"
    settings_type = StatePatchingSettings

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of states that are patched: the setting, or the recurrent states that every layer has."""
        return self.settings.kinds or in_every_layer(self.subject.config, MEMORIES)
