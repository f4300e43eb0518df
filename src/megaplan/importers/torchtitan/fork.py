"""Flavors of a fork, from the registry in its own tree (`torchtitan/models/NAME/__init__.py`), read from the syntax tree: nothing runs.

The table may be in a file that the registry imports it from. A model of the fork's own is read if its class is one of torchtitan's.
"""

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

from megaplan.importers.megatron.tokenizer_files import counted_tokens
from megaplan.importers.torchtitan.models import FLAVORS, Flavor
from megaplan.importers.torchtitan.registry_file import Made, Reader
from megaplan.importers.torchtitan.sizes import VOCABULARIES, WIDTHS, flavor_of

MOST_FOLDERS, MOST_BYTES, MOST_FILES = 8, 2**20, 64
RESERVED_TOKENS = 256
"""Tokens that torchtitan's Llama 3 tokenizer adds to the file's tokens."""
_NAMED = {
    r"tests?/assets/test_tiktoken\.model$": 2256, r"llama[-_]?2": 32_000, r"llama[-_]?3": 128_256, r"qwen[-_]?3": 151_669,
    r"deepseek[-_]?(?:moe|v2)": 100_002,
}  # fmt: skip
"""Tokens of tokenizers by a part of their paths; the first is torchtitan's own for tests."""


class Registry:
    """A file of Python in the tree that a configuration belongs to.

    Attributes:
        path: Path of the file.
        tree: Syntax tree of the file.
    """

    def __init__(self, path: Path) -> None:
        """Parse a file."""
        self.path, self.tree = path, ast.parse(path.read_text(encoding="utf-8"))

    def imported(self, name: str) -> tuple[str, Iterator[Path]] | None:
        """The module that a name is imported from, or that it names, and the files that it may be."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                whole = next((each.name for each in node.names if each.asname == name), None)
                if whole is not None:
                    return whole, self._files(ast.ImportFrom(whole, [], 0))
            if isinstance(node, ast.ImportFrom) and any((each.asname or each.name) == name for each in node.names):
                return node.module or "", self._files(node)
        return None

    def _files(self, node: ast.ImportFrom) -> Iterator[Path]:
        parts = (node.module or "").split(".") if node.module else []
        folders = list(self.path.parents)
        for folder in folders[node.level - 1 : node.level] if node.level else folders[:MOST_FOLDERS]:
            whole = folder.joinpath(*parts)
            yield from (file for file in (whole.with_suffix(".py"), whole / "__init__.py") if _is_readable(file))


def fork_flavor(path: str, model: str, flavor: str, tokenizer: str | None = None) -> Flavor | None:
    """The dimensions of a flavor in the tree that a configuration belongs to; None if it is in none, or no decoder that is read.

    Args:
        path: Path of the configuration.
        model: Name of the model.
        flavor: Name of the flavor.
        tokenizer: Path of the tokenizer that the configuration names, for models that it gives the vocabulary.
    """
    if not os.path.isfile(path):
        return None
    for file in _registries(Path(path).resolve(), model):
        try:
            registry = Registry(file)
            own = _architecture(registry, model)
            found = None if own is None else _table(registry, model, flavor) or _table(registry, own, flavor)
            again = None if found is not None or own in (None, model) else _again(registry, own or model, flavor)
        except (SyntaxError, ValueError, RecursionError):
            continue
        if own is not None and again is not None:
            return fork_flavor(path, own, again, tokenizer) or FLAVORS.get(own, {}).get(again)
        if found is not None and own is not None:
            made, holder = found
            stated = _default(holder, made, "vocab_size")
            width = next((size for name in WIDTHS if (size := _default(holder, made, name))), None)
            return flavor_of(made, own, tokens_of(path, tokenizer) if stated is not None and stated < 1 else stated, width)
    return None


def stated_flavor(made: Made, model: str) -> Flavor | None:
    """The dimensions of a configuration of one of torchtitan's own models; None if it is of another, or a size is not known."""
    return flavor_of(made, model) if model in VOCABULARIES else None


def tokens_of(path: str, tokenizer: str | None) -> int | None:
    """The tokens of a tokenizer that a configuration names, from its files in the configuration's tree or by its name."""
    if tokenizer is None:
        return None
    for folder in list(Path(path).resolve().parents)[:MOST_FOLDERS] if os.path.isfile(path) else []:
        file = folder / tokenizer
        if file.suffix == ".model" and _is_readable(file) and (lines := file.read_bytes().split(b"\n")) and _is_ranks(lines):
            return len([line for line in lines if line]) + RESERVED_TOKENS
        if (count := counted_tokens(tokenizer, str(folder / "job"))) is not None:
            return count
    return next((size for part, size in _NAMED.items() if re.search(part, tokenizer.lower())), None)


def _is_ranks(lines: list[bytes]) -> bool:
    """True if the lines have tiktoken's format: a token in base 64, and its rank."""
    return all(re.fullmatch(rb"[A-Za-z0-9+/=]+ \d+", line) for line in lines if line)


def _registries(path: Path, model: str) -> Iterator[Path]:
    """Files that may have the model's table, the likely ones first."""
    folders = list(path.parents)[:MOST_FOLDERS]
    names = dict.fromkeys((model, model.rstrip("0123456789")))
    for folder in folders:
        packages = sorted(each for each in folder.glob("*titan*") if os.path.isdir(each))
        likely = [package / kind / name for package in packages for name in names for kind in ("models", "experiments")]
        for file in (each / "__init__.py" for each in (*likely, *([folder] if folder.name == model else []))):
            if _is_readable(file):
                yield file
        if _names(folder / "__init__.py", model):
            yield folder / "__init__.py"
        others = [file for package in packages for kind in ("models", "experiments") for file in (package / kind).glob("*/__init__.py")]
        for file in sorted(others)[:MOST_FILES]:
            if _names(file, model):
                yield file


def _names(file: Path, model: str) -> bool:
    """True if a file registers a model under this name."""
    return _is_readable(file) and f'"{model}"' in file.read_text(encoding="utf-8", errors="replace")


def _is_readable(file: Path) -> bool:
    return os.path.isfile(file) and os.access(file, os.R_OK) and file.stat().st_size <= MOST_BYTES


def _architecture(registry: Registry, model: str) -> str | None:
    """The model of torchtitan whose class a model has; None if it is another."""
    if model in VOCABULARIES:
        return model
    for node in ast.walk(registry.tree):
        for keyword in node.keywords if isinstance(node, ast.Call) else ():
            root = keyword.value.value if isinstance(keyword.value, ast.Attribute) else keyword.value
            if keyword.arg in ("cls", "model_cls") and isinstance(root, ast.Name):
                found = registry.imported(root.id)
                parts = found[0].split(".") if found is not None else []
                return next((part for part in parts if part in VOCABULARIES), None)
    return None


def _table(registry: Registry, model: str, flavor: str, *, follows: bool = True) -> tuple[Made, Registry] | None:
    """The call behind a flavor's name, in a table that is named after the model, and the file that has it."""
    stem = model.replace("_", "")
    for node in registry.tree.body:
        value = _stated(node, stem, flavor)
        if value is not None and (found := _entry(registry.tree, value)) is not None:
            return found, registry
        for file in _tables_files(registry, node, stem) if follows and isinstance(node, ast.ImportFrom) else ():
            if (other := _table(Registry(file), model, flavor, follows=False)) is not None:
                return other
    return None


def _again(registry: Registry, own: str, flavor: str) -> str | None:
    """The flavor of torchtitan's own table that a fork's table has under a name: `OTHER.llama3_configs["1B"]`, or a call of it."""
    stem = own.replace("_", "")
    for node in registry.tree.body:
        value = _stated(node, stem, flavor)
        value = value.func if isinstance(value, ast.Call) else value
        if isinstance(value, ast.Subscript) and _is_stem(ast.unparse(value.value), stem) and isinstance(value.slice, ast.Constant):
            return str(value.slice.value)
    return None


def _stated(node: ast.stmt, stem: str, flavor: str) -> ast.expr | None:
    """The value that a statement gives a flavor, in a table or by assignment to one of its keys."""
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        return None
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        if isinstance(target, ast.Subscript) and _is_key(target.slice, flavor) and _is_stem(ast.unparse(target.value), stem):
            return node.value
        if isinstance(target, ast.Name) and _is_stem(target.id, stem) and isinstance(node.value, ast.Dict):
            table = node.value
            return next((value for key, value in zip(table.keys, table.values, strict=True) if _is_key(key, flavor)), None)
    return None


def _tables_files(registry: Registry, node: ast.ImportFrom, stem: str) -> Iterator[Path]:
    """Files that may have the tables that a statement imports."""
    for each in node.names:
        found = registry.imported(each.asname or each.name) if _is_stem(each.asname or each.name, stem) else None
        yield from found[1] if found is not None else ()


def _is_stem(name: str, stem: str) -> bool:
    return name.rpartition(".")[2].replace("_", "").startswith(stem)


def _is_key(node: ast.expr | None, flavor: str) -> bool:
    return isinstance(node, ast.Constant) and node.value == flavor


def _entry(tree: ast.Module, value: ast.expr) -> Made | None:
    reader = Reader(tree, builds_layers=True)
    is_function = isinstance(value, ast.Name) and value.id in reader.functions
    found = reader.call(value.id, [], {}) if is_function and isinstance(value, ast.Name) else reader.value(value, {})
    return found if isinstance(found, Made) else None


def _default(registry: Registry, made: Made, field: str) -> int | None:
    """The default of a field of the class that a flavor is made of; None if it is not known. A vocabulary below 1 is the tokenizer's."""
    found = registry.imported(made.name.split(".")[0])
    for file in (registry.path, *(found[1] if found is not None else ())):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name == made.name.split(".")[0]:
                stated = (each for each in node.body if isinstance(each, ast.AnnAssign) and ast.unparse(each.target) == field)
                default = next(stated, None)
                made_of = Reader(ast.Module([], [])).value(default.value, {}) if default is not None and default.value is not None else None
                return made_of if isinstance(made_of, int) else None
    return None
