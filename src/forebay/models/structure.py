"""Parts of transformers modules, read from the source of their forward methods.

Input: a class. Output: functions that run a part of its forward, statement by statement as the class has it, so that no family
has to be known by name; None where the source does not have the structure. A decoder layer is cut in two where a single value
passes from one half to the other (`halves_of`); a MoE block also returns what its router said, or is cut in two at its experts
(`routing_of`). Made functions have the file and the line numbers of the original, so tracebacks show the family's own code.
"""

from __future__ import annotations

import ast
import copy
import inspect
import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

Call = Callable[[ast.Call], str]
"""The text of the expression that takes the place of a call."""


@dataclass(frozen=True, eq=False)
class ForwardSource:
    """A function and its syntax tree, without docstring and decorators.

    Attributes:
        decorators: those that do more than documentation, outermost first.
    """

    function: FunctionType
    tree: ast.FunctionDef
    decorators: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether the statements are all that runs: decorators do no more than take arguments by their old names."""
        return all(name == "deprecate_kwarg" for name in self.decorator_names)

    @property
    def decorator_names(self) -> list[str]:
        """Names of `decorators`, without arguments."""
        return [decorator.partition("(")[0] for decorator in self.decorators]

    def decorated(self, made: FunctionType) -> Callable[..., Any]:
        """`made`, a function of this source, inside the original's decorators."""
        function: Callable[..., Any] = made
        for decorator in reversed(self.decorators):
            function = eval(decorator, self.function.__globals__)(function)
        return function

    @property
    def parameters(self) -> frozenset[str]:
        """Names of all parameters but ``self``."""
        a = self.tree.args
        every = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
        return frozenset(arg.arg for arg in every) - {"self"}

    def make(self, body: Sequence[ast.stmt], *parameters: str, own: bool = False) -> FunctionType:
        """A function of `body` in the original's module: ``f(self, *parameters)``, with `own` followed by its own parameters."""
        arguments = copy.copy(self.tree.args)
        after = arguments.args[1:] if own else []
        if not own:
            arguments = ast.arguments([], [], None, [], [], None, [])
        arguments.args = [ast.arg("self"), *map(ast.arg, parameters), *after]
        tree = ast.copy_location(ast.FunctionDef(self.tree.name, arguments, list(body), []), self.tree)
        made = FunctionType(_code(tree, self.function), self.function.__globals__)
        if own:
            made.__defaults__, made.__kwdefaults__ = self.function.__defaults__, self.function.__kwdefaults__
        return made


def source_of(function: Any) -> ForwardSource | None:
    """The source of a function inside transformers' decorators; None if there is none, or if it is not what runs."""
    function = own_function(function)
    try:
        lines, first = inspect.getsourcelines(function)
        # An indented method keeps its indentation, which texts of several lines contain, in a block of its own.
        indented = lines[0][:1].isspace()
        before = "\n" * (first - 1 - indented) + "if True:\n" * indented
        tree: ast.AST = ast.parse(before + "".join(lines)).body[0]
        tree = tree.body[0] if isinstance(tree, ast.If) else tree
    except (OSError, TypeError, SyntaxError):
        return None
    if not isinstance(tree, ast.FunctionDef) or not isinstance(function, FunctionType) or function.__closure__:
        return None
    decorators = tuple(d for d in map(ast.unparse, tree.decorator_list) if not d.startswith("auto_docstring"))
    tree.decorator_list = []
    # A file that was changed since its import is not what runs. The instructions themselves depend on the file's imports.
    code = _code(tree, function)
    if any(getattr(code, f) != getattr(function.__code__, f) for f in ("co_names", "co_varnames", "co_consts")):
        return None
    if ast.get_docstring(tree) is not None:
        tree.body = tree.body[1:]
    return ForwardSource(function, tree, decorators)


def own_function(function: Any) -> Any:
    """A function inside the wrappers that transformers puts on it, such as 5.23's on the forward of every decoder layer."""

    def is_foreign(wrapper: Any) -> bool:
        return not getattr(wrapper, "__globals__", {}).get("__name__", "").startswith("transformers.")

    return inspect.unwrap(function, stop=is_foreign)


def _code(tree: ast.FunctionDef, original: FunctionType) -> CodeType:
    module = ast.fix_missing_locations(ast.Module([tree], []))
    constants = compile(module, original.__code__.co_filename, "exec", dont_inherit=True).co_consts
    return next(c for c in constants if isinstance(c, CodeType) and c.co_name == tree.name)


# --- reading ----------------------------------------------------------------------------------------------------------


def called(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, ast.Call]]:
    """Each call ``self.NAME(...)`` below `nodes`, with its NAME."""
    for node in (n for top in nodes for n in ast.walk(top)):
        match node:
            case ast.Call(ast.Attribute(ast.Name("self"), name)):
                yield name, node


def _names(*nodes: ast.AST, context: type[ast.expr_context] = ast.Load) -> set[str]:
    found = (n for top in nodes for n in ast.walk(top) if isinstance(n, ast.Name))
    return {n.id for n in found if isinstance(n.ctx, context)}


def _needed(statements: Sequence[ast.stmt]) -> set[str]:
    """Names that the statements may read before they write them."""
    needed: set[str] = set()
    written: set[str] = set()
    for statement in statements:
        needed |= _names(statement) - written
        if isinstance(statement, ast.AugAssign):
            needed |= _names(statement.target, context=ast.Store) - written
        if isinstance(statement, (ast.Assign, ast.AnnAssign)):
            written |= _names(statement, context=ast.Store)
    return needed


def _returns(statements: Sequence[ast.stmt]) -> list[ast.Return]:
    return [node for top in statements for node in ast.walk(top) if isinstance(node, ast.Return)]


def _returns_a_tuple(statements: Sequence[ast.stmt]) -> bool:
    values = [node.value for node in _returns(statements)]
    names = {value.id for value in values if isinstance(value, ast.Name)}
    for node in (n for top in statements for n in ast.walk(top)):
        match node:
            case ast.Assign([ast.Name(name)], ast.Tuple()) if name in names:
                return True
    return not values or any(value is None or isinstance(value, ast.Tuple) for value in values)


# --- writing ----------------------------------------------------------------------------------------------------------


class _Rewriter(ast.NodeTransformer):
    def __init__(self, calls: Mapping[str, Call], result: str | None):
        self._calls, self._result = calls, result

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = next((name for name, found in called([node]) if found is node), None)
        return node if name is None or name not in self._calls else expression(self._calls[name](node), node)

    def visit_Return(self, node: ast.Return) -> ast.AST:
        self.generic_visit(node)
        if self._result is not None:
            node.value = expression(self._result.format(ast.unparse(node.value or ast.Constant(None))), node)
        return node


def rewritten(body: Sequence[ast.stmt], calls: Mapping[str, Call], result: str | None = None) -> list[ast.stmt]:
    """A copy of `body` with other calls of ``self.NAME(...)``, and with `result` in place of what is returned (``{}`` in it)."""
    rewriter = _Rewriter(calls, result)
    return [rewriter.visit(copy.deepcopy(statement)) for statement in body]


def expression(text: str, where: ast.AST) -> ast.expr:
    """The expression `text` at the line of `where`."""
    made = ast.parse(text, mode="eval").body
    for node in ast.walk(made):
        ast.copy_location(node, where)
    return made


def _text(nodes: Iterable[ast.AST]) -> str:
    return ", ".join(map(ast.unparse, nodes))


def _without_hooks(call: ast.Call) -> str:
    return f"{ast.unparse(call.func)}.forward({_text([*call.args, *call.keywords])})"


class _NotAddedError(Exception):
    """The experts' result is used otherwise than in a sum."""


class _Stopped:
    """The statements of a function without the summand that the call ``self.<name>(...)`` gives to what is returned.

    The statement `stop`, with the call's arguments in ``{}``, takes the place of the call. `rest` names the variable that the
    call's result is added to; None for nothing. The result is (rest of the sum or None, _stop).

    Raises:
        _NotAddedError: the call's result is scaled, normed, or used in another way than as a summand.
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
                    for written in _names(statement, context=ast.Store):
                        self._sums.pop(written, None)
                    self._add(statement)
                case ast.If(ast.Call(ast.Name("isinstance"), [ast.Name(name), ast.Name("tuple")])) if (
                    name in self._sums
                ):
                    pass  # a block that returns more than hidden states, of which only these are here
                case _ if self._is_in(statement) or _names(statement, context=ast.Store) & self._sums.keys():
                    raise _NotAddedError
                case ast.Return():
                    raise _NotAddedError
                case _:
                    self._add(statement)

    def _add(self, statement: ast.stmt) -> None:
        ast.copy_location(statement, self._where)
        self.body.append(statement)

    def _is_in(self, node: ast.AST) -> bool:
        return bool(_names(node) & self._sums.keys()) or any(name == self._name for name, _ in called([node]))

    def _assign(self, target: ast.expr, kept: ast.expr | None) -> None:
        target = target.elts[0] if isinstance(target, ast.Tuple) else target
        if not isinstance(target, ast.Name):
            raise _NotAddedError
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
                for statement in ast.parse(self._stop.format(_text(arguments))).body:
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
        raise _NotAddedError


def _around(
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
        return None if _returns(here.orelse) else _around(branch, name, given)
    parts = [n for n in ast.walk(here) if isinstance(n, _OPTIONAL)]
    if not isinstance(here, (ast.Assign, ast.Return)) or any(calls[0] in ast.walk(n) for n in parts) or _returns(ahead):
        return None
    after = [*rewritten([here], {name: lambda _: "_value"}), *following]
    needed = _needed(after)
    names = sorted(needed & {*_set_in(ahead), *given})
    if needed & _defined_in(ahead) or any(_writes_into(after, n) for n in (*names, "_value")):
        return None
    live = "(" + "".join(f"{n}, " for n in names) + ")"
    # ERNIE 4.5 makes shared experts' results only where it has some.
    absent = [f"{n} = None" for n in names if n not in {*_always_set_in(ahead), *given}]

    def before(text: str) -> list[ast.stmt]:
        returned = ast.copy_location(ast.Return(expression(f"({live}, {text})", here)), here)
        return [*_statements(absent, here), *ahead, returned]

    unpack = _statements([f"{live} = _live"] if names else [], here)
    return before, [*unpack, *after], _text([*calls[0].args, *calls[0].keywords])


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
            found |= _names(*statement.targets, context=ast.Store)
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            found |= _names(statement.target, context=ast.Store)
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


# --- decoder layers ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Halves:
    """A decoder layer's forward in two: x2, *passed = first(x, ...); x3 = second(x2, **given). The layer returns x3, *passed.

    Attributes:
        first, second: names of what each half calls as ``self.NAME(...)``, in order.
        passed: what the first half makes and the layer returns after the hidden states, such as the positions that GLM-5's next
            layer attends to. Where there is any, the first half returns a tuple.
        given: parameters of the layer that the second half reads, and their defaults; DeepSeek-V4 routes by `input_ids`.
        keeps_dtype: the second half asks its own x2 for the dtype that the layer was given.
    """

    first: tuple[str, ...]
    second: tuple[str, ...]
    passed: tuple[str, ...]
    given: Mapping[str, Any]
    keeps_dtype: bool
    _source: ForwardSource
    _head: Sequence[ast.stmt]
    _tail: Sequence[ast.stmt]
    _carried: str

    def attention(self, direct: str | None = None) -> FunctionType:
        """``f(layer, x, **keywords) -> x2``, or (x2, *passed); skips the module hooks of the mixer `direct`."""
        calls = {} if direct is None else {direct: _without_hooks}
        result = f"({self._carried}, {', '.join(self.passed)})" if self.passed else self._carried
        last = self._tail[0]
        returned = ast.copy_location(ast.Return(expression(result, last)), last)
        return self._source.make([*rewritten(self._head, calls), returned], own=True)

    def feed_forward(self) -> FunctionType:
        """``f(layer, x2, **given) -> x3``."""
        return self._source.make(self._tail, self._carried, *self.given)

    def moe(self, block: str) -> FunctionType:
        """``f(layer, x2, run, experts, **given) -> (x3, logits, ids)``, which calls ``run(layer.<block>, experts, normed)``; see
        `RoutedForward.block`."""

        def run(call: ast.Call) -> str:
            return f"(_out := _run({ast.unparse(call.func)}, _experts, {_text([*call.args, *call.keywords])}))[0]"

        return self._source.make(
            rewritten(self._tail, {block: run}, "({}, _out[1], _out[2])"),
            self._carried,
            "_run",
            "_experts",
            *self.given,
        )

    def front(self, block: str, shared: bool) -> FunctionType | None:
        """``f(layer, x2, run) -> (residual, (rows, ids, weights, logits))`` with the ``run`` of `RoutedForward.front`.

        None if the block's result is not just added, or if the half reads more than x2.
        """
        stop = f"_shared, _stop = _run(self.{block}, {{}})"
        try:
            stopped = _Stopped(self._tail, block, "_shared" if shared else None, stop)
        except _NotAddedError:
            return None
        return None if self.given else self._source.make(stopped.body, self._carried, "_run")

    def stages(self, block: str) -> tuple[FunctionType, FunctionType] | None:
        """The second half before and after its block: ``f(layer, x2, run, **given) -> (live, run(layer.<block>, ...))``, and
        ``g(layer, live, y) -> x3``, for the block's result `y`. None: see `_around`."""
        found = _around(self._tail, block, {self._carried, *self.given})
        if found is None:
            return None
        before, after, arguments = found
        front = before(f"_run(self.{block}, {arguments})")
        return self._source.make(front, self._carried, "_run", *self.given), self._source.make(after, "_live", "_value")

    def calls_once(self, block: str) -> bool:
        """Whether the second half calls the module `block` once, with hidden states and what it was given."""
        calls = [call for name, call in called(self._tail) if name == block]
        return (
            len(calls) == 1
            and len(calls[0].args) == 1
            and all(k.arg is not None and ast.unparse(k.value) in self.given for k in calls[0].keywords)
        )

    def arguments_of(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """`given` in a layer's keyword arguments."""
        return {name: keywords.get(name, default) for name, default in self.given.items()}


def halves_of(forward: Any) -> Halves | None:
    """The two halves of a decoder layer's forward.

    The cut comes after a statement that leaves one value to all later ones, where these read the fewest parameters: before the
    mixer, they would read what the model gives its layers. So the mixer is in the first half, and the residual sum.
    """
    source = source_of(forward)
    if source is None or not source.is_whole or len(source.tree.args.args) < 2:
        return None
    cuts = (_cut(source, at) for at in range(1, len(source.tree.body)))
    return min((cut for cut in cuts if cut is not None), key=lambda cut: len(cut.given), default=None)


def _cut(source: ForwardSource, at: int) -> Halves | None:
    """The halves before and after statement `at`; None if more than one value passes."""
    head, tail = source.tree.body[:at], source.tree.body[at:]
    x = source.tree.args.args[1].arg
    written = _names(*head, context=ast.Store)
    tail, passed = _without_passed(tail, written)
    dtypes = [s for n, s in enumerate(head) if _is_dtype_of(s, x) and x not in _names(*head[:n], context=ast.Store)]
    known = _names(*dtypes, context=ast.Store) - _names(*(s for s in head if s not in dtypes), context=ast.Store)
    needed = _needed(tail) & (written | source.parameters)
    carried, given = (needed & written) - known, needed - written
    first, second = (tuple(dict.fromkeys(name for name, _ in called(part))) for part in (head, tail))
    if len(carried) != 1 or not first or not second or _returns(head) or _returns_a_tuple(tail):
        return None
    if _writes_into(tail, *carried):  # of its caller's, which a rerun reads again
        return None
    defaults = _defaults(source.function, given - {x})
    if x in given or defaults is None:
        return None
    name = carried.pop()
    dtypes = [s for s in dtypes if _names(s, context=ast.Store) & needed & known]
    before = [_Renamed(x, name).visit(copy.deepcopy(s)) for s in dtypes]
    return Halves(first, second, passed, defaults, bool(dtypes), source, head, [*before, *tail], name)


def _writes_into(statements: Sequence[ast.stmt], name: str) -> bool:
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
                names -= _names(statement, context=ast.Store)
    return False


def _root(target: ast.expr) -> str:
    """The name of a variable, or of one of which this is an element or an attribute."""
    while isinstance(target, (ast.Subscript, ast.Attribute)):
        target = target.value
    return target.id if isinstance(target, ast.Name) else ""


def _without_passed(tail: list[ast.stmt], written: set[str]) -> tuple[list[ast.stmt], tuple[str, ...]]:
    """A second half that returns hidden states alone, and the names in `written` that it does nothing with but to return them."""
    match tail[-1]:
        case ast.Return(ast.Tuple([value, *others])) if others and all(isinstance(o, ast.Name) for o in others):
            names = tuple(o.id for o in others if isinstance(o, ast.Name))
            alone = [*tail[:-1], ast.copy_location(ast.Return(value), tail[-1])]
            used = _names(*alone) | _names(*alone, context=ast.Store)
            if written.issuperset(names) and not used.intersection(names):
                return alone, names
    return tail, ()


def _is_dtype_of(statement: ast.stmt, x: str) -> bool:
    match statement:
        case ast.Assign([ast.Name()], ast.Attribute(ast.Name(name), "dtype")):
            return name == x
    return False


def _defaults(function: FunctionType, names: set[str]) -> dict[str, Any] | None:
    """The defaults of parameters that are given by keyword, in their order; None if one may stand for several arguments."""
    found = inspect.signature(function).parameters
    several = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    if any(found[name].kind in several for name in names):
        return None
    return {name: None if p.default is p.empty else p.default for name, p in found.items() if name in names}


class _Renamed(ast.NodeTransformer):
    def __init__(self, old: str, new: str):
        self._old, self._new = old, new

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.copy_location(ast.Name(self._new, node.ctx), node) if node.id == self._old else node


# --- MoE blocks -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class RoutedForward:
    """The forward of a MoE block that calls ``self.experts(rows, ids, weights)``.

    Attributes:
        router: name of the module that routes.
        outputs: what it returns, in its order: "logits", "weights", "ids" or "" for anything else; ("logits",) for logits alone.
    """

    router: str
    outputs: tuple[str, ...]
    _source: ForwardSource

    def block(self, direct: bool) -> FunctionType:
        """``f(block, experts, x) -> (what the block returns, logits or None, ids)``; `direct` skips the router's module hooks.

        It calls ``experts(block.experts, rows, ids, weights)``.
        """
        return self._source.make(self._rewritten(direct, f"({{}}, {self._logits}, _ids)"), "_experts", own=True)

    def front(self, direct: bool) -> tuple[FunctionType, bool] | None:
        """``f(block, x) -> (shared or None, (rows, ids, weights, logits))``, and whether there is a shared part.

        None if the result of the experts is not just added.
        """
        body = self._rewritten(direct, None, name_ids=False)
        try:
            stopped = _Stopped(body, "experts", None, f"_stop = (*({{}},), {self._logits})")
        except _NotAddedError:
            return None
        return self._source.make(stopped.body, own=True), stopped.has_rest

    def stages(self, direct: bool) -> tuple[FunctionType, FunctionType] | None:
        """The forward before and after the experts: ``f(block, x, ...) -> (live, (rows, ids, weights, logits))``, and
        ``g(block, live, y) -> what the block returns``, for the experts' result `y`.

        None if the router returns no logits, or see `_around`.
        """
        body = self._rewritten(direct, None, name_ids=False)
        found = _around(body, "experts", self._source.parameters)
        if found is None or self._logits == "None":
            return None
        before, after, arguments = found
        return (
            self._source.make(before(f"({arguments}, {self._logits})"), own=True),
            self._source.make(after, "_live", "_value"),
        )

    def output(self, logits: Any, ids: Any) -> Any:
        """The router's output without weights, as its hooks get it."""
        if self.outputs == ("logits",):
            return logits
        return tuple({"logits": logits, "ids": ids}.get(name) for name in self.outputs)

    def logits_and_ids(self, output: Any) -> tuple[Any, Any]:
        """Both of the router's output. Raises ValueError if it does not have both."""
        return output[self.outputs.index("logits")], output[self.outputs.index("ids")]

    @property
    def _logits(self) -> str:
        if self.outputs == ("logits",):
            return "_route"
        return f"_route[{self.outputs.index('logits')}]" if "logits" in self.outputs else "None"

    def _rewritten(self, direct: bool, result: str | None, name_ids: bool = True) -> list[ast.stmt]:
        def route(call: ast.Call) -> str:
            return f"(_route := {_without_hooks(call) if direct else ast.unparse(call)})"

        def experts(call: ast.Call) -> str:
            rows, ids, weights = map(ast.unparse, call.args)
            return f"_experts(self.experts, {rows}, (_ids := {ids}), {weights})"

        return rewritten(
            self._source.tree.body, {self.router: route} | ({"experts": experts} if name_ids else {}), result
        )


def routing_of(forward: Any, modules: Container[str]) -> RoutedForward | None:
    """How a MoE block routes: its experts are called once, with ids and weights that come from a call of its router.

    Args:
        modules: names of the block's modules.
    """
    source = source_of(forward)
    if source is None or not source.is_whole:
        return None
    calls = [call for name, call in called(source.tree.body) if name == "experts"]
    if len(calls) != 1 or len(calls[0].args) != 3 or calls[0].keywords:
        return None
    roles = {"ids": calls[0].args[1], "weights": calls[0].args[2]}
    wanted = _names(*roles.values())
    before = [s for s in source.tree.body if s.lineno < calls[0].lineno]
    for statement in reversed(before):
        branches = _alternatives(statement)
        if branches is None or not _names(statement, context=ast.Store) & wanted:
            continue
        found = [_routed(branch, roles, modules) for branch in branches]
        if found[0] is not None and all(routed == found[0] for routed in found):
            return RoutedForward(*found[0], source)
        wanted |= _names(*(branch.value for branch in branches))
    return None


def _alternatives(statement: ast.stmt) -> list[ast.Assign] | None:
    """An assignment, or those of which one is run: DeepSeek-V4 gives some of its routers the tokens too. None for others."""
    match statement:
        case ast.Assign():
            return [statement]
        case ast.If(body=[ast.Assign() as first], orelse=[ast.Assign() as second]):
            return [first, second]
    return None


def _routed(
    statement: ast.Assign, roles: Mapping[str, ast.expr], modules: Container[str]
) -> tuple[str, tuple[str, ...]] | None:
    """`RoutedForward.router` and `outputs` of an assignment of what a router returns; None for another one."""
    target, value = statement.targets[0], statement.value
    name = next((n for n, c in called([value]) if c is value and n in modules), None)
    outputs = None if name is None else _router_outputs(target, roles)
    return None if name is None or outputs is None else (name, outputs)


def _router_outputs(target: ast.expr, roles: Mapping[str, ast.expr]) -> tuple[str, ...] | None:
    """`RoutedForward.outputs` of a router whose result is assigned to `target`; None if ids and weights are not in it.

    Args:
        roles: the expressions that the experts are given as "ids" and "weights".
    """
    if isinstance(target, ast.Name):
        return ("logits",)
    if not isinstance(target, ast.Tuple):
        return None
    by_name = {ast.unparse(expr): role for role, expr in roles.items()}
    found = [by_name.get(ast.unparse(element), "") for element in target.elts]
    if not roles.keys() <= set(found):
        return None
    if len(found) == 3:
        found[found.index("")] = "logits"
    return tuple(found)


# --- indexers ---------------------------------------------------------------------------------------------------------


class _Products(ast.NodeTransformer):
    """Calls ``_product(q, k)`` in the place of ``torch.matmul(q, k.unsqueeze(1))``."""

    found = 0

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.Call(
                ast.Attribute(ast.Name("torch"), "matmul"),
                [q, ast.Call(ast.Attribute(k, "unsqueeze"), [ast.Constant(1)], [])],
                [],
            ):
                self.found += 1
                return expression(f"_product({ast.unparse(q)}, {ast.unparse(k)})", node)
        return node


def with_product(forward: Any) -> Callable[..., Any] | None:
    """``f(module, product, *own parameters)``: a forward that calls ``product(q, k)`` for ``torch.matmul(q, k.unsqueeze(1))``,
    inside its decorators; None for one without such a product."""
    source = source_of(inspect.unwrap(forward))  # out of torch.no_grad as well, which is among the decorators
    if source is None:
        return None
    products = _Products()
    body = [products.visit(copy.deepcopy(statement)) for statement in source.tree.body]
    return source.decorated(source.make(body, "_product", own=True)) if products.found else None


# --- base models ------------------------------------------------------------------------------------------------------


def called_before(forward: Any, norm: str) -> str | None:
    """NAME of a forward that calls ``self.<norm>(self.NAME(...))``; None if it does not."""
    source = source_of(forward)
    for name, call in called(source.tree.body) if source is not None else ():
        match call.args:
            case [ast.Call(ast.Attribute(ast.Name("self"), before))] if name == norm:
                return before
    return None


# --- attention --------------------------------------------------------------------------------------------------------


def sinks_of(forward: Any) -> FunctionType | None:
    """``f(attention, attend, *own parameters)``: an attention forward that calls `attend`, or its own eager attention for None.

    None unless it passes its sinks to one (``s_aux=self.sinks``), and nothing that changes scores besides.
    """
    source = source_of(forward)
    if source is None or not source.is_whole:
        return None
    body = copy.deepcopy(source.tree.body)
    nodes = [node for top in body for node in ast.walk(top)]
    calls = [n for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and _passes_sinks(n)]
    if len(calls) != 1 or not {k.arg for k in calls[0].keywords} <= _ATTENTION_KEYWORDS:
        return None
    interface = ast.unparse(calls[0].func)  # = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager)
    chosen = [
        s for s in body if isinstance(s, (ast.Assign, ast.AnnAssign)) and _names(s, context=ast.Store) == {interface}
    ]
    if len(chosen) != 1 or not isinstance(chosen[0].value, ast.Call) or len(chosen[0].value.args) != 2:
        return None
    chosen[0].value = expression(f"_attend or {ast.unparse(chosen[0].value.args[1])}", chosen[0])
    return source.make(body, "_attend", own=True)


_ATTENTION_KEYWORDS = frozenset({"dropout", "scaling", "sliding_window", "s_aux", None})  # None: ``**kwargs``


def _passes_sinks(call: ast.Call) -> bool:
    return any(k.arg == "s_aux" and ast.unparse(k.value) == "self.sinks" for k in call.keywords)
