"""Wrong inputs of every command: one line that says what was expected, exit code 2, nothing left."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

import mizarr
from mizarr.workflows.cli import run

SHORT = {
    "file": "capture specimen --hooks blocks.0.hook_resid_post --store new",
    "hook": "capture specimen a --text --store new --hooks",
    "with": "capture specimen a --text --store new --hooks blocks.0.hook_resid_post",
    "into": "capture specimen a --text --hooks blocks.0.hook_resid_post --store",
    "model": "capture --text --hooks blocks.0.hook_resid_post --store new",
    "lens": "compute logit_lens --store new --set",
}
"""First words of the table that stand for several; of "model" a prompt follows."""

# Command -> how its message begins, behind "Invalid value for" where click says that.
TABLE = r"""
file folder -> expected files of documents at 'folder', found none; name files, globs or folders with
file empty.txt -> expected at least one prompt, found none in empty.txt
file blank.txt -> expected at least one prompt, found none in blank.txt
file latin.txt -> expected UTF-8 text in 'latin.txt', found byte 0xe9; convert the file
file utf16.txt -> expected UTF-8 text in 'utf16.txt', found byte 0xff; convert the file
file missing.jsonl -> missing.jsonl:2: expected a string, {'text': string} or {'ids': [integers]}, found
file broken.jsonl -> broken.jsonl:2: expected JSON, found '{"text": "b"' (Expecting ',' delimiter)
file null.jsonl -> null.jsonl:1: expected a string, {'text': string} or {'ids': [integers]}, found
file float.jsonl -> float.jsonl:1: expected a string, {'text': string} or {'ids': [integers]}, found
file big.jsonl -> expected token ids in 0..2047, found 99999999 in the prompt; encode it with
file neg.jsonl -> expected token ids in 0..2047, found -1 in the prompt; encode it with the
file noids.jsonl -> expected at least one token in the prompt, found none
file bool.jsonl -> bool.jsonl:1: expected a string, {'text': string} or {'ids': [integers]}, found
file list.json -> expected text, or documents in .txt, .md, .jsonl, .ndjson, .parquet, .arrow, .tar,
file data.csv -> expected text, or documents in .txt, .md, .jsonl, .ndjson, .parquet, .arrow, .tar,
file prompts.parquet -> expected a Parquet file at 'prompts.parquet', found one that cannot be read
file dangling.txt -> expected a file of prompts at 'dangling.txt', found nothing; to give the prompt itself
file loop -> expected a file of prompts at 'loop', found nothing; to give the prompt itself add
file nowhere.txt -> expected a file of prompts at 'nowhere.txt', found nothing; to give the prompt itself
file 'no*.txt' -> expected files of documents at 'no*.txt', found none; name files, globs or folders with
file '' --text -> expected prompt 0 to have a token of its own, found only the 1 that the tokenizer adds
file folder --context 4 -> expected files of documents at 'folder', found none; name files, globs or folders
file prompts.txt --context 0 -> '--context': 0 is not in the range x>=1. (see mizarr capture --help)
file prompts.txt --share nan -> Corpus: expected share= in (0, 1], the share of documents to read, found nan
file prompts.txt --pack -> Corpus: pack=True (--pack) needs context=, the tokens of a prompt, found none
file prompts.txt --text --context 4 -> --context is an option for files of documents, but --text says that
hook blocks.99.hook_resid_post -> specimen has layers 0 to 5, found 'blocks.99.hook_resid_post'; the last one
hook blocks.-1.hook_resid_post -> there is no hook point 'blocks.-1.hook_resid_post'; did you mean
hook blocks.0.hook_resid_pots -> there is no hook point 'blocks.0.hook_resid_pots'; did you mean
hook resid_post -> there is no hook point 'resid_post'; did you mean 'blocks.0.hook_resid_post'?
hook '   ' -> there is no hook point ' '; a model lists its own: `model.hook_points`
hook grad:blocks.0.hook_resid_post -> 'grad:blocks.0.hook_resid_post' captures a gradient: expected a
hook grad:blocks.0.hook_resid_post --metric foo=1 -> no metric 'foo' that has a gradient; there are
hook grad:blocks.0.hook_resid_post --metric 'logit_difference=["a"]' -> metric 'logit_difference': expected
hook grad:blocks.0.hook_resid_post --metric 'log_probability=1.5' -> metric 'log_probability': expected one
hook grad:blocks.0.hook_resid_post --metric 'log_probability=1' --at 99 -> gradient_of: expected a position
hook grad:blocks.0.hook_resid_post --metric kl -> the metric kl compares a prediction with that of a baseline
with --at 1 -> --at is a parameter of the metric, and no metric is named; add --metric NAME=TOKENS (see
with --positions first -> expected positions as 'last', a slice such as '::16', or numbers such as '0,5,-1',
with --positions 99 -> positions [99] (--positions) selects no token: the longest prompt has 2 tokens; choose
with --positions ::-1 -> expected positions as a slice with a step of at least 1, found step -1
with --positions 5:2 -> positions '5:2:' (--positions) selects no token: the longest prompt has 2 tokens;
with --positions mask.npy -> '--positions': expected a numpy array in the file 'mask.npy', found none; write
with --positions nowhere.npy -> '--positions': expected a file with a mask of tokens, found no file
with --reduce nrom -> reduce=: expected one of norm, mean, max, weighted_mean, run_mean, logsumexp,
with --reduce features: -> expected a directory, or a hub reference such as org/repo, found ''; name the
with --reduce features:nope -> expected a directory, or a hub reference such as
hook hook_logits --reduce topk:0 -> reduce=: expected one of norm, mean, max, weighted_mean, run_mean,
hook hook_logits --reduce topk:99999999 -> expected at most the 2048 logits of specimen, found
with --dtype float8 -> '--dtype': 'float8' is not one of 'float32', 'float16', 'bfloat16', 'float64'. (see
with --storage-dtype int4 -> '--storage-dtype': 'int4' is not one of 'float32', 'float16', 'bfloat16',
with --device cuda:99 -> expected a device such as cpu, cuda or cuda:1 that this machine has, found 'cuda:99'
with --device gpu -> expected a device such as cpu, cuda or cuda:1 that this machine has, found 'gpu' (no
with --device meta -> expected a device such as cpu, cuda or cuda:1 that this machine has, found 'meta'
with --batch-tokens ten -> '--batch-tokens': 'ten' is not a valid integer range. (see mizarr capture --help)
with --memory inf -> '--memory': expected a size such as 500MB or 2GiB, found 'inf' (see mizarr capture
with --memory 1e999 -> '--memory': expected a size such as 500MB or 2GiB, found '1e999' (see mizarr capture
with --memory -1GiB -> '--memory': expected a size such as 500MB or 2GiB, found '-1GiB' (see mizarr capture
with --memory 1 -> memory: expected at least 768 bytes, for one token of 1 captures, found 1; raise it
with --memory-limit 1kB -> memory_limit: expected more than 41,946,112 bytes, which the activations of a
with --workers 1.5 -> '--workers': '1.5' is not a valid integer range. (see mizarr capture --help)
with --cluster foo -> there is no Dask scheduler at 'foo' (missing port number in address 'foo'); start one
with --cluster foo --workers 2 -> both a cluster ('foo') and 2 workers of this machine were given; leave out
with --log nowhere/x.jsonl -> the progress log 'nowhere/x.jsonl' cannot be written (No such file or
with --adapter folder -> expected a LoRA adapter in folder, found no adapter_config.json; pass the folder in
with --revision v9 -> expected no revision for the directory specimen, found 'v9'; leave it out, as only hub
with --exact -> --exact works with --dry-run only, because a capture itself always counts all prompts; leave
into a_file -> expected the folder of a store at
into nostore -> expected a store of mizarr or an empty folder at
into a_file/sub -> 'a_file/sub' cannot be the folder of a store (Not a directory); name another folder
into dangling -> expected the folder of a store at
into s4://bucket/x -> expected a store as a folder, or as a URL that begins with s3://, gs://, az://,
model specimenn -> expected a directory or a model in the local cache
model '' -> expected a model directory, a hub id such as org/name, or one of specimen,
model folder -> expected a model in folder, found no config.json; name the folder that contains config.json
model a_file -> expected the directory of a model, found the file a_file; name the folder that contains it
model x.gguf -> expected a GGUF file at x.gguf, found one that cannot be read (expected 8 bytes at byte 8,
compute logit_lens --store new --set prompts='["a"]' --memory 1B -> the step capture needs about
compute logit_lense --store new -> no workflow 'logit_lense'; did you mean 'logit_lens'?
compute logit_lens --store new --set promts='["a"]' -> workflow 'logit_lens' has no setting 'promts'; did you
lens prompts=5 -> expected prompts to be a list of str, found 5 (int)
lens prompts=NaN -> expected prompts to be a list of str, found nan (float)
lens 'prompts=[[1.5]]' -> expected prompts to be a list of str, found [[1.5]] (list)
lens 'prompts=[""]' -> expected prompt 0 to have a token of its own, found only the 1 that the tokenizer adds
lens 'prompts=["\ud800"]' -> prompts: expected valid Unicode text, found half of a surrogate pair ('\ud800')
lens top_k=0 -> expected top_k to be int of at least 1, found 0 (int)
lens top_k=ten -> expected top_k to be int of at least 1, found 'ten' (str)
lens top_k=1e999 -> expected top_k to be int of at least 1, found inf (float)
lens top_k=true -> expected top_k to be int of at least 1, found True (bool)
lens heatmaps=-1 -> expected heatmaps to be int of at least 0, found -1 (int)
lens soft_cap=yes -> expected soft_cap to be bool, found 'yes' (str)
lens dtype=fp16 -> expected dtype to be float32, float16, bfloat16 or float64, found 'fp16' (str); did you
lens device=5 -> expected device to be str | None, found 5 (int)
lens model=folder -> expected a model in folder, found no config.json; name the folder that
lens top_k=3 --set top_k=4 -> '--set': setting 'top_k' is given twice; keep one of them (see mizarr compute
lens model=specimen --model specimen -> the model is given twice: --model and --set model=…; keep one (see
lens prompts=a --figures a_file/x -> cannot write figure.png, because
lens prompts=a --figures dangling -> cannot write figure.png, because
lens prompts=a --memory 1 -> the step capture needs about 18 KiB of memory at once, and --memory (memory=)
compute generate --store new --set temperature=NaN -> expected a finite temperature >= 0, found nan
compute generate --store new --set temperature=1 --set top_p=2 -> expected top_p in (0, 1], found 2.0
compute generate --store new --set max_tokens=0 -> expected max_tokens of at least 1, found 0
compute generate --store new --set seed=-1 -> expected seed to be int of at least 0, found -1 (int)
compute generate --store new --set seed=123456789012345678901234567890 -> expected seed of at most
compute generate --store new --set 'zero=["blocks.9.hook_mlp_out"]' -> there is no hook point
compute activation_patching --store new --set prompt=a -> expected prompt and corrupted together, or none
compute activation_patching --store new --set window=0 -> expected window to be int of at least 1, found 0
compute activation_patching --store new --set 'kinds=["resid_pots"]' -> expected kinds among resid_pre,
compute probe --store new --set 'layers=[99]' -> specimen has layers 0 to 5, found
compute sae_features --store new --set dictionary=nope -> expected a directory, or a hub reference such as
compute counterfact_patching --store new --set data=listfacts.json -> record 0 of 'listfacts.json': expected
compute rwkv_inference --store new --model specimen -> rwkv_inference: expected an RWKV model with
explain logit_lens --store nostore -> expected a store of mizarr in
report logit_lens --store new --output folder -> cannot write the file folder, because it is a folder; name a
report logit_lens --store new --output dangling/x.html -> cannot write x.html, because
replicate nope --store new -> no replication 'nope'; there are activation-patching, algzoo,
workflows nope -> no workflow 'nope'; there are logit_lens, jacobian_lens, logit_attribution, generate,
stages logit_lense -> expected the name of a stage or experiment, found 'logit_lense'; did you mean
ls --store nowhere -> expected a store of mizarr in
show zzz --store activations -> no key in
show ../x --store activations -> no key in
export RUN --to x.csv --store activations -> the suffix of 'x.csv' names no export format; end the name in
export RUN --to good.safetensors --store activations -> the file to export to, 'good.safetensors', exists
export RUN --to new.npz --layers 99 --store activations -> run RUN has variable 'resid_post' at layers 0-5,
export RUN --to new.npz --layers 5-0 --store activations -> expected --layers as numbers and ranges such as
export RUN --to new.npz --variables resid_pots --store activations -> run RUN has no complete variable
export RUN --to new.npz --context 5 --store activations -> --context (context=) is for formats saelens
import nowhere.npz --model x --store new -> expected a file at 'nowhere.npz', found none; check the path
import text.safetensors --model x --store new -> text.safetensors is not a complete safetensors file: its
import truncated.safetensors --model x --store new -> truncated.safetensors is truncated: expected 224 bytes,
import foo.safetensors --model x --store new -> array 'foo': there is no hook point 'foo'; a model lists its
import data.csv --model x --store new -> expected files that end in .safetensors or .npz, found 'data.csv';
import good.safetensors --model x --map foo --store new -> expected --map ARRAY=HOOK, found --map 'foo' (see
import good.safetensors --model x --skip zzz --store new -> no array is named 'zzz'; there are
import good.safetensors --model x --n-layers 0 --store new -> expected n_layers of at least 1, found 0
import good.safetensors --model x --prompts prompts.txt --store new -> expected texts to have one text per
copy nowhere new -> expected a store of mizarr in
copy activations activations -> the store 'activations' is both source and target; name another store as the
copy activations ./activations/ -> the store './activations/' is both source and target; name another store
copy activations new --runs , -> expected --runs to list the first characters of keys, such as 35be,7a01,
copy activations new --runs zzz -> no run in
merge activations activations -> the store 'activations' is both source and target; name another store as the
verify --store folder -> expected a store of mizarr in
pin x zzz --store activations -> no key in
pin ../x KEY --store activations -> expected the name of a pin as letters, digits, '.', '_' and '-', with a
pin x KEY --store nowhere -> expected a store of mizarr in
gc --store nowhere -> expected a store of mizarr in
gc --grace 1e999h --store activations -> '--grace': expected a duration such as 90s, 24h or 7d, found
gc --quota inf --store activations -> '--quota': expected a size such as 500MB or 2GiB, found 'inf' (see
browse --port 99999 --store activations --no-open -> '--port': 99999 is not in the range 0<=x<=65535. (see
site nostore --store activations -> cannot write a site to nostore, because the folder holds files that
models inspect folder -> expected a model in folder, found no config.json; name the folder that
models inspect x.gguf -> expected a GGUF file at x.gguf, found one that cannot be read (expected 8 bytes
models fetch a/b/c -> expected a hub id such as org/name, found 'a/b/c'
features inspect '' -> expected a directory, or a hub reference such as org/repo, found ''; name the
features fetch '' -> expected a directory, or a hub reference such as org/repo, found ''; name the dictionary
features inspect specimen/nope -> expected specimen/clt, specimen/plt, specimen/sae, which ship with mizarr,
features inspect specimen/sae --read nope -> expected a hook point of TransformerLens or a module of
features inspect specimen/sae --read '' -> option --read has an empty text as its value; give it a value, or
features export specimen/sae a_file --format saelens -> expected a new or empty folder for the exported
features export specimen/clt new --format saelens -> SAELens has no cross-layer transcoders, such as
features label specimen/sae L99:0 x --store new -> expected a layer that the dictionary specimen/sae reads
features label specimen/sae L3:1.5 x --store new -> expected a feature as layer:index, such as L14:13043,
features pages new --store new --neuronpedia nope -> expected --neuronpedia MODEL/SET, such as
features pages new --store new --creator x -> --creator has an effect only together with --neuronpedia;
train specimen prompts.txt --out a_file/x --store new --set 'layers=[3]' --set k=4 -> cannot write
train specimen prompts.txt --out new --store new --set layerz=3 -> workflow 'train' has no setting 'layerz';
train specimen prompts.txt --out new --store new --set seed=-1 -> expected seed of at least 0, found -1
train specimen prompts.txt --out new --store new --set features=1e999 -> expected features to be int, found
train specimen prompts.txt --out new --store new --config settings.toml -> expected TOML in the file
train-zoo 2nd_argmax --hidden 4 --sequence 3 --seed -1 -> expected seed of at least 0, found -1
train-zoo 2nd_argmax --hidden 4 --sequence 3 --out a_file -> cannot write
train-zoo 2nd_argmax --hidden 4 --sequence 3 --heads 3 -> expected heads to divide the hidden size 4, found
demo --output a_file/x -> 'a_file/x/store' cannot be the folder of a store (Not a directory); name another
completion tcsh -> '{bash|zsh|fish}': 'tcsh' is not one of 'bash', 'zsh', 'fish'. (see mizarr completion
"""
CASES = [line.split(" -> ") for line in TABLE.strip().splitlines()]

FILES: dict[str, bytes] = {
    "prompts.txt": b"one two\nthree four\n",
    "empty.txt": b"",
    "blank.txt": b"\n\n  \n",
    "latin.txt": "caf\xe9\n".encode("latin1"),
    "utf16.txt": "hello\n".encode("utf-16"),
    "missing.jsonl": b'{"text": "a"}\n{"txt": "b"}\n',
    "broken.jsonl": b'{"text": "a"}\n{"text": "b"\n',
    "null.jsonl": b'{"text": null}\n',
    "float.jsonl": b'{"ids": [1.5, 2]}\n',
    "big.jsonl": b'{"ids": [1, 99999999]}\n',
    "neg.jsonl": b'{"ids": [-1]}\n',
    "noids.jsonl": b'{"ids": []}\n',
    "bool.jsonl": b'{"ids": [true, false]}\n',
    "list.json": b'[{"text": "a"}]',
    "data.csv": b"text,label\na,b\n",
    "prompts.parquet": b"not parquet",
    "mask.npy": b"not npy",
    "text.safetensors": b"hello world, I am a text",
    "x.gguf": b"GGUF\x03\0\0\0",
    "settings.toml": b"layers = [",
    "listfacts.json": b"[1,2]",
    "a_file": b"x",
    "nostore/notes.txt": b"x",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as users have it, with a store `activations` of one run."""
    import torch
    from safetensors.torch import save_file

    root = tmp_path_factory.mktemp("wrong")
    (root / "folder").mkdir()
    (root / "nostore").mkdir()
    for name, content in FILES.items():
        (root / name).write_bytes(content)
    for name, target in {"dangling": "nowhere", "dangling.txt": "nowhere.txt", "loop": "loop"}.items():
        (root / name).symlink_to(target)
    save_file({"blocks.0.hook_resid_post": torch.zeros(4, 8)}, root / "good.safetensors")
    save_file({"foo": torch.zeros(4, 8)}, root / "foo.safetensors")
    (root / "truncated.safetensors").write_bytes((root / "good.safetensors").read_bytes()[:-20])
    store = mizarr.open_store(root / "activations", durability="process")
    model = mizarr.Model.from_pretrained("specimen")
    prompts = ["one two", "three four"]
    mizarr.capture(model, prompts, "blocks.*.hook_resid_post", store=store, progress=False)
    return root


def named(text: str, folder: Path) -> str:
    """A text of the table with the names that the store gave."""
    store = mizarr.open_store(folder / "activations", "r")
    names = {"RUN": next(store.entries()).digest[:12], "KEY": next(store.records()).key[:12]}
    return " ".join(names.get(word, word) for word in text.split(" "))


def command(text: str) -> list[str]:
    """The words of a line of the table."""
    first, *rest = shlex.split(text)
    prompt = ["a"] if first == "model" else []
    return [*SHORT.get(first, first).split(), *rest, *prompt]


def tree(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every name below a folder, of files with their content."""
    names = [path for path in sorted(folder.rglob("*")) if path.name != "index.sqlite"]
    return {
        str(path.relative_to(folder)): (path.lstat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in names
    }


@pytest.mark.parametrize(("text", "said"), CASES, ids=[text for text, _ in CASES])
def test_a_wrong_input_is_told_in_one_line_and_leaves_nothing(text, said, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    before = tree(folder)
    assert run(command(named(text, folder))) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith("mizarr: error: ") and streams.err.count("\n") == 1
    told = streams.err.removeprefix("mizarr: error: ").removeprefix("Invalid value for ")
    assert told.startswith(named(said, folder)) and len(told) < 2_000
    after = tree(folder)
    left = after.keys() - before.keys()
    shutil.rmtree(folder / "new", ignore_errors=True)
    assert not left
    assert {name: after[name] for name in before} == before
