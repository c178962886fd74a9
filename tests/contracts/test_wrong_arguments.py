"""Wrong arguments of public functions: one line that says what was expected, and nothing left."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mizarr
from mizarr.store.errors import MizarrError

POINT = "blocks.0.hook_resid_post"

# Expression -> how its message begins.
TABLE = r"""
Model.from_pretrained(None) -> expected a model, its hub id or its folder, found None; load it:
Model.from_pretrained(Path("nowhere")) -> expected a directory or a model in the local cache
Model.from_pretrained(Path("folder")) -> expected a model in folder, found no config.json; name the folder
Model.from_pretrained(Path("a_file")) -> expected the directory of a model, found the file a_file; name the
Model.from_pretrained("specimen", dtype="fp16") -> expected dtype to be one of float32, float16, bfloat16,
Model.from_pretrained("specimen", device="cuda") -> expected a device such as cpu, cuda or cuda:1 that this
Model.from_pretrained("specimen", revision=5) -> expected no revision for the directory specimen, found 5;
Model.from_pretrained("specimen", backend="jax") -> expected backend to be one of native, transformers, found
Model.from_pretrained("specimen", adapter=5) -> expected a LoRA adapter in 5, found no
Model.from_pretrained("specimen", adapter="nowhere") -> expected a LoRA adapter in nowhere, found no
Model("specimen") -> expected a network, found 'specimen'; load a model by name:
m.tokenize(None) -> expected prompts as a text, several texts, token ids ([position] or [prompt, position]),
m.tokenize({"text":"a"}) -> expected a text, several texts, token ids ([position] or [prompt, position]), or
m.tokenize([]) -> expected at least one prompt, found none; pass a text, several texts, token ids ([position]
m.tokenize([[]]) -> expected at least one token in the prompt, found none
m.tokenize([None]) -> expected prompt 0 as a text or token ids, found None; leave missing values out
m.tokenize([[1.5]]) -> expected token ids (whole numbers) in prompt 0, found 1.5 (float) at position 0;
m.tokenize([[-1]]) -> expected token ids in 0..2047, found -1 in the prompt; encode it with
m.tokenize(["a",5]) -> expected prompt 1 as a text or token ids, found 5 (int)
m.tokenize(["a",[1]]) -> expected prompts that are all texts or all token ids, found both; pass texts
fw("one", 5) -> expected hooks as a HookSpec, found 5; write
fw("one", want="all") -> expected want as mizarr.logits(…), or None, found 'all'; write
fw("one", want=logits(5)) -> logits: expected a position in -2..1, found 5
fw("one", want=logits(tokens=99999)) -> logits: expected a token id in 0..2047, found 99999
fw("one", recurrent=5) -> expected recurrent as a mizarr.RecurrentPass, found 5; leave it out for one pass
fw("a "*5000) -> specimen reads at most 512 positions, found 5002 in the prompt; shorten or split it
logits("last") -> logits: positions: expected whole numbers, found 'last'; write a list such as [0, -1]
logits(tokens="a") -> logits: tokens: expected whole numbers, found 'a'; write a list such as [0, -1]
S.capture(None) -> expected a hook point's name, found None; write one such as 'blocks.5.hook_resid_post'
S.capture("") -> there is no hook point ''; a model lists its own: `model.hook_points`
S.capture(P, when="during") -> expected when='after' or when='before', found 'during'
S.capture(P, positions="first") -> expected positions as 'last', a slice such as '::16', or numbers such as
S.capture(P, positions=1.5) -> expected positions as 'last', a slice such as '::16', numbers, or one bool per
S.capture(P, positions=None, reduce=5) -> reduce=: expected one of norm, mean, max, weighted_mean, run_mean,
S.capture(P, positions=slice(None,None,-1)) -> expected positions as a slice with a step of at least 1, found
S.capture(P, positions=slice("a")) -> positions: expected whole numbers, found 'a'; write a list such as [0,
S.intervene(P, None) -> expected an intervention such as mizarr.Zero(), found None
S.intervene(None, Zero()) -> expected a hook point's name, found None; write one such as
S.intervene("nope", Zero()).bind(m.hook_points) -> there is no hook point 'nope'; a model lists its own:
S.gradient_of(None) -> gradient_of: expected a differentiable metric, found None; use LogitDifference,
S.extend(None) -> expected other as a HookSpec, found None; write
Zero(positions=(1.5,)) -> Zero: positions: expected whole numbers, found 1.5; write ints, or a list of them
Zero(heads=(True,)) -> Zero: heads: expected whole numbers, found True; write the numbers of the selected
Zero(positions=()) -> Zero: expected at least one of positions, found none; leave positions out to mean all
iv(Zero(positions=(99,))) -> Zero at 'blocks.0.hook_resid_post': expected positions in 0..2 (or negative,
iv(Zero(heads=(0,))) -> expected a hook point with heads to select, found 'blocks.0.hook_resid_post' with
iv(Zero(heads=(99,)),"blocks.0.attn.hook_z") -> Zero at 'blocks.0.attn.hook_z': expected heads in 0..5 (or
iv(Zero(neurons=(99999,)),"blocks.0.mlp.hook_post") -> expected a hook point with neurons to select, found
iv(Zero(experts=(0,))) -> expected a hook point with experts to select, found 'blocks.0.hook_resid_post'
Scale(nan) -> Scale: expected a finite number, found nan
Scale("2") -> expected Scale to be a number, found '2'; write a float
Add(None) -> Add: expected a floating-point tensor, found dtype object; convert it to float32
iv(Add(5)) -> Add: expected a floating-point tensor, found dtype int64; convert it to float32
iv(Add(torch.zeros(7))) -> Add at 'blocks.0.hook_resid_post': expected a tensor that broadcasts to [batch=1,
iv(Add(torch.full((192,),nan))) -> Add: expected finite numbers, found NaN or infinity in a tensor of shape
Replace({"a":1}) -> Replace: expected a floating-point tensor, found dtype object; convert it to float32
AddAtPositions([(0,None)]) -> AddAtPositions: expected a floating-point tensor, found dtype object; convert
AddAtPositions([]) -> AddAtPositions: expected at least one (position, vector) pair, found none
AddAtPositions([(1.5,v)]) -> AddAtPositions: positions: expected whole numbers, found 1.5; write ints, or a
AddAtPositions([(0,v)], scale=nan) -> AddAtPositions: expected a finite number, found nan
AddAtPositions(v) -> AddAtPositions: expected a list of (position, vector) pairs, found
iv(AddAtPositions([(99,v)])) -> AddAtPositions at 'blocks.0.hook_resid_post': expected positions in 0..2 (or
Knockout() -> Knockout: expected either edges or a mask, found neither
Knockout([(1,)]) -> Knockout: expected each edge as (query, key) with at most one None, found (1,)
Knockout([("a","b")]) -> Knockout: positions of edges: expected whole numbers, found 'a'; write a list such
Knockout(5) -> Knockout: expected (query, key) edges, found 5; write [(-1, 0)]
iv(Knockout([(1,0)])) -> Knockout: expected the hook point 'blocks.0.attn.hook_scores' or
iv(Knockout([(99,0)]),"blocks.0.attn.hook_attn_scores") -> Knockout at 'blocks.0.attn.hook_attn_scores':
Steer([(1,0)],nan) -> Steer: expected a finite number, found nan
Steer([(1,0)],-1) -> Steer: expected a factor >= 0, found -1.0
Steer([(1,0)],"x") -> expected Steer to be a number, found 'x'; write a float
Steer([],1) -> Steer: expected at least one (query, key) edge, found none
SetValue([(1,0)],nan) -> SetValue: expected a finite number, found nan
SetValue([(1,0)],None) -> expected SetValue to be a number, found None; write a float
HookPoint("nope") -> there is no hook point 'nope'; a model lists its own: `model.hook_points`
HookPoint(5) -> there is no hook point 5; a model lists its own: `model.hook_points`
HookPoint("blocks.{}.hook_resid_post","a") -> there is no hook point 'blocks.{}.hook_resid_post'; did you
cache["nope"] -> there is no hook point 'nope'; a model lists its own: `model.hook_points`
cache[5] -> expected a hook point's name, found 5; write one such as 'blocks.5.hook_resid_post'
cache[None] -> expected a hook point's name, found None; write one such as 'blocks.5.hook_resid_post'
cache["blocks.1.hook_resid_post"] -> expected a captured hook point, found
cache[0] -> expected a hook point's name, found 0; write one such as 'blocks.5.hook_resid_post'
cache.require(5) -> expected a hook point's name, found 5; write one such as 'blocks.5.hook_resid_post'
cache.require("nope") -> there is no hook point 'nope'; a model lists its own: `model.hook_points`
Run(5) -> expected prompts as a text, several texts, token ids ([position] or [prompt, position]), or a tokeni
Run("one", hooks=5) -> expected hooks as a HookSpec, found 5; write
Run("one", want="x") -> expected want as mizarr.logits(…), or None, found 'x'; write
run(m,None) -> expected runs as a list of mizarr.Run, found None; write [mizarr.Run(prompt)]
run("specimen",[Run("one")]) -> expected a loaded model, found 'specimen'; load it:
run(m,[Run("one")],memory=0) -> memory: expected 40,960 bytes for a run of 2 tokens, found only 0; raise
run(m,[Run("one")],memory=-1) -> expected --memory (memory=) as a size such as "2GiB" or "500MB", or a number
run(m,[Run("one")],store=5) -> expected store to be an open store, found 5; write
gen(None) -> expected prompts as a text, several texts, token ids ([position] or [prompt, position]), or a
gen([]) -> expected at least one prompt, found none; pass a text, several texts, token ids ([position] or
gen(max_tokens=0) -> expected max_tokens of at least 1, found 0
gen(max_tokens=1.5) -> expected max_tokens to be a whole number, found 1.5; write max_tokens=1
gen(temperature=-1) -> expected a finite temperature >= 0, found -1
gen(temperature="x") -> expected temperature to be a number, found 'x'; write a float
gen(temperature=1,seed=1.5) -> seed: expected whole numbers, found 1.5; write ints, or a list of them
gen(temperature=1,seed=-1) -> expected seed of at least 0, found -1
gen(temperature=1,seed=2**70) -> expected seed of at most 9007199254740992, found 1180591620717411303424
gen(temperature=1,seed=[1,2,3]) -> seed: expected one seed, or one for each of 1 prompts, found 3
gen(top_k=0) -> expected top_k of at least 1, found 0; leave it out for all tokens
gen(top_k=1.5) -> expected top_k to be a whole number, found 1.5; write top_k=1
gen(temperature=1,top_p=0) -> expected top_p in (0, 1], found 0
gen(temperature=1,top_p="x") -> expected top_p to be a number, found 'x'; write a float
gen(stop=5.5) -> stop: expected texts and token ids, found 5.5; remove it
gen(stop=999999) -> stop: expected token ids in 0..2047, found 999999; remove it
gen(eos=-1) -> eos: expected token ids, found -1; pass eos=() to generate past every end token
gen(cache="yes") -> expected cache=True or cache=False, found 'yes'
gen(capture_positions="old") -> expected capture_positions='new' or 'every', found 'old'
gen(on_token=5) -> expected on_token as a function of a NewToken, found 5; pass a function, or
gen(hooks=5) -> expected hooks as a HookSpec, found 5; write
generate("specimen","a") -> expected a loaded model, found 'specimen'; load it:
cap(h=None) -> expected a hook point's name, found None; write one such as 'blocks.5.hook_resid_post'
cap(h=[]) -> expected a HookSpec that captures something, found none; add .capture('blocks.*.hook_resid_post')
cap(h="") -> there is no hook point ''; a model lists its own: `model.hook_points`
cap(h="nope") -> there is no hook point 'nope'; a model lists its own: `model.hook_points`
cap(p=None) -> expected prompts as a text, several texts, token ids ([position] or [prompt, position]), or a
cap(p=[]) -> expected at least one prompt, found none; pass a text, several texts, token ids ([position] or
cap(p={"a":1}) -> expected a text, several texts, token ids ([position] or [prompt, position]), or a
cap(p=[nan]) -> expected prompt 0 as a text or token ids, found nan (float); leave missing values out
cap(p=[[1.5]]) -> expected token ids (whole numbers) in prompt 0, found 1.5 (float) at position 0; convert
cap(p=[[99999]]) -> expected token ids in 0..2047, found 99999 in the prompt; encode it with the tokenizer of
cap(store=None) -> expected store to be an open store, found None; write
cap(dtype="float64x") -> expected dtype to be one of float32, float16, bfloat16, float64, found 'float64x'
cap(storage_dtype="int4") -> expected storage_dtype to be one of float32, float16, bfloat16, float64, int8,
cap(batch_tokens=0) -> expected batch_tokens of at least 1, found 0
cap(batch_tokens=1.5) -> expected batch_tokens to be a whole number, found 1.5; write batch_tokens=1
cap(segment_tokens=0) -> expected segment_tokens of at least 1, found 0
cap(segment_tokens=1.5) -> expected segment_tokens to be a whole number, found 1.5; write segment_tokens=1
cap(memory=0) -> expected memory of at least 1, found 0
cap(memory=-5) -> expected --memory (memory=) as a size such as "2GiB" or "500MB", or a number of bytes,
cap(memory=None) -> expected memory to be a whole number, found None; write memory=1
cap(order="layers") -> capture order: expected one of auto, batch, layer, found 'layers'
cap(device="cuda") -> expected device together with the name of a model,
cap(workers=-1) -> expected workers of at least 0, found -1
cap(workers=1.5) -> expected workers to be a whole number, found 1.5; write workers=1
cap(codec="gzip") -> expected codec (--codec) among zstd, none, found 'gzip'; leave it out
cap(backend="jax") -> expected backend together with the name of a model, found backend='jax' together with a
cap(adapter="nowhere") -> expected adapter together with the name of a model, found adapter='nowhere'
cap(progress="no") -> expected progress=True or progress=False, found 'no'
capture("specimen",["a"],P,store=new,trust_layout="x") -> expected trust_layout=True or trust_layout=False,
comp(model="specimen",trust_layout=1) -> expected trust_layout=True or trust_layout=False, found 1
comp(quiet="x") -> expected quiet=True or quiet=False, found 'x'
comp(store="fresh",memory=1) -> the step capture needs about
comp(store="fresh",threads=0) -> expected threads of at least 1, found 0
Model.from_pretrained("specimen",trust_layout="no") -> expected trust_layout=True or trust_layout=False, found
Model.from_pretrained("specimen",progress="x") -> expected progress=True or progress=False, found 'x'
store.verify(quick="x") -> expected quick=True or quick=False, found 'x'
store.gc(dry_run="no") -> expected dry_run=True or dry_run=False, found 'no'
cap(revision="x") -> expected revision together with the name of a model, found revision='x' together with a
capture(None,["a"],P,store=new) -> expected a model, its hub id or its folder, found None; load it:
ds.mi.sel(layer=99) -> layers 99 of resid_post were not captured, only 0-5; leave them out, or capture them:
ds.mi.sel(layer=-1) -> layers -1 of resid_post were not captured, only 0-5; leave them out, or capture them:
ds.mi.sel(layer=1.5) -> layers: expected whole numbers, found 1.5; write ints, or a list of them
ds.mi.sel(prompt=99) -> there is no prompt 99; prompts are numbered 0 to 1
ds.mi.sel(prompt="a") -> none of 2 prompts has exactly the text 'a'
ds.mi.sel(prompt=1.5) -> prompts: expected whole numbers, found 1.5; write ints, or a list of them
ds.mi.sel(position=99) -> a prompt of 3 tokens has no position 99; select prompts that are longer, or give
ds.mi.sel(position=1.5) -> positions: expected whole numbers, found 1.5; write ints, or a list of them
ds.mi.sel(token="nope") -> the vocabulary has no token 'nope'; did you mean 'no'?; token strings are exact,
ds.mi.sel(token=99999) -> no token in 2 prompts meets the conditions token=99999; drop a condition, or select
ds.mi.sel(token=1.5) -> tokens: expected whole numbers, found 1.5; write ints, or a list of them
ds.mi.sel(nope=1) -> ds.mi.sel selects by prompt, token, chars, position, layer, found 'nope'; store labels
store[None] -> expected a key, or the first hex digits of one as a text, found None; `mizarr ls` lists keys
store[5] -> expected a key, or the first hex digits of one as a text, found 5; `mizarr ls` lists keys
store[b"ab"] -> expected a key, or the first hex digits of one as a text, found b'ab'; `mizarr ls` lists keys
store.lookup(None) -> expected a key, or the first hex digits of one as a text, found None; `mizarr ls` lists
store.record(5) -> expected a key, or the first hex digits of one as a text, found 5; `mizarr ls` lists keys
open_store(None) -> expected the folder or URL of a store as a text or Path, found None; write for
open_store("a_file") -> expected the folder of a store at
open_store("nostore") -> expected a store of mizarr or an empty folder at
open_store("x",mode="w") -> open_store: expected mode='a' (read, write and create) or mode='r' (read only),
open_store("x",mode="r") -> expected a store of mizarr in
open_store("x",durability="no") -> open_store: expected durability='disk' or durability='process', found 'no'
open_store("s4://x") -> expected a store as a folder, or as a URL that begins with s3://, gs://, az://,
open_store("x\0y") -> 'x\x00y' cannot be the folder of a store (embedded null byte); name another folder
compute("logit_lense",store=new) -> no workflow 'logit_lense'; did you mean 'logit_lens'?
comp(store=5) -> expected store to be an open store, found 5; write store=mizarr.open_store('activations'),
comp(prompts=5) -> expected prompts to be a list of str, found 5 (int)
comp(top_k=np.int64(0)) -> expected top_k to be int of at least 1, found 0 (int)
comp(topk=3) -> workflow 'logit_lens' has no setting 'topk'; did you mean 'top_k'?
comp(model=5) -> expected model to be str, found 5 (int)
comp(model=m,revision="x") -> expected revision together with the name of a model,
comp(model=m,device="cuda") -> expected device together with the name of a model,
comp(model=m,dtype="float16") -> expected dtype together with the name of a model,
comp(dtype="fp16") -> expected dtype to be float32, float16, bfloat16 or float64, found 'fp16' (str); did you
comp(threads=0) -> expected threads of at least 1, found 0
comp(threads=1.5) -> expected threads to be a whole number, found 1.5; write threads=1
comp(memory=nan) -> expected --memory (memory=) as a size such as "2GiB" or "500MB", or a number of bytes,
comp(workers=-1) -> expected workers of at least 0, found -1
comp(workers="x") -> expected workers to be a whole number, found 'x'; write workers=1
export(None,"x.npz") -> expected dataset as an xarray.Dataset, found None; write array.to_dataset() for a
export(ds,"x") -> the suffix of 'x' names no export format; end the name in .nc, .zarr, .parquet,
export(ds,None) -> expected path to be the path of a file or folder, as a text or a Path, found None
export(ds,"x.npz",format="hdf5") -> expected --format among netcdf, zarr, parquet, safetensors, npz,
export(ds,"good.safetensors") -> the file to export to, 'good.safetensors', exists already; remove it, or
export(ds,"nofolder/x.npz") -> the folder 'nofolder' to export into does not exist; create it first
export(ds,"x.npz",layout="x") -> expected --layout (layout=) 'long' or 'wide', found 'x'
export(ds,"x.npz",context=0) -> expected context of at least 1, found 0
export(ds,"y",format="saelens",context=1.5) -> expected context to be a whole number, found 1.5; write
export(xr.Dataset(),"x.npz") -> the dataset to export has no variables; name some that are stored with
import_activations(None,model="x",store=new) -> expected files to be the path of a file or folder, as a text
import_activations([],model="x",store=new) -> expected activations in , found no arrays; map arrays to their
import_activations("nowhere.npz",model="x",store=new) -> expected a file at 'nowhere.npz', found none; check
import_activations("good.safetensors",model=None,store=new) -> expected model to name the model that
import_activations("good.safetensors",model="x",store=None) -> expected the folder or URL of a store as a
import_activations("good.safetensors",model="x",store=new,names=5) -> expected names as a mapping, found 5;
import_activations("good.safetensors",model="x",store=new,names={"a":5}) -> no array is named 'a'; there are
import_activations("good.safetensors",model="x",store=new,tokens=5) -> expected tokens as a list, found 5;
import_activations("good.safetensors",model="x",store=new,tokens=[[1.5]*4]) -> expected ids as a
import_activations("good.safetensors",model="x",store=new,tokens=[[-1]*4]) -> expected token ids >= 0, found
import_activations("good.safetensors",model="x",store=new,tokens=["abcd"]) -> expected the token ids to
import_activations("good.safetensors",model="x",store=new,texts="abc") -> expected texts as a list, found
import_activations("good.safetensors",model="x",store=new,texts=[5]) -> expected texts as a list of str,
import_activations("good.safetensors",model="x",store=new,dtype=5) -> expected dtype='bfloat16' or no dtype,
import_activations("good.safetensors",model="x",store=new,n_layers="x") -> expected n_layers to be a whole
import_activations("good.safetensors",model="x",store=new,n_layers=0) -> expected n_layers of at least 1,
import_activations("good.safetensors",model="x",store=new,skip=5) -> expected skip as a list, found 5; write
Dictionary.from_pretrained(None) -> expected a directory, or a hub reference such as org/repo, found None
Dictionary.from_pretrained("nope") -> expected a directory, or a hub reference such as
Dictionary.from_pretrained(Path("folder")) -> no known layout of transcoders or autoencoders in folder: found
Dictionary.from_pretrained("specimen/sae",read=5) -> expected read= as the name of a hook point, found 5;
Dictionary.from_pretrained("specimen/sae",read="nope") -> expected a hook point of TransformerLens or a
d.layer(99) -> expected a layer that the dictionary specimen/sae reads (layer 3), found layer 99
d.layer("a") -> layers: expected whole numbers, found 'a'; write a list such as [0, -1]
d.feature("x") -> expected a feature as layer:index, such as L14:13043, found 'x'
d.feature((3,)) -> expected a feature as (layer, index), or as text such as L14:13043, found (3,)
d.feature((3,-1)) -> expected a feature number from 0 to 511 in layer 3 of the dictionary specimen/sae, found
d.feature((3,1.5)) -> a feature's index: expected whole numbers, found 1.5; write ints, or a list of them
d.decoder_vector((3,0),target=99) -> features of layer 3 write to layer 3, not to layer 99
d.decoder_vector((3,0),target="x") -> features of layer 3 write to layer 3, not to layer x
d.encode(None) -> expected states by layer, found None; write {3: states}, states of [position, d_in]
d.encode({}) -> expected the states of at least one layer, found none; the dictionary specimen/sae reads
d.encode({99:v[None]}) -> expected a layer that the dictionary specimen/sae reads (layer 3), found layer 99
d.encode({3:torch.zeros(2,7)}) -> expected inputs of width 192 for the features of layer 3, found 7; give
d.encode({3:None}) -> expected the states of layer 3 as a tensor, found None; write torch.as_tensor(states)
d.encode({3:torch.zeros(2,192)},zero_positions=-1) -> expected zero_positions of at least 0, found -1
d.encode({3:torch.zeros(2,192)},zero_positions=1.5) -> expected zero_positions to be a whole number, found
d.read_hook(99) -> expected a layer that the dictionary specimen/sae reads (layer 3), found layer 99
d.targets("x") -> layers: expected whole numbers, found 'x'; write a list such as [0, -1]
Corpus(None) -> Corpus: expected files, folders or globs as sources, found None; pass
Corpus("prompts.txt",context=0) -> Corpus: expected a context of at least 1 token, found 0
Corpus("prompts.txt",context=1.5) -> expected context to be a whole number, found 1.5; write context=1
Corpus("prompts.txt",share=0) -> Corpus: expected share= in (0, 1], the share of documents to read, found 0
Corpus("prompts.txt",share="x") -> expected share to be a number, found 'x'; write a float
Corpus("prompts.txt",seed=1.5) -> expected seed to be a whole number, found 1.5; write seed=1
Corpus("prompts.txt",pack=True) -> Corpus: pack=True (--pack) needs context=, the tokens
Corpus("prompts.txt",column=5) -> Corpus: expected column= as the name of a column, found 5; leave it out for
Corpus("prompts.txt",labels=5) -> expected labels as names of columns, found 5; write ['label']
ActivationLoader(None) -> expected states as a dataset that mizarr.capture gave, or several, found None; open
ActivationLoader([]) -> expected at least one stored run for an ActivationLoader, found an empty
ActivationLoader(xr.Dataset()) -> the dataset was not opened from a stored run; open one with
ActivationLoader(ds,5) -> expected variables as names, found 5; write ['resid_post']
ActivationLoader(ds,[]) -> expected at least one variable with a row per token to load,
ActivationLoader(ds,layers=1.5) -> layers: expected whole numbers, found 1.5; write ints, or a list of them
ActivationLoader(ds,layers=[]) -> expected stored activations of at least one batch of 4096 tokens, found 7
ActivationLoader(ds,layers=0,batch=0) -> expected batch of at least 1, found 0
ActivationLoader(ds,layers=0,batch=1.5) -> expected batch to be a whole number, found 1.5; write batch=1
ActivationLoader(ds,layers=0,buffer_tokens=0) -> expected buffer_tokens of at least 1, found 0
ActivationLoader(ds,layers=0,buffer_tokens="x") -> expected buffer_tokens to be a whole number, found 'x';
ActivationLoader(ds,layers=0,block_tokens=0) -> expected block_tokens of at least 1, found 0
ActivationLoader(ds,layers=0,block_tokens=nan) -> expected block_tokens to be a whole number, found nan;
ActivationLoader(ds,layers=0,epochs=0) -> expected epochs of at least 1, found 0
ActivationLoader(ds,layers=0,epochs=1.5) -> expected epochs to be a whole number, found 1.5; write epochs=1
ActivationLoader(ds,layers=0,skip_positions=-1) -> expected skip_positions to be at least 0, found -1
ActivationLoader(ds,layers=0,without=["a"]) -> without: expected whole numbers, found 'a'; write a list such
ActivationLoader(ds,layers=0,normalise="x") -> normalise= and statistics= belong together, found only one
ActivationLoader(ds,layers=0,dtype="float64") -> expected 'float32' or 'stored' as the dtype of an
attribution_graph(m,"specimen/clt","a b",targets=5.5) -> expected targets as token ids, strings, or (label,
attribution_graph(m,"specimen/clt","a b",max_n_logits=0) -> expected max_n_logits to be at least 1, and
attribution_graph(m,"specimen/clt","a b",max_n_logits="x") -> expected max_n_logits to be a whole number,
attribution_graph(m,"specimen/clt","a b",max_feature_nodes=-1) -> expected max_feature_nodes to be at least 1
attribution_graph(m,"specimen/clt","a b",max_feature_nodes="x") -> expected max_feature_nodes to be a whole
m.embedding_vector("nope nope nope") -> expected 'nope nope nope' to be one token of specimen, found ['Ġno',
m.embedding_vector(99999) -> expected a token id in 0..2047, found 99999
m.embedding_vector(1.5) -> tokens: expected whole numbers, found 1.5; write ints, or a list of them
m.embed(None) -> expected token ids as an integer tensor [batch, position], found None; pass
m.embed(torch.tensor([[99999]])) -> expected token ids in 0..2047, found 99999 to 99999; encode the
m.project_to_vocab(None) -> expected residual states as a tensor [..., 192], found None; pass e.g.
m.project_to_vocab(torch.zeros(192),tokens=[99999]) -> logits: expected a token id in 0..2047, found 99999
m.project_to_vocab(torch.zeros(192),tokens="x") -> logits: tokens: expected whole numbers, found 'x'; write a
m.chat("x") -> expected a chat template of specimen in tokenizer_config.json or chat_template.jinja, found
m.pair("a","b") -> model.pair: expected an encoder-decoder model, found specimen, which reads
m.bind(5) -> expected hooks as a HookSpec, found 5; write
"""
CASES = [line.split(" -> ", 1) for line in TABLE.strip().splitlines()]


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What expressions of the table are about; `root` is where their files lie."""
    import torch
    import xarray as xr
    from safetensors.torch import save_file

    root = tmp_path_factory.mktemp("wrong")
    (root / "folder").mkdir()
    (root / "nostore").mkdir()
    for name in ("a_file", "nostore/notes.txt", "prompts.txt"):
        (root / name).write_text("x")
    (root / "listfacts.json").write_text(json.dumps([1, 2]))
    save_file({POINT: torch.zeros(4, 8)}, root / "good.safetensors")
    model = mizarr.Model.from_pretrained("specimen")
    new = mizarr.open_store(root / "new", durability="process")
    store = mizarr.open_store(root / "activations", durability="process")
    prompts = ["one two", "three four"]
    dataset = mizarr.capture(model, prompts, "blocks.*.hook_resid_post", store=store, progress=False)
    spec = mizarr.HookSpec()
    public = {name: getattr(mizarr, name) for name in mizarr.__all__}
    return public | {
        "Path": Path, "np": np, "torch": torch, "xr": xr, "nan": math.nan, "inf": math.inf,
        "root": root, "m": model, "new": new, "store": store, "ds": dataset, "S": spec, "P": POINT,
        "v": torch.zeros(192), "cache": model.forward(["one two"], spec.capture(POINT)),
        "d": mizarr.Dictionary.from_pretrained("specimen/sae"),
        "fw": lambda prompts="one two", hooks=None, **how: model.forward(prompts, hooks, **how),
        "iv": lambda change, point=POINT: model.forward("one two", spec.intervene(point, change)),
        "gen": lambda prompts="a", **how: mizarr.generate(model, prompts, **({"max_tokens": 1} | how)),
        "cap": lambda p="a", h=POINT, **how: mizarr.capture(
            model, p, h, **({"store": new, "progress": False} | how)
        ),
        "comp": lambda name="logit_lens", **how: mizarr.compute(
            name, **({"store": new, "prompts": ["a"]} | how)
        ),
    }  # fmt: skip


@pytest.mark.parametrize(("expression", "said"), CASES, ids=[expression for expression, _ in CASES])
def test_a_wrong_argument_is_told_in_one_line_and_leaves_nothing(expression, said, names, monkeypatch):
    monkeypatch.chdir(names["root"])
    with pytest.raises(MizarrError) as caught:
        eval(expression, names)
    told = str(caught.value)
    assert told.startswith(said) and "\n" not in told and len(told) < 1_500
    new, root = names["new"], names["root"]
    assert not list(new.records()) and not list(new.entries())
    assert {path.name for path in root.iterdir()} == {
        *("folder", "nostore", "a_file", "prompts.txt", "listfacts.json", "good.safetensors"),
        *("new", "activations"),
    }


REMEDIES = """
m.forward('a', P) -> mizarr.HookSpec().capture('blocks.0.hook_resid_post')
    m.forward('a', HookSpec().capture('blocks.0.hook_resid_post'))
m.forward('a', want='last') -> mizarr.logits(position=-1)
    m.forward('a', want=logits(position=-1))
run(m, 'a') -> [mizarr.Run(prompt)]
    run(m, [Run('a')])
run('specimen', [Run('a')]) -> mizarr.Model.from_pretrained('specimen')
    run(Model.from_pretrained('specimen'), [Run('a')])
Model('specimen') -> mizarr.Model.from_pretrained('specimen')
    Model.from_pretrained('specimen')
capture(m, 'a', P, store='later', progress=False) -> store=mizarr.open_store('activations')
    capture(m, 'a', P, store=open_store('later'), progress=False)
capture(m, 'a', P, store=store, dtype='float16') -> or leave it out
    capture(m, 'a', P, store=open_store('later'), progress=False)
m.embed([[1, 2]]) -> torch.tensor(model.tokenize(prompts))
    m.embed(torch.tensor(m.tokenize(['a'])))
d.encode({3: np.zeros((2, 192), 'f4')}) -> torch.as_tensor(states)
    d.encode({3: torch.as_tensor(np.zeros((2, 192), 'f4'))})
export(ds['resid_post'], 'one.npz') -> array.to_dataset()
    export(ds['resid_post'].to_dataset(), 'one.npz')
Knockout(5) -> [(-1, 0)]
    Knockout([(-1, 0)])
"""
"""What is wrong -> what its message says to write; below it, that written."""


LINES = REMEDIES.strip().split("\n")


@pytest.mark.parametrize(("wrong", "remedy"), list(zip(LINES[::2], LINES[1::2], strict=True)))
def test_what_a_message_says_to_do_works(wrong, remedy, names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expression, said = wrong.split(" -> ")
    with pytest.raises(MizarrError) as caught:
        eval(expression, names)
    assert said in str(caught.value)
    eval(remedy, names)
