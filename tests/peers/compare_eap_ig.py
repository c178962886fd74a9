"""EAP-IG (inputs, 5 steps) beside its published code on one GPT-2 of random weights: times, and scores.

    python tests/peers/compare_eap_ig.py FOLDER [--rounds 7] [--threads 1] [--layers 12] [--pairs 4]
        [--length 16] [--frozen]

FOLDER: a checkout of hannamw/EAP-IG (2.0.0). It needs transformer-lens 2.16.1, as later ones have no
HookedTransformer, and runs on a CPU once its fixed device is replaced, which is done here as it is imported.
An environment of its own, so that nothing here is held to what it pins: `python -m venv eap && eap/bin/pip
install -e . transformer-lens==2.16.1`, then `eap/bin/python` in the place of `python` above.

Both score the same pairs in one batch, in alternation, the first one in turn; models and the graph are made
beforehand. As published its way back computes gradients of weights as well, which nobody reads: `--frozen`
spares it that. Printed: median seconds, the median over rounds of the ratio (target 0.8), the largest
difference of scores over the largest score, and how they correlate.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.util
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import mizarr
from mizarr.stages.causal.grids.patching_metrics import LogitDifference
from mizarr.stages.circuits.pairs import Pair
from mizarr.stages.circuits.scores import EdgeScores
from mizarr.stages.forward.edges.layout import Layout

STEPS = 5


def main() -> None:
    """Run the rounds and print what came of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    for name, default in (("rounds", 7), ("threads", 1), ("layers", 12), ("pairs", 4), ("length", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--frozen", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    config = GPT2Config(n_layer=args.layers, attn_implementation="eager")
    reference = GPT2LMHeadModel(config).eval()
    with tempfile.TemporaryDirectory() as scratch:
        reference.save_pretrained(scratch)
        model = mizarr.Model.from_pretrained(scratch)
    pairs = _pairs(args.pairs, args.length, config.vocab_size)
    ours, theirs = _ours(model, pairs), _theirs(reference, config, pairs, args.folder, args.frozen)
    calls, scores = {"mizarr": ours, "EAP-IG": theirs}, {}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(args.rounds + 1):  # the first warms up
        for name in list(calls)[:: -1 if number % 2 else 1]:
            start = time.perf_counter()
            scores[name] = calls[name]()
            if number:
                seconds[name].append(time.perf_counter() - start)
    layout = Layout.of(model.config)
    mine, published = (scores[name][layout.edges] for name in ("mizarr", "EAP-IG"))
    difference = np.abs(mine - published).max() / np.abs(published).max()
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    for name, each in seconds.items():
        print(f"{name:8} {medians[name]:8.2f} s   ({', '.join(f'{one:.2f}' for one in each)})")
    ratio = statistics.median(a / b for a, b in zip(*seconds.values(), strict=True))
    print(f"ratio    {ratio:8.2f}     (target 0.8)")
    print(f"scores   {difference:8.1e}     largest difference over the largest score")
    print(f"         {np.corrcoef(mine, published)[0, 1]:8.6f}     correlation over {len(mine)} edges")


def _pairs(count: int, length: int, vocabulary: int) -> tuple[Pair, ...]:
    ids = np.random.default_rng(0).integers(0, vocabulary, (count, 2 * length + 2)).tolist()
    return tuple(
        Pair(tuple(row[:length]), tuple(row[length : 2 * length]), LogitDifference(*row[2 * length :]))
        for row in ids
    )


def _ours(model: mizarr.Model, pairs: tuple[Pair, ...]):
    experiment = EdgeScores(pairs=pairs, method="EAP-IG-inputs", steps=STEPS)
    return lambda: experiment.dataset(model, {}, ())["score"].values


def _theirs(
    reference: GPT2LMHeadModel, config: GPT2Config, pairs: tuple[Pair, ...], folder: Path, frozen: bool
):
    """The published function, over ids in the place of texts."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig
    from transformer_lens.pretrained.weight_conversions import convert_gpt2_weights

    sys.meta_path.insert(0, _OnCpu(folder / "src"))
    from eap import attribute
    from eap.graph import Graph

    shape = HookedTransformerConfig(
        n_layers=config.n_layer,
        d_model=config.n_embd,
        d_head=config.n_embd // config.n_head,
        n_heads=config.n_head,
        d_mlp=4 * config.n_embd,
        d_vocab=config.vocab_size,
        n_ctx=config.n_positions,
        act_fn="gelu_new",
        normalization_type="LN",
        eps=config.layer_norm_epsilon,
        original_architecture="GPT2LMHeadModel",
        use_attn_result=True,
        use_split_qkv_input=True,
        use_hook_mlp_in=True,
        device="cpu",
    )
    model = HookedTransformer(shape).eval()
    model.load_state_dict(convert_gpt2_weights(reference, shape), strict=False)
    model.requires_grad_(not frozen)
    graph = Graph.from_model(model)
    attribute.tokenize_plus = lambda _, rows: (
        (ids := torch.tensor(rows)),
        torch.ones_like(ids),
        torch.full((len(rows),), ids.shape[1]),
        ids.shape[1],
    )
    batch = (
        [list(pair.clean) for pair in pairs],
        [list(pair.corrupted) for pair in pairs],
        [[pair.metric.correct, pair.metric.wrong] for pair in pairs],
    )

    def metric(logits, clean, lengths, labels):
        right, wrong = torch.tensor(labels).T
        last, rows = logits[:, -1], torch.arange(len(logits))
        return (last[rows, right] - last[rows, wrong]).sum()

    def scores():
        model.zero_grad()
        found = attribute.get_scores_eap_ig(model, graph, [batch], metric, steps=STEPS, quiet=True)
        return found.detach().double().numpy()

    return scores


class _OnCpu(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the published package with its fixed device replaced."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(self, name, path=None, target=None):
        """See `MetaPathFinder`: of this package alone."""
        if name.partition(".")[0] != "eap":
            return None
        place = self._folder.joinpath(*name.split("."))
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        return importlib.util.spec_from_file_location(
            name, file, loader=self, submodule_search_locations=[str(place)] if place.is_dir() else None
        )

    def create_module(self, spec):
        """See `Loader`: as usual."""

    def exec_module(self, module):
        """See `Loader`."""
        source = Path(module.__spec__.origin).read_text().replace("device='cuda'", "device='cpu'")
        exec(compile(source, module.__spec__.origin, "exec"), module.__dict__)


if __name__ == "__main__":
    main()
