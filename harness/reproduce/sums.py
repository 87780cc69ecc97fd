"""Figures that are a sum or a quotient of others: the formula stands beside the figure.

A formula has numbers, names of the setting, + - * / ** and the functions of `_FUNCTIONS`. It is
read as a tree and computed here; nothing in it is executed.
"""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

_OPERATIONS: Mapping[type[ast.AST], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
_FUNCTIONS: Mapping[str, Callable[..., float]] = {
    "ceil": math.ceil,
    "floor": math.floor,
    "max": max,
    "min": min,
    "exp": math.exp,
    "log": math.log,
}


def computed_sum(setting: Mapping[str, Any]) -> float:
    """Compute `formula`.

    Raises:
        ValueError: It has something that a formula has not, or a name that the setting has not.
    """
    return _value(ast.parse(setting["formula"], mode="eval").body, setting)


def _value(node: ast.expr, names: Mapping[str, Any]) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.Name(id=name) if name in names:
            return float(names[name])
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, names)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_value(left, names), _value(right, names))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(_value(each, names) for each in args))
    known = ", ".join([*names, *_FUNCTIONS])
    raise ValueError(f"formula: {ast.unparse(node)} has no meaning here; it may use {known}")
