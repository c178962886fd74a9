"""Stages without a version, each with a change that moves its answer; run here and in processes of their own.

    python functions_for_tests.py FOLDER changed|unchanged|moved

prints, for every case, what its stage gives on an empty store in this process, and the version in its key.
"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import xarray as xr

import mizarr
from mizarr.pipeline import run, stage


@dataclass(frozen=True)
class Case:
    """mine, other: texts of two modules, `f` in the first is the stage. change: what is done to them."""

    mine: str
    change: str
    other: str = ""


CASES = {
    "a global": Case("K = 5\ndef f(x): return x * K", "mine.K = 7"),
    "a global read in a nested function": Case(
        "K = 5\ndef f(x):\n    def g(y):\n        return y * K\n    return g(x)", "mine.K = 7"
    ),
    "a global read in a lambda in a nested function": Case(
        "K = 5\ndef f(x):\n    def g():\n        return lambda y: y * K\n    return g()(x)", "mine.K = 7"
    ),
    "a global read in a comprehension": Case(
        "K = 5\ndef f(x): return x * sum([K for _ in range(3)])", "mine.K = 7"
    ),
    "a global read in a class inside": Case(
        "K = 5\ndef f(x):\n    class C:\n        k = K\n    return x * C.k", "mine.K = 7"
    ),
    "a global that shadows a built-in": Case("def f(x): return x * len('ab')", "mine.len = lambda _: 7"),
    "a global of another type": Case("K = 2\ndef f(x): return x * isinstance(K, int)", "mine.K = 2.0"),
    "the sign of zero": Case(
        "import math\nK = 0.0\ndef f(x): return x * math.copysign(1, K)", "mine.K = -0.0"
    ),
    "a default of a helper": Case(
        "def h(x, k=5): return x * k\ndef f(x): return h(x)", "mine.h.__defaults__ = (7,)"
    ),
    "a keyword default of a helper": Case(
        "def h(x, *, k=5): return x * k\ndef f(x): return h(x)", "mine.h.__kwdefaults__ = {'k': 7}"
    ),
    "a default changed in place": Case(
        "def h(x, k=[5]): return x * k[0]\ndef f(x): return h(x)", "mine.h.__defaults__[0][0] = 7"
    ),
    "a closure": Case(
        "def make(k):\n    def f(x): return x * k\n    return f\nf = make(5)",
        "mine.f.__closure__[0].cell_contents = 7",
    ),
    "a closure read further inside": Case(
        "def make(k):\n    def f(x): return (lambda: x * k)()\n    return f\nf = make([5, 6][0])",
        "mine.f.__closure__[0].cell_contents = 7",
    ),
    "a helper": Case("def h(x): return x * 5\ndef f(x): return h(x)", "mine.h = lambda x: x * 7"),
    "the code of a helper": Case(
        "def h(x): return x * 5\ndef g(x): return x * 7\ndef f(x): return h(x)",
        "mine.h.__code__ = mine.g.__code__",
    ),
    "a helper of a helper, in a circle": Case(
        "K = 5\ndef a(x, n): return b(x, n) * K\ndef b(x, n): return a(x, n - 1) if n else x\n"
        "def f(x): return a(x, 2)",
        "mine.K = 7",
    ),
    "a helper imported by name": Case(
        "from OTHER import h\ndef f(x): return h(x)", "mine.h = lambda x: x * 7", "def h(x): return x * 5"
    ),
    "a helper of another module": Case(
        "import OTHER\ndef f(x): return OTHER.h(x)", "other.h = lambda x: x * 7", "def h(x): return x * 5"
    ),
    "a global behind an imported helper": Case(
        "from OTHER import h\ndef f(x): return h(x)", "other.K = 7", "K = 5\ndef h(x): return x * K"
    ),
    "a number of another module": Case("import OTHER\ndef f(x): return x * OTHER.K", "other.K = 7", "K = 5"),
    "an import by name inside": Case(
        "def f(x):\n    from OTHER import K\n    return x * K", "other.K = 7", "K = 5"
    ),
    "a helper imported inside": Case(
        "def f(x):\n    from OTHER import h\n    return h(x)", "other.K = 7", "K = 5\ndef h(x): return x * K"
    ),
    "an attribute of a function": Case(
        "def h(x): return x * h.k\nh.k = 5\ndef f(x): return h(x)", "mine.h.k = 7"
    ),
    "a list changed in place": Case("K = [5]\ndef f(x): return x * sum(K)", "mine.K.append(2)"),
    "a dictionary changed in place": Case(
        "K = {'a': [5]}\ndef f(x): return x * K['a'][0]", "mine.K['a'][0] = 7"
    ),
    "the order of a dictionary": Case(
        "K = {'a': 5, 'b': 7}\ndef f(x): return x * next(iter(K.values()))", "mine.K['a'] = mine.K.pop('a')"
    ),
    "a set changed in place": Case("K = {5}\ndef f(x): return x * sum(K)", "mine.K.add(7)"),
    "an array changed in place": Case(
        "import numpy as np\nK = np.array([5.0])\ndef f(x): return x * K[0]", "mine.K[0] = 7"
    ),
    "an array of objects": Case(
        "import numpy as np\nK = np.array([5, 'a'], object)\ndef f(x): return x * K[0]", "mine.K[0] = 7"
    ),
    "a labelled array changed in place": Case(
        "import xarray as xr\nK = xr.DataArray([5.0], dims='k')\ndef f(x): return x * K.values[0]",
        "mine.K.values[0] = 7",
    ),
    "a class attribute": Case("class C:\n    k = 5\ndef f(x): return x * C.k", "mine.C.k = 7"),
    "an inherited class attribute": Case(
        "class B:\n    k = 5\nclass C(B): pass\ndef f(x): return x * C().k", "mine.B.k = 7"
    ),
    "a method": Case(
        "class C:\n    def m(self, x): return x * 5\ndef f(x): return C().m(x)",
        "mine.C.m = lambda self, x: x * 7",
    ),
    "a global read by a static method": Case(
        "K = 5\nclass C:\n    @staticmethod\n    def m(x): return x * K\ndef f(x): return C.m(x)",
        "mine.K = 7",
    ),
    "a global read by a property": Case(
        "K = 5\nclass C:\n    @property\n    def k(self): return K\nc = C()\ndef f(x): return x * c.k",
        "mine.K = 7",
    ),
    "an attribute of an instance": Case(
        "class C:\n    def __init__(self): self.k = 5\nc = C()\ndef f(x): return x * c.k", "mine.c.k = 7"
    ),
    "a slot of an instance": Case(
        "class C:\n    __slots__ = ('k',)\nc = C()\nc.k = 5\ndef f(x): return x * c.k", "mine.c.k = 7"
    ),
    "a bound method": Case(
        "class C:\n    k = 5\n    def m(self, x): return x * self.k\nm = C().m\ndef f(x): return m(x)",
        "mine.m.__self__.k = 7",
    ),
    "a field of a dataclass": Case(
        "from dataclasses import dataclass, field\n@dataclass\nclass C:\n    k: int = 5\n"
        "    rest: list = field(default_factory=list)\nc = C()\ndef f(x): return x * (c.k + len(c.rest))",
        "mine.c.rest.append(2)",
    ),
    "a field of a named tuple": Case(
        "from typing import NamedTuple\nclass C(NamedTuple):\n    k: int = 5\nc = C()\n"
        "def f(x): return x * c.k",
        "mine.c = mine.C(7)",
    ),
    "a member of an enumeration": Case(
        "from enum import Enum\nclass E(Enum):\n    A = 5\n    B = 7\nk = E.A\ndef f(x): return x * k.value",
        "mine.k = mine.E.B",
    ),
    "an attribute of a member": Case(
        "from enum import Enum\nclass E(Enum):\n    A = 1\n    def __init__(self, k): self._k = 5 * k\n"
        "def f(x): return x * E.A._k",
        "mine.E.A._k = 7",
    ),
    "a subclass of dict": Case(
        "class D(dict): pass\nd = D(k=5)\ndef f(x): return x * d['k']", "mine.d['k'] = 7"
    ),
    "what a subclass of dict gives for a missing name": Case(
        "K = 5\nclass D(dict):\n    def __missing__(self, key): return K\nd = D()\n"
        "def f(x): return x * d['k']",
        "mine.K = 7",
    ),
    "a metaclass": Case(
        "K = 5\nclass M(type):\n    def __call__(cls): return K\nclass C(metaclass=M): pass\n"
        "def f(x): return x * C()",
        "mine.K = 7",
    ),
    "a descriptor": Case(
        "class D:\n    k = 5\n    def __get__(self, obj, kind): return self.k\nclass C: d = D()\n"
        "def f(x): return x * C.d",
        "vars(mine.C)['d'].k = 7",
    ),
    "a method of a class above": Case(
        "class B:\n    def m(self): return 5\nclass C(B):\n    def m(self): return super().m()\n"
        "def f(x): return x * C().m()",
        "mine.B.m = lambda self: 7",
    ),
    "an array of text": Case(
        "import numpy as np\nK = np.array(['abcde' * 9], np.dtypes.StringDType())\n"
        "def f(x): return x * len(K[0])",
        "mine.K[0] = 'abcdefg' * 9",
    ),
    "an attribute of a labelled array": Case(
        "import xarray as xr\nK = xr.DataArray([1.0], dims='k', attrs={'k': 5})\n"
        "def f(x): return x * K.attrs['k']",
        "mine.K.attrs['k'] = 7",
    ),
    "an instance put into a library": Case(
        "import statistics\nclass C:\n    k = 5\nstatistics.planted = C()\n"
        "def f(x): return x * statistics.planted.k",
        "import statistics; statistics.planted.k = 7",
    ),
    "a generator seeded inside": Case(
        "import numpy as np\nSEED = 5\ndef f(x): return x * np.random.default_rng(SEED).integers(1000)",
        "mine.SEED = 7",
    ),
    "a partial": Case(
        "from functools import partial\ndef h(x, k): return x * k[0]\np = partial(h, k=[5])\n"
        "def f(x): return p(x)",
        "mine.p.keywords['k'][0] = 7",
    ),
    "a getter": Case(
        "from operator import itemgetter\ng = itemgetter(0)\ndef f(x): return x * g([5, 7])",
        "from operator import itemgetter; mine.g = itemgetter(1)",
    ),
    "behind a decorator": Case(
        "from functools import wraps\nK = 5\ndef twice(h):\n    @wraps(h)\n    def g(x): return 2 * h(x)\n"
        "    return g\n@twice\ndef h(x): return x * K\ndef f(x): return h(x)",
        "mine.K = 7",
    ),
    "behind a library's decorator": Case(
        "from contextlib import contextmanager\nK = 5\n@contextmanager\ndef h(): yield K\n"
        "def f(x):\n    with h() as k:\n        return x * k",
        "mine.K = 7",
    ),
    "another stage without a version": Case(
        "from mizarr.pipeline import stage\nK = 5\n"
        "@stage(inputs={'x': ('n',)}, outputs={'y': ('n',)})\ndef g(x): return x * K\ndef f(x): return g(x)",
        "mine.K = 7",
    ),
    "the version of another stage": Case(
        "from mizarr.pipeline import stage\n"
        "@stage(version=1, inputs={'x': ('n',)}, outputs={'y': ('n',)})\ndef g(x): return x * 5\n"
        "def f(x): return g(x)",
        "from mizarr.pipeline import stage\n"
        "mine.g = stage(version=2, inputs={'x': ('n',)}, outputs={'y': ('n',)}, name='g')(lambda x: x * 7)",
    ),
    "a library's function replaced": Case(
        "import statistics\ndef f(x): return x * statistics.median([5])",
        "import statistics; statistics.median = lambda _: 7",
    ),
    "a pattern": Case(
        "import re\nP = re.compile('a')\ndef f(x): return x * len(P.findall('aabbb'))",
        "import re; mine.P = re.compile('b')",
    ),
    "a path": Case(
        "from pathlib import Path\nP = Path('a')\ndef f(x): return x * len(P.name)",
        "from pathlib import Path; mine.P = Path('abc')",
    ),
    "a name assigned later": Case(
        "def f(x):\n    try:\n        return x * K\n    except NameError:\n        return x", "mine.K = 7"
    ),
}
"""What a function reads, and a change to it."""

REFUSED = {
    "a generator of random numbers": "import numpy as np\nR = np.random.default_rng(0)\n"
    "def f(x): return x * R.random()",
    "an iterator": "G = iter([5, 7])\ndef f(x): return x * next(G)",
    "a generator": "G = (k for k in (5, 7))\ndef f(x): return x * next(G)",
    "an open file": "import io\nF = io.StringIO('57')\ndef f(x): return x * len(F.read())",
    "open": "def f(x): return x * len(open(__file__).read())",
    "a global that is written": "N = 0\ndef f(x):\n    global N\n    N += 1\n    return x * N",
    "a closure that is written": "def make():\n    n = 0\n    def f(x):\n        nonlocal n\n        n += 1\n"
    "        return x * n\n    return f\nf = make()",
    "a closure that is written further inside": "def make():\n    n = 0\n    def f(x):\n        def g():\n"
    "            nonlocal n\n            n += 1\n        g()\n        return x * n\n    return f\nf = make()",
    "results remembered": "from functools import cache\nK = 5\n@cache\ndef h(): return K\n"
    "def f(x): return x * h()",
    "globals()": "K = 5\ndef f(x): return x * globals()['K']",
    "eval": "K = 5\ndef f(x): return x * eval('K')",
    "the globals of a helper": "K = 5\ndef h(): pass\ndef f(x): return x * h.__globals__['K']",
    "the environment": "import os\ndef f(x): return x * float(os.environ.get('K', 5))",
    "the environment by name": "from os import getenv\ndef f(x): return x * float(getenv('K', 5))",
    "a computed name of a module": "import OTHER\ndef f(x): return x * getattr(OTHER, 'K')",
    "a module put into a variable": "import OTHER\ndef f(x):\n    m = OTHER\n    return x * m.K",
    "an attribute of a module that is written": "import OTHER\ndef f(x):\n    OTHER.K = 7\n    return x",
    "an import of a module inside": "def f(x):\n    import OTHER\n    return x * OTHER.K",
    "an import by a computed name": "import importlib\n"
    "def f(x): return x * importlib.import_module('OTHER').K",
    "an instance of a library's class": "import threading\nK = threading.Lock()\n"
    "def f(x): return x * K.locked()",
    "an instance of a class of a library's": "class E(Exception): pass\nK = E(5)\n"
    "def f(x): return x * K.args[0]",
    "a module as a default": "import OTHER\ndef h(m=OTHER): return m.K\ndef f(x): return x * h()",
    "objects in a labelled array": "import numpy as np, xarray as xr\n"
    "K = xr.DataArray(np.array([object()]), dims='k')\ndef f(x): return x * K.size",
    "a function compiled from another": "import numpy as np\nh = np.frompyfunc(lambda x: 5 * x, 1, 1)\n"
    "def f(x): return x * h(1)",
    "annotations": "class C:\n    k: 5\ndef f(x): return x * len(C.__annotations__)",
    "a helper that does so": "import numpy as np\nR = np.random.default_rng(0)\ndef h(): return R.random()\n"
    "def f(x): return x * h()",
    "a default of a helper that does so": "def h(k=iter([5, 7])): return next(k)\ndef f(x): return x * h()",
}
"""What has no identity."""


def modules(
    folder: Path, name: str, mine: str, other: str = "K = 5", indent: int = 0
) -> tuple[ModuleType, ModuleType]:
    """Both modules of a case, written into a folder on the path and imported.

    indent: empty lines before them.
    """
    stem = "".join(letter if letter.isalnum() else "_" for letter in name)
    for suffix, text in (("mine", mine), ("other", other)):
        named = text.replace("OTHER", f"{stem}_other")
        (folder / f"{stem}_{suffix}.py").write_text("\n" * indent + named + "\n")
    importlib.invalidate_caches()
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return importlib.import_module(f"{stem}_mine"), importlib.import_module(f"{stem}_other")


def declared(mine: ModuleType) -> Any:
    """The stage of a case; it has no version."""
    return stage(inputs={"x": ("n",)}, outputs={"y": ("n",)}, name="f")(mine.f)


def answer(function: Any, store: Any) -> float:
    """What the stage gives for 1, stored or computed."""
    node = function.on(x=xr.DataArray([1.0], dims="n", name="x"))
    run(node, store, threads=1)
    return float(node.open(store)["y"][0])


def main(folder: Path, how: str) -> dict[str, Any]:
    """Every case in this process: case -> [answer, version]. how: "moved" is unchanged, in another order and
    on other lines."""
    told = {}
    for name in reversed(CASES) if how == "moved" else CASES:
        case = CASES[name]
        mine, other = modules(folder, name, case.mine, case.other, indent=3 if how == "moved" else 0)
        if how == "changed":
            exec(case.change, {"mine": mine, "other": other})
        function = declared(mine)
        store = mizarr.open_store(folder / f"store-{len(told)}", durability="process")
        told[name] = [answer(function, store), function.key_version]
    return told


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]), sys.argv[2])))
