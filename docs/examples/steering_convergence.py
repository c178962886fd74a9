"""A pushed state, and how far it is from its way in the layers after.

Prints:

    blocks.1.hook_resid_post 0.42
    blocks.2.hook_resid_post 0.49
    blocks.3.hook_resid_post 0.55
    blocks.4.hook_resid_post 0.66
    blocks.5.hook_resid_post 0.67
"""

import mizarr

model = mizarr.Model.from_pretrained("specimen")
prompt = "The mother tongue of Danielle Darrieux is"
away = model.embedding_vector(" English") - model.embedding_vector(" French")
points = [mizarr.HookPoint.resid_post(layer) for layer in range(1, 6)]
push = mizarr.Add(away * 4.0, positions=(-1,))
plain = model.forward(prompt, mizarr.HookSpec().capture(*points))
pushed = model.forward(prompt, mizarr.HookSpec().capture(*points).intervene(points[0], push))
for point in points:
    distance = (pushed[point] - plain[point])[0, -1].norm() / plain[point][0, -1].norm()
    print(point, f"{float(distance):.2f}")
