"""Commands of bash and tools of text whose output a script's text gives."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import ClassVar

from megaplan.importers.megatron.shell.substitutes import SUBSTITUTES, replaced
from megaplan.importers.megatron.shell.words import Value, Words, formatted
from megaplan.importers.megatron.unset import UNSET, readable, unset
from megaplan.spec.host import NODE

LIST_OF_NODES = "list-of-nodes"
"""Name of the output that is a cluster's list of nodes."""
_NODES = re.compile(r"node|host|machine", re.IGNORECASE)
OF_NODES = "PBS_NUM_NODES"
"""Variable of the number of nodes."""
MAX_FILE_BYTES, MOST_NUMBERS, MOST_FOLDERS = 2**20, 20_000, 5


class Builtins(Words):
    """Variables of a script, its folders, and what its commands read and print.

    Args:
        variables: Variables of the environment.
        name: Name of the script.
        argv: Arguments of the script.
        folder: Folder of the script; None for a text without a file.
    """

    def __init__(self, variables: dict[str, Value], name: str, argv: Sequence[str], folder: Path | None) -> None:
        super().__init__(variables, name, argv)
        self._folder, self._current = folder, Path.cwd()
        self._out: list[str] = []
        self._line, self._given = 0, ""
        self.files: dict[str, str] = {}
        """Texts of the settings that the script writes, by their paths."""
        self.elsewhere: dict[str, str] = {}
        """Files here that are read in the place of another machine's, by the name in the script."""
        self.lists_gpus = False
        """True if the script queries the GPUs of its machine, which is taken to be a full node."""

    def _path(self, name: str) -> Path | None:
        """The file or folder of a name relative to the current folder, the script's folder, or a parent of it."""
        relative = name.removeprefix(f"{self._current}/")
        own = [] if self._folder is None or relative.startswith("/") else [self._folder, *self._folder.resolve().parents][:MOST_FOLDERS]
        tried = [self._current / name, *(folder / relative for folder in own)]
        return next((path for path in tried if os.path.exists(path)), None)

    def _here(self, name: str) -> str:
        """The name of a script's file; a path of another machine is replaced by the local file that shares its longest suffix.

        A name without a folder is searched only next to the script.
        """
        known = UNSET.split(name)[-1]
        if known == name and (self._path(name) is not None or not name.startswith("/")):
            return name
        parts = [part for part in known.split("/")[known != name :] if part]
        near = [] if self._folder is None else [self._folder, *self._folder.resolve().parents][:MOST_FOLDERS]
        for start in range(len(parts)):
            alone = start == len(parts) - 1
            for folder in near[:1] if alone else [*near, self._current]:
                path = folder.joinpath(*parts[start:])
                if os.path.isfile(path):
                    self.elsewhere[readable(name)] = str(path)
                    return str(path)
        return name

    def _read(self, name: str) -> str | None:
        if name in self.files:
            return self.files[name]
        path = None if UNSET.search(name) else self._path(name)
        if path is None or not (os.path.isfile(path) and os.access(path, os.R_OK)) or path.stat().st_size > MAX_FILE_BYTES:
            return None
        return path.read_text(encoding="utf-8", errors="replace")

    def _echo(self, words: list[str]) -> bool:
        escapes = ends = False
        while words and re.fullmatch(r"-[neE]+", words[0]):
            ends, escapes = ends or "n" in words[0], escapes or "e" in words[0]
            words = words[1:]
        text = " ".join(words)
        self._out.append((formatted(text.replace("%", "%%"), []) if escapes else text) + ("" if ends else "\n"))
        return True

    def _printf(self, words: list[str]) -> bool:
        if words[:1] == ["-v"] and len(words) > 2:
            self.set(words[1], formatted(words[2], words[3:]))
        elif words:
            self._out.append(formatted(words[0], words[1:]))
        return True

    def _read_words(self, words: list[str]) -> bool:
        names, is_list, whole = list[str](), False, False
        rest = iter(words)
        for word in rest:
            if re.fullmatch(r"-[a-zA-Z]+", word):
                is_list, whole = is_list or "a" in word, whole or "d" in word
                if word[-1] in "dpntuN":
                    next(rest, None)
            else:
                names.append(word)
        text = self._given if whole else self._given.split("\n", 1)[0]
        if not self._given:
            return False
        if not whole:
            self._given = self._given.partition("\n")[2]
        separators = self.text_of("IFS")
        parts = re.split(f"[{re.escape(separators)}]", text) if separators and separators.strip() else text.split()
        if is_list:
            self.set(names[0] if names else "REPLY", parts)
            return True
        for index, name in enumerate(names or ["REPLY"]):
            last = index == len(names or ["REPLY"]) - 1
            self.set(
                name, text.strip() if len(names) < 2 else " ".join(parts[index:]) if last else parts[index] if index < len(parts) else ""
            )
        return True

    def _map(self, words: list[str]) -> bool:
        names = [word for word in words if not word.startswith("-")]
        self.set(names[-1] if names else "MAPFILE", self._given.rstrip("\n").split("\n") if self._given else [])
        return True

    def _shift(self, words: list[str]) -> bool:
        count = int(words[0]) if words and words[0].isdigit() else 1
        if count > len(self.positional):
            return False
        self.positional = self.positional[count:]
        return True

    def _set(self, words: list[str]) -> bool:
        if "--" in words:
            self.positional = words[words.index("--") + 1 :]
        return True

    def _unset(self, words: list[str]) -> bool:
        for word in words:
            self.variables.pop(word, None)
        return True

    def _change_folder(self, words: list[str]) -> bool:
        path = next((word for word in reversed(words) if not word.startswith("-")), None)
        if path is not None and not UNSET.search(path):
            self._current = self._path(path) or self._current / path
        return True

    def _put(self, text: str | None, program: str) -> bool | None:
        self._out.append(unset(f"({program})") if text is None else f"{text}\n")
        return None if text is None else True

    def _files(self, words: list[str]) -> bool | None:
        named = [word for word in words if not word.startswith("-")]
        texts = [self._read(word) for word in named]
        if any(text is None for text in texts):
            return self._put(None, LIST_OF_NODES if _NODES.search(" ".join(named)) else "cat")
        self._out.append("".join(text or "" for text in texts) if named else self._given)
        return True

    def _sum_words(self, words: list[str]) -> bool | None:
        return (
            self._put(self.sum(" ".join(words), self._line), "expr")
            if all(re.fullmatch(r"[\w()*/%+-]+|\0.*\0", word) for word in words)
            else self._put(None, "expr")
        )

    def _bc(self, _: list[str]) -> bool | None:
        text = self._given.strip().rpartition(";")[2]
        return self._put(self.sum(text, self._line) if re.fullmatch(r"[\d\s()*/%+-]+", text) else None, "bc")

    def _counted(self, words: list[str]) -> bool | None:
        """Counts lines or words of a file or of the input; a cluster's list of nodes has PBS_NUM_NODES lines."""
        named = [word for word in words if not word.startswith("-")]
        text = self._read(named[0]) if named else None if UNSET.search(self._given) else self._given
        if text is not None:
            number = len(text.split()) if "-w" in words else text.count("\n")
            return self._put(f"{number} {named[0]}" if named else str(number), "wc")
        if "-l" in words and _NODES.search("".join(named) or self._given):
            return self._put(str(self.variables.get(OF_NODES, unset(OF_NODES))), "wc")
        return self._put(None, "wc")

    def _filtered(self, words: list[str], lines: Callable[[list[str]], list[str]], name: str) -> bool | None:
        """Prints transformed lines of a file or of the input; unknown output keeps its placeholder."""
        named = [word for word in words if not word.startswith("-")]
        text = self._given if not named else self._read(named[0])
        if text is None or (not named and UNSET.search(text)):
            self._out.append(unset(f"({LIST_OF_NODES if _NODES.search(named[0]) else name})") if named else self._given)
            return None
        known = {word for word in words if word.startswith("-")} <= {"-u"} and len(text) < MAX_FILE_BYTES
        found = lines(text.splitlines())
        return self._put("\n".join(dict.fromkeys(found) if "-u" in words else found) if known else None, name)

    def _gpus(self, words: list[str]) -> bool | None:
        query = next((word.partition("=")[2] for word in words if word.startswith("--query-gpu=")), None)
        if not {"-L", "--list-gpus"} & set(words) and query not in ("name", "index", "gpu_name", "uuid", "count"):
            return self._put(None, "nvidia-smi")
        self.lists_gpus = True
        header = [query or "name"] if query is not None and not any("noheader" in word for word in words) else []
        of_each = {"index": "{}", "count": str(NODE)}.get(query or "", "GPU {}")
        return self._put("\n".join([*header, *[of_each.format(index) for index in range(NODE)]]), "nvidia-smi")

    def count_gpus(self, words: list[str]) -> bool | None:
        """Prints the result of a line of Python that counts GPUs: from the ids of CUDA_VISIBLE_DEVICES, else a node's number."""
        text, ids = "".join(words[words.index("-c") + 1 :][:1]), self.variables.get("CUDA_VISIBLE_DEVICES")
        if not re.search(r"print\(.*(?:CUDA_VISIBLE_DEVICES.*(?:count|split)|device_count\(\))", text, re.DOTALL):
            return self._put(None, "python")
        known = isinstance(ids, str) and re.fullmatch(r"\w[\w-]*(?:,\w[\w-]*)*", ids) is not None
        self.lists_gpus = self.lists_gpus or not known
        return self._put(str(len(str(ids).split(",")) if known else NODE), "python")

    def _grep(self, words: list[str]) -> bool | None:
        named = [word for word in words if word == "--" or not word.startswith("-")]
        named = words[words.index("--") + 1 :] if "--" in named else named
        known = (
            len(named) == 1
            and not UNSET.search(self._given + named[0])
            and len(named[0]) < 80
            and not re.search(r"[)\]*+}][*+{]", named[0])
        )
        quiet = any(re.fullmatch(r"-[a-zA-Z]*q[a-zA-Z]*", word) for word in words)
        if not known or not quiet:
            return self._put(None, "grep")
        return re.search(named[0] if "-E" in words else re.escape(named[0]), self._given) is not None

    def _sed(self, words: list[str]) -> bool | None:
        """Replaces texts in a file or in the input; a file that is changed in another way becomes unknown."""
        options = {word for word in words if word.startswith("-")}
        plain = [word for word in words if not word.startswith("-")]
        rules = [word for word in (plain if "-e" in options else plain[:1]) if SUBSTITUTES.fullmatch(word)]
        files = plain[len(rules) :]
        text = (
            self._given if not {*files, *options & {"-i"}} else self.files.get(files[0], self._read(files[0])) if len(files) == 1 else None
        )
        if not rules or text is None or not options <= {"-e", "-i"}:
            self.files = {path: held for path, held in self.files.items() if "-i" not in options or path not in files}
            return self._put(None, "sed")
        text = replaced(text, rules)
        if "-i" not in options:
            self._out.append(text)
        elif files[0] in self.files:
            self.files = {**self.files, files[0]: text}
        return True

    def _sequence(self, words: list[str]) -> bool | None:
        numbers = [int(word) for word in words if re.fullmatch(r"-?\d{1,6}", word)]
        if len(numbers) != len(words) or not numbers or (len(numbers) == 3 and not numbers[1]):
            return self._put(None, "seq")
        first, step, last = (1, 1, numbers[0]) if len(numbers) == 1 else (numbers[0], 1, numbers[1]) if len(numbers) == 2 else numbers
        return self._put("\n".join(map(str, list(range(first, last + (1 if step > 0 else -1), step))[:MOST_NUMBERS])), "seq")

    def _base_name(self, words: list[str]) -> bool | None:
        name, *end = [*(word for word in words if not word.startswith("-")), "", ""][:2]
        return self._put(name.rstrip("/").rpartition("/")[2].removesuffix(*end), "basename")

    def _folder_name(self, words: list[str]) -> bool | None:
        head, slash, _ = next((word for word in words if not word.startswith("-")), "").rstrip("/").rpartition("/")
        return self._put(head or slash or ".", "dirname")

    def _real(self, words: list[str]) -> bool | None:
        named = [word for word in words if not word.startswith("-")]
        return self._put(
            None if not named or UNSET.search(named[-1]) else str(self._path(named[-1]) or self._current / named[-1]), "realpath"
        )

    builtins: ClassVar[dict[str, Callable[[Builtins, list[str]], bool | None]]] = {
        **dict.fromkeys(("true", ":", "trap", "ulimit", "shopt", "wait", "hash", "umask", "alias", "pushd", "popd"), lambda _, __: True),
        **dict.fromkeys(("mkdir", "rm", "cp", "mv", "ln", "chmod", "touch", "sleep", "tee", "module", "conda"), lambda _, __: None),
        **{"echo": _echo, "printf": _printf, "read": _read_words, "mapfile": _map, "readarray": _map, "shift": _shift, "set": _set},
        **{
            "unset": _unset,
            "cd": _change_folder,
            "cat": _files,
            "expr": _sum_words,
            "bc": _bc,
            "wc": _counted,
            "sort": lambda shell, words: shell._filtered(words, sorted, "sort"),
            "uniq": lambda shell, words: shell._filtered(words, lambda lines: [line for line, _ in groupby(lines)], "uniq"),
            "nvidia-smi": _gpus,
            "grep": _grep,
            "sed": _sed,
            "seq": _sequence,
        },
        **{"realpath": _real, "readlink": _real, "basename": _base_name, "dirname": _folder_name},
        "pwd": lambda shell, _: shell._put(str(shell._current), "pwd"),
        "false": lambda _, __: False,
        "let": lambda shell, words: shell.sum(",".join(words), shell._line) != "0",
    }
    """Functions of commands by name; each takes the following words and returns the command's status, None if unknown."""
