"""Which token holds which character.

Prints:

    0 '<s>' 0 0
    1 'The' 0 3
    2 ' mother' 3 10
    3 ' t' 10 12
    4 'ong' 12 15
    5 'ue' 15 17
"""

import mizarr

found = mizarr.compute(
    "token_positions", store="activations", text="The mother tongue", characters=[4, 11]
).to_json()
for token in found["tokens"]:
    print(token["position"], repr(token["token"]), token["start"], token["end"])
