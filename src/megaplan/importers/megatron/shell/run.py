"""The commands that a bash script would run, found by following its assignments, conditions and loops; no command is run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import pairwise

from megaplan.importers.megatron.shell.expand import UNKNOWN, Field, Scope, unknown_names
from megaplan.importers.megatron.shell.syntax import (
    Chain,
    Choice,
    Command,
    Condition,
    Function,
    Loop,
    Negated,
    Statement,
    Test,
    parse,
)
from megaplan.importers.megatron.shell.words import Token, Word

Outcome = bool | None
"""Whether a command succeeds; None where that is not known."""
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[(\w*)\])?(\+?)=", re.ASCII)
_DIRECTIVE = re.compile(r"^#SBATCH\s+(--[\w-]+)(?:[= ]+(\S+))?|^#SBATCH\s+-([NnG])\s*(\d+)", re.MULTILINE)
_SLURM = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "ntasks_per_node": ("SLURM_NTASKS_PER_NODE",),
    "gpus_per_node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    "ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
}
_SHORT = {"N": "nodes", "n": "ntasks", "G": "gpus"}
_SHELLS = frozenset({"bash", "sh", "zsh"})
_DECLARES = frozenset({"export", "declare", "local", "readonly", "typeset"})
_READERS = _SHELLS | {"sbatch", "srun", "ssh"}
_COMPARED = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}
MOST_ROUNDS, MOST_DEPTH = 200, 20


class _Exit(Exception):  # noqa: N818 (no error: the script's own end)
    """The script ends here."""


@dataclass(slots=True)
class Shell:
    """A script that is followed.

    Attributes:
        scope: Its variables.
        commands: Words of every command that it would run.
        left_out: What is not followed, each with its line: sourced files, and branches behind a condition that is not known.
    """

    scope: Scope
    commands: list[list[Field]] = field(default_factory=list)
    left_out: list[tuple[int, str]] = field(default_factory=list)
    _functions: dict[str, Chain] = field(default_factory=dict)
    _depth: int = 0
    _nested: int = 0

    def run(self, text: str, line: int = 1) -> None:
        """Follow a script whose first line has this number.

        Raises:
            ScriptError: It cannot be read.
        """
        try:
            self._chain(parse(text, line))
        except _Exit:
            return

    def _chain(self, chain: Chain) -> Outcome:
        found: Outcome = True
        for connector, step in chain.steps:
            if (connector == "&&" and found is False) or (connector == "||" and found is not False):
                continue
            if connector != ";":
                self._nested += 1
            found = self._statement(step)
            if connector != ";":
                self._nested -= 1
        return found

    def _statement(self, step: Statement) -> Outcome:
        if isinstance(step, Command):
            return self._command(step)
        if isinstance(step, Chain):
            return self._chain(step)
        if isinstance(step, Function):
            self._functions[step.name] = step.body
            return True
        if isinstance(step, Negated | Test):
            return self._asked(step)
        self._nested += 1
        try:
            return self._compound(step)
        finally:
            self._nested -= 1

    def _asked(self, step: Negated | Test) -> Outcome:
        if isinstance(step, Negated):
            found = self._statement(step.body)
            return None if found is None else not found
        if step.sum is None:
            return self._test(list(step.tokens))
        value = self.scope.sum(step.sum)
        return None if value is None else bool(value)

    def _compound(self, step: Condition | Choice | Loop) -> Outcome:
        if isinstance(step, Condition):
            for condition, body in step.branches:
                found = self._chain(condition)
                if found:
                    return self._chain(body)
                if found is None:
                    self._unknown_branch(body, step.line)
            return self._chain(step.otherwise)
        if isinstance(step, Choice):
            text = self.scope.text(step.word)
            for patterns, body in step.branches:
                if any(fnmatchcase(text, self.scope.pattern(pattern)) for pattern in patterns):
                    return self._chain(body)
            return True
        return self._loop(step)

    def _unknown_branch(self, body: Chain, line: int) -> None:
        """A branch behind a condition that is not known is left out; noted if it would have changed a variable."""
        if any(isinstance(step, Command) and step.words and ASSIGNMENT.match(_head(step.words[0])) for _, step in body.steps):
            self.left_out.append((line, "the condition depends on the machine, and its branch is left out"))

    def _loop(self, step: Loop) -> Outcome:
        if step.condition is not None:
            for _ in range(MOST_ROUNDS):
                found = self._chain(step.condition)
                if found is None or found is step.until:
                    break
                self._chain(step.body)
            return True
        fields = self.scope.positional if step.words is None else [each for word in step.words for each in self.scope.fields(word)]
        for each in fields[:MOST_ROUNDS]:
            self.scope.set(step.name, [each], array=False)
            self._chain(step.body)
        return True

    def _command(self, step: Command) -> Outcome:
        words = list(step.words)
        while words and self._assigned(words[0]):
            words.pop(0)
        if not words:
            return True
        if words[0].plain in _DECLARES:
            return self._declared(words[1:])
        fields = [each for word in words for each in self.scope.fields(word)]
        if not fields:
            return True
        return self._builtin(fields, step)

    def _assigned(self, word: Word) -> bool:
        """Whether the word is an assignment, which is made."""
        match = ASSIGNMENT.match(_head(word))
        if match is None:
            return False
        name, index, more = match[1], match[2], bool(match[3])
        before = self.scope.values.get(name, []) if more else []
        if word.items is not None:
            fields = [each for item in word.items for each in self.scope.fields(item)]
            self.scope.set(name, [*before, *fields], array=True)
            return True
        text = self.scope.text(word)[match.end() :]
        if index is not None and index.isdigit():
            held = [*self.scope.values.get(name, []), *[Field("", word.line)] * (int(index) + 1)]
            held = held[: max(len(self.scope.values.get(name, [])), int(index) + 1)]
            held[int(index)] = Field(text, word.line)
            self.scope.set(name, held, array=True)
        else:
            self.scope.set(name, [Field((before[0].text if before else "") + text, word.line)], array=False)
        return True

    def _declared(self, words: Sequence[Word]) -> Outcome:
        for word in words:
            self._assigned(word)
        return True

    def _builtin(self, fields: list[Field], step: Command) -> Outcome:
        name, rest = fields[0].text, fields[1:]
        if name in ("[", "test"):
            return self._condition([each.text for each in rest if each.text != "]" or each is not rest[-1]])
        if name in ("true", ":", "false"):
            return name != "false"
        if name in ("exit", "return") and not self._nested:
            raise _Exit
        if name in ("shift", "set", "unset"):
            self._changed(name, rest)
        elif name in ("source", "."):
            self.left_out.append((step.line, f"{rest[0].text if rest else 'a file'} is sourced there, and is not read"))
        elif name == "eval":
            self._inner(" ".join(each.text for each in rest), step.line)
        elif name in self._functions:
            return self._called(name, rest)
        elif name not in ("echo", "printf", "exit", "return"):
            self._recorded(fields, step)
            return None
        return True

    def _changed(self, name: str, rest: list[Field]) -> None:
        """`shift`, `set -- …` and `unset`."""
        if name == "shift":
            count = int(rest[0].text) if rest and rest[0].text.isdigit() else 1
            self.scope.read_positional = True
            self.scope.positional = self.scope.positional[count:]
        elif name == "unset":
            for each in rest:
                self.scope.values.pop(each.text, None)
        elif rest and rest[0].text == "--":
            self.scope.positional = rest[1:]

    def _called(self, name: str, arguments: list[Field]) -> Outcome:
        if self._depth >= MOST_DEPTH:
            return None
        before, read = self.scope.positional, self.scope.read_positional
        self.scope.positional = arguments
        self._depth += 1
        found = self._chain(self._functions[name])
        self._depth -= 1
        self.scope.positional, self.scope.read_positional = before, read
        return found

    def _recorded(self, fields: list[Field], step: Command) -> None:
        self.commands.append(fields)
        texts = [each.text for each in fields]
        for place, text in enumerate(texts[:-1]):
            if re.fullmatch(r"-[a-z]*c", text) and {each.rpartition("/")[2] for each in texts[:place]} & _SHELLS:
                self._inner(texts[place + 1], fields[place + 1].line)
        if texts[0].rpartition("/")[2] in _READERS:
            for document, quoted in step.documents:
                self._inner(document if quoted else self._expanded(document), step.line)

    def _expanded(self, document: str) -> str:
        """A here-document after expansion, as bash does it before the command reads it."""
        escaped = document.replace('"', '\\"')
        (only,) = parse(f'"{escaped}"').steps
        assert isinstance(only[1], Command)
        return self.scope.text(only[1].words[0])

    def _inner(self, text: str, line: int) -> None:
        if self._depth < MOST_DEPTH:
            self._depth += 1
            _preset(self.scope, text)
            self.run(text, line)
            self._depth -= 1

    def _test(self, tokens: list[Token]) -> Outcome:
        """`[[ … ]]`: `||` binds least, then `&&`, then `!`."""
        for sign, joined in (("||", any), ("&&", all)):
            cuts = [place for place, token in enumerate(tokens) if token.kind == "operator" and token.text == sign]
            if cuts:
                ends = [-1, *cuts, len(tokens)]
                found = [self._test(tokens[start + 1 : stop]) for start, stop in pairwise(ends)]
                decided = joined is any
                return decided if any(each is decided for each in found) else None if None in found else not decided
        if tokens and tokens[0].kind == "operator" and tokens[0].text == "(":
            return self._test(tokens[1:-1])
        texts = []
        for token in tokens:
            if token.word is None:
                texts.append(token.text)
            else:
                pattern = texts[-1:] in (["=="], ["="], ["!="])
                texts.append(self.scope.pattern(token.word) if pattern else self.scope.text(token.word))
        return self._condition(texts, patterns=True)

    def _condition(self, words: list[str], *, patterns: bool = False) -> Outcome:
        """A test of words; of a variable that is set nowhere the text is empty, as in bash."""
        if words and words[0] == "!":
            found = self._condition(words[1:], patterns=patterns)
            return None if found is None else not found
        for sign, joined in (("-o", any), ("-a", all)):
            if sign in words[1:] and not patterns:
                place = words.index(sign)
                parts = [self._condition(words[:place]), self._condition(words[place + 1 :])]
                return None if None in parts else joined(bool(each) for each in parts)
        texts = [self._tested(word) for word in words]
        if any(text is None for text in texts):
            return None
        plain = [text or "" for text in texts]
        if len(plain) == 1:
            return bool(plain[0])
        if len(plain) == 2:
            return {"-z": not plain[1], "-n": bool(plain[1]), "-v": plain[1] in self.scope.values}.get(plain[0])
        return _compared(plain, patterns=patterns) if len(plain) == 3 else len(plain) > 0 and None

    @staticmethod
    def _tested(word: str) -> str | None:
        """A word of a test; None where it has the output of a command."""
        if any(not re.fullmatch(r"\w+", name) for name in unknown_names(word)):
            return None
        return UNKNOWN.sub("", word)


def _compared(words: list[str], *, patterns: bool) -> Outcome:
    left, sign, right = words
    if sign in ("=", "==", "!="):
        equal = fnmatchcase(left, right) if patterns else left == right
        return equal is (sign != "!=")
    if sign in _COMPARED:
        value = Scope().sum(f"{left or 0} {_COMPARED[sign]} {right or 0}")
        return None if value is None else bool(value)
    return None


def _head(word: Word) -> str:
    """The unquoted beginning of a word."""
    first = word.parts[0] if word.parts else None
    return first.text if first is not None and not first.quoted and first.kind == "text" else ""


def follow(text: str, environment: Mapping[str, str], positional: Sequence[str]) -> Shell:
    """A script with variables of its environment and arguments of its own.

    Raises:
        ScriptError: It cannot be read.
    """
    shell = Shell(Scope(positional=[Field(each, 0) for each in positional]))
    _preset(shell.scope, text)
    for name, value in environment.items():
        shell.scope.set(name, [Field(value, 0)], array=False)
    shell.run(text)
    return shell


def _preset(scope: Scope, text: str) -> None:
    """Variables that Slurm sets from a batch script's directives."""
    for match in _DIRECTIVE.finditer(text):
        key, value = (match[1][2:].replace("-", "_"), match[2]) if match[1] else (_SHORT[match[3]], match[4])
        number = re.search(r"(\d+)$", value or "")
        for name in _SLURM.get(key, ()):
            if number is not None:
                scope.set(name, [Field(number[1], text.count("\n", 0, match.start()) + 1)], array=False)
