"""A pretrained model beside transformers with sdpa, TransformerLens and nnsight; a cached answer in seconds.

    python tests/benchmarks/bench_real.py [FILE.gguf] [--peers PYTHON] [--rounds 5] [--threads 2]
        [--beside NAME ...] [--only CASE ...]

FILE: SmolLM2-135M-Instruct (30 layers, width 576, 49,152 tokens), by default from the folder
MIZARR_REAL_MODELS, or ~/.cache/mizarr-real. The others read the same weights from float32 files made with
the gguf package. PYTHON: an environment with transformer-lens and nnsight, in which they run,
each in a process of its own, as they do not install beside mizarr. All get the same threads, take turns, and
are timed only after their numbers were compared with mizarr's (`real_peers.py` has what each does). If those
of transformers differ, the benchmark stops; a peer whose numbers differ is named and not timed:

- plain: logits of 8 x 256 tokens;
- capture: residual streams of all layers of these on disk; transformers makes a plain pass beside it, peers
  write a file that is not synced, where mizarr's store is;
- grid: one clean state in the corrupted prompt, at every layer and position (30 x 14);
- lens: ten most likely tokens, entropy and KL at all layers and positions of 50 prompts;
- generate: 48 tokens after each of 4 prompts, greedy;
- attribution: direct logit attribution of 32 prompts of 14 tokens to embedding, attention and MLPs.

Ratios are medians over rounds, by the clock and by processor time; on a machine with other work the latter is
the one to read. Targets: TARGETS below. At last `mizarr compute logit_lens --model FILE` in fresh processes,
when the answer is stored: at most 3 s.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import alternate, print_table, ratio
from real_peers import CASES, NEW_TOKENS, PEERS, TOP, Inputs, Transformers
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

import mizarr
from mizarr.stages.forward.architectures.points import HookPoint
from mizarr.stages.forward.runs.run import stream
from mizarr.stages.logits.attribution import logit_attrs
from mizarr.stages.logits.lens import logit_lens
from mizarr.stages.logits.residual import decompose_resid
from mizarr.workflows.general_facts import general_facts
from mizarr.workflows.subject import shipped_prose

MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPTS, LENGTH, POSITIONS, SHORT, STARTS, ATTRIBUTED = 8, 256, 14, 50, 4, 32
TRANSFORMERS = "transformers"
FEW = {"grid": 3, "lens": 3}
"""Largest number of rounds of the cases in which peers take half a minute each."""
TARGETS = {
    ("plain", TRANSFORMERS): 0.9,
    ("capture", TRANSFORMERS): 1.0,
    ("grid", "TransformerLens"): 0.03,
    ("generate", TRANSFORMERS): 0.9,
}
NAMES = {
    "token_embd": "model.embed_tokens",
    "output": "lm_head",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Modules of a GGUF file -> those of transformers."""
CACHED_SECONDS = 3.0
TOLERANCE = 1e-3
"""Largest difference of two contestants' numbers, over the largest number: float32 in other orders, through
30 layers."""


def inputs_of(model: mizarr.Model) -> Inputs:
    """Prose in rows for what needs many tokens, and general facts for the lens."""
    ids = torch.tensor(model.tokenize([shipped_prose()[:12_000]])[0][: PROMPTS * LENGTH])
    facts = [model.tokenize([fact["prompt"]])[0] for fact in general_facts()[:SHORT]]
    rows = ids[: (2 + STARTS + ATTRIBUTED) * POSITIONS].view(-1, POSITIONS)
    return Inputs(
        batch=ids.view(PROMPTS, LENGTH),
        clean=rows[:1],
        corrupted=rows[1:2],
        answers=torch.tensor([260, 28]),
        short=torch.tensor([token for fact in facts for token in fact]),
        sizes=torch.tensor([len(fact) for fact in facts]),
        starts=rows[2 : 2 + STARTS],
        attributed=rows[2 + STARTS :],
        targets=torch.stack([torch.arange(ATTRIBUTED) + 1000, torch.arange(ATTRIBUTED) + 2000]),
    )


def save_for_transformers(path: Path, folder: Path) -> None:
    """Write a Llama of a GGUF file in transformers' layout, in float32: read with the gguf package, as
    transformers' own reader of such files needs accelerate. The tokenizer is a dummy: all inputs are ids."""
    from gguf import GGUFReader, dequantize
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig

    reader = GGUFReader(path)
    value = {name.removeprefix("llama."): field.contents() for name, field in reader.fields.items()}
    heads, groups = value["attention.head_count"], value["attention.head_count_kv"]
    weights = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        kind = tensor.name.split(".")[-2]
        if kind in ("attn_q", "attn_k"):
            # llama.cpp rotates neighbours, transformers the two halves of a head.
            rows = weight.reshape(heads if kind == "attn_q" else groups, -1, 2, weight.shape[1])
            weight = rows.swapaxes(1, 2).reshape(weight.shape)
        name = tensor.name.replace("blk.", "model.layers.").replace(kind, NAMES[kind])
        weights[name] = np.ascontiguousarray(weight)
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        num_hidden_layers=value["block_count"],
        hidden_size=value["embedding_length"],
        intermediate_size=value["feed_forward_length"],
        num_attention_heads=heads,
        num_key_value_heads=groups,
        vocab_size=weights["model.embed_tokens.weight"].shape[0],
        max_position_embeddings=value["context_length"],
        rms_norm_eps=value["attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": value["rope.freq_base"]},
        tie_word_embeddings="lm_head.weight" not in weights,
        dtype="float32",
    ).save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    Tokenizer(models.WordLevel({"<s>": 0}, unk_token="<s>")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


class Mizarr:
    """mizarr's own way to do each thing."""

    def __init__(self, model: mizarr.Model, path: Path, inputs: Inputs, scratch: Path) -> None:
        self.model, self.inputs, self.scratch = model, inputs, scratch
        self._stores = 0
        lens = mizarr.compute("logit_lens", store=self._store(), model=str(path), prompts=["One"])
        self.readout = lens.result("readout").load()

    def _store(self) -> Any:
        """A new store."""
        self._stores += 1
        return mizarr.open_store(self.scratch / "stores" / str(self._stores))

    def _captured(self, prompts: Any, hooks: Any) -> Any:
        return mizarr.capture(self.model, prompts, hooks, store=self._store(), progress=False)

    def plain(self) -> torch.Tensor:
        """Logits of the batch."""
        return self.model.forward(self.inputs.batch).logits

    def capture(self) -> Any:
        """Residual streams in a new store, lazy: [layer, prompt, position, hidden]."""
        states = self._captured(self.inputs.batch, "blocks.*.hook_resid_post")["resid_post"]
        return states.data.reshape(states.sizes["layer"], PROMPTS, LENGTH, -1)

    def grid(self) -> torch.Tensor:
        """Logit difference of each cell, [layer, position]."""
        hooks = mizarr.HookSpec().capture("blocks.*.hook_resid_pre")
        clean = self.model.forward(self.inputs.clean, hooks, want=None)
        corrupted, want = self.inputs.corrupted[0].tolist(), self.inputs.answers.tolist()
        runs = [
            mizarr.Run(
                corrupted,
                mizarr.HookSpec().intervene(
                    point, mizarr.Replace(clean[point][0, position], positions=(position,))
                ),
                mizarr.logits(position=-1, tokens=want),
            )
            for point in map(HookPoint.resid_pre, range(self.model.config.num_layers))
            for position in range(POSITIONS)
        ]
        values = torch.zeros(len(runs))
        for index, cache in stream(self.model, runs):
            right, wrong = cache.logits[0, 0]
            values[index] = right - wrong
        return values.view(-1, POSITIONS)

    def lens(self) -> np.ndarray[Any, Any]:
        """Log-probabilities of ten tokens, entropy and KL, [layer, token, 12]."""
        prompts = [ids[0].tolist() for ids in self.inputs.prompts]
        states = self._captured(prompts, "blocks.*.hook_resid_post")["resid_post"]
        found = logit_lens(states, None, self.readout, top_k=TOP)
        return np.concatenate(
            [found["top_logprob"], found["entropy"].values[..., None], found["kl"].values[..., None]], -1
        )

    def generate(self) -> torch.Tensor:
        """Continuations, [prompt, new token]."""
        return torch.tensor(
            mizarr.generate(self.model, self.inputs.starts, max_tokens=NEW_TOKENS, eos=()).ids
        )

    def attribution(self) -> np.ndarray[Any, Any]:
        """Shares of the logit difference at the last position, [component, prompt]."""
        points = ("hook_embed", "blocks.*.hook_attn_out", "blocks.*.hook_mlp_out", "ln_final.hook_scale")
        hooks = mizarr.HookSpec().capture(*points, positions="last")
        found = self._captured(self.inputs.attributed, hooks)
        parts = {name.removesuffix("__last"): array for name, array in found.data_vars.items()}
        stack = decompose_resid(parts["embed"], parts["attn_out"], parts["mlp_out"])
        right, wrong = (stack["token_id"].copy(data=ids.numpy()) for ids in self.inputs.targets)
        return logit_attrs(stack, parts["ln_final_scale"], self.readout, token=right, against=wrong).values


class Peer:
    """A peer in a process of its own."""

    def __init__(self, python: str, name: str, folder: Path, threads: int) -> None:
        self.name, self.folder = name, folder
        script = str(Path(__file__).with_name("real_peers.py"))
        command = [python, script, str(folder), name, str(threads)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / f"{name}.log").open("w"),
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"},
        )
        self._answer("ready")

    def numbers(self, case: str) -> Any:
        """What it computes."""
        self._ask("check", case)
        return np.load(self.folder / f"{self.name}.npy")

    def run(self, case: str) -> float:
        """Processor time of one case, in seconds."""
        return float(self._ask("run", case))

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, *words: str) -> str:
        assert self._process.stdin is not None
        print(*words, file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self, expected: str = "") -> str:
        """The next line that it says; libraries may print others, which are no numbers."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            words = line.strip()
            if words == expected if expected else words.replace(".", "").replace("e-", "").isdigit():
                return words
        log = (self.folder / f"{self.name}.log").read_text()
        raise SystemExit(f"{self.name} ended:\n{log[-2000:]}")


class Clocked:
    """A contestant's work, of which processor time is noted at each call."""

    def __init__(self, work: Callable[[], float]) -> None:
        self.work, self.processor = work, list[float]()

    def __call__(self) -> None:
        """Do it once."""
        self.processor.append(self.work())


def own_time(call: Callable[[], Any]) -> float:
    """Processor time of a call in this process, in seconds."""
    start = time.process_time()
    call()
    return time.process_time() - start


def difference(case: str, ours: Any, theirs: Any) -> float:
    """Largest difference of two contestants' numbers, over the largest of them; of tokens, 0 or infinity."""
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert ours.shape == theirs.shape, (case, ours.shape, theirs.shape)
    if case == "generate":
        return 0.0 if np.array_equal(ours, theirs) else float("inf")
    return float(np.abs(ours - theirs).max() / np.abs(ours).max())


@torch.no_grad()
def measure(case: str, ours: Mizarr, reference: Transformers | None, peers: list[Peer], rounds: int) -> None:
    """Compare the numbers of one case, time it, and print its table."""
    own = getattr(ours, case)
    numbers, contestants, largest = own(), {"mizarr": Clocked(partial(own_time, own))}, 0.0
    if reference is not None:
        largest = difference(case, numbers, getattr(reference, case)())
        assert largest <= TOLERANCE, f"{case}: transformers' numbers differ from mizarr's by {largest:.0e}"
        beside = reference.plain if case == "capture" else getattr(reference, case)
        contestants[TRANSFORMERS] = Clocked(partial(own_time, beside))
    for peer in peers:
        if (found := difference(case, numbers, peer.numbers(case))) > TOLERANCE:
            print(f"{case}: {peer.name} is not timed, as its numbers differ by {found:.0e}")
            continue
        largest = max(largest, found)
        contestants[peer.name] = Clocked(partial(peer.run, case))
    del numbers  # logits of a batch are 400 MB
    # Everyone did it once above.
    seconds = alternate(contestants, rounds, warmup=0)
    processor = {name: contestant.processor for name, contestant in contestants.items()}
    rows = []
    for name in contestants:
        target = TARGETS.get((case, name))
        ratios = [f"{ratio(times['mizarr'], times[name]):.3f}" for times in (seconds, processor)]
        medians = [f"{statistics.median(times[name]):.2f}" for times in (seconds, processor)]
        rows.append((name, *medians, *ratios, "" if target is None else f"{target}"))
    columns = ("", "seconds", "processor s", "mizarr / this", "by processor", "target")
    print_table(f"{case}: {rounds} rounds; largest difference of numbers {largest:.0e}", columns, rows)


def cached_answer(path: Path, scratch: Path, threads: int, rounds: int) -> None:
    """Time a workflow in a process that finds its answer stored."""
    words = ["compute", "logit_lens", "--model", str(path), "--store", str(scratch / "answers"), "--quiet"]
    code = "from mizarr.workflows.cli import main; main()"
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}

    def answer() -> tuple[float, float]:
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run([sys.executable, "-c", code, *words], check=True, capture_output=True, env=environment)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return time.perf_counter() - start, processor

    times = {"computed": [answer()], "cached": [answer() for _ in range(rounds)]}
    rows = []
    for name, each in times.items():
        wall, processor = (statistics.median(column) for column in zip(*each, strict=True))
        target = f"{CACHED_SECONDS}" if name == "cached" else ""
        rows.append((name, f"{wall:.1f}", f"{processor:.1f}", target))
    print_table("mizarr compute logit_lens --model FILE", ("", "seconds", "processor s", "target"), rows)


def main() -> None:
    """Run the rounds and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    folder = Path(os.environ.get("MIZARR_REAL_MODELS") or Path.home() / ".cache" / "mizarr-real")
    parser.add_argument("file", nargs="?", type=Path, default=folder / MODEL)
    parser.add_argument(
        "--peers", help="interpreter with transformer-lens and nnsight; none: transformers alone"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    others = (TRANSFORMERS, *PEERS)
    parser.add_argument("--beside", nargs="+", choices=others, default=others)
    parser.add_argument("--only", nargs="*", choices=(*CASES, "cached"), default=(*CASES, "cached"))
    args = parser.parse_args()
    if not args.file.is_file():
        print(f"expected a GGUF file, found no {args.file}; name one")
        sys.exit(2)
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as scratch, threadpool_limits(args.threads):
        cases = [case for case in CASES if case in args.only]
        if cases:
            print_cases(cases, Path(scratch), args)
        if "cached" in args.only:
            cached_answer(args.file, Path(scratch), args.threads, args.rounds)


def print_cases(cases: list[str], scratch: Path, args: argparse.Namespace) -> None:
    """Load everyone, and print a table of each case."""
    model = mizarr.Model.from_pretrained(args.file, progress=False)
    inputs = inputs_of(model)
    inputs.save(scratch / "inputs.npz")
    save_for_transformers(args.file, scratch)
    ours = Mizarr(model, args.file, inputs, scratch)
    reference = Transformers.load(scratch) if TRANSFORMERS in args.beside else None
    peers = [
        Peer(args.peers, name, scratch, args.threads) for name in PEERS if name in args.beside and args.peers
    ]
    print(f"{args.file.name}, {args.threads} threads each")
    for case in cases:
        measure(case, ours, reference, peers, min(args.rounds, FEW.get(case, args.rounds)))
    for peer in peers:
        peer.close()


if __name__ == "__main__":
    main()
