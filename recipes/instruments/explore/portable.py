"""Python functions as JSON: their syntax trees, with the functions and constants that they use.

The explorer's page interprets them (explorer/python.js), so that it computes with the formulas of
this project instead of a copy of them. What builtins, the standard library and JAX do in these
functions, python.js does itself, by name: NATIVE.
"""

import ast
import builtins
import dataclasses
import functools
import inspect
import pathlib
import re
import textwrap
import types
from typing import Any

NONE = dataclasses.MISSING
PROJECT = ("recipes", "zoo")
SCRIPT = pathlib.Path(__file__).parent / "python.js"
NATIVE = {
    *re.findall(r"^  (\w+): ", SCRIPT.read_text().split("natives = {")[1].split("\n};")[0], re.M)
}
DROPPED = {"ctx", "kind", "type_comment", "annotation", "returns", "decorator_list", "type_params"}
Node = Any  # nested lists: [type of a syntax node, *its fields]


class Library:
    """Functions as JSON, by the names under which they refer to each other."""

    def __init__(self):
        self.definitions: dict[str, Any] = {}
        self._attributes: set[str] = set()  # read anywhere: decides which methods are needed
        self._classes: dict[str, type] = {}
        self._searched: set[tuple[str, str]] = set()  # (class, attribute)

    def add(self, thing: Any) -> Node:
        """Returns the node that refers to a function or value; defines all that it uses.

        Raises TypeError if that is more than python.js has.
        """
        node = self._value(thing, getattr(thing, "__name__", ""))
        while (
            missing := {
                (name, method)
                for name, of_class in self._classes.items()
                for method in self._attributes & vars(of_class).keys() - NATIVE
            }
            - self._searched
        ):
            self._searched |= missing
            for name, method in sorted(missing):
                self._add_method(self.definitions[name], method, vars(self._classes[name])[method])
        return node

    def _add_method(self, of_class: dict[str, Any], name: str, member: Any) -> None:
        is_property = isinstance(member, (property, functools.cached_property))
        function: Any = member
        if is_property:
            function = member.fget if isinstance(member, property) else member.func
        before = dict(self.definitions)
        try:
            of_class["methods"][name] = self._function(function)
        except TypeError:  # perhaps a method of another class is meant, such as str.lower
            self.definitions = before
        else:
            of_class["properties"] += [name] * is_property

    def _value(self, value: Any, name: str) -> Node:
        """A node that evaluates to a global value; `name`: what its user calls it."""
        if name in NATIVE:
            return ["Native", name]
        if value is None or isinstance(value, (bool, int, float, str)):
            return ["Constant", value]
        module = str(getattr(value, "__module__", "")).partition(".")[0]
        if module in PROJECT and isinstance(value, (type, types.FunctionType)):
            return self._definition(value)
        if module in PROJECT and (fields := _fields(type(value))):
            values = [self._value(getattr(value, name), "") for name in fields]
            return ["Call", self._definition(type(value)), values, []]
        if isinstance(value, dict):
            pairs = [(self._value(k, ""), self._value(v, "")) for k, v in value.items()]
            return ["Dict", *map(list, zip(*pairs, strict=True))] if pairs else ["Dict", [], []]
        if isinstance(value, (tuple, list, set, frozenset)):
            return ["Tuple", [self._value(x, "") for x in value]]
        if not name:  # a value in a table, such as a kernel: formulas only ask for its name
            return ["Constant", None]
        raise TypeError(f"python.js has no {name!r}, and it is not one of this project's functions")

    def _definition(self, thing: Any) -> Node:
        name = f"{thing.__module__}.{thing.__qualname__}"
        if name not in self.definitions:
            self.definitions[name] = {}  # may refer to itself
            if isinstance(thing, type):
                self._classes[name] = thing
                defaults = {
                    n: self._value(x, "") for n, x in _fields(thing).items() if x is not NONE
                }
                parts = {"fields": [*_fields(thing)], "defaults": defaults}
                self.definitions[name].update(parts, methods={}, properties=[])
            else:
                self.definitions[name].update(self._function(thing))
        return ["Global", name]

    def _function(self, function: types.FunctionType) -> dict[str, Any]:
        inner = inspect.unwrap(function)
        tree: Any = ast.parse(textwrap.dedent(inspect.getsource(inner))).body[0]
        return {"def": self._encode(tree, _bound(tree), inner.__globals__)}

    def _encode(self, node: Any, bound: set[str], scope: dict[str, Any]) -> Node:
        if isinstance(node, list):
            return [self._encode(item, bound, scope) for item in node]
        if not isinstance(node, ast.AST):
            return node
        if isinstance(node, (ast.Name, ast.Attribute)) and (
            referred := _global(node, bound, scope)
        ):
            return self._value(*referred)
        if isinstance(node, ast.Attribute):
            self._attributes.add(node.attr)
        if isinstance(node, ast.AnnAssign):
            node = ast.Assign([node.target], node.value or ast.Constant(None))
        if isinstance(node, ast.FunctionDef):
            yields = any(isinstance(inner, (ast.Yield, ast.YieldFrom)) for inner in ast.walk(node))
            body = node.body[1:] if ast.get_docstring(node) else node.body
            parts = self._encode([node.args, body], bound, scope)
            return ["FunctionDef", node.name, *parts, yields]
        fields = [getattr(node, name, None) for name in node._fields if name not in DROPPED]
        return [type(node).__name__, *(self._encode(field, bound, scope) for field in fields)]


def _fields(of_class: Any) -> dict[str, Any]:
    """Field → its default or NONE, of a NamedTuple or a dataclass; {} of other classes."""
    if dataclasses.is_dataclass(of_class):
        return {field.name: field.default for field in dataclasses.fields(of_class)}
    defaults = getattr(of_class, "_field_defaults", {})
    return {name: defaults.get(name, NONE) for name in getattr(of_class, "_fields", ())}


def _bound(tree: ast.AST) -> set[str]:
    """The names that a function or one inside it binds."""
    names = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        if isinstance(node, ast.FunctionDef) and node is not tree:
            names.add(node.name)
    return names


def _global(node: ast.AST, bound: set[str], scope: dict[str, Any]) -> tuple[Any, str] | None:
    """(value, name) of NAME or MODULE.NAME, if that is global; None for other expressions."""
    if isinstance(node, ast.Name):
        if node.id in bound:
            return None
        value = scope[node.id] if node.id in scope else getattr(builtins, node.id)
        return value, node.id
    if isinstance(node, ast.Attribute):
        outer = _global(node.value, bound, scope)
        if outer and isinstance(outer[0], types.ModuleType):
            return getattr(outer[0], node.attr), node.attr
    return None
