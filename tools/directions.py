"""Package and module import cycles, and imports against the direction, of a checkout: python3 directions.py CHECKOUT"""

import ast
import sys
from collections import defaultdict
from pathlib import Path

root = Path(sys.argv[1]) / "src"
mods = {}
for p in root.rglob("*.py"):
    name = ".".join(p.relative_to(root).with_suffix("").parts)
    mods[name.removesuffix(".__init__")] = p
edges, late = defaultdict(set), defaultdict(set)
for name, p in mods.items():
    tree = ast.parse(p.read_text())
    inside = {x for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)) for x in ast.walk(n)}
    typing = {x for n in tree.body if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test) for x in ast.walk(n)}
    for n in ast.walk(tree):
        if isinstance(n, ast.ImportFrom) and n.module and n.module.startswith("forebay"):
            for a in n.names:
                target = f"{n.module}.{a.name}" if f"{n.module}.{a.name}" in mods else n.module
                (late if n in inside or n in typing else edges)[name].add(target)


def cycles(graph):
    order, low, stack, on, found, count = {}, {}, [], set(), [], [0]

    def visit(v):
        order[v] = low[v] = count[0]
        count[0] += 1
        stack.append(v)
        on.add(v)
        for w in graph.get(v, ()):
            if w not in order:
                visit(w)
                low[v] = min(low[v], low[w])
            elif w in on:
                low[v] = min(low[v], order[w])
        if low[v] == order[v]:
            part = []
            while True:
                w = stack.pop()
                on.discard(w)
                part.append(w)
                if w == v:
                    break
            if len(part) > 1:
                found.append(sorted(part))

    for v in list(graph):
        if v not in order:
            visit(v)
    return found


def package(m):
    parts = m.split(".")
    return parts[1] if len(parts) > 1 else "<root>"


everything = {m: edges[m] | late[m] for m in mods}
packages = defaultdict(set)
for m, targets in everything.items():
    for t in targets:
        if package(m) != package(t):
            packages[package(m)].add(package(t))
print("module cycles at import:", cycles({m: edges[m] for m in mods}))
print("module cycles with late and typing imports:", cycles(everything))
print("package cycles:", cycles({p: t for p, t in packages.items() if p != "<root>"}))
for p in sorted(packages):
    print(f"{p:12} -> {' '.join(sorted(packages[p]))}")
