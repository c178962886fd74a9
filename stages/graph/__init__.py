"""Attribution graphs: how one prompt's tokens, features and errors bring about its next token. See DESIGN.md.

rows/                    the local replacement model of a prompt, as linear maps, and its rows of effects
options, prepare, node   what a graph is of, and computing it, each block of rows a cell in the store
pruning, quantile        what matters in it; numpy, block by block
logit_effects            which tokens the features raise and lower
graph                    the graph as users meet it
interventions            the model run with features set to other values
files/                   other programs' files

Border: models come from stages/forward, dictionaries from stages/features; importing this imports no torch.
"""
