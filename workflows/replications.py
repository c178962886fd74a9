"""Replications of published results: `mizarr replicate NAME`.

A replication is a workflow with the published settings, on the published models. Printed numbers are compared
with the computed ones, with a tolerance each. Offline, the same protocol runs on a shipped model; this shows
that it runs, not that it replicates.

Numbers without another source are from the Rust library candle-mi, version 0.1.10: documents of its examples
and tables of its README. It ran Llama 3.2 without RoPE scaling, which changes logits of short prompts by up
to 1e-2, so its numbers agree to two or three digits. Gemma 2 is computed with its soft caps; the published
logit lens left out the final one. Commits of the model repositories were not published: branch `main` is
used, and the commit is reported.

Border: names, settings and numbers; reads no files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["REPLICATIONS", "PrintedNumber", "Replication", "value_at"]

LLAMA, GEMMA, STARCODER = "meta-llama/Llama-3.2-1B", "google/gemma-2-2b", "bigcode/starcoder2-3b"
RWKV7, RWKV6 = "RWKV/RWKV7-Goose-World3-1.5B-HF", "RWKV/v6-Finch-1B6-HF"
FRANCE = "The capital of France is"
SCOPE = "google/gemma-scope-2b-pt-res/layer_0/width_16k/average_l0_105"
LINDSEY = "Lindsey et al. 2025, On the Biology of a Large Language Model"

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class PrintedNumber:
    """A published number, and where its counterpart is in the JSON document of a workflow."""

    model: str
    """Model that the number was published for."""
    path: Path
    """Keys and indices that lead to the value in the document."""
    value: float | str
    """The published value."""
    tolerance: float = 0.0
    """Largest difference of a computed value that agrees."""

    @property
    def place(self) -> str:
        """Path to the value as text: "layers.3.kl"."""
        return ".".join(map(str, self.path))

    def agrees(self, computed: Any) -> bool:
        """Whether a computed value equals the published one within the tolerance."""
        if isinstance(self.value, str) or not isinstance(computed, int | float):
            return bool(computed == self.value)
        return abs(computed - self.value) <= self.tolerance


@dataclass(frozen=True)
class Replication:
    """A published result, and the workflow that replicates it."""

    title: str
    """What the result shows."""
    source: str
    """Publication."""
    workflow: str
    """Name of the workflow."""
    models: tuple[str, ...]
    """Models that it was published for, the main one first; empty if it needs none."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Published settings of the workflow."""
    offline: Mapping[str, Any] = field(default_factory=dict)
    """Settings that differ in the offline run on a shipped model; the value None stands for the workflow's
    default."""
    dictionary: str = ""
    """Repository of the feature dictionary that is downloaded in addition; empty for none."""
    claims: tuple[PrintedNumber, ...] = ()
    """Published numbers that computed ones are compared with."""
    revision: str = "main"
    """Revision of the models."""

    def asked(self, model: str) -> dict[str, Any]:
        """Settings of the run on a published model, which `model` names."""
        return {**self.settings, "model": model, "revision": self.revision}

    @property
    def here(self) -> dict[str, Any]:
        """Settings of the offline run on a shipped model, without those at the workflow's default."""
        settings = {**self.settings, **self.offline}
        return {name: value for name, value in settings.items() if value is not None}


def value_at(document: Any, path: Path) -> Any:
    """Value at a path of keys and indices in a JSON document; None if the path does not exist.

    Arguments:
        document: the JSON document.
        path: keys and indices, from the outermost on.
    """
    for step in path:
        try:
            document = document[step]
        # TypeError: an index into a value that is no list, such as None.
        except (KeyError, IndexError, TypeError):
            return None
    return document


def recovered(layer: int) -> Path:
    """Path, in the document of `activation_patching`, of the percentage recovered by patching a layer at the
    subject's first position."""
    return ("results", 0, "subject_recovery", layer)


CANDLE = "candle-mi 0.1.10, examples"
REPLICATIONS: dict[str, Replication] = {
    "activation-patching": Replication(
        "a fact passes from its subject to the last token in the middle layers",
        f"{CANDLE}; after Meng et al. 2022",
        "activation_patching",
        (LLAMA, GEMMA, STARCODER),
        {"pairs": 1, "kinds": ("resid_post",)},
        claims=(
            PrintedNumber(LLAMA, ("results", 0, "subject_pos"), 4),
            PrintedNumber(LLAMA, ("results", 0, "corrupted_kl"), 3.78, 0.1),
            PrintedNumber(LLAMA, recovered(8), 99.5, 0.6),
            PrintedNumber(LLAMA, recovered(11), 72, 5),
            PrintedNumber(LLAMA, recovered(15), 0, 3),
            PrintedNumber(GEMMA, ("results", 0, "subject_pos"), 4),
            PrintedNumber(GEMMA, ("results", 0, "corrupted_kl"), 0.50, 0.01),
            PrintedNumber(GEMMA, recovered(25), 0, 2),
            PrintedNumber(STARCODER, ("results", 0, "subject_pos"), 3),
            PrintedNumber(STARCODER, ("results", 0, "corrupted_kl"), 4.16, 0.05),
            PrintedNumber(STARCODER, recovered(21), 5, 1),
        ),
    ),
    "algzoo": Replication(
        "a written network of ten numbers finds the second largest 99 times of 100",
        "Alignment Research Center, AlgZoo (arc-ml-public/alg/zoo)",
        "stoicheia_inference",
        (),
        offline={"model": "handcrafted-2nd-argmax-10", "samples": 100_000},
    ),
    "attention-knockout": Replication(
        "without its view of the first token, the last one says Paris less often",
        CANDLE,
        "attention_knockout",
        (LLAMA, GEMMA, STARCODER),
        {"prompt": FRANCE, "target": " Paris", "sweep": False},
        {"prompt": None, "target": None},
        claims=(
            PrintedNumber(LLAMA, ("kl_divergence",), 0.0559, 0.006),
            PrintedNumber(LLAMA, ("target_logit_diff",), 0.553, 0.03),
            PrintedNumber(LLAMA, ("baseline_p_target",), 0.393, 0.01),
            PrintedNumber(LLAMA, ("ablated_p_target",), 0.260, 0.01),
            PrintedNumber(GEMMA, ("kl_divergence",), 0.01705, 5e-4),
            PrintedNumber(GEMMA, ("target_logit_diff",), -0.3310, 5e-3),
            PrintedNumber(GEMMA, ("baseline_p_target",), 0.03878, 1e-3),
            PrintedNumber(GEMMA, ("ablated_p_target",), 0.06650, 1e-3),
            PrintedNumber(STARCODER, ("kl_divergence",), 0.02852, 1e-3),
            PrintedNumber(STARCODER, ("top_changed", 0, "token"), " Par"),
            PrintedNumber(STARCODER, ("top_changed", 0, "baseline_prob"), 0.4093, 2e-3),
            PrintedNumber(STARCODER, ("top_changed", 0, "ablated_prob"), 0.3218, 2e-3),
        ),
    ),
    "attention-patterns": Replication(
        "the last token looks at the first one",
        CANDLE,
        "attention_patterns",
        (LLAMA, GEMMA, STARCODER),
        {"prompt": FRANCE, "key": "first"},
        claims=(
            PrintedNumber(LLAMA, ("peak_layer",), 2),
            PrintedNumber(LLAMA, ("peak_weight",), 0.847, 5e-3),
            PrintedNumber(GEMMA, ("peak_layer",), 22),
            PrintedNumber(GEMMA, ("peak_weight",), 0.845, 2e-3),
            PrintedNumber(STARCODER, ("peak_layer",), 26),
            PrintedNumber(STARCODER, ("peak_weight",), 0.866, 2e-3),
        ),
    ),
    "attention-routing": Replication(
        "attention carries a planned word to the end of the line",
        f"{CANDLE}; after {LINDSEY}",
        "attention_routing",
        (GEMMA,),
        {"preset": "gemma2-2b-426k"},
        {"preset": "specimen"},
        dictionary="mntss/clt-gemma-2-2b-426k",
        claims=(
            PrintedNumber(GEMMA, ("planning_site",), 23),
            PrintedNumber(GEMMA, ("top_heads", 0, "layer"), 21),
            PrintedNumber(GEMMA, ("top_heads", 0, "head"), 5),
            PrintedNumber(GEMMA, ("top_heads", 0, "baseline_attn"), 0.3157, 2e-3),
            PrintedNumber(GEMMA, ("top_heads", 0, "delta"), -0.0462, 2e-3),
            PrintedNumber(GEMMA, ("top_heads", 1, "delta"), 0.0273, 2e-3),
            PrintedNumber(GEMMA, ("strength_sweep", 5, "total_routing_shift"), 0.1912, 5e-3),
            PrintedNumber(GEMMA, ("strength_sweep", 11, "total_routing_shift"), 0.3400, 5e-3),
        ),
    ),
    "attention-routing-2.5m": Replication(
        "the same with a larger dictionary",
        f"{CANDLE}; after {LINDSEY}",
        "attention_routing",
        (GEMMA,),
        {"preset": "gemma2-2b-2.5m"},
        {"preset": "specimen"},
        dictionary="mntss/clt-gemma-2-2b-2.5M",
        claims=(
            PrintedNumber(GEMMA, ("top_heads", 0, "layer"), 21),
            PrintedNumber(GEMMA, ("top_heads", 0, "head"), 5),
            PrintedNumber(GEMMA, ("top_heads", 0, "delta"), -0.0087, 1e-3),
            PrintedNumber(GEMMA, ("strength_sweep", 5, "total_routing_shift"), 0.0519, 3e-3),
        ),
    ),
    "character-count": Replication(
        "counts of characters lie on a helix in a few dimensions",
        "Gurnee et al. 2025, When Models Manipulate Manifolds",
        "character_count_helix",
        (GEMMA,),
        {"preset": "gemma2-2b"},
        {"preset": None},
    ),
    "clt-vs-plt": Replication(
        "features of both kinds of transcoders at the end of a poem",
        f"{CANDLE}; transcoders: Hanna and Ameisen 2025",
        "clt_vs_plt",
        (LLAMA,),
        {"preset": "llama3.2-1b-524k"},
        {"preset": "specimen"},
        dictionary="mntss/transcoder-Llama-3.2-1B",
        claims=(
            PrintedNumber(LLAMA, ("step_a", "max_prob"), 0.687, 0.01),
            PrintedNumber(LLAMA, ("baseline_logit",), 8.1287, 0.05),
            PrintedNumber(LLAMA, ("arms", "plt", "suppress_only", "max_prob"), 0.98607, 0.01),
            PrintedNumber(LLAMA, ("arms", "plt", "suppress_only", "spike_position"), 30),
            PrintedNumber(LLAMA, ("arms", "plt", "suppress_inject", "max_prob"), 0.98583, 0.01),
            PrintedNumber(LLAMA, ("arms", "plt", "w_skip_projection_at_spike"), 0.5407, 0.01),
            PrintedNumber(LLAMA, ("arms", "clt", "over_targets_suppress_only", "max_prob"), 0.87126, 0.02),
            PrintedNumber(LLAMA, ("arms", "clt", "over_targets_suppress_inject", "max_prob"), 0.90119, 0.02),
            PrintedNumber(
                LLAMA, ("arms", "clt", "over_targets_suppress_inject_same_layer", "max_prob"), 0.91706, 0.02
            ),
        ),
    ),
    "correction-test": Replication(
        "a commitment to a word taken back by another feature",
        f"{CANDLE}, which printed no numbers",
        "correction_test",
        (GEMMA,),
        {"preset": "gemma2-2b-426k"},
        {"preset": "specimen"},
        dictionary="mntss/clt-gemma-2-2b-426k",
    ),
    "counterfact": Replication(
        "which layers carry a fact's subject, over many facts",
        f"{CANDLE}; facts: Meng et al. 2022",
        "counterfact_patching",
        (LLAMA, GEMMA),
    ),
    "dose-response": Replication(
        "the attention of the last token to the first one, scaled",
        CANDLE,
        "steering_dose_response",
        (LLAMA, GEMMA, STARCODER),
        {"prompt": FRANCE, "doses": (0.5, 4.0, 6.0), "sweep": False},
        {"prompt": None},
        claims=(
            PrintedNumber(LLAMA, ("baseline_attention",), 0.630, 0.01),
            PrintedNumber(LLAMA, ("points", 0, "kl_divergence"), 0.006, 2e-3),
            PrintedNumber(LLAMA, ("points", 1, "kl_divergence"), 0.029, 5e-3),
            PrintedNumber(LLAMA, ("points", 2, "kl_divergence"), 0.043, 5e-3),
            PrintedNumber(GEMMA, ("baseline_attention",), 0.589, 2e-3),
            PrintedNumber(GEMMA, ("points", 1, "kl_divergence"), 0.002, 1e-3),
            PrintedNumber(GEMMA, ("points", 2, "kl_divergence"), 0.003, 1e-3),
            PrintedNumber(STARCODER, ("baseline_attention",), 0.673, 2e-3),
            PrintedNumber(STARCODER, ("points", 0, "kl_divergence"), 0.002, 1e-3),
            PrintedNumber(STARCODER, ("points", 1, "kl_divergence"), 0.004, 1e-3),
            PrintedNumber(STARCODER, ("points", 2, "kl_divergence"), 0.005, 1e-3),
        ),
    ),
    "factual-routing": Replication(
        "heads that carry a fact from its subject",
        f"{CANDLE}; facts: Meng et al. 2022",
        "factual_routing",
        (LLAMA, GEMMA),
    ),
    "figure13": Replication(
        "features of another rhyme, put in at the end of a line, change the word the next one ends on",
        f"{LINDSEY}, figure 13; {CANDLE}",
        "planning_in_poems",
        (LLAMA,),
        {"preset": "llama3.2-1b-524k"},
        {"preset": "specimen"},
        dictionary="mntss/clt-llama-3.2-1b-524k",
        claims=(
            PrintedNumber(LLAMA, ("max_position",), 30),
            PrintedNumber(LLAMA, ("max_prob",), 0.6866, 0.01),
            PrintedNumber(LLAMA, ("baseline_prob",), 1.0573e-06, 2e-7),
        ),
    ),
    "figure13-gemma": Replication(
        "the same in Gemma 2",
        f"{LINDSEY}, figure 13; {CANDLE}",
        "planning_in_poems",
        (GEMMA,),
        {"preset": "gemma2-2b-426k"},
        {"preset": "specimen"},
        dictionary="mntss/clt-gemma-2-2b-426k",
        claims=(
            PrintedNumber(GEMMA, ("max_position",), 31),
            PrintedNumber(GEMMA, ("max_prob",), 0.4567, 0.01),
            PrintedNumber(GEMMA, ("baseline_prob",), 4.836e-08, 1e-8),
        ),
    ),
    "figure13-gemma-2.5m": Replication(
        "the same with a larger dictionary",
        f"{LINDSEY}, figure 13; {CANDLE}",
        "planning_in_poems",
        (GEMMA,),
        {"preset": "gemma2-2b-2.5m"},
        {"preset": "specimen"},
        dictionary="mntss/clt-gemma-2-2b-2.5M",
        claims=(
            PrintedNumber(GEMMA, ("max_position",), 31),
            PrintedNumber(GEMMA, ("max_prob",), 0.4642, 0.01),
            PrintedNumber(GEMMA, ("baseline_prob",), 1.8939e-11, 4e-12),
        ),
    ),
    "figure13-pairs": Replication(
        "the same over several pairs of words",
        f"{LINDSEY}, figure 13; {CANDLE}, and its predecessor plip-rs 1.4.0, whose 136 pairs are not public",
        "planning_pairs",
        (LLAMA,),
        {"preset": "llama3.2-1b-524k"},
        {"preset": "specimen"},
        dictionary="mntss/clt-llama-3.2-1b-524k",
    ),
    "logit-lens": Replication(
        "in which layer the answer is first among the likely tokens",
        f"{CANDLE}; after nostalgebraist 2020",
        "logit_lens",
        (GEMMA, STARCODER, LLAMA),
        # The published lens left out Gemma's final soft cap.
        {"prompts": (FRANCE,), "answers": (" Paris",), "soft_cap": False},
        {"prompts": None, "answers": None},
        claims=(
            PrintedNumber(GEMMA, ("results", 0, "answer_first_top10"), 25),
            PrintedNumber(GEMMA, ("results", 0, "layers", 25, "predictions", 0, "token"), " a"),
            PrintedNumber(GEMMA, ("results", 0, "layers", 25, "predictions", 0, "probability"), 0.9956, 2e-3),
            PrintedNumber(STARCODER, ("results", 0, "layers", 22, "predictions", 0, "token"), " Par"),
            PrintedNumber(GEMMA, ("results", 0, "layers", 25, "answer_probability"), 1.35e-5, 3e-6),
            PrintedNumber(
                STARCODER, ("results", 0, "layers", 22, "predictions", 0, "probability"), 0.330, 5e-3
            ),
            PrintedNumber(
                STARCODER, ("results", 0, "layers", 26, "predictions", 0, "probability"), 0.740, 5e-3
            ),
            PrintedNumber(
                STARCODER, ("results", 0, "layers", 29, "predictions", 0, "probability"), 0.4093, 2e-3
            ),
            PrintedNumber(LLAMA, ("results", 0, "layers", 15, "answer_probability"), 0.393, 0.01),
        ),
    ),
    "recurrent-feedback": Replication(
        "the rhyme fed back at the end of a line rescues couplets",
        f"{CANDLE}: anacrousis",
        "recurrent_feedback",
        (LLAMA,),
        {"preset": "anacrousis", "sweep": False, "controls": 1},
        {"preset": "specimen"},
        claims=(
            PrintedNumber(LLAMA, ("baseline_rhymes",), 9, 1),
            PrintedNumber(LLAMA, ("recurrent_rhymes",), 11, 1),
        ),
    ),
    "rwkv": Replication(
        "what a token leaves in a recurrent state",
        CANDLE,
        "rwkv_inference",
        (RWKV7, RWKV6),
        {"prompt": "def fibonacci(n):\n    ", "target": "if"},
        {"prompt": None, "target": None},
        claims=(
            PrintedNumber(RWKV7, ("top_tokens", 0, "token_id"), 1942),
            PrintedNumber(RWKV6, ("top_tokens", 0, "token_id"), 1942),
        ),
    ),
    "sae": Replication(
        "features of a sparse autoencoder at one token",
        f"{CANDLE}; autoencoders: Lieberum et al. 2024, Gemma Scope",
        "sae_features",
        (GEMMA,),
        {"prompt": FRANCE, "dictionary": SCOPE},
        {"prompt": None, "dictionary": None},
        dictionary=SCOPE,
        claims=(
            PrintedNumber(GEMMA, ("positions", -1, "active"), 14),
            PrintedNumber(GEMMA, ("positions", -1, "top", 0, "index"), 10492),
            PrintedNumber(GEMMA, ("positions", -1, "top", 0, "activation"), 44.07, 0.05),
            PrintedNumber(GEMMA, ("positions", -1, "top", 1, "index"), 8920),
            PrintedNumber(GEMMA, ("mse",), 6.9127, 0.02),
        ),
    ),
    "steering-convergence": Replication(
        "states that were pushed stay away from those that were not",
        CANDLE,
        "steering_convergence",
        (LLAMA, GEMMA),
        {"prompt": FRANCE, "target": " Paris"},
        {"prompt": None, "target": None},
        claims=(
            PrintedNumber(LLAMA, ("baseline_p_target",), 0.393, 0.01),
            PrintedNumber(LLAMA, ("best_injection_layer",), 12),
            PrintedNumber(LLAMA, ("layer_summaries", 8, "p_target"), 0.266, 0.01),
            PrintedNumber(LLAMA, ("layer_summaries", 15, "p_target"), 0.903, 0.01),
            PrintedNumber(LLAMA, ("layer_summaries", 15, "kl_divergence"), 1.507, 0.05),
            PrintedNumber(LLAMA, ("convergence_matrix", 8, 15), 0.9974, 2e-3),
            PrintedNumber(LLAMA, ("convergence_matrix", 14, 15), 0.9037, 5e-3),
            PrintedNumber(LLAMA, ("strength_sweep", 0, "kl_divergence"), 0.0707, 5e-3),
            PrintedNumber(GEMMA, ("best_injection_layer",), 23),
            PrintedNumber(GEMMA, ("layer_summaries", 25, "p_target"), 0.3680, 5e-3),
            PrintedNumber(GEMMA, ("layer_summaries", 25, "kl_divergence"), 0.6982, 1e-2),
            PrintedNumber(GEMMA, ("convergence_matrix", 13, 25), 0.9867, 1e-3),
            PrintedNumber(GEMMA, ("convergence_matrix", 24, 25), 0.8994, 2e-3),
            PrintedNumber(GEMMA, ("strength_sweep", 0, "kl_divergence"), 0.0139, 1e-3),
        ),
    ),
}
"""All replications, by name."""
