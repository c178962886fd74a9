"""Features: sparse dictionaries that read a model's activations and write to them.

dictionary, crosscoder   dictionaries of one model's layers, and of several places or models
dictionary_experiment    base class of experiments that use a dictionary
layers/                  their parts: files, layout, the features of one layer, activations, scaling
formats/                 file formats of transcoders and autoencoders
export, download         writing the formats of other programs; downloads from the hub
effects/                 features in single prompts, interventions on them, and what they write
corpus/                  features of stored corpora: encoding, statistics, strongest examples
pages/, labels           contents of the pages of features, and names given by people
training/                training of dictionaries on stored activations

Border: this room knows activations by hook point; importing it does not import torch.
"""
