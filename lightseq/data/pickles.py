"""Pickle reader that executes nothing. It returns plain values, and descriptions of objects."""

from __future__ import annotations

import mmap
import pickle
import pickletools
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, NoReturn, cast

import numpy as np

from lightseq.data.columns import HARMLESS, is_blank
from lightseq.data.token_directory import IntArray
from lightseq.utils.formatting import first_line

PICKLE_COLUMNS: Final = ("input_ids", "labels", "attention_mask")
PICKLE_ERRORS = (  # raised for an invalid pickle
    *(pickle.UnpicklingError, EOFError, ValueError, TypeError, LookupError, AttributeError),
    *(OverflowError, MemoryError, RecursionError),
)
VALUE_OPCODES: Final = frozenset(  # opcodes whose argument is the value
    ["INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING"]
    + ["SHORT_BINSTRING", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"]
    + ["SHORT_BINBYTES", "BINBYTES", "BINBYTES8"]
)
CONSTANTS: Final = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
TUPLES: Final = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
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


class _PickleMachine:
    """Stack and memo of one pickle. Dict keys are strings or PickledObjects, which hash in constant time."""

    def __init__(self, data: mmap.mmap, check_name: Callable[[str, str], None]) -> None:
        self._data, self._check_name = data, check_name
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        for opcode, argument, _ in pickletools.genops(cast(IO[bytes], self._data)):
            name = opcode.name
            if name in VALUE_OPCODES:
                self._stack.append(argument)
            elif name in CONSTANTS:
                self._stack.append(CONSTANTS[name])
            elif name not in ("PROTO", "FRAME", "STOP") and not (self._remember(name, argument) or self._collect(name)):
                self._describe(name, argument)
        return self._pop(1)[0]

    def _remember(self, name: str, argument: Any) -> bool:
        match name:
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                self._memo[argument] = self._top(object)
            case "MEMOIZE":
                self._memo[len(self._memo)] = self._top(object)
            case "GET" | "BINGET" | "LONG_BINGET":
                if argument not in self._memo:
                    raise pickle.UnpicklingError(f"it refers to memo entry {argument} before it is set")
                self._stack.append(self._memo[argument])
            case _:
                return False
        return True

    def _collect(self, name: str) -> bool:
        match name:
            case "MARK":
                self._marks.append(len(self._stack))
            case "EMPTY_LIST" | "EMPTY_DICT":
                self._stack.append([] if name == "EMPTY_LIST" else {})
            case "LIST":
                self._stack.append(self._since_mark())
            case "TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = TUPLES.get(name)
                self._stack.append(tuple(self._since_mark() if count is None else self._pop(count)))
            case "APPEND" | "APPENDS":
                items = self._pop(1) if name == "APPEND" else self._since_mark()
                self._top(list).extend(items)
            case "DICT":
                self._stack.append(_fill({}, self._since_mark()))
            case "SETITEM" | "SETITEMS":
                items = self._pop(2) if name == "SETITEM" else self._since_mark()
                _fill(self._top(dict), items)
            case _:
                return False
        return True

    def _describe(self, name: str, argument: Any) -> None:
        match name:
            case "GLOBAL" | "INST":
                self._stack.append(self._named(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                self._stack.append(self._named(*self._pop(2)))
            case "REDUCE" | "NEWOBJ":
                called, arguments = self._pop(2)
                if type(called) is PickledGlobal and type(arguments) is tuple:
                    self._stack.append(PickledObject(called.text, arguments))
                else:
                    raise pickle.UnpicklingError("it calls a value that is not a class or function")
            case "BUILD":
                (state,) = self._pop(1)
                self._top(PickledObject).state = state
            case "PERSID" | "BINPERSID":
                raise pickle.UnpicklingError("it refers to an object outside the file")
        if name not in ("GLOBAL", "STACK_GLOBAL", "REDUCE", "NEWOBJ", "BUILD"):
            raise pickle.UnpicklingError(f"its opcode {name} is not for a plain list, dict, string or number")

    def _named(self, module: Any, name: Any) -> PickledGlobal:
        if type(module) is not str or type(name) is not str:
            raise pickle.UnpicklingError("it names a class with a value that is not a string")
        self._check_name(module, name)
        return PickledGlobal(f"{module}.{name}")

    def _pop(self, count: int) -> list[Any]:
        if len(self._stack) - count < (self._marks[-1] if self._marks else 0):
            raise pickle.UnpicklingError("it pops from an empty stack")
        taken = self._stack[-count:]
        del self._stack[-count:]
        return taken

    def _since_mark(self) -> list[Any]:
        if not self._marks:
            raise pickle.UnpicklingError("it ends a list without a mark")
        begin = self._marks.pop()
        taken = self._stack[begin:]
        del self._stack[begin:]
        return taken

    def _top(self, kind: type) -> Any:
        (top,) = self._pop(1)
        self._stack.append(top)
        if not (kind is object or type(top) is kind):
            raise pickle.UnpicklingError(f"it changes a {type(top).__name__} as if it were a {kind.__name__}")
        return top


def _fill(target: dict[Any, Any], items: list[Any]) -> dict[Any, Any]:
    for key, value in zip(items[::2], items[1::2], strict=True):
        if type(key) not in (str, PickledObject):
            raise pickle.UnpicklingError(f"a dict key is a {type(key).__name__}; only strings are allowed")
        target[key] = value
    return target


@contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("it is not a regular file")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        yield data


def load(path: Path, check_name: Callable[[str, str], None]) -> Any:
    """Returns the lists, tuples, dicts, strings and numbers of a pickle, and a PickledObject for each other object.

    `check_name` gets a module and a name, and raises UnpicklingError if they are not allowed. Nothing is imported or
    called, so a hostile file can only waste memory in proportion to its length.
    """
    with _mapped(path) as data:
        return _PickleMachine(data, check_name).run()


def load_plain_pickle(path: Path) -> Any:
    """Returns the lists, dicts, strings and numbers of a pickle. Raises ValueError if it holds anything else."""
    try:
        with _mapped(path) as data, path.open("rb") as file:  # unpickling the file is faster than unpickling the map
            if _is_simple(data):  # true for most files; _PickleMachine takes eight times as long
                return _PlainUnpickler(file).load()
        return load(path, _refuse_name)
    except (*PICKLE_ERRORS, OSError) as error:
        raise ValueError(
            f"{path} cannot be read as a pickle: {first_line(error)}; write it again with plain lists"
        ) from error


class _PlainUnpickler(pickle.Unpickler):
    """Python's unpickler without classes, for pickles that pass `_is_simple`."""

    def find_class(self, module: str, name: str) -> NoReturn:
        _refuse_name(module, name)


def _refuse_name(module: str, name: str) -> NoReturn:
    raise pickle.UnpicklingError(f"it builds {module}.{name}; only plain lists, dicts and numbers are allowed")


def _is_simple(data: mmap.mmap) -> bool:
    """Returns whether Python's unpickler reads the pickle in time and memory proportional to its length.

    Others can take more: the unpickler allocates memory for the largest memo index, and hashes nested tuples used as
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


def read_pickle(path: Path) -> Iterator[tuple[IntArray, IntArray]]:
    """Yields aligned ids and labels of a pickled dict with 'input_ids' and optionally 'labels', lists of integer lists.

    An 'attention_mask' must be all ones.
    """
    content = load_plain_pickle(path)
    if not isinstance(content, dict) or not isinstance(content.get("input_ids"), list | tuple):
        raise ValueError(f"{path} is not a dict with 'input_ids', a list of lists of token ids; write it as one")
    for column, value in content.items():
        if column not in PICKLE_COLUMNS and column not in HARMLESS and not is_blank(value):
            raise ValueError(
                f"{path}: column {column!r} is not known beside {', '.join(PICKLE_COLUMNS)}; remove it, or write its "
                "rows as .jsonl or .parquet"
            )
    sequences, all_labels, masks = content["input_ids"], content.get("labels"), content.get("attention_mask")
    for name, column in (("labels", all_labels), ("attention_mask", masks)):
        if column is not None and (not isinstance(column, list | tuple) or len(column) != len(sequences)):
            raise ValueError(f"{path}: {name!r} is not a list with one entry for each of {len(sequences)} input_ids")
    for index, sequence in enumerate(sequences):
        ids = _integers(sequence, f"{path} sequence {index}")
        labels = ids if all_labels is None else _integers(all_labels[index], f"{path} labels {index}")
        if len(labels) != len(ids):
            raise ValueError(f"{path} sequence {index}: {len(ids)} input_ids but {len(labels)} labels; align them")
        if masks is not None and not _integers(masks[index], f"{path} attention_mask {index}").all():
            raise ValueError(f"{path} sequence {index}: its attention_mask masks tokens; write it without padding")
        yield ids, labels


def _integers(numbers: Any, where: str) -> IntArray:
    # Checks types first, because nested references to one list could expand to an array larger than memory.
    if isinstance(numbers, list | tuple) and set(map(type, numbers)) <= {int}:
        try:
            return np.array(numbers, np.int64)
        except OverflowError:
            pass
    raise ValueError(f"{where} is not a list of integers; write it as one")
