"""At which layer does the Jacobian lens read the answer, compared with the logit lens?

The Jacobian lens (Gurnee et al. 2026; stages/lenses/jacobian.py) carries a state to the last layer by the
mean Jacobian of the last stream, where the logit lens decodes it as it is. The lens is fitted on prose, and
read at the last token of prompts with an answer, which are not part of that prose.

Two claims, about prompts whose answer the model itself predicts: the Jacobian lens ranks the answer higher
than the logit lens does, against differences with random signs; and higher than random lenses, whose
difference from the identity has the same singular values but acts on random directions of the state.

Defaults: prose and facts that ship with mizarr. Where an exact fit would take too long, the lens is an
unbiased estimate from random cotangents, whose standard error is stated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ...stages.forward.runs.duration import PassWork
from ...stages.lenses.jacobian import JacobianLensFit, standard_error
from ...stages.lenses.readout import lens_ranks
from ...stages.logits.lens import format_text, format_token
from ...stages.logits.readout import readout_node
from ...store.arrays import Array, Floats
from ...store.errors import ConfigError
from ..claim import Claim
from ..labelled import column
from ..material.answers import require_next
from ..material.line_corpus import wrapped_prose
from ..material.sizes import affordable
from ..settings import AnswerSettings, AtLeastTwo, ControlSettings, Natural, setting
from ..subject import answered, read_texts
from ..views import Line, Lines, Table, View, together
from ..workflow import ModelWorkflow, Nodes, loaded

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["JacobianLens", "JacobianLensSettings"]

MOST_PROMPTS, FEWEST_PROMPTS = 16, 8
"""Largest and smallest number of prompts of prose by default; fewer give unreliable error bars."""
FACTS = 24
"""Largest number of facts by default."""
WIDTH, LONGEST = 60, 256
"""Line width of the prose in characters, and largest number of tokens of its prompts before they are cut."""
TOP = 10
"""Rank up to which an answer counts as readable at a layer."""
ROWS = 12
"""Number of prompts listed in the table."""


@dataclass(frozen=True)
class JacobianLensSettings(ControlSettings, AnswerSettings):
    """Settings of the workflow `jacobian_lens`: the prose to fit on, and the prompts to read.

    Raises:
        ConfigError: prompts without answers, or prose without counted positions.
    """

    text: str = setting("", "file, folder or glob of texts to fit the lens on; none: the shipped prose")
    fit_prompts: Natural = setting(0, "number of prompts of prose; 0: by the size of the model")
    context: AtLeastTwo = setting(20, "largest number of tokens of a prompt of prose")
    skip: Natural = setting(4, "number of positions at the beginning of each prompt of prose not counted")
    cotangents: Natural = setting(
        0, "number of random cotangents per prompt of prose; 0: by the size of the model, exact if possible"
    )
    limit: Natural = setting(0, "largest number of facts read by default; 0: by the size of the model")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompts and not self.answers:
            raise ConfigError("expected the answers of the prompts, found none; set answers, one per prompt")
        if self.context < self.skip + 2:
            raise ConfigError(
                f"expected context to be at least {self.skip + 2}, as {self.skip} positions are skipped and "
                f"the last is not counted, found {self.context}; give a larger context or a smaller skip"
            )


class JacobianLens(ModelWorkflow):
    """Workflow that fits a Jacobian lens on prose and ranks answers of prompts at every layer with it, with
    the logit lens and with random lenses."""

    name = "jacobian_lens"
    question = "At which layer does the Jacobian lens read the answer, compared with the logit lens?"
    settings_type = JacobianLensSettings
    settings: JacobianLensSettings

    ranks = loaded("ranks")
    """Result of `lens_ranks`, in memory: target_rank [lens, layer, token], one token per prompt."""

    def plan(self) -> Nodes:
        """Nodes of the fit, of the model's readout, and of the ranks of the answers."""
        settings, config = self.settings, self.subject.config
        config.require_gradients()
        require_next(self.subject)
        config.require_linear_head()
        self.texts, self.words = answered(
            self.subject, settings.prompts, settings.answers, settings.limit or self._affordable_facts
        )
        tokens = self.subject.pack(self.texts)
        targets = np.full(tokens.n_tokens, -1, np.int32)
        pairs = list(zip(self.texts, self.words, strict=True))
        targets[[tokens.row(i).stop - 1 for i in range(len(self.texts))]] = self.subject.answer_ids(pairs)
        states = self.subject.capture(tokens, "blocks.*.hook_resid_post")["resid_post"]
        fit, readout = self.on_model(self._fit()), readout_node(self.subject.files, dtype=self.subject.dtype)
        ranks = lens_ranks.on(
            resid_post=states,
            targets=column(targets, "token", "targets"),
            readout=readout,
            lens=fit,
            rotations=settings.controls,
            seed=settings.seed,
        )
        return {"ranks": ranks, "fit": fit, "readout": readout}

    def _fit(self) -> JacobianLensFit:
        """The fit on the first prompts of the prose, exact or with as many random cotangents as the
        operations of a default allow (material/sizes.py)."""
        settings, config = self.settings, self.subject.config
        # Cut off again by the fit: a line of prose may be longer than the context of the fit.
        context, longest = (min(n, config.context_length) for n in (settings.context, LONGEST))
        prose = [
            ids.tolist()
            for ids in wrapped_prose(self.subject, read_texts(settings.text), (WIDTH,), longest)
            if len(ids) > settings.skip + 1
        ]
        width, counted = config.axis_sizes["hidden"], context - settings.skip - 1
        # A pass back multiplies with every weight once, as a pass forward does.
        per_cotangent = PassWork(float(counted * config.num_layers)).operations(config)
        most, fewest = MOST_PROMPTS * width, min(FEWEST_PROMPTS, width)
        total = affordable(per_cotangent, most, least=fewest)
        n_prompts = settings.fit_prompts or int(np.clip(total // width, FEWEST_PROMPTS, MOST_PROMPTS))
        cotangents = settings.cotangents or max(1, total // n_prompts)
        return JacobianLensFit(
            prompts=tuple(map(tuple, prose[:n_prompts])),
            skip=settings.skip,
            longest=context,
            cotangents=None if cotangents >= width else cotangents,
            seed=settings.seed,
        )

    @property
    def _affordable_facts(self) -> int:
        """Default number of facts: as many as are ranked with all random lenses in the time of a default."""
        config, lenses = self.subject.config, self.settings.controls + 2
        states = float(lenses * config.num_layers)
        return affordable(PassWork(0.0, logit_rows=states).operations(config), FACTS)

    @cached_property
    def known(self) -> Array:
        """Whether the model itself predicts each answer, bool [prompt]."""
        is_first: Array = self.ranks["target_rank"].sel(lens="logit").isel(layer=-1).values == 1
        return is_first

    @cached_property
    def below(self) -> xr.DataArray:
        """Ranks of known answers at the source layers, [lens, layer, token]."""
        return self.ranks["target_rank"].isel(layer=slice(-1), token=np.flatnonzero(self.known))

    @property
    def not_claimed(self) -> str:
        """Reason why nothing is claimed: the model predicts too few of the answers; empty otherwise."""
        if self.known.sum() >= 2:
            return ""
        return (
            f"The model itself predicts {self.known.sum()} of {len(self.texts)} answers; claims need at "
            "least two that it predicts."
        )

    def claims(self) -> Iterator[Claim]:
        """Claims that the Jacobian lens ranks answers higher than the logit lens, and than random lenses."""
        scores = _reciprocal(self.below)
        own, logit = (scores.sel(lens=name).values for name in ("jacobian", "logit"))
        text = "the Jacobian lens ranks the answer higher than {} (reciprocal rank, mean over layers)"
        signs = "draws of random signs of the differences"
        yield Claim.paired(text.format("the logit lens"), own - logit, signs, self.settings)
        drawn = scores.isel(lens=slice(2, None))
        reference = drawn.mean("lens").values if drawn.sizes["lens"] else np.zeros_like(own)
        yield Claim.against(
            text.format("random lenses do on average"),
            own - reference,
            (drawn.values - reference).mean(1),
            "random lenses whose difference from the identity has the same singular values",
            seed=self.settings.seed,
        )

    def claims_caption(self) -> str:
        """Caption of the claims: the prompts they are about, and how the lens was fitted."""
        return (
            f"Claims are about {self.known.sum()} of {len(self.texts)} prompts, those whose answer the model "
            f"predicts. {self._fitted}"
        )

    @cached_property
    def _fitted(self) -> str:
        """Sentences on the fit: prompts, cotangents, and standard error in comparison with the lens's
        change."""
        lens = self.result("fit")
        n, k = int(lens["n_prompts"]), lens.attrs.get("cotangents")
        how = f"with {k} random cotangents per prompt" if k else "exactly"
        if n < 2:
            return f"The lens was fitted {how} on one prompt of prose, so that its error is not known."
        error = standard_error(lens).values / self.ranks["change"].values[:-1]
        return (
            f"The lens was fitted {how} on {n} prompts of prose; its standard error is {error.min():.0%} to "
            f"{error.max():.0%} of its difference from the identity, by layer (Frobenius norms)."
        )

    @property
    def summary(self) -> str:
        """See `Workflow`: median first layer at which each lens has the answer among the most likely
        tokens."""
        parts = [
            f"{title} layer {np.median(first):g}, {len(first)} of {self.known.sum()} answers"
            for name, title in (("jacobian", "Jacobian lens"), ("logit", "logit lens"))
            if len(first := self._first(name)[~np.isnan(self._first(name))])
        ]
        if not parts:
            return ""
        return (
            "Median over answers of the first layer at which the answer is among the "
            f"{TOP} most likely tokens: {'; '.join(parts)} (those that are ever among them)."
        )

    def _first(self, lens: str) -> Floats:
        """First source layer with the answer among the most likely tokens, [known prompt]; NaN for none."""
        is_read = self.below.sel(lens=lens).values <= TOP
        first: Floats = np.where(is_read.any(0), self.below["layer"].values[is_read.argmax(0)], np.nan)
        return first

    def views(self) -> Iterator[View]:
        """Views in reading order: ranks of the answers by layer with all lenses, and a table of prompts."""
        model = self.subject.name
        if self.known.any():
            yield from together("jacobian_lens", f"Answers read from each layer of {model}", self._curves())
        yield self._table()

    def _curves(self) -> Lines:
        """Curves of the mean reciprocal rank of the answer by layer, for each lens."""
        scores = (1.0 / self.below).mean("token")
        lines = [
            Line("Jacobian lens", scores.sel(lens="jacobian").values, strong=True),
            Line("logit lens", scores.sel(lens="logit").values),
        ]
        if self.settings.controls:
            drawn = scores.isel(lens=slice(2, None)).values
            band = np.percentile(drawn, (2.5, 97.5), axis=0)
            lines.append(Line("random lenses", np.median(drawn, axis=0), control=True, band=band))
        return Lines(
            title="Rank of the answer by layer",
            caption="x: layer whose residual stream is read at the last token. y: reciprocal of the answer's "
            f"rank, mean over {self.below.sizes['token']} prompts; 1 if it is the most likely token. Random "
            "lenses: control, median and middle 95 % of lenses whose difference from the identity has the "
            "singular values of that of the Jacobian lens, along random directions.",
            sources=("ranks", "fit"),
            x=tuple(self.below["layer"].values.tolist()),
            x_name="layer",
            y_name="reciprocal rank of the answer",
            low=0.0,
            high=1.0,
            lines=tuple(lines),
        )

    def _table(self) -> Table:
        """Table of the first layer at which each lens reads each answer."""
        rank, layers = self.ranks["target_rank"], self.ranks["layer"].values
        documents: list[dict[str, Any]] = []
        for i, (text, word) in enumerate(zip(self.texts, self.words, strict=True)):
            document: dict[str, Any] = {"prompt": text, "answer": word, "is_known": bool(self.known[i])}
            for lens in ("jacobian", "logit"):
                ranks = rank.sel(lens=lens).isel(token=i).values
                hits = np.flatnonzero(ranks <= TOP)
                document |= {
                    f"{lens}_layer": int(layers[hits[0]]) if len(hits) else None,
                    f"{lens}_ranks": ranks.tolist(),
                }
            documents.append(document)

        def since(lens: str, row: dict[str, Any]) -> str:
            layer = row[f"{lens}_layer"]
            return "never" if layer is None else f"layer {layer}"

        more = (
            f" {len(documents) - ROWS} more prompts are in the JSON document."
            if len(documents) > ROWS
            else ""
        )
        return Table.of(
            documents[:ROWS],
            ("prompt", lambda row: format_text(row["prompt"])),
            ("answer", lambda row: format_token(row["answer"])),
            ("known", lambda row: "yes" if row["is_known"] else "no"),
            ("Jacobian lens", lambda row: since("jacobian", row)),
            ("logit lens", lambda row: since("logit", row)),
            title=f"Answers read from each layer of {self.subject.name}",
            caption=f"One row per prompt.{more} Known: whether the answer is the model's own most likely "
            f"token. Jacobian lens, logit lens: first layer at which the lens has the answer among its {TOP} "
            f"most likely tokens, at the last token of the prompt. {self._fitted}",
            sources=("ranks", "fit"),
            json={
                **self.subject.about,
                "fit": self._fitted,
                "layers": layers.tolist(),
                "prompts": documents,
            },
        )


def _reciprocal(ranks: xr.DataArray) -> xr.DataArray:
    """Reciprocal rank, mean over layers, [lens, token]."""
    mean: xr.DataArray = (1.0 / ranks).mean("layer")
    return mean
