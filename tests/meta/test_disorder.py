"""No order of a set, or of a folder's files, reaches a program, a file or a message."""

import textwrap

import pytest

from tests.meta.disorder import disorder, files_of, package_of
from tests.meta.test_packages import PACKAGE, ROOT

FILES = {module: file.read_text("utf-8") for module, file in files_of(PACKAGE, ROOT).items()}


def test_nothing_depends_on_the_order_of_a_set():
    package = package_of(FILES)
    found = [
        f"{module}:{line}: {text}"
        for module, source in FILES.items()
        for line, text in disorder(source, module, package)
    ]
    assert found == [], "use a tuple, a dict or sorted()"


IN_ORDER = """
for name in {"wq", "wkv_b"} & set(w): out[name] = w[name]
for name in a.keys() & b.keys(): print(name)
for name in a.keys() - set(known): raise ValueError(name)
for item in a.items() & b.items(): print(item)
print(", ".join({"a", "b"}))
print(", ".join(map(str, frozenset(names))))
print(", ".join(f"{name}" for name in set(names)))
rows = list(set(names)); first = rows[0]
rows = [*set(names)]; print(rows)
rows = tuple({n for n in names}); print(rows)
first = next(iter(set(names)))
first = set(names).pop()
best = max(set(names), key=len)
best = sorted(set(names), key=len)
best = sorted(set(names), key=lambda name: len(name))
table = {name: 0 for name in set(names)}
table = dict.fromkeys(set(names))
text = f"unknown: {set(names)}"
text = "unknown: %s" % (set(a) ^ set(b))
text = str(set(names))
assert a == b, set(a) ^ set(b)
raise ValueError(set(names))
first, second = set(names)
rows += set(names)
rows.extend(set(names))
print(*set(names))
total = sum(size[name] for name in set(names))
known = set(names); rest = known - {"a"}; print([n for n in rest])
known = set(); known |= other; print(list(known))
if (known := set(names)): print(list(known))
for place, name in enumerate(set(names)): print(place, name)
for name in (a if a else set(names)): print(name)
for name in a or set(names): print(name)
for name in set(a).union(b).difference(c): print(name)
for name in set[str](): print(name)
for device in x.sharding.device_set: put(device)
axes = tuple(jax.typeof(x).manual_axis_type.varying); print(axes)
cpus = " ".join(map(str, os.sched_getaffinity(0)))
for file in folder.iterdir(): print(file)
names = [file.name for file in folder.glob("*")]; print(names[0])
for name in os.listdir(folder): print(name)
for root, folders, files in os.walk(folder): print(files)
with os.scandir(folder) as entries: pass
seed = hash(name)
groups[k] = set(); [print(list(group)) for group in groups.values()]
"""

ORDERLESS = """
for name in sorted({"wq", "wkv_b"} & set(w)): out[name] = w[name]
for name in ("wq", "wkv_b"): out[name] = w[name]
for name in dict.fromkeys(names): print(name)
found = len(set(names)) == 1 and "a" in set(names) and not set(a) <= set(b)
found = any(n == "a" for n in set(names)) or all({1, 2}) or bool(set(names))
found = max(set(steps), default=-1) + min(step for step in set(steps))
other = {n.lower() for n in set(names)} | frozenset(a); other.discard("b"); other.update(set(c))
rows = [n for n in set(names)]; print(sorted(rows))
best = sorted(set(names), key=lambda name: (len(name), name))
best = min(x.sharding.device_set, key=lambda device: device.id)
os.scandir(folder).close()
count = sum(1 for n in set(names)) + sum(len(n) for n in set(names))
(only,) = set(names)
table = {name: 0 for name in sorted(set(names))}
text = f"unknown: {sorted(set(names))}, {len(set(names))} in all"
files = sorted(p for p in folder.rglob("*") if p.is_file())
size = sum(p.stat().st_size for p in folder.rglob("*"))
for file in sorted(folder.iterdir()): print(file)
done = set(a) if a else set(); done.isdisjoint(b)
for node in ast.walk(tree): print(node)
x = x.at[rows].set(value); y = [x]; event.set(); print(list(event.set()))
names = list(table.keys()); print(names[0], list(a.keys()), [k for k in b.keys()])
if set(a) - set(b): raise ValueError(sorted(set(a) - set(b)))
"""


@pytest.mark.parametrize("line", IN_ORDER.strip().splitlines())
def test_a_use_in_order_is_seen(line):
    assert disorder(line), line
    in_function = "def f(a, b, names):\n" + textwrap.indent(line.replace("; ", "\n"), "    ")
    assert disorder(in_function), in_function


@pytest.mark.parametrize("line", ORDERLESS.strip().splitlines())
def test_a_use_without_order_is_accepted(line):
    assert disorder(line) == []


DECLARED = {
    "a.parts": """
        KNOWN = frozenset({"a", "b"})
        def found(x: int) -> set[str]: return {"a"} if x else set()
        def reads(names: Set[str], more: Iterable[str] = ()) -> bool: return "a" in names
        class Held:
            names: frozenset[str] = frozenset()
            steps: dict[int, set[str]]
            def __init__(self): self._seen: set[str] = set()
            def alive(self) -> set[str]: return self._seen
        """,
    "a": "from a.parts import KNOWN as EXPORTED",
}

USES = {
    "from a.parts import KNOWN\nprint(list(KNOWN))": 1,
    "from a import EXPORTED\nprint(list(EXPORTED))": 1,
    "from a import parts\nfor n in parts.found(1): print(n)": 1,
    "from a import parts\nn = parts.found(1)\nm = n | {'c'}\nprint([*m])": 1,
    "from a.parts import found as f\nprint(sorted(f(1)))": 0,
    "print(list(held.names), list(held.alive()), list(held._seen))": 3,
    "print(sorted(held.names), 'a' in held.alive(), len(held._seen))": 0,
    "print(list(held.steps[3]), held.steps)": 1,
    "for step, names in held.steps.items(): print(step, sorted(names))": 0,
    "for step, names in held.steps.items(): print(step, list(names))": 1,
    "for names in held.steps.values(): print(list(names))": 1,
    "def f(names: set[str] | None, more: 'frozenset[str]'):\n print(list(names), list(more))": 2,
    "def f(names: list[str]):\n print(list(names))": 0,
    "def f() -> list[str]:\n return [n for n in {'a', 'b'}]": 1,
    "def f() -> frozenset[str]:\n return frozenset({'a', 'b'})": 0,
    "def f(a):\n yield from set(a)": 1,
    "from a.parts import reads\nreads(set(x)), reads(names=set(x))": 0,
    "from a.parts import reads\nreads(y, set(x))\nreads(y, more=set(x))": 2,
    "unknown(set(x))": 1,
    "key = lambda x: set(x)": 1,
}


@pytest.mark.parametrize(("source", "number"), USES.items())
def test_declarations_of_the_package_are_followed(source, number):
    files = {name: textwrap.dedent(text) for name, text in DECLARED.items()}
    assert len(disorder(source, "b", package_of(files | {"b": source}))) == number
