"""Attribution graphs: direct effects of tokens, features and errors on a prompt's next token. See DESIGN.md.

rows/                    the local replacement model of a prompt, as linear maps, and its rows of effects
options, prepare, node   settings of a graph, and its computation in blocks of rows, each a cell in the store
pruning, quantile        nodes and edges with most of the influence; numpy, block by block
logit_effects            tokens whose logits each feature raises and lowers
graph                    classes and functions for users
interventions            the model run with features set to other values
files/                   files of circuit-tracer, its viewer, GraphML and Parquet

Border: models come from stages/forward, dictionaries from stages/features; importing this imports no torch.
"""
