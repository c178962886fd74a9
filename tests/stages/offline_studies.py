"""Every stage that reads a store, on one stored corpus, as a program that needs no model and no torch.

    python offline_studies.py STORE TABLES OUT     TABLES: {"readout": key, "attention": key, "mlp": key}

writes what each study gives to OUT/<study>.npz. Not a test: tests run the studies here and without torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xarray as xr

import mizarr
from mizarr.stages import find
from mizarr.stages.attention.head_detection import detection_pattern
from mizarr.stages.logits.residual import (
    accumulated_resid,
    apply_ln_to_stack,
    decompose_resid,
    full_resid_decomposition,
    stack_head_results,
    stack_neuron_results,
)


class Material(NamedTuple):
    """What is stored: states of one run, lazy, and the model's tables."""

    states: xr.Dataset
    readout: xr.Dataset
    attention: xr.Dataset
    mlp: xr.Dataset

    @property
    def targets(self) -> dict[str, xr.DataArray]:
        """Token ids for every token: each one's successor, and another."""
        ids = np.roll(self.states["token_id"].values, -1)
        return {"targets": tokens_of(ids), "against": tokens_of((ids + 11) % self.readout.sizes["vocab"])}

    @property
    def direction(self) -> dict[str, xr.DataArray | xr.Dataset]:
        """What attribution needs besides states and weights."""
        return {**self.targets, "scale": self.states["ln_final_scale"], "readout": self.readout}

    @property
    def patterns(self) -> dict[str, xr.DataArray]:
        """Attention patterns, and how they divide into prompts."""
        return {"pattern": self.states["pattern"], "row_size": self.states["row_size"]}

    @property
    def side(self) -> xr.DataArray:
        """-1 or 1 per token: the two sides of a contrast."""
        return tokens_of(self.states["token_id"].values % 2 * 2 - 1)

    @property
    def count(self) -> xr.DataArray:
        """A number per token."""
        return tokens_of(np.arange(self.states.sizes["token"]) % 7)


def tokens_of(values: np.ndarray) -> xr.DataArray:
    return xr.DataArray(values, dims="token")


def parts_of(stored: Material) -> xr.Dataset:
    """The residual stream as it grows, and apart in three ways; and as the last norm passes it on."""
    s = stored.states
    last = s["resid_post"].isel(layer=-1, drop=True)
    heads = stack_head_results(s["z"], stored.attention, remainder_of=last)
    neurons = stack_neuron_results(s["mlp_post_act"], stored.mlp)
    full = full_resid_decomposition(
        s["embed"],
        stack_head_results(s["z"], stored.attention),
        s["mlp_out"],
        attention_weights=stored.attention,
    )
    grown = accumulated_resid(s["resid_pre"], s["resid_mid"], final=last)
    parts = decompose_resid(s["embed"], s["attn_out"], s["mlp_out"])
    normed = apply_ln_to_stack(parts, s["ln_final_scale"], norm="rms")
    found = {
        "grown": grown,
        "parts": parts,
        "normed": normed,
        "heads": heads,
        "neurons": neurons,
        "all": full,
    }
    return xr.Dataset({name: array.rename(component=name).drop_vars(name) for name, array in found.items()})


def scan(stored: Material) -> xr.Dataset:
    """Pairs of the pattern as samples of two conditions."""
    pairs, samples = xr.DataArray([0, 3, 5, 9], dims="target"), xr.DataArray([0, 1, 2, 3], dims="target")
    condition = xr.DataArray([0, 0, 1, 1], dims="sample")
    found: xr.Dataset = find("layer_scan")(stored.states["pattern"], pairs, samples, condition)
    return found


def lens_of(stored: Material) -> xr.Dataset:
    """A lens of all layers but the last: a tenth more than the identity."""
    states = stored.states["resid_post"]
    layers, width = states["layer"].values[:-1], states.sizes["hidden"]
    matrices = np.repeat(1.1 * np.eye(width, dtype=np.float32)[None], len(layers), axis=0)
    dims = ("layer", "target_hidden", "hidden")
    return xr.Dataset({"jacobian": (dims, matrices), "n_prompts": 1}, {"layer": layers})


def examples_of(stored: Material) -> xr.Dataset:
    """The two sides of the contrast as labels, and the prompts as groups."""
    data = {"target": (stored.side.values + 1) / 2, "group": stored.states["prompt"].values}
    return xr.Dataset({name: ("example", values) for name, values in data.items()})


def one_prompt(stored: Material) -> xr.DataArray:
    """The pattern of the first prompt, heads before pairs."""
    size = int(stored.states["row_size"][0])
    pattern = stored.states["pattern"].isel(pair=slice(size * (size + 1) // 2))
    return pattern.transpose("layer", "head", "pair")


def own_pattern(stored: Material) -> xr.Dataset:
    """Heads that look at the token before, told by a pattern of one's own, over the longest prompts."""
    sizes = stored.states["row_size"].values
    longest = stored.states.mi.prompts(np.flatnonzero(sizes == sizes.max()).tolist())
    looks = detection_pattern("previous_token_head", range(sizes.max()))
    dims = ("query_position", "key_position")
    found: xr.Dataset = find("pattern_scores")(
        longest["pattern"], xr.DataArray(looks, dims=dims), longest["row_size"]
    )
    return found


def by(name: str, read: Callable[[Material], dict]) -> Callable[[Material], xr.Dataset]:
    """A study that is one stage and what it is given."""

    def study(stored: Material) -> xr.Dataset:
        found = find(name)(**read(stored))
        return found.to_dataset() if isinstance(found, xr.DataArray) else found

    return study


STATES: dict[str, dict] = {
    "moments": {},
    "randomized_components": {"n_components": 3, "seed": 5},
    "layer_cosine": {},
    "layer_cka": {},
    "token_statistics": {},
    "dimension_sums": {"magnitude": 1.0},
    "state_statistics": {"skip_positions": 1},
}
"""Stages that are given states and nothing else."""

SLOPES = {"": "resid_post", "_of_heads": "z", "_of_neurons": "mlp_post_act"}
"""Forms of attribution -> states, which stand for gradients here: a stage cannot tell."""

STUDIES: dict[str, Callable[[Material], xr.Dataset]] = {
    **{
        name: by(name, lambda stored, more=more: {"states": stored.states["resid_post"], **more})
        for name, more in STATES.items()
    },
    "representation_similarity": lambda s: find("representation_similarity")(
        s.states["resid_post"], s.states["resid_post"], seed=2
    ),
    "principal_components": lambda s: find("principal_components")(STUDIES["moments"](s), n_components=3),
    "scree": lambda s: find("scree")(STUDIES["moments"](s)),
    "outlier_dimensions": lambda s: find("outlier_dimensions")(STUDIES["dimension_sums"](s)),
    "side_sums": by("side_sums", lambda s: {"states": s.states["resid_post"], "side": s.side}),
    "contrastive_direction": lambda s: find("contrastive_direction")(STUDIES["side_sums"](s)),
    "projection_scores": lambda s: find("projection_scores")(
        s.states["resid_post"], STUDIES["contrastive_direction"](s)
    ),
    "steering_direction": lambda s: find("steering_direction")(
        s.states["resid_post"], s.side, s.count, tokens_of(s.count.values < 2)
    ),
    "fitted_lens": by(
        "fitted_lens",
        lambda s: {
            "resid_post": s.states["resid_post"],
            "targets": s.targets["targets"],
            "readout": s.readout,
            "lens": lens_of(s),
        },
    ),
    "lens_ranks": by(
        "lens_ranks",
        lambda s: {
            "resid_post": s.states["resid_post"],
            "targets": s.targets["targets"],
            "readout": s.readout,
            "lens": lens_of(s),
            "rotations": 2,
        },
    ),
    "pooled_states": by(
        "pooled_states",
        lambda s: {"states": s.states["resid_post"], "prompt": s.states["prompt"], "pooling": "mean"},
    ),
    "train_probes": by(
        "train_probes",
        lambda s: {
            "states": s.states["resid_post"].rename(token="example"),
            "examples": examples_of(s),
            "draws": 2,
            "folds": 2,
        },
    ),
    "probe_scores": lambda s: find("probe_scores")(
        s.states["resid_post"].rename(token="example"), STUDIES["train_probes"](s)
    ),
    "logit_lens": by(
        "logit_lens",
        lambda s: {
            "resid_post": s.states["resid_post"],
            "targets": s.targets["targets"],
            "readout": s.readout,
        },
    ),
    "count_sums": by(
        "count_sums", lambda s: {"states": s.states["resid_post"], "count": s.count, "max_count": 6}
    ),
    "count_geometry": lambda s: find("count_geometry")(STUDIES["count_sums"](s), n_components=2),
    "decodability": by(
        "decodability",
        lambda s: {
            "states": s.states["resid_post"],
            "count": s.count,
            "prompt": s.states["prompt"],
            "max_count": 6,
        },
    ),
    "expert_use": by(
        "expert_use",
        lambda s: {
            "weights": np.abs(s.states["mlp_out"]).rename(hidden="expert"),
            "token_id": s.states["token_id"],
        },
    ),
    **{
        f"gradient_attribution{form}": by(
            f"gradient_attribution{form}",
            lambda s, name=name: {"activation": s.states[name], "gradient": s.states[name]},
        )
        for form, name in SLOPES.items()
    },
    **{
        f"patch_attribution{form}": by(
            f"patch_attribution{form}",
            lambda s, name=name: {
                "clean": s.states[name],
                "corrupted": 0.5 * s.states[name],
                "gradient": s.states[name],
            },
        )
        for form, name in SLOPES.items()
    },
    "attention_flow": lambda s: find("attention_flow")(one_prompt(s)),
    "head_scores": by("head_scores", lambda s: {**s.patterns, "token_id": s.states["token_id"]}),
    "displaced_scores": by(
        "displaced_scores",
        lambda s: {**s.patterns, "token_id": s.states["token_id"], "displacements": (1, 2, 3)},
    ),
    "pattern_scores": own_pattern,
    "head_statistics": by("head_statistics", lambda s: s.patterns),
    "layer_scan": scan,
    "probe": by(
        "probe",
        lambda s: {
            "states": s.states["resid_post"],
            "target": s.count.astype(float),
            "prompt": s.states["prompt"],
            "kind": "number",
            "resamples": 20,
        },
    ),
    "contrasted_tokens": by(
        "contrasted_tokens",
        lambda s: {
            "final": s.states["resid_post"].isel(layer=[-1]),
            **s.targets,
            "readout": s.readout,
        },
    ),
    "component_attribution": by(
        "component_attribution",
        lambda s: {name: s.states[name] for name in ("embed", "attn_out", "mlp_out")} | s.direction,
    ),
    "component_attribution_pre_norm": by(
        "component_attribution_pre_norm",
        lambda s: {name: s.states[name] for name in ("embed", "attn_out", "mlp_out")} | s.direction,
    ),
    "component_attribution_of_mixers": by(
        "component_attribution_of_mixers",
        lambda s: {name: s.states[name] for name in ("embed", "attn_out")} | s.direction,
    ),
    "head_attribution": by(
        "head_attribution", lambda s: {"z": s.states["z"], "weights": s.attention, **s.direction}
    ),
    "neuron_attribution": by(
        "neuron_attribution",
        lambda s: {"post_act": s.states["mlp_post_act"], "weights": s.mlp, **s.direction},
    ),
    "residual_parts": parts_of,
}
POST_NORM: dict[str, Callable[[Material], xr.Dataset]] = {
    "head_attribution_post_norm": by(
        "head_attribution_post_norm",
        lambda s: {
            "z": s.states["z"],
            "weights": s.attention,
            "post_scale": s.states["ln1_post_scale"],
            **s.direction,
        },
    ),
    "neuron_attribution_post_norm": by(
        "neuron_attribution_post_norm",
        lambda s: {
            "post_act": s.states["mlp_post_act"],
            "weights": s.mlp,
            "post_scale": s.states["ln2_post_scale"],
            **s.direction,
        },
    ),
}
"""Studies of families with norms after attention and MLP."""


def material(path: str | Path, keys: dict[str, str]) -> Material:
    """The one run of a store and its tables, opened as anybody would."""
    store = mizarr.open_store(path, mode="r")
    (entry,) = store.entries()
    tables = (store.open_result(keys[name]) for name in ("readout", "attention", "mlp"))
    return Material(entry.open(), *tables)


def studied(stored: Material) -> dict[str, dict[str, np.ndarray]]:
    """Arrays of every study that this family allows."""
    studies = POST_NORM if "ln1_post_scale" in stored.states else STUDIES
    found = {name: study(stored) for name, study in studies.items()}
    return {
        study: {str(name): np.asarray(array.values) for name, array in result.data_vars.items()}
        for study, result in found.items()
    }


if __name__ == "__main__":
    for study, arrays in studied(material(sys.argv[1], json.loads(sys.argv[2]))).items():
        np.savez(Path(sys.argv[3]) / study, **arrays)
