"""transformers, TransformerLens and nnsight doing what bench_real.py measures, each in its usual way.

A contestant is loaded once, from a folder in transformers' layout, and does one thing per method on the same
token ids; what comes out is checked against mizarr's numbers before anything is timed. Peers that do not
install beside mizarr run in an interpreter of their own, which reads `check CASE` and `run CASE` from stdin:

    PYTHON real_peers.py FOLDER NAME THREADS

The border: imports neither mizarr nor its requirements.

Axes: layer, position, prompt, component, vocab.
"""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

CASES = ("plain", "capture", "grid", "lens", "generate", "attribution")
NEW_TOKENS, TOP = 48, 10


@dataclass(frozen=True)
class Inputs:
    """Token ids that all contestants read."""

    batch: torch.Tensor
    """Prompts of a plain pass and of a capture, [prompt, position]."""
    clean: torch.Tensor
    """Prompt whose states are put into the corrupted one, [1, position]."""
    corrupted: torch.Tensor
    """Prompt of every cell of the grid, [1, position]."""
    answers: torch.Tensor
    """Right and wrong answer of the grid's logit difference, [2]."""
    short: torch.Tensor
    """Prompts of the lens end to end, [token]."""
    sizes: torch.Tensor
    """Number of tokens of each of them, [prompt]."""
    starts: torch.Tensor
    """Prompts that are continued, [prompt, position]."""
    attributed: torch.Tensor
    """Prompts of the attribution, [prompt, position]."""
    targets: torch.Tensor
    """Right and wrong answer of each of those, [2, prompt]."""

    def save(self, path: Path) -> None:
        """Write all of them into a file."""
        np.savez(path, **{name: value.numpy() for name, value in vars(self).items()})

    @classmethod
    def load(cls, path: Path) -> Inputs:
        """The inputs of a file."""
        with np.load(path) as arrays:
            return cls(**{name: torch.from_numpy(arrays[name]) for name in arrays})

    @property
    def prompts(self) -> list[torch.Tensor]:
        """Prompts of the lens, each [1, position]."""
        return [ids[None] for ids in self.short.split(self.sizes.tolist())]


def read_out(states: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Log-probabilities of the ten most likely tokens, entropy, and KL of the last layer from this one.

    Arguments:
        states: residual stream after every layer, [layer, position, hidden].
        head: final norm and unembedding.

    Returns:
        [layer, position, 12].
    """
    final = head(states[-1]).log_softmax(-1)
    rows = []
    for state in states:
        logprobs = head(state).log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        kl = (final.exp() * (final - logprobs)).sum(-1)
        rows.append(torch.cat([logprobs.topk(TOP).values, entropy[:, None], kl[:, None]], -1))
    return torch.stack(rows)


class Transformers:
    """transformers with sdpa, and forward hooks of torch."""

    def __init__(self, model: Any, inputs: Inputs, scratch: Path) -> None:
        self.model, self.inputs, self.scratch = model, inputs, scratch
        self.layers = model.model.layers

    @classmethod
    def load(cls, folder: Path) -> Transformers:
        """From a folder with a model and `inputs.npz`."""
        return cls(load_reference(folder), Inputs.load(folder / "inputs.npz"), folder)

    def head(self, states: torch.Tensor) -> torch.Tensor:
        """Logits of states."""
        logits: torch.Tensor = self.model.lm_head(self.model.model.norm(states))
        return logits

    def streams(self, ids: torch.Tensor) -> torch.Tensor:
        """Residual stream after every layer, [layer, prompt, position, hidden]."""
        # `output_hidden_states` gives the last state after the final norm.
        found: list[torch.Tensor] = []
        handles = [
            layer.register_forward_hook(lambda module, args, out: found.append(first(out)))
            for layer in self.layers
        ]
        self.model.model(ids, use_cache=False)
        for handle in handles:
            handle.remove()
        return torch.stack(found)

    def plain(self) -> torch.Tensor:
        """Logits of the batch."""
        logits: torch.Tensor = self.model(self.inputs.batch, use_cache=False).logits
        return logits

    def capture(self) -> torch.Tensor:
        """Residual streams of the batch, written into a safetensors file, which is not synced."""
        return saved(self.streams(self.inputs.batch), self.scratch)

    def grid(self) -> torch.Tensor:
        """Logit difference with one clean state before a layer at one position, [layer, position]."""
        clean = self.inputs.clean
        embedded = self.model.model.embed_tokens(clean)
        before = torch.cat([embedded, self.streams(clean)[:-1, 0]])
        right, wrong = self.inputs.answers
        rows = []
        for layer, states in zip(self.layers, before, strict=True):
            for position in range(clean.shape[1]):

                def patch(
                    module: Any, args: Any, kwargs: Any, at: int = position, states: Any = states
                ) -> Any:
                    hidden = (args[0] if args else kwargs["hidden_states"]).clone()
                    hidden[0, at] = states[at]
                    return (
                        ((hidden, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": hidden})
                    )

                handle = layer.register_forward_pre_hook(patch, with_kwargs=True)
                last = self.model(self.inputs.corrupted, use_cache=False).logits[0, -1]
                handle.remove()
                rows.append(last[right] - last[wrong])
        return torch.stack(rows).view(len(self.layers), -1)

    def lens(self) -> torch.Tensor:
        """Logit lens at all layers and positions of the prompts, [layer, token, 12]."""
        return torch.cat([read_out(self.streams(ids)[:, 0], self.head) for ids in self.inputs.prompts], 1)

    def generate(self) -> torch.Tensor:
        """Greedy continuations, [prompt, new token]."""
        starts = self.inputs.starts
        ids: torch.Tensor = self.model.generate(starts, **greedy(starts))
        return ids[:, starts.shape[1] :]

    def attribution(self) -> torch.Tensor:
        """Share of the embedding and of every attention and MLP output in the logit difference at the last
        position, [component, prompt]."""
        parts: list[torch.Tensor] = []
        final: list[torch.Tensor] = []
        decoder = self.model.model

        def keep(module: Any, args: Any, out: Any) -> None:
            parts.append(first(out)[:, -1])

        modules = [part for layer in self.layers for part in (layer.self_attn, layer.mlp)]
        handles = [module.register_forward_hook(keep) for module in (decoder.embed_tokens, *modules)]
        handles.append(decoder.norm.register_forward_pre_hook(lambda _, args: final.append(args[0][:, -1])))
        decoder(self.inputs.attributed, use_cache=False)
        for handle in handles:
            handle.remove()
        return self.shares(parts, final[0])

    def shares(self, parts: list[torch.Tensor], final: torch.Tensor) -> torch.Tensor:
        """Shares of parts of the stream, each [prompt, hidden], in the logit difference.

        Arguments:
            parts: what is written to the stream.
            final: the stream before the final norm.
        """
        norm, unembed = self.model.model.norm, self.model.lm_head.weight
        scale = torch.rsqrt(final.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
        right, wrong = self.inputs.targets
        return torch.einsum(
            "cph,ph->cp", torch.stack(parts), (unembed[right] - unembed[wrong]) * norm.weight * scale
        )


class TransformerLens:
    """TransformerLens's bridge, its cache, and its `patching` module."""

    def __init__(self, folder: Path) -> None:
        self.inputs, self.scratch = Inputs.load(folder / "inputs.npz"), folder
        self.model = self._loaded()

    def _loaded(self) -> Any:
        from transformer_lens.model_bridge import TransformerBridge

        model = TransformerBridge.boot_transformers(str(self.scratch), device="cpu", dtype=torch.float32)
        model.eval()
        return model

    @cached_property
    def folded(self) -> Any:
        """The model with the weight of its norms folded into what reads them, as attribution needs it."""
        model = self._loaded()
        model.enable_compatibility_mode()
        return model

    def streams(self, ids: torch.Tensor) -> torch.Tensor:
        """Residual stream after every layer, [layer, prompt, position, hidden]."""
        _, cache = self.model.run_with_cache(ids, names_filter=lambda name: name.endswith("hook_resid_post"))
        return torch.stack([cache["resid_post", layer] for layer in range(self.model.cfg.n_layers)])

    def plain(self) -> torch.Tensor:
        """As in `Transformers`."""
        logits: torch.Tensor = self.model(self.inputs.batch)
        return logits

    def capture(self) -> torch.Tensor:
        """As in `Transformers`."""
        return saved(self.streams(self.inputs.batch), self.scratch)

    def grid(self) -> torch.Tensor:
        """As in `Transformers`, by `get_act_patch_resid_pre`."""
        from transformer_lens import patching

        right, wrong = self.inputs.answers
        _, cache = self.model.run_with_cache(self.inputs.clean)
        found: torch.Tensor = patching.get_act_patch_resid_pre(
            self.model,
            self.inputs.corrupted,
            cache,
            lambda logits: logits[0, -1, right] - logits[0, -1, wrong],
        )
        return found

    def lens(self) -> torch.Tensor:
        """As in `Transformers`."""

        def head(states: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.model.unembed(self.model.ln_final(states[None]))[0]
            return logits

        return torch.cat([read_out(self.streams(ids)[:, 0], head) for ids in self.inputs.prompts], 1)

    def generate(self) -> torch.Tensor:
        """As in `Transformers`."""
        starts = self.inputs.starts
        ids: torch.Tensor = self.model.generate(
            starts,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            stop_at_eos=False,
            verbose=False,
            return_type="tokens",
        )
        return ids[:, starts.shape[1] :]

    def attribution(self) -> torch.Tensor:
        """As in `Transformers`, by `decompose_resid` and `logit_attrs`."""
        right, wrong = self.inputs.targets
        _, cache = self.folded.run_with_cache(self.inputs.attributed)
        stack, _ = cache.decompose_resid(layer=-1, pos_slice=-1, return_labels=True)
        shares: torch.Tensor = cache.logit_attrs(stack, tokens=right, incorrect_tokens=wrong, pos_slice=-1)
        return shares


class Nnsight(Transformers):
    """nnsight around transformers' model."""

    def __init__(self, model: Any, inputs: Inputs, scratch: Path) -> None:
        super().__init__(model, inputs, scratch)
        from nnsight import TransformersModel
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(scratch)
        self.traced = TransformersModel(model, tokenizer=tokenizer, task="text-generation")

    def streams(self, ids: torch.Tensor) -> torch.Tensor:
        """As in `Transformers`."""
        import nnsight

        traced = self.traced
        with traced.trace(ids):
            found = nnsight.save([layer.output for layer in traced.model.layers])
        return torch.stack([first(state) for state in found])

    def plain(self) -> torch.Tensor:
        """As in `Transformers`."""
        traced = self.traced
        with traced.trace(self.inputs.batch):
            logits = traced.lm_head.output.save()
        found: torch.Tensor = logits
        return found

    def grid(self) -> torch.Tensor:
        """As in `Transformers`."""
        clean, traced = self.inputs.clean, self.traced
        before = torch.cat([self.model.model.embed_tokens(clean), self.streams(clean)[:-1, 0]])
        right, wrong = self.inputs.answers
        rows = []
        for layer in range(len(self.layers)):
            for position in range(clean.shape[1]):
                with traced.trace(self.inputs.corrupted):
                    hidden = traced.model.layers[layer].input.clone()
                    hidden[0, position] = before[layer, position]
                    traced.model.layers[layer].input = hidden
                    last = traced.lm_head.output[0, -1].save()
                rows.append(last[right] - last[wrong])
        return torch.stack(rows).view(len(self.layers), -1)

    def generate(self) -> torch.Tensor:
        """As in `Transformers`."""
        starts = self.inputs.starts
        with self.traced.generate(starts, **greedy(starts)) as tracer:
            ids = tracer.result.save()
        found: torch.Tensor = ids[:, starts.shape[1] :]
        return found

    def attribution(self) -> torch.Tensor:
        """As in `Transformers`."""
        import nnsight

        traced = self.traced
        with traced.trace(self.inputs.attributed):
            parts = [traced.model.embed_tokens.output[:, -1]]
            for layer in traced.model.layers:
                parts.append(layer.self_attn.output[0][:, -1])
                parts.append(layer.mlp.output[:, -1])
            final = traced.model.norm.input[:, -1].save()
            parts = nnsight.save(parts)
        return self.shares(parts, final)


def first(output: Any) -> torch.Tensor:
    """The output of a module, or the first one of several."""
    tensor: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def greedy(starts: torch.Tensor) -> dict[str, Any]:
    """Arguments of transformers' `generate`."""
    return {
        "attention_mask": torch.ones_like(starts),
        "do_sample": False,
        "use_cache": True,
        "max_new_tokens": NEW_TOKENS,
        "min_new_tokens": NEW_TOKENS,
        "pad_token_id": 2,
    }


def saved(states: torch.Tensor, scratch: Path) -> torch.Tensor:
    """The states, after they were written into a safetensors file."""
    from safetensors.torch import save_file

    save_file({"resid_post": states}, scratch / "streams.safetensors")
    return states


def load_reference(folder: Path) -> Any:
    """transformers' model of a folder, in float32, with sdpa."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    return model.eval()  # type: ignore[no-untyped-call]


PEERS: dict[str, Callable[[Path], Any]] = {"TransformerLens": TransformerLens, "nnsight": Nnsight.load}


@torch.no_grad()
def serve(folder: Path, name: str) -> None:
    """Read cases from stdin. `check CASE` writes the numbers into `NAME.npy`; both answer with a line: the
    processor time in seconds."""
    peer = PEERS[name](folder)
    print("ready", flush=True)
    for line in sys.stdin:
        command, case = line.split()
        start = time.process_time()
        found = getattr(peer, case)()
        seconds = time.process_time() - start
        if command == "check":
            np.save(folder / f"{name}.npy", found.detach().numpy())
        del found
        print(seconds, flush=True)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(int(sys.argv[3]))
    serve(Path(sys.argv[1]), sys.argv[2])
