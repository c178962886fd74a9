"""What does the recurrent state of another prompt change in the answer?

Activation patching of recurrent states: from a clean prompt into a corrupted one.

Like causal/activation_patching.py, with the state that carries a prompt on to later tokens: for each layer
and position, the state after a token of the corrupted prompt is replaced by that of the clean prompt, and the
recurrence continues from it. A state has memory: after the position at which two prompts differ, the state at
every later position contains the difference; the residual stream contains it at single positions.

Two things limit the recovery by one cell: the token shift passes the previous token on without the state, and
the states of all other layers remain those of the corrupted prompt. `window` patches neighbouring layers
together.

Claims are made of the layer whose state after the subject's last token recovers most on other shipped pairs;
it is scored on the pairs shown and further ones. Control: states of unrelated prompts at the same position.
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
"""Kinds of hook points of recurrent states: the state after each token."""


@dataclass(frozen=True)
class StatePatchingSettings(ActivationPatchingTraceSettings):
    """Settings of the workflow `state_patching`, which patches recurrent states."""

    model: str = setting(RECURRENT, MODEL_HELP)
    kinds: tuple[str, ...] = setting(
        (),
        "hook points patched by layer and position, such as resid_post, attn_out, mlp_out; none: the "
        "recurrent states",
    )


class StatePatching(ActivationPatchingTrace):
    """Workflow that patches recurrent states of a clean prompt into a corrupted one, by layer and
    position."""

    name = "state_patching"
    question = "What does the recurrent state of another prompt change in the answer?"
    needs = "states"
    settings_type = StatePatchingSettings

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of hook points to patch: the setting, or by default the recurrent states that every layer
        has."""
        # A grid has a row per layer, so states that only some layers of a hybrid have are left out.
        return self.settings.kinds or in_every_layer(self.subject.config, MEMORIES)
