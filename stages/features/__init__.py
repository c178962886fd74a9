"""Features: sparse dictionaries that read a model's activations and write to them.

dictionary, crosscoder   what a dictionary is, of one model's layers and of several places or models
layers/                  what it is made of: files, layout, the features of one layer, activations, scaling
formats/                 files of transcoders and autoencoders as others write them
export, download         files written as others read them; files from the hub
effects/                 features in single prompts, changed by hand, and by what they write
corpus/                  features of stored corpora: encoded, counted, with their strongest examples
pages/, labels           what a page of a feature shows, and what people call it
training/                dictionaries learnt from stored activations

Border: this room knows activations by hook point; importing it does not import torch.
"""
