"""The attribution graph of a prompt in cross-layer transcoders, and how much of the model it holds.

Prints:

    replacement 0.78, completeness 0.94
    237 nodes kept of 1994
"""

import mizarr

model = mizarr.Model.from_pretrained("specimen")
store = mizarr.open_store("activations")
graph = mizarr.attribution_graph(model, "specimen/clt", "The mother tongue of Raimu is", store=store)
kept = graph.prune(node_threshold=0.8, edge_threshold=0.98)
print(f"replacement {graph.replacement_score:.2f}, completeness {graph.completeness_score:.2f}")
print(kept.nodes.sizes["node"], "nodes kept of", graph.adjacency.shape[0])
