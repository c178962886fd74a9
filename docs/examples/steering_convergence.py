"""A pushed state, and how far it is from its way in the layers after.

Prints:

    blocks.1.hook_resid_post 0.53
    blocks.2.hook_resid_post 0.49
    blocks.3.hook_resid_post 0.51
    blocks.4.hook_resid_post 0.59
    blocks.5.hook_resid_post 1.00
"""

import mizarr

model = mizarr.Model.from_pretrained("specimen")
prompt = "The mother tongue of Danielle Darrieux is"
away = model.embedding_vector(" London") - model.embedding_vector(" French")
points = [mizarr.HookPoint.resid_post(layer) for layer in range(1, 6)]
push = mizarr.Add(away * 40.0, positions=(-1,))
plain = model.forward(prompt, mizarr.HookSpec().capture(*points))
pushed = model.forward(prompt, mizarr.HookSpec().capture(*points).intervene(points[0], push))
for point in points:
    distance = (pushed[point] - plain[point])[0, -1].norm() / plain[point][0, -1].norm()
    print(point, f"{float(distance):.2f}")
