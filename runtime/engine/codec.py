"""Turns the protocol's dataclasses into plain lists for msgpack and back, checking every value on the way in.

Invariant: what `unpack` returns has exactly the types that messages.py declares; anything else raises DecodeError that
names the field. A dataclass travels as the list of its fields in declaration order: the version in the hello fixes that
order. An array of ids travels as its bytes, in the order of this machine, which both sides run on. Must not know
frames, sockets or what a message means.
"""

from __future__ import annotations

import dataclasses
import operator
import types
import typing
from array import array
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from gptoss_trt.runtime.engine.messages import IDS, Prompt

T = TypeVar("T")
Path = tuple[Any, str | int]  # where a value stands: the path of what holds it (or a name), then its field or index
Where = Path | str
Check = Callable[[Any, Where], Any]


class DecodeError(ValueError):
    """A message whose shape or types are not those of the protocol; the text names the field and what stood there."""


def pack(message: Any) -> Any:
    """The message as lists, strings, bytes, numbers and None, ready for msgpack. Raises TypeError for an array that
    does not hold ids."""
    values_of = _values.get(type(message))
    if values_of is not None:
        return [value if type(value) in _PLAIN else pack(value) for value in values_of(message)]
    if isinstance(message, (tuple, list)):
        # Prompts are long tuples of ids: they need no copy.
        return message if not message or isinstance(message[0], int) else [pack(item) for item in message]
    if isinstance(message, array):
        if message.typecode != IDS:
            raise TypeError(f"ids are an array of typecode {IDS!r}, not {message.typecode!r}")
        return message.tobytes()
    if dataclasses.is_dataclass(message):
        _values[type(message)] = _values_getter(_field_names(type(message)))
        return pack(message)
    return message


def unpack(kind: type[T], raw: Any) -> T:
    """Checks `raw` (msgpack output with tuples for arrays) and builds a `kind`. Raises DecodeError."""
    return typing.cast(T, _dataclass_check(kind)(raw, kind.__name__))


_PLAIN = frozenset({int, float, str, bool, type(None)})
_names: dict[Any, tuple[str, ...]] = {}
_values: dict[Any, Callable[[Any], tuple[Any, ...]]] = {}  # the values of a dataclass's fields, for each seen
_checks: dict[Any, Check] = {}


def _values_getter(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) == 1:  # an attrgetter of one name gives no tuple
        return lambda message: (getattr(message, names[0]),)
    return operator.attrgetter(*names)


def _field_names(kind: Any) -> tuple[str, ...]:
    if kind not in _names:
        _names[kind] = tuple(field.name for field in dataclasses.fields(kind))
    return _names[kind]


def _dataclass_check(kind: Any) -> Check:
    if kind not in _checks:
        _checks[kind] = _make_dataclass_check(kind)
    return _checks[kind]


def _make_dataclass_check(kind: Any) -> Check:
    hints = typing.get_type_hints(kind)
    checks = tuple((name, _check_for(hints[name])) for name in _field_names(kind))

    def check(raw: Any, where: Where) -> Any:
        if type(raw) is not tuple or len(raw) != len(checks):
            raise DecodeError(f"{_text(where)}: expected a list of {len(checks)} fields, got {_describe(raw)}")
        return kind(*[one(value, (where, name)) for (name, one), value in zip(checks, raw, strict=True)])

    return check


def _check_for(hint: Any) -> Check:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _dataclass_check(hint)
    if hint == Prompt:
        return _prompt
    if origin in (typing.Union, types.UnionType):
        return _optional_check(arguments)
    if origin is Literal:
        return _literal_check(arguments)
    if origin is tuple:
        return _list_check(arguments[0]) if arguments[-1] is Ellipsis else _pair_check(arguments)
    if hint in _SCALARS:
        return _SCALARS[hint]
    raise TypeError(f"no decoder for {hint!r}")


def _optional_check(arguments: tuple[Any, ...]) -> Check:
    inner = [_check_for(argument) for argument in arguments if argument is not type(None)]
    if len(inner) != 1:
        raise TypeError(f"no decoder for a union of {arguments!r}")
    return lambda raw, where: None if raw is None else inner[0](raw, where)


def _literal_check(words: tuple[Any, ...]) -> Check:
    def check(raw: Any, where: Where) -> Any:
        if type(raw) is not str or raw not in words:
            raise DecodeError(f"{_text(where)}: {_describe(raw)} is not one of {', '.join(words)}")
        return raw

    return check


def _list_check(item: Any) -> Check:
    if item is int:
        return _int_list
    one = _check_for(item)

    def check(raw: Any, where: Where) -> Any:
        if type(raw) is not tuple:
            raise DecodeError(f"{_text(where)}: expected a list, got {_describe(raw)}")
        return tuple([one(value, (where, index)) for index, value in enumerate(raw)])

    return check


def _pair_check(items: tuple[Any, ...]) -> Check:
    checks = tuple(_check_for(item) for item in items)

    def check(raw: Any, where: Where) -> Any:
        if type(raw) is not tuple or len(raw) != len(checks):
            raise DecodeError(f"{_text(where)}: expected {len(checks)} values, got {_describe(raw)}")
        return tuple([one(value, (where, i)) for i, (one, value) in enumerate(zip(checks, raw, strict=True))])

    return check


def _int_list(raw: Any, where: Where) -> Any:
    if type(raw) is not tuple:
        raise DecodeError(f"{_text(where)}: expected a list of integers, got {_describe(raw)}")
    if set(map(type, raw)) - {int}:
        index = next(i for i, value in enumerate(raw) if type(value) is not int)
        raise DecodeError(f"{_text(where)}[{index}]: expected an integer, got {_describe(raw[index])}")
    return raw


def _prompt(raw: Any, where: Where) -> Any:
    if type(raw) is not bytes:
        return _int_list(raw, where)
    ids = array(IDS)
    if len(raw) % ids.itemsize:
        raise DecodeError(f"{_text(where)}: {len(raw)} bytes are no whole number of ids of {ids.itemsize}")
    ids.frombytes(raw)
    return ids


def _scalar_check(kind: type, accepted: tuple[type, ...]) -> Check:
    def check(raw: Any, where: Where) -> Any:
        if type(raw) is kind:
            return raw
        if type(raw) not in accepted:  # not isinstance: True is no integer here
            raise DecodeError(f"{_text(where)}: expected {kind.__name__}, got {_describe(raw)}")
        return kind(raw)

    return check


_SCALARS: dict[Any, Check] = {
    int: _scalar_check(int, (int,)),
    float: _scalar_check(float, (int, float)),
    str: _scalar_check(str, (str,)),
    bool: _scalar_check(bool, (bool,)),
}


def _text(where: Where) -> str:
    """A path as an error writes it: Submit.sampling.seed, Submit.guides[0]."""
    if isinstance(where, str):
        return where
    holder, part = where
    return f"{_text(holder)}.{part}" if isinstance(part, str) else f"{_text(holder)}[{part}]"


def _describe(raw: Any) -> str:
    """The type of a value and its length or a short form: never a whole prompt."""
    if isinstance(raw, (tuple, list, dict, str, bytes)):
        return f"{type(raw).__name__} of length {len(raw)}"
    return repr(raw)[:40]
