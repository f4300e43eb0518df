"""The commands that a bash script would run, found by following its assignments, conditions and loops; no command is run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from megaplan.importers.megatron.shell.assign import assigned, assigns, counted, declared, name_of
from megaplan.importers.megatron.shell.conditions import Outcome, condition, test
from megaplan.importers.megatron.shell.expand import Field, Kept, Scope
from megaplan.importers.megatron.shell.output import expanded, output_of
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
_LOCAL = frozenset({"declare", "local", "typeset"})
"""Of these, what makes variables of a function."""
_READERS = _SHELLS | {"sbatch", "srun", "ssh"}
MOST_ROUNDS, MOST_DEPTH = 200, 20


class _Exit(Exception):  # noqa: N818 (no error: the script's own end)
    """The script ends here."""


class _Return(Exception):  # noqa: N818
    """The function ends here, with this outcome."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__()
        self.outcome = outcome


class _Leave(Exception):  # noqa: N818
    """`break` and `continue` of so many loops."""

    def __init__(self, loops: int, *, ends: bool) -> None:
        super().__init__()
        self.loops, self.ends = loops, ends


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
    _loops: int = 0
    _locals: list[dict[str, Kept]] = field(default_factory=list)

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
            self._nested += connector != ";"
            try:
                found = self._statement(step)
            finally:
                self._nested -= connector != ";"
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
            return test(self.scope, list(step.tokens))
        value = counted(self.scope, step.sum)
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
        if _changes(body):
            self.left_out.append((line, "the condition depends on the machine, and its branch is left out"))

    def _loop(self, step: Loop) -> Outcome:
        fields = self.scope.positional if step.words is None else [each for word in step.words for each in self.scope.fields(word)]
        self._loops += 1
        try:
            for place in range(MOST_ROUNDS):
                if step.condition is not None:
                    found = self._chain(step.condition)
                    if found is None or found is step.until:
                        break
                elif place == len(fields):
                    break
                else:
                    self.scope.set(step.name, [fields[place]], array=False)
                if not self._round(step.body):
                    break
                counted(self.scope, step.step)
        finally:
            self._loops -= 1
        return True

    def _round(self, body: Chain) -> bool:
        """A round of a loop; whether another may follow."""
        try:
            self._chain(body)
        except _Leave as left:
            if left.loops > 1 and self._loops > 1:
                raise _Leave(left.loops - 1, ends=left.ends) from None
            return not left.ends
        return True

    def _command(self, step: Command) -> Outcome:
        words = list(step.words)
        while words and assigned(self.scope, words[0]):
            words.pop(0)
        if not words:
            return True
        if words[0].plain in _DECLARES:
            if self._locals and words[0].plain in _LOCAL:
                for name in filter(None, map(name_of, words[1:])):
                    self._locals[-1].setdefault(name, self.scope.kept(name))
            declared(self.scope, words[1:])
            return True
        fields = [each for word in words for each in self.scope.fields(word)]
        if not fields:
            return True
        return self._builtin(fields, step)

    def _builtin(self, fields: list[Field], step: Command) -> Outcome:
        name, rest = fields[0].text, fields[1:]
        if name in ("[", "test"):
            return condition(self.scope, [each.text for each in rest if each.text != "]" or each is not rest[-1]])
        if name in ("exit", "return", "break", "continue"):
            return self._left(name, rest[0].text if rest else "")
        if name in ("shift", "set", "unset"):
            self._changed(name, rest)
        elif name in ("source", "."):
            self.left_out.append((step.line, f"{rest[0].text if rest else 'a file'} is sourced there, and is not read"))
        elif name == "eval":
            self._inner(" ".join(each.text for each in rest), step.line)
        elif name in self._functions:
            return self._called(name, rest)
        elif name == "read" and step.documents:
            self._read([each.text for each in rest], *step.documents[0])
        elif name == "let":
            for each in rest:
                counted(self.scope, each.text)
        elif name not in ("echo", "printf", "true", ":", "false"):
            self._recorded(fields, step)
            return None
        return name != "false"

    def _read(self, words: list[str], document: str, quoted: bool) -> None:
        """`read -d '' NAME` takes all of a here-document, without `-d` its first line."""
        text = document if quoted else expanded(self.scope, document)
        names = [word for word in words if re.fullmatch(r"[A-Za-z_]\w*", word)]
        whole = any(re.fullmatch(r"-\w*d", word) for word in words)
        if len(names) == 1:
            self.scope.set(names[0], [Field((text if whole else text.partition("\n")[0]).strip(), 0)], array=False)

    def _left(self, name: str, argument: str) -> Outcome:
        """`break`, `continue`, `return` of a function, and the end of the script.

        An end inside a branch is not followed: it is a refusal of arguments that the launch may have been given.
        """
        if name in ("break", "continue"):
            if self._loops:
                raise _Leave(int(argument) if argument.isdigit() else 1, ends=name == "break")
        elif name == "return" and self._locals:
            raise _Return(int(argument) == 0 if argument.isdigit() else None if argument else True)
        elif not self._nested:
            raise _Exit
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
                self.scope.keyed.pop(each.text, None)
        elif rest and rest[0].text == "--":
            self.scope.positional = rest[1:]

    def _called(self, name: str, arguments: list[Field]) -> Outcome:
        if self._depth >= MOST_DEPTH:
            return None
        before, read = self.scope.positional, self.scope.read_positional
        self.scope.positional = arguments
        self._depth += 1
        self._locals.append({})
        try:
            return self._chain(self._functions[name])
        except _Return as ended:
            return ended.outcome
        finally:
            self._depth -= 1
            for variable, kept in self._locals.pop().items():
                self.scope.restore(variable, kept)
            self.scope.positional, self.scope.read_positional = before, read

    def _recorded(self, fields: list[Field], step: Command) -> None:
        self.commands.append(fields)
        texts = [each.text for each in fields]
        for place, text in enumerate(texts[:-1]):
            if re.fullmatch(r"-[a-z]*c", text) and {each.rpartition("/")[2] for each in texts[:place]} & _SHELLS:
                self._inner(texts[place + 1], fields[place + 1].line)
        if texts[0].rpartition("/")[2] in _READERS:
            for document, quoted in step.documents:
                self._inner(document if quoted else expanded(self.scope, document), step.line)

    def _inner(self, text: str, line: int) -> None:
        if self._depth < MOST_DEPTH:
            self._depth += 1
            _preset(self.scope, text)
            try:
                self.run(text, line)
            finally:
                self._depth -= 1


def _changes(step: Statement) -> bool:
    """Whether a statement, or one inside it, gives a variable a value."""
    if isinstance(step, Command):
        declares = bool(step.words) and step.words[0].plain in _DECLARES
        return any(assigns(word) for word in step.words[: None if declares else 1])
    if isinstance(step, Chain):
        return any(_changes(inner) for _, inner in step.steps)
    if isinstance(step, Condition | Choice):
        return any(_changes(body) for _, body in step.branches) or (isinstance(step, Condition) and _changes(step.otherwise))
    return isinstance(step, Loop) and _changes(step.body)


def follow(text: str, environment: Mapping[str, str], positional: Sequence[str]) -> Shell:
    """A script with variables of its environment and arguments of its own.

    Raises:
        ScriptError: It cannot be read.
    """
    shell = Shell(Scope(output=output_of, positional=[Field(each, 0) for each in positional]))
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
