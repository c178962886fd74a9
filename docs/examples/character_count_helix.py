"""Where, and in what shape, a model counts the characters of a line.

Prints:

    true: [0.2, 0.3, 0.9, 1.0, 0.3, 0.2]
    shuffled: [-0.0, -0.0, -0.0, -0.0, -0.0, -0.0]
"""

import mizarr

asked = mizarr.compute("character_count_helix", store="activations")
r2 = asked.result("decodability").r2
for counts in r2.counts.values:
    print(f"{counts}:", [round(float(x), 1) for x in r2.sel(counts=counts)])
