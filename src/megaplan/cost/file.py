"""Costs files: measured times and bytes of layers, read and written as `megaplan.costs/1`.

    {"format": "megaplan.costs/1",
     "layers": [{"forward_ns": 1331, "input_ns": 2306, "weight_ns": 481, "static_bytes": null, "activation_bytes": null}, …],
     "edges": {"embedding": {…} or null, "head": {…} or null},
     "boundary_ns": null}

There are no silent defaults: every layer and both edges must be present; an edge that takes no time is null. `static_bytes` and
`activation_bytes` may be absent or null, which means the budget's own values. The same holds for `boundary_ns`, whose default is the
modelled time.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megaplan.cost.times import model_times
from megaplan.cost.values import LayerTime, MeasuredCosts, ModelTimes, StoredBytes
from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, MegaplanError
from megaplan.inventory.tensors import Inventory
from megaplan.spec.models import Spec
from megaplan.spec.read import display_name, read_text
from megaplan.wording import plural, series, show

FORMAT = "megaplan.costs/1"
MAX_COSTS_BYTES = 16 * 2**20
"""A file of this size can hold sixteen times the 4,096 layers that a model may have."""
MAX_NS = 10**12
MAX_STORED_BYTES = 2**48
MAX_DIGITS = 100
MAX_FINDINGS = 20
WRITE_ONE = "megaplan costs SPEC -o costs.json, then replace the times that were measured"

_TIMES = ("forward_ns", "input_ns", "weight_ns")
_BYTES = ("static_bytes", "activation_bytes")
_EDGES = ("embedding", "head")


def read_costs(path: str, spec: Spec, inventory: Inventory) -> MeasuredCosts:
    """Read a costs file, `-` for stdin.

    Args:
        path: Path as the user wrote it.
        spec: The spec whose layers the file must describe.
        inventory: Inventory of the spec.

    Raises:
        MegaplanError: The file cannot be read (MP101 … MP107), is not JSON (MP109, MP110, MP117), or not the costs of this model's layers
            (MP340 … MP343); all that is found.
    """
    try:
        text = read_text(path, MAX_COSTS_BYTES)
    except MegaplanError as error:
        raise MegaplanError([replace(found, hints=(WRITE_ONE, found.hints[-1])) for found in error.diagnostics]) from None
    return parse_costs(text, display_name(path), spec, inventory)


def parse_costs(text: str, name: str, spec: Spec, inventory: Inventory) -> MeasuredCosts:
    """The costs in `text`; `name` is what diagnostics call the file."""
    document = _parsed(text, name)
    found = list(_Checker(name).document(document, spec))
    if found:
        more = (
            [] if len(found) <= MAX_FINDINGS else [diagnostic("MP116", plural(len(found) - MAX_FINDINGS, "more finding"), Location(name))]
        )
        raise MegaplanError([*found[:MAX_FINDINGS], *more])
    layers, edges = document["layers"], document["edges"]
    given_ns = document.get("boundary_ns")
    boundaries_ns = model_times(spec, inventory).boundaries_ns if given_ns is None else (given_ns,)
    first, last = (edges[name] or {} for name in _EDGES)
    return MeasuredCosts(
        times=ModelTimes(tuple(map(_time, layers)), _time(first), _time(last), boundaries_ns),
        digest=_digest(document),
        static_bytes=tuple(layer.get("static_bytes") for layer in layers),
        activation_bytes=tuple(layer.get("activation_bytes") for layer in layers),
        first=StoredBytes(*(first.get(key) for key in _BYTES)),
        last=StoredBytes(*(last.get(key) for key in _BYTES)),
    )


def costs_document(times: ModelTimes) -> dict[str, Any]:
    """A costs file with these times, every key written out; memory is left to the budget."""
    return {
        "format": FORMAT,
        "layers": [_record(layer) for layer in times.layers],
        "edges": {"embedding": _record(times.first), "head": _record(times.last)},
        "boundary_ns": times.boundary_ns if len(times.boundaries_ns) == 1 else None,
    }


def _record(time: LayerTime) -> dict[str, int | None]:
    return {**{key: getattr(time, key) for key in _TIMES}, **dict.fromkeys(_BYTES)}


def _time(record: dict[str, Any]) -> LayerTime:
    return LayerTime(*(record.get(key, 0) for key in _TIMES))


def _digest(document: dict[str, Any]) -> str:
    """The digest of the values: absent keys count as null, keys are sorted, spaces do not count."""

    def whole(record: dict[str, Any] | None) -> Any:
        return record and {key: record.get(key) for key in (*_TIMES, *_BYTES)}

    values = {
        "format": FORMAT,
        "layers": [whole(layer) for layer in document["layers"]],
        "edges": {edge: whole(document["edges"][edge]) for edge in _EDGES},
        "boundary_ns": document.get("boundary_ns"),
    }
    return "sha256:" + hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class _ReadingError(Exception):
    """Code and detail of an error in the JSON syntax."""


def _parsed(text: str, name: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_int=_integer)
    except json.JSONDecodeError as error:
        detail, place = f"{error.msg[:1].lower()}{error.msg[1:]}", Location(name, error.lineno, error.colno)
        raise MegaplanError([diagnostic("MP109", detail, place, (WRITE_ONE,))]) from None
    except _ReadingError as error:
        code, detail = error.args
        raise MegaplanError([diagnostic(code, detail, Location(name), (WRITE_ONE,))]) from None
    except RecursionError:
        detail = "its arrays or objects are nested thousands of levels deep"
        raise MegaplanError([diagnostic("MP117", detail, Location(name), (WRITE_ONE,))]) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) != len(pairs):
        names = [key for key, _ in pairs]
        twice = next(key for index, key in enumerate(names) if key in names[:index])
        raise _ReadingError("MP110", f"the key {show(twice)} occurs twice in one object")
    return keys


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise _ReadingError("MP342", f"a number has {len(text):,} digits, but at most {MAX_DIGITS} are read")
    return int(text)


class _Checker:
    """Collects all errors of a document, in the order of the document."""

    def __init__(self, file: str) -> None:
        self._file = file

    def document(self, document: Any, spec: Spec) -> Iterator[Diagnostic]:
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            yield self._no_costs(document)
            return
        yield from self._keys(document, "", ("format", "layers", "edges"), ("boundary_ns",))
        if "layers" in document:
            yield from self._layers(document["layers"], spec)
        if "edges" in document:
            yield from self._edges(document["edges"])
        if document.get("boundary_ns") is not None:
            yield from self._whole_number(document["boundary_ns"], "boundary_ns", MAX_NS)

    def _no_costs(self, document: Any) -> Diagnostic:
        if not isinstance(document, dict):
            detail = f"the document is {show(document)}, but costs are an object with format: {FORMAT}"
        elif "format" not in document:
            detail = f"the document has no key `format`, but a costs file has format: {FORMAT}"
        else:
            detail = f"format = {show(document['format'])}, but this version reads {FORMAT}"
        return diagnostic("MP340", detail, Location(self._file, key="format"), (WRITE_ONE,))

    def _layers(self, layers: Any, spec: Spec) -> Iterator[Diagnostic]:
        if not isinstance(layers, list):
            yield self._wrong("layers", layers, "a list with an object for each layer")
            return
        for index, layer in enumerate(layers):
            yield from self._record(layer, f"layers[{index}]")
        if len(layers) != spec.model.num_layers:
            detail = f"the file has {plural(len(layers), 'layer')}, but model.num_layers = {spec.model.num_layers}"
            yield diagnostic("MP343", detail, Location(self._file, key="layers"), (WRITE_ONE,))

    def _edges(self, edges: Any) -> Iterator[Diagnostic]:
        if not isinstance(edges, dict):
            yield self._wrong("edges", edges, f"an object with the keys {series(list(_EDGES), 'and')}")
            return
        yield from self._keys(edges, "edges", _EDGES)
        for name in _EDGES:
            if edges.get(name) is not None:
                yield from self._record(edges[name], f"edges.{name}")

    def _record(self, record: Any, key: str) -> Iterator[Diagnostic]:
        if not isinstance(record, dict):
            yield self._wrong(key, record, f"an object with the keys {series([*_TIMES, *_BYTES], 'and')}")
            return
        yield from self._keys(record, key, _TIMES, _BYTES)
        for name in _TIMES:
            if name in record:
                yield from self._whole_number(record[name], f"{key}.{name}", MAX_NS)
        for name in _BYTES:
            if record.get(name) is not None:
                yield from self._whole_number(record[name], f"{key}.{name}", MAX_STORED_BYTES)

    def _keys(self, record: dict[str, Any], key: str, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> Iterator[Diagnostic]:
        where = key or "a costs file"
        missing = [name for name in required if name not in record]
        if missing:
            hint = "null for an edge that takes no time" if key == "edges" else WRITE_ONE
            detail = f"{where} lacks {series(missing, 'and')}"
            yield diagnostic("MP341", detail, Location(self._file, key=key or None), (hint,))
        unknown = [name for name in record if name not in required + optional]
        if unknown:
            names = series([show(name) for name in unknown[:MAX_FINDINGS]], "and")
            detail = f"{where} has {names}, but its keys are {series([*required, *optional], 'and')}"
            yield diagnostic("MP341", detail, Location(self._file, key=key or None), (f"remove {names}",))

    def _whole_number(self, value: Any, key: str, limit: int) -> Iterator[Diagnostic]:
        if not isinstance(value, int) or isinstance(value, bool):
            rounded = isinstance(value, float) and 0 <= value <= limit
            yield self._wrong(key, value, f"a whole number from 0 to {limit:,}", *((f"write {round(value)}",) if rounded else ()))
        elif not 0 <= value <= limit:
            yield self._wrong(key, value, f"a whole number from 0 to {limit:,}")

    def _wrong(self, key: str, value: Any, wanted: str, *hints: str) -> Diagnostic:
        return diagnostic("MP342", f"{key} = {show(value)}, but it takes {wanted}", Location(self._file, key=key), hints)
