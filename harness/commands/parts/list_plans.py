"""Descriptions of strategies and patterns for `list`, including those of other packages."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Any, TypedDict, TypeVar

from rich.text import Text

from harness.plan.tasks import Scope
from harness.planning.options import COMMON_OPTIONS, LAYER_OPTIONS, Common, options_of, shown
from harness.planning.strategy import Strategy
from harness.terminal.progress import Output
from patterns import PATTERNS, kind_of, make_pattern, outside
from patterns.kind import Kind
from strategies import EVERY_STRATEGY, named

T = TypeVar("T")
_PICTURED_TOKENS = 512
_PICTURE_COLUMNS = 16
_INDENT = 17
_SPELLING = "Options follow a colon: NAME:option=value,option=value. "


class _OptionEntry(TypedDict):
    name: str
    values: str
    default: str
    summary: str


class _StrategyEntry(TypedDict):
    name: str
    aliases: list[str]
    summary: str
    paper: str
    options: list[_OptionEntry]
    scopes: list[str]


class _PatternEntry(TypedDict):
    name: str
    summary: str
    parameters: dict[str, str | None]
    cross: bool
    pictured: str
    picture: str | None


def _found(
    names: Sequence[str], ours: Mapping[str, T], group: str, find: Callable[[str], T]
) -> Iterator[tuple[str, T | str]]:
    """Yield names with what they stand for, or with why they stand for nothing.

    Args:
        names: Those that were asked for; if none were, ours and those that packages register.
        ours: Ours.
        group: The group of entry points of the others.
        find: From a name to what it stands for; raises ValueError.

    Raises:
        ValueError: One that was asked for stands for nothing.
    """
    for name in names:
        yield name, find(name)
    for name in () if names else (*ours, *outside.registered(group)):
        try:
            yield name, find(name)
        except ValueError as error:  # a package that is broken hides no other
            yield name, str(error)


def strategies(names: Sequence[str] = ()) -> list[_StrategyEntry]:
    """The strategies, by name."""
    found = _found(names, EVERY_STRATEGY, outside.STRATEGY_GROUP, named)
    return [_strategy(name, each) for name, each in found]


def _strategy(name: str, strategy: Strategy[Any] | str) -> _StrategyEntry:
    if isinstance(strategy, str):
        return _StrategyEntry(
            name=name, aliases=[], summary=strategy, paper="", options=[], scopes=[]
        )
    return _StrategyEntry(
        name=name,
        aliases=list(strategy.aliases),
        summary=strategy.summary,
        paper=strategy.paper,
        options=_options(strategy.defaults),
        scopes=[s for s in Scope if s is Scope.LAYER or not strategy.layers_only],
    )


def _options(values: object) -> list[_OptionEntry]:
    """The options of a dataclass of options, by name."""
    return [
        _OptionEntry(
            name=name,
            values=option.reader.values,
            default=option.unset if value is None else shown(value),
            summary=option.summary,
        )
        for name, option in sorted(options_of(values).items())
        for value in (getattr(values, name),)
    ]


def patterns(names: Sequence[str] = ()) -> list[_PatternEntry]:
    """The patterns, by name."""
    found = _found(names, PATTERNS, outside.PATTERN_GROUP, kind_of)
    return [_pattern(name, each) for name, each in found]


def _pattern(name: str, kind: Kind | str) -> _PatternEntry:
    if isinstance(kind, str):
        return _PatternEntry(
            name=name, summary=kind, parameters={}, cross=False, pictured="", picture=None
        )
    parameters = {key: parameter.default for key, parameter in kind.parameters.items()}
    picture, pictured = None, "" if kind.sample is None else kind.sample(_PICTURED_TOKENS)
    if pictured or None not in parameters.values():
        text = f"{name}:{pictured}" if pictured else name
        picture = make_pattern(text, _PICTURED_TOKENS).picture(_PICTURE_COLUMNS)
    return _PatternEntry(
        name=name,
        summary=kind.summary,
        parameters=parameters,
        cross=kind.cross,
        pictured=pictured,
        picture=picture,
    )


def show_strategies(console: Output, names: Sequence[str]) -> None:
    """Print the strategies."""
    console.print(Text("strategies", style="bold"))
    meshes = [
        f"{name}:4x2 is short for {name}:{mesh[0]}=4,{mesh[1]}=2 (U x R, with U x R = cp)."
        for name, mesh in ((name, each.mesh) for name, each in EVERY_STRATEGY.items())
        if mesh is not None
    ]
    console.print(_SPELLING + " ".join(meshes))
    for entry in strategies(names):
        console.print()
        beside(console, entry["name"], entry["summary"])
        if entry["aliases"]:
            beside(console, "", f"also called {', '.join(entry['aliases'])}")
        if Scope.ATTENTION not in entry["scopes"]:
            beside(console, "", "whole layers only: --scope layer")
        beside(console, "", entry["paper"])
        for option in entry["options"]:
            beside(console, f"  {option['name']}=", _said(option))
    console.print()
    common = {option["name"]: option for option in _options(Common())}
    for name, group in (
        ("also takes", COMMON_OPTIONS),
        ("and at layer scope", LAYER_OPTIONS),
    ):
        beside(console, "any strategy", name)
        for option_name in sorted(group):
            beside(console, f"  {option_name}=", _said(common[option_name]))


def _said(option: _OptionEntry) -> str:
    return f"{option['summary']}: {option['values']} (default: {option['default']})"


def _must(pattern: str, key: str) -> str:
    """What is required of a parameter that has no default."""
    instead = kind_of(pattern).parameters[key].instead
    return f"this or {instead} must be given" if instead else "must be given"


def show_patterns(console: Output, names: Sequence[str]) -> None:
    """Print the patterns."""
    console.print()
    console.print(Text("patterns", style="bold"))
    console.print(f"pictured at {_PICTURED_TOKENS} tokens: queries down, keys across")
    for entry in patterns(names):
        parameters = [
            f"{key} ({_must(entry['name'], key)})" if default is None else f"{key}={default}"
            for key, default in entry["parameters"].items()
        ]
        console.print()
        beside(console, entry["name"], entry["summary"])
        if parameters:
            beside(console, "", f"parameters: {', '.join(parameters)}")
        if entry["pictured"]:
            beside(console, "", f"pictured with {entry['pictured']}")
        for line in (entry["picture"] or "its picture depends on its parameters").splitlines():
            beside(console, "", line)


def beside(console: Output, name: str, text: str) -> None:
    """Print a name and what it says, wrapped on its own side."""
    indent = " " * _INDENT
    lines = wrap(
        text,
        console.width,
        initial_indent=name.ljust(_INDENT) if len(name) < _INDENT else f"{name}  ",
        subsequent_indent=indent,
        break_on_hyphens=False,
    )
    console.print(Text("\n".join(lines)), soft_wrap=True)
