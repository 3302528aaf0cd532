"""The source of a function as a syntax tree, and functions that are made of parts of it.

Input: a function, such as the forward method of a transformers module. Output: its statements (`source_of`), what they call and
read, copies of them with other calls, and functions of some of them. Made functions have the file and the line numbers of the
original, so tracebacks show the family's own code.
"""

from __future__ import annotations

import ast
import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


def names_in(*nodes: ast.AST, context: type[ast.expr_context] = ast.Load) -> set[str]:
    found = (n for top in nodes for n in ast.walk(top) if isinstance(n, ast.Name))
    return {n.id for n in found if isinstance(n.ctx, context)}


def needed_by(statements: Sequence[ast.stmt]) -> set[str]:
    """Names that the statements may read before they write them."""
    needed: set[str] = set()
    written: set[str] = set()
    for statement in statements:
        needed |= names_in(statement) - written
        if isinstance(statement, ast.AugAssign):
            needed |= names_in(statement.target, context=ast.Store) - written
        if isinstance(statement, (ast.Assign, ast.AnnAssign)):
            written |= names_in(statement, context=ast.Store)
    return needed


def returns_in(statements: Sequence[ast.stmt]) -> list[ast.Return]:
    return [node for top in statements for node in ast.walk(top) if isinstance(node, ast.Return)]


def returns_a_tuple(statements: Sequence[ast.stmt]) -> bool:
    values = [node.value for node in returns_in(statements)]
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


def text_of(nodes: Iterable[ast.AST]) -> str:
    return ", ".join(map(ast.unparse, nodes))


def without_hooks(call: ast.Call) -> str:
    return f"{ast.unparse(call.func)}.forward({text_of([*call.args, *call.keywords])})"
