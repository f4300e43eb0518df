"""Mutated specs, plans, manifests and token files: each is loaded or answered with diagnostics, whatever was done to it."""

import contextlib
import copy
import json
import random
import resource
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from megaplan.errors import MegaplanError
from megaplan.plan.read import read_plan
from megaplan.spec.load import load_spec
from megarun.checkpoint.index import INDEX, read_index
from megarun.checkpoint.manifest import MANIFEST, Manifest, damaged_files, manifest_digest, read_manifest
from megarun.checkpoint.sums import FileRecord
from megarun.cli.checkpoint import checkpoints_at
from megarun.data.format import PAYLOAD_START, PREAMBLE
from megarun.data.token_file import TokenFile

CASE_SECONDS = 2
"""Limit of processor time of an answer on a machine that has nothing else to do."""
HANG_SECONDS = 20
"""Limit of processor time in tests, which find hangs, not slow answers: on shared processors the same work takes several times as long."""
LARGEST_BYTES = 512 << 20
ROOT = Path(__file__).parents[3]
PLANS = ROOT / "plans"
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 255, 2**31, 2**48, 2**63, 2**64, 10**30, 0.5, -0.0, 1e308, float("inf"), float("nan"),
    "", "x", "A|M", "..", "../../etc/passwd", "/dev/zero", "a\0b", "\ud800", "é" * 300, "9" * 5000, [], {}, [[]], [None], {"": None},
    [0] * 50, {"a": {"a": {"a": {}}}},
]  # fmt: skip
PIECES = [
    b"{",
    b"}",
    b"[",
    b"]",
    b'"',
    b":",
    b",",
    b"\0",
    b"\xff",
    b"\n",
    b"- ",
    b"&a ",
    b"*a",
    b"!!python/object/apply:os.system ['true']",
    b"1e999",
]


@dataclass
class Found:
    """Record of a run of the fuzzer: how often each kind of input was loaded and refused, and what went wrong."""

    loaded: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def mutated_tree(tree: Any, draw: random.Random) -> Any:
    """A few nodes replaced, removed, doubled or renamed; one tree in six stays as it is."""
    tree = copy.deepcopy(tree)
    for _ in range(draw.choice((0, 1, 1, 1, 2, 4))):
        places = list(places_of(tree))
        if not places:
            return tree
        parent, key = draw.choice(places)
        match draw.randrange(5):
            case 0 if isinstance(parent, dict):
                parent[draw.choice(("", "x", "format", "kind", "num_layers", "__class__"))] = parent.pop(key)
            case 1:
                del parent[key]
            case 2 if isinstance(parent, list):
                parent.append(copy.deepcopy(parent[key]))
            case 3:
                other, name = draw.choice(places)
                parent[key] = copy.deepcopy(other[name]) if _has(other, name) else None
            case _:
                parent[key] = copy.deepcopy(draw.choice(VALUES))
    return tree


def places_of(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every node of a tree, as its parent and its key or index in it."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield tree, key
        yield from places_of(value)


def _has(parent: Any, key: Any) -> bool:
    return key in parent if isinstance(parent, dict) else key < len(parent)


def mutated_bytes(data: bytes, draw: random.Random) -> bytes:
    """A few bytes flipped, cut out, put in or repeated; sometimes the end is missing."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8))):
        at = draw.randrange(len(changed) + 1)
        match draw.randrange(5):
            case 0 if at < len(changed):
                changed[at] ^= 1 << draw.randrange(8)
            case 1:
                del changed[at : at + draw.choice((1, 2, 40, 4000))]
            case 2:
                changed[at:at] = draw.choice(PIECES) * draw.choice((1, 1, 3, 2000))
            case 3:
                changed[at:at] = changed[at : at + draw.choice((1, 30, 300))]
            case _:
                del changed[at:]
    return bytes(changed)


def json_bytes(tree: Any) -> bytes:
    """A tree as JSON, whatever its texts hold."""
    return json.dumps(tree).encode("utf-8", "surrogatepass")


class Inputs:
    """Writes one mutated file after another and reads it as megaplan and megarun do."""

    def __init__(self, folder: Path, tokens: Path) -> None:
        self._folder, self._tokens = folder, tokens.read_bytes()
        self._specs = [path.read_bytes() for path in sorted(PLANS.glob("*.yaml"))]
        self._plans = [path.read_bytes() for path in sorted(PLANS.glob("tiny*.json"))]
        self._checkpoint = folder / "step-00000002"
        self._checkpoint.mkdir()
        files = {"__0_0.distcp": FileRecord(1, "ab" * 32), INDEX: FileRecord(2, "cd" * 32)}
        self._manifest = json.loads(Manifest(2, 0, (4, 16), "sha256:a", "sha256:b", 2, "2.13.0", files).text())
        self._manifest["course"] = {"skipped": [[1, 2], [5, 8]], "losses": [1.5]}
        self._manifest["line"] = [[0, 0], [1, 2]]
        self._manifest["data"] = [{"name": "a.tokens", "payload_sha256": "ef" * 32, "num_tokens": 40, "weight": 1}]
        chunk = [[0, 0], [4, 4], "__0_0.distcp", 0, 64]
        self._manifest["digest"] = manifest_digest(self._manifest)
        self._index = {"tensors": {"embedding.weight": {"dtype": "torch.float32", "shape": [4, 4], "chunks": [chunk]}}}
        self.readers: dict[str, Reader] = {
            "spec": self.spec,
            "plan": self.plan,
            "manifest": self.manifest,
            "token file": self.token_file,
        }

    def spec(self, draw: random.Random) -> None:
        path, source = self._folder / "spec.yaml", draw.choice(self._specs)
        tree = draw.random() < 0.6
        path.write_bytes(yaml.safe_dump(mutated_tree(yaml.safe_load(source), draw)).encode() if tree else mutated_bytes(source, draw))
        load_spec(str(path))

    def plan(self, draw: random.Random) -> None:
        path, source = self._folder / "plan.json", draw.choice(self._plans)
        path.write_bytes(json_bytes(mutated_tree(json.loads(source), draw)) if draw.random() < 0.6 else mutated_bytes(source, draw))
        read_plan(str(path))

    def manifest(self, draw: random.Random) -> None:
        broken, tree = draw.choice((MANIFEST, INDEX)), draw.random() < 0.7
        for name, content in ((MANIFEST, self._manifest), (INDEX, self._index)):
            data = json_bytes(content)
            if name == broken:
                data = self._broken(content, draw) if tree else mutated_bytes(data, draw)
            (self._checkpoint / name).write_bytes(data)
        path = checkpoints_at(str(self._checkpoint))[0]
        found = read_manifest(path)
        damaged_files(path, found)
        found.data_progress.batch(10)
        read_index(path)

    def _broken(self, content: dict[str, Any], draw: random.Random) -> bytes:
        """A mutated tree; mostly with the digest of what it says now, so that the reader looks beyond it."""
        tree = mutated_tree(content, draw)
        if "digest" in tree and draw.random() < 0.8:
            tree["digest"] = manifest_digest(tree)
        return json_bytes(tree)

    def token_file(self, draw: random.Random) -> None:
        path, data = self._folder / "some.tokens", self._tokens
        if draw.random() < 0.5:
            magic, version, size = PREAMBLE.unpack_from(data)
            header = json_bytes(mutated_tree(json.loads(data[PREAMBLE.size : PREAMBLE.size + size]), draw))
            start = PREAMBLE.pack(magic, version, len(header)) + header
            data = start.ljust(PAYLOAD_START, b"\0") + data[PAYLOAD_START:]
        elif draw.random() < 0.5:
            data = mutated_bytes(data[:PAYLOAD_START], draw)[:PAYLOAD_START].ljust(PAYLOAD_START, b"\0") + data[PAYLOAD_START:]
        else:
            data = mutated_bytes(data, draw)
        path.write_bytes(data)
        source = TokenFile(path)
        source.rows(3, 0, 4, 16)
        source.starts(3, 0, 4, 16)
        source.verify()


Reader = Callable[[random.Random], bool | None]
"""Writes and reads one mutated input; False where a command has refused it."""


def fuzz(readers: Mapping[str, Reader], count: int, seed: int, seconds: float = CASE_SECONDS) -> Found:
    """Read `count` mutated inputs, kind by kind in turn, each within a limit; case i of a seed is always the same."""
    found, before, kinds = Found(), signal.signal(signal.SIGPROF, too_long), list(readers)
    try:
        for index in range(count):
            kind = kinds[index % len(kinds)]
            signal.setitimer(signal.ITIMER_PROF, seconds)
            try:
                with contextlib.redirect_stderr(sys.stdout):
                    refused = readers[kind](random.Random(f"{seed} {index}")) is False
                (found.refused if refused else found.loaded)[kind] += 1
            except MegaplanError as error:
                found.refused[kind] += 1
                if not error.diagnostics or any(each.code in ("MP610", "MP900") for each in error.diagnostics):
                    found.wrong.append(f"{kind} {index}: {error}")
            except Exception as error:
                found.wrong.append(f"{kind} {index}: {type(error).__name__}: {str(error)[-300:]}")
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
    finally:
        signal.signal(signal.SIGPROF, before)
    return found


def too_long(number: int, _: FrameType | None) -> None:
    raise TimeoutError(f"no answer within its processor time (signal {number})")


def peak_bytes() -> int:
    """Resident memory of this process at its largest."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
