"""The statements of a forward around one call, such as that of its experts.

Input: statements, and the NAME of a call ``self.NAME(...)`` among them. Output: either the statements without the summand that
the call gives to their result (`WithoutSummand`), or those before the call and those after it (`around_call`). An error or None
where the call is used otherwise, or where a rerun of the statements after it would read what they have changed.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from forebay.models.forward_source import called, expression, names_in, needed_by, returns_in, rewritten, text_of


class NotAddedError(Exception):
    """The experts' result is used otherwise than in a sum."""


class WithoutSummand:
    """The statements of a function without the summand that the call ``self.<name>(...)`` gives to what is returned.

    The statement `stop`, with the call's arguments in ``{}``, takes the place of the call. `rest` names the variable that the
    call's result is added to; None for nothing. The result is (rest of the sum or None, _stop).

    Raises:
        NotAddedError: the call's result is scaled, normed, or used in another way than as a summand.
    """

    def __init__(self, body: Sequence[ast.stmt], name: str, rest: str | None, stop: str):
        self._name, self._rest, self._stop = name, rest, stop
        # variables that have the call's result in them -> whether they have anything else
        self._sums: dict[str, bool] = {}
        self.body: list[ast.stmt] = []
        self.has_rest = False
        for statement in copy.deepcopy(list(body)):
            self._where = statement
            match statement:
                case ast.Assign([target], value) if self._is_in(value):
                    self._assign(target, self._without(value))
                case ast.Return(ast.Tuple([value, *_]) | (ast.expr() as value)) if self._is_in(
                    value
                ):  # GPT-OSS also returns its scores
                    kept = self._without(value)
                    self.has_rest = kept is not None
                    result = ast.Tuple([kept or ast.Constant(None), ast.Name("_stop", ast.Load())], ast.Load())
                    self._add(ast.Return(result))
                case ast.Assign() if not self._is_in(statement):
                    for written in names_in(statement, context=ast.Store):
                        self._sums.pop(written, None)
                    self._add(statement)
                case ast.If(ast.Call(ast.Name("isinstance"), [ast.Name(name), ast.Name("tuple")])) if (
                    name in self._sums
                ):
                    pass  # a block that returns more than hidden states, of which only these are here
                case _ if self._is_in(statement) or names_in(statement, context=ast.Store) & self._sums.keys():
                    raise NotAddedError
                case ast.Return():
                    raise NotAddedError
                case _:
                    self._add(statement)

    def _add(self, statement: ast.stmt) -> None:
        ast.copy_location(statement, self._where)
        self.body.append(statement)

    def _is_in(self, node: ast.AST) -> bool:
        return bool(names_in(node) & self._sums.keys()) or any(name == self._name for name, _ in called([node]))

    def _assign(self, target: ast.expr, kept: ast.expr | None) -> None:
        target = target.elts[0] if isinstance(target, ast.Tuple) else target
        if not isinstance(target, ast.Name):
            raise NotAddedError
        self._sums[target.id] = kept is not None
        if kept is not None:
            self._add(ast.Assign([target], kept))

    def _without(self, node: ast.expr) -> ast.expr | None:
        """An expression with the call's result in it, without that; None if nothing is left."""
        match node:
            case ast.Name(name) if name in self._sums:
                return node if self._sums[name] else None
            case ast.Call(args=arguments) if (self._name, node) in called([node]) and not any(
                map(self._is_in, arguments)
            ):
                for statement in ast.parse(self._stop.format(text_of(arguments))).body:
                    self._add(statement)
                return None if self._rest is None else ast.Name(self._rest, ast.Load())
            case ast.Call(ast.Attribute(value, "view" | "reshape" as method), arguments, []) if self._is_in(value):
                kept = self._without(value)
                return None if kept is None else ast.Call(ast.Attribute(kept, method, ast.Load()), arguments, [])
            case ast.BinOp(left, ast.Add(), right) if self._is_in(left) != self._is_in(right):
                summand, other = (left, right) if self._is_in(left) else (right, left)
                kept = self._without(summand)
                if kept is None:
                    return other
                return ast.BinOp(*((kept, node.op, other) if summand is left else (other, node.op, kept)))
        raise NotAddedError


def around_call(
    body: Sequence[ast.stmt], name: str, given: Collection[str]
) -> tuple[Callable[[str], list[ast.stmt]], list[ast.stmt], str] | None:
    """The statements before and after the call ``self.<name>(...)``, and the call's arguments.

    Args:
        given: local variables that there are before the first statement.

    Returns:
        A function that returns the statements before, which return ``(live, TEXT)``; the statements after, which read `_live`,
        and `_value` for the call; the text of the arguments. Live are all variables that these read; one that is only set under
        a condition is None without it. None if the call may run never or several times, if a statement before it returns, or if
        one after it writes into what is live.
    """
    calls = [call for called_name, call in called(body) if called_name == name]
    at = next((n for n, s in enumerate(body) if name in dict(called([s]))), None)
    if len(calls) != 1 or at is None:
        return None
    here, ahead, following = body[at], list(body[:at]), list(body[at + 1 :])
    if isinstance(here, ast.If) and name in dict(called(here.body)):  # GraniteMoeHybrid: if self.has_experts
        missing = f"if not ({ast.unparse(here.test)}): raise RuntimeError('a block without experts has no stages')"
        branch = [*ahead, *_statements([missing], here), *here.body, *following]
        return None if returns_in(here.orelse) else around_call(branch, name, given)
    parts = [n for n in ast.walk(here) if isinstance(n, _OPTIONAL)]
    if (
        not isinstance(here, (ast.Assign, ast.Return))
        or any(calls[0] in ast.walk(n) for n in parts)
        or returns_in(ahead)
    ):
        return None
    after = [*rewritten([here], {name: lambda _: "_value"}), *following]
    needed = needed_by(after)
    names = sorted(needed & {*_set_in(ahead), *given})
    if needed & _defined_in(ahead) or any(writes_into(after, n) for n in (*names, "_value")):
        return None
    live = "(" + "".join(f"{n}, " for n in names) + ")"
    # ERNIE 4.5 makes shared experts' results only where it has some.
    absent = [f"{n} = None" for n in names if n not in {*_always_set_in(ahead), *given}]

    def before(text: str) -> list[ast.stmt]:
        returned = ast.copy_location(ast.Return(expression(f"({live}, {text})", here)), here)
        return [*_statements(absent, here), *ahead, returned]

    unpack = _statements([f"{live} = _live"] if names else [], here)
    return before, [*unpack, *after], text_of([*calls[0].args, *calls[0].keywords])


def _set_in(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Variables that are set, but those of comprehensions, which are their own."""
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        if not isinstance(node, (ast.comprehension, *_SCOPES)):
            yield from _set_in(ast.iter_child_nodes(node))


def _always_set_in(statements: Iterable[ast.stmt]) -> set[str]:
    """Variables that assignments set, which no condition surrounds."""
    found: set[str] = set()
    for statement in statements:
        if isinstance(statement, ast.Assign):
            found |= names_in(*statement.targets, context=ast.Store)
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            found |= names_in(statement.target, context=ast.Store)
    return found


def _defined_in(statements: Iterable[ast.stmt]) -> set[str]:
    """Names that are bound otherwise than by an assignment or a loop."""
    found: set[str] = set()
    for node in (n for top in statements for n in ast.walk(top)):
        match node:
            case ast.Import(names) | ast.ImportFrom(names=names):
                found |= {(alias.asname or alias.name).partition(".")[0] for alias in names}
            case ast.FunctionDef(name=str(name)) | ast.ClassDef(name=str(name)) | ast.ExceptHandler(name=str(name)):
                found.add(name)
    return found


_SCOPES = (ast.Lambda, ast.FunctionDef, ast.ClassDef)
_OPTIONAL = (ast.IfExp, ast.BoolOp, ast.Lambda, ast.ListComp, ast.GeneratorExp, ast.DictComp, ast.SetComp)


def _statements(texts: Iterable[str], where: ast.AST) -> list[ast.stmt]:
    return [ast.copy_location(statement, where) for text in texts for statement in ast.parse(text).body]


def writes_into(statements: Sequence[ast.stmt], name: str) -> bool:
    """Whether they change the value of `name` in place, under this name or another one. A view counts as another value."""
    names = {name}
    for statement in statements:
        for node in ast.walk(statement):
            match node:
                case ast.AugAssign(target) | ast.Assign([ast.Subscript() as target]) if _root(target) in names:
                    return True
                case ast.Call(ast.Attribute(ast.Name(changed), method)) if changed in names and re.fullmatch(
                    "[a-z].*_", method
                ):
                    return True
        match statement:
            case ast.Assign([ast.Name(other)], ast.Name(same)) if same in names:
                names.add(other)
            case ast.Assign() | ast.AnnAssign():
                names -= names_in(statement, context=ast.Store)
    return False


def _root(target: ast.expr) -> str:
    """The name of a variable, or of one of which this is an element or an attribute."""
    while isinstance(target, (ast.Subscript, ast.Attribute)):
        target = target.value
    return target.id if isinstance(target, ast.Name) else ""
