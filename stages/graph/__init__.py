"""Attribution graphs: how one prompt's tokens, features and errors bring about its next token. See DESIGN.md.

frozen, replacement, sources     the local replacement model of a prompt, as explicit linear maps
targets, nodes, selection        which nodes there are, and which features get a row
attribute, node                  the adjacency matrix, block by block, each block a cell in the store
influence, quantile, pruning     what matters in it; numpy, block by block
graph                            the graph as users meet it
interventions                    the model run with features set to other values
logit_effects                    which tokens the features raise and lower
torch_file, viewer, tables       other programs' files
feature_taps, threads            how interventions and small batches are run

Border: models come from stages/forward, dictionaries from stages/features; importing this imports no torch.
"""
