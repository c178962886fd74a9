"""Attribution graphs: how one prompt's tokens, features and errors bring about its next token. See DESIGN.md.

frozen, replacement, sources     the local replacement model of a prompt, as explicit linear maps
targets, nodes, selection        which nodes there are, and which features get a row
attribute, rows                  the adjacency matrix, block by block, each block a cell in the store
influence, quantile, pruning     what matters in it; numpy, block by block
graph                            the graph as users meet it
interventions                    the model run with features set to other values
torch_file, viewer, tables       other programs' files

Border: models come from stages/forward, dictionaries from stages/features; importing this imports no torch.
"""
