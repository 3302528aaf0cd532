"""Parts of transformers modules, read from the source of their forward methods.

Input: a class. Output: functions that run a part of its forward, statement by statement as the class has it, so that no family
has to be known by name; None where the source does not have the structure. A decoder layer is cut in two where a single value
passes from one half to the other (`halves_of`); a MoE block also returns what its router said, or is cut in two at its experts
(`routing_of`).
"""

from __future__ import annotations

import ast
import copy
import inspect
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from forebay.models.around_call import NotAddedError, WithoutSummand, around_call, writes_into
from forebay.models.forward_source import (
    ForwardSource,
    called,
    expression,
    names_in,
    needed_by,
    returns_a_tuple,
    returns_in,
    rewritten,
    source_of,
    text_of,
    without_hooks,
)

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
        calls = {} if direct is None else {direct: without_hooks}
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
            return f"(_out := _run({ast.unparse(call.func)}, _experts, {text_of([*call.args, *call.keywords])}))[0]"

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
            stopped = WithoutSummand(self._tail, block, "_shared" if shared else None, stop)
        except NotAddedError:
            return None
        return None if self.given else self._source.make(stopped.body, self._carried, "_run")

    def stages(self, block: str) -> tuple[FunctionType, FunctionType] | None:
        """The second half before and after its block: ``f(layer, x2, run, **given) -> (live, run(layer.<block>, ...))``, and
        ``g(layer, live, y) -> x3``, for the block's result `y`. None: see `around_call`."""
        found = around_call(self._tail, block, {self._carried, *self.given})
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
    written = names_in(*head, context=ast.Store)
    tail, passed = _without_passed(tail, written)
    dtypes = [s for n, s in enumerate(head) if _is_dtype_of(s, x) and x not in names_in(*head[:n], context=ast.Store)]
    known = names_in(*dtypes, context=ast.Store) - names_in(*(s for s in head if s not in dtypes), context=ast.Store)
    needed = needed_by(tail) & (written | source.parameters)
    carried, given = (needed & written) - known, needed - written
    first, second = (tuple(dict.fromkeys(name for name, _ in called(part))) for part in (head, tail))
    if len(carried) != 1 or not first or not second or returns_in(head) or returns_a_tuple(tail):
        return None
    if writes_into(tail, *carried):  # of its caller's, which a rerun reads again
        return None
    defaults = _defaults(source.function, given - {x})
    if x in given or defaults is None:
        return None
    name = carried.pop()
    dtypes = [s for s in dtypes if names_in(s, context=ast.Store) & needed & known]
    before = [_Renamed(x, name).visit(copy.deepcopy(s)) for s in dtypes]
    return Halves(first, second, passed, defaults, bool(dtypes), source, head, [*before, *tail], name)


def _without_passed(tail: list[ast.stmt], written: set[str]) -> tuple[list[ast.stmt], tuple[str, ...]]:
    """A second half that returns hidden states alone, and the names in `written` that it does nothing with but to return them."""
    match tail[-1]:
        case ast.Return(ast.Tuple([value, *others])) if others and all(isinstance(o, ast.Name) for o in others):
            names = tuple(o.id for o in others if isinstance(o, ast.Name))
            alone = [*tail[:-1], ast.copy_location(ast.Return(value), tail[-1])]
            used = names_in(*alone) | names_in(*alone, context=ast.Store)
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
            stopped = WithoutSummand(body, "experts", None, f"_stop = (*({{}},), {self._logits})")
        except NotAddedError:
            return None
        return self._source.make(stopped.body, own=True), stopped.has_rest

    def stages(self, direct: bool) -> tuple[FunctionType, FunctionType] | None:
        """The forward before and after the experts: ``f(block, x, ...) -> (live, (rows, ids, weights, logits))``, and
        ``g(block, live, y) -> what the block returns``, for the experts' result `y`.

        None if the router returns no logits, or see `around_call`.
        """
        body = self._rewritten(direct, None, name_ids=False)
        found = around_call(body, "experts", self._source.parameters)
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
            return f"(_route := {without_hooks(call) if direct else ast.unparse(call)})"

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
    wanted = names_in(*roles.values())
    before = [s for s in source.tree.body if s.lineno < calls[0].lineno]
    for statement in reversed(before):
        branches = _alternatives(statement)
        if branches is None or not names_in(statement, context=ast.Store) & wanted:
            continue
        found = [_routed(branch, roles, modules) for branch in branches]
        if found[0] is not None and all(routed == found[0] for routed in found):
            return RoutedForward(*found[0], source)
        wanted |= names_in(*(branch.value for branch in branches))
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
    """``f(attention, choose, *own parameters)``: an attention forward that calls ``choose(eager)``; `eager` is its own attention.

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
        s for s in body if isinstance(s, (ast.Assign, ast.AnnAssign)) and names_in(s, context=ast.Store) == {interface}
    ]
    if len(chosen) != 1 or not isinstance(chosen[0].value, ast.Call) or len(chosen[0].value.args) != 2:
        return None
    chosen[0].value = expression(f"_choose({ast.unparse(chosen[0].value.args[1])})", chosen[0])
    return source.make(body, "_choose", own=True)


# None: ``**kwargs``. Indices repeat for sparse kernels what the mask of eager attention says.
_ATTENTION_KEYWORDS = frozenset({"dropout", "scaling", "sliding_window", "s_aux", "indices", None})


def _passes_sinks(call: ast.Call) -> bool:
    return any(k.arg == "s_aux" and ast.unparse(k.value) == "self.sinks" for k in call.keywords)
