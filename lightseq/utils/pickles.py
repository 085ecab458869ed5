"""Pickle reader that executes nothing. It returns plain values, and descriptions of objects."""

from __future__ import annotations

import mmap
import pickle
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from lightseq.utils.files import open_regular
from lightseq.utils.formatting import first_line

PICKLE_ERRORS = (  # raised for an invalid pickle
    *(pickle.UnpicklingError, EOFError, ValueError, TypeError, LookupError, AttributeError),
    *(OverflowError, MemoryError, RecursionError, struct.error),
)
# Opcodes of plain values and of objects. Sets, byte arrays, extensions and references outside the file are left out.
OPCODES: Final = """
    PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT
    STRING BINSTRING SHORT_BINSTRING UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8
    EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST LIST APPEND APPENDS EMPTY_DICT DICT SETITEM SETITEMS
    PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE NEWOBJ BUILD
"""
# Runs of opcodes for integers, lists, dicts and short operands, which make up nearly all of a file of integer lists.
SIMPLE_OPCODES: Final = re.compile(
    rb"(?:(?:J.{4})++|(?:M.{2})++|(?:K.)++|[(\]})ldaesuN\x88\x89\x94]++|[hq\x80].|j.{4}|[G\x95].{8}"
    rb"|[ILFgVS][^\n]*+\n)*+",
    re.DOTALL,
)
COUNTED_OPCODES: Final = {  # opcodes whose operand begins with its length, and the bytes of that length field
    **dict.fromkeys((b"U", b"C", b"\x8c", b"\x8a"), 1),
    **dict.fromkeys((b"T", b"B", b"X", b"\x8b"), 4),
    **dict.fromkeys((b"\x8d", b"\x8e"), 8),
}
DECIMAL: Final = re.compile(rb"([0-9]{1,18})\n")


@dataclass(frozen=True)
class PickledGlobal:
    """A class or function named in a pickle. It is not looked up."""

    text: str


@dataclass(eq=False)
class PickledObject:
    """An object's description in a pickle: the callable, its arguments, and the state to set."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None


class _Handlers(dict[int, Callable[[Any], None]]):
    def __missing__(self, opcode: int) -> NoReturn:
        raise pickle.UnpicklingError(f"its opcode {bytes([opcode])!r} is not for a plain list, dict, string or number")


class _DescribingUnpickler(pickle._Unpickler):
    """Unpickler that describes objects instead of making them.

    It extends the pure-Python unpickler, whose memory grows only with the file's length. Dict keys are strings or
    PickledObjects, which hash in constant time.
    """

    stack: list[Any]
    append: Callable[[Any], None]  # to the stack
    pop_mark: Callable[[], list[Any]]
    dispatch = _Handlers(
        {opcode[0]: pickle._Unpickler.dispatch[opcode[0]] for opcode in map(vars(pickle).__getitem__, OPCODES.split())}
    )

    def __init__(self, file: Any, check_name: Callable[[str, str], None]) -> None:
        super().__init__(file)
        self.check_name = check_name

    def find_class(self, module: str, name: str) -> PickledGlobal:
        self.check_name(module, name)
        return PickledGlobal(f"{module}.{name}")

    def describe_object(self) -> None:
        arguments, called = self.stack.pop(), self.stack.pop()
        if type(called) is not PickledGlobal or type(arguments) is not tuple:
            raise pickle.UnpicklingError("it calls a value that is not a class or function")
        self.append(PickledObject(called.text, arguments))

    def set_state(self) -> None:
        state = self.stack.pop()
        if type(self.stack[-1]) is not PickledObject:
            raise pickle.UnpicklingError("it sets the state of a value that is not an object")
        self.stack[-1].state = state

    def make_dict(self) -> None:
        items = self.pop_mark()  # changes self.append
        self.append(_fill({}, items))

    def set_item(self) -> None:
        items = self.stack[-2:]
        del self.stack[-2:]
        _fill(self.stack[-1], items)

    def set_items(self) -> None:
        items = self.pop_mark()
        _fill(self.stack[-1], items)

    dispatch |= {
        pickle.REDUCE[0]: describe_object,
        pickle.NEWOBJ[0]: describe_object,
        pickle.BUILD[0]: set_state,
        pickle.DICT[0]: make_dict,
        pickle.SETITEM[0]: set_item,
        pickle.SETITEMS[0]: set_items,
    }


def _fill(target: Any, items: list[Any]) -> dict[Any, Any]:
    if type(target) is not dict:
        raise pickle.UnpicklingError(f"it changes a {type(target).__name__} as if it were a dict")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if type(key) not in (str, PickledObject):
            raise pickle.UnpicklingError(f"a dict key is a {type(key).__name__}; only strings are allowed")
        target[key] = value
    return target


def load_described(path: Path, check_name: Callable[[str, str], None]) -> Any:
    """Returns the lists, tuples, dicts, strings and numbers of a pickle, and a PickledObject for each other object.

    `check_name` gets a module and a name, and raises UnpicklingError if they are not allowed. Nothing is imported or
    called, so a hostile file can only waste memory in proportion to its length.
    """
    with open_regular(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _DescribingUnpickler(data, check_name).load()


def load_plain(path: Path) -> Any:
    """Returns the lists, dicts, strings and numbers of a pickle. Raises ValueError if it holds anything else."""
    try:
        with open_regular(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if _is_simple(data):  # true for most files; _DescribingUnpickler takes ten times as long
                return _PlainUnpickler(file).load()
        return load_described(path, _refuse_name)
    except (*PICKLE_ERRORS, OSError) as error:
        raise ValueError(
            f"{path} cannot be read as a pickle: {first_line(error)}; write it again with plain lists"
        ) from error


class _PlainUnpickler(pickle.Unpickler):
    """Python's unpickler in C without classes, for pickles that pass `_is_simple`."""

    def find_class(self, module: str, name: str) -> NoReturn:
        _refuse_name(module, name)


def _refuse_name(module: str, name: str) -> NoReturn:
    raise pickle.UnpicklingError(f"it builds {module}.{name}; only plain lists, dicts and numbers are allowed")


def _is_simple(data: mmap.mmap) -> bool:
    """Returns whether the unpickler in C reads the pickle in time and memory proportional to its length.

    Others can take more: that unpickler allocates memory for the largest memo index, and hashes nested tuples used as
    dict keys once per path to them.
    """
    position = 0
    while run := SIMPLE_OPCODES.match(data, position):
        end = run.end()
        opcode, operand, index = data[end : end + 1], end + 1, 0
        if opcode in COUNTED_OPCODES:
            position = operand + COUNTED_OPCODES[opcode]
            position += int.from_bytes(data[operand:position], "little")
        elif opcode == b"r":
            index, position = int.from_bytes(data[operand : operand + 4], "little"), operand + 4
        elif opcode == b"p" and (text := DECIMAL.match(data, operand)):
            index, position = int(text[1]), text.end()
        else:
            return opcode == b"."
        if index > end:  # pickle numbers memo entries in order, so an honest index is smaller than the position
            break
    return False
