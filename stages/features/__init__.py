"""Features: sparse dictionaries that read a model's activations and write to them.

dictionary, layer, activations, scaling   what a dictionary is, and its arithmetic
formats and the modules it lists          files of transcoders and autoencoders as others write them
single, layered, npz, names, files        what formats share
export, download                          files written as others read them; files from the hub
activity, injection, sweeps, alignment    features in single prompts, changed by hand, and by what they write
words                                     the tokens that features raise and lower by themselves
encode, sparse, statistics, examples      features of stored corpora
training                                  dictionaries learnt from stored activations

Border: this room knows activations by hook point; importing it does not import torch.
"""
