"""The words of a shell script that starts a training. Nothing of it is run.

Variables, integer arithmetic, and branches that depend on known values are evaluated, as if the
script was started without arguments. A value that depends on anything else stays as it is written,
such as ``$NAME``, so a word with a dollar sign is one that could not be read.

An unknown condition is taken to hold. For each unknown condition the script is read once more, as
if it did not hold. The reading with most flags counts; flags that differ between readings are
undecided.
"""

import ast
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

_KEYWORDS = ("if", "then", "elif", "else", "fi", "do", "done", "while", "until", "{", "}", "esac")
_OPERATORS = ("&&", "||", ";;", "\n", ";", "&", "|", "(", ")")
_DECLARES = ("export", "local", "readonly", "declare", "typeset")
_ASSIGNMENT = re.compile(r"(\w+)(\[.*?\])?(\+?)=(.*)", re.S)
_SETS = re.compile(r"([A-Za-z_]\w*)(?:\[.*?\])?\s*(?:[-+*/%]?=(?!=)|\+\+|--)")
_PLAIN = re.compile(r"[^'\"`$\\]+")
_QUOTED = re.compile(r"['\"`]|\$[({]")
_VARIABLE = re.compile(r"\$([A-Za-z_]\w*|[\d#@*?$!-])")
_PARAMETER = re.compile(r"\{(\w+)(\[[@*]\])?(?:(:?[-=+])(.*))?\}", re.S)
_ARRAY = re.compile(r"\$(?:(\w+)|\{(\w+)(?:\[[@*]\])?\})")
_HERE_DOCUMENT = re.compile(
    r"((?<!<)<<-?\s*[\"']?([A-Za-z_]\w*)[^\n]*\n)(.*?)(?=^\s*\2\s*$)", re.S | re.M
)
_REDIRECTION = re.compile(r"[\d&]*(?:>>?|<{1,3})")
_OPERATIONS: Mapping[str | type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda one, other: int(one * other > 0 or -1) * (abs(one) // abs(other)),
    ast.Mod: lambda one, other: (1 if one >= 0 else -1) * (abs(one) % abs(other)),
    **dict.fromkeys((ast.Lt, "-lt"), operator.lt),
    **dict.fromkeys((ast.LtE, "-le"), operator.le),
    **dict.fromkeys((ast.Gt, "-gt"), operator.gt),
    **dict.fromkeys((ast.GtE, "-ge"), operator.ge),
    **dict.fromkeys((ast.Eq, "-eq"), operator.eq),
    **dict.fromkeys((ast.NotEq, "-ne"), operator.ne),
}
_LONGEST = 200  # an expression's characters

Value = str | list[str]
"""Of a variable: text, or an array's words."""


@dataclass(frozen=True, slots=True)
class ScriptWords:
    """The words of a script's commands.

    Attributes:
        words: in order; those of variables that no command uses come first.
        reasons: why a part of a word, such as ``$NAME``, could not be read.
        undecided: flags that depend on an unknown condition.
    """

    words: tuple[str, ...]
    reasons: Mapping[str, str]
    undecided: tuple[str, ...]


def script_words(text: str) -> ScriptWords:
    """Return the words of a shell script."""
    # Quotes in here-documents need not match.
    text = _HERE_DOCUMENT.sub(lambda found: found[1] + re.sub("['\"`]", " ", found[3]), text)
    tokens = [*_tokens(text)]
    readings, failing, seen = list[_Reader](), [frozenset[str]()], set[str]()
    for fails in failing:  # which grows
        readings.append(_Reader(tokens, fails))
        readings[-1].block()
        new = readings[-1].unknown - seen
        failing += (fails | {condition} for condition in sorted(new))
        seen |= new
    found = [(reading.read(), _by_flag(reading.read())) for reading in readings]
    commands, flags = max(found, key=lambda pair: len(pair[1]))
    undecided = (
        flag
        for _, others in found
        for flag in (*flags, *others)
        if flags.get(flag) != others.get(flag)
    )
    return ScriptWords(
        words=tuple(word for words in commands for word in words),
        reasons={part: why for reading in readings for part, why in reading.reasons.items()},
        undecided=tuple(dict.fromkeys(undecided)),
    )


def reasons_of(value: str, reasons: Mapping[str, str]) -> str:
    """Return why a word could not be read."""
    found = (f"{part}: {why}" for part, why in reasons.items() if part in value)
    return "; ".join(found) or "the script gives it no value"


def _by_flag(commands: Sequence[Sequence[str]]) -> Mapping[str, list[str]]:
    found = dict[str, list[str]]()
    for words in commands:
        flag = ""
        for word in words:
            flag = word if "--" in word else flag
            if flag and "$" not in word:
                found.setdefault(flag, []).append(word)
    return found


def _end(text: str, at: int) -> int:
    """Return the index behind the quote, bracket or expansion that begins here; 0 if none ends."""
    at += text[at] == "$"
    opener = text[at]
    closer = {"(": ")", "{": "}"}.get(opener, opener)
    at += 1
    while at < len(text):
        char, found = text[at], _QUOTED.match(text, at)
        if char == closer:
            return at + 1
        is_nested = found is not None if closer != opener else found and len(found[0]) > 1
        if opener != "'" and (is_nested or char == opener):
            at = _end(text, at) or len(text)
        elif char == "#" and opener == "(" and text[at - 1].isspace():
            at = text.find("\n", at) % (len(text) + 1)
        else:
            at += 2 if char == "\\" and opener != "'" else 1
    return 0


def _tokens(text: str) -> Iterator[str]:
    """Yield words, with their quotes, and operators. A quote that nothing closes is a space."""
    at, word = 0, ""
    while at <= len(text):
        char, following = text[at : at + 1] or "\n", text[at + 1 : at + 2]
        is_bracket = char == "(" and (word.endswith("=") or (not word and following == "("))
        if is_bracket or _QUOTED.match(text, at):
            if end := _end(text, at):
                word, at = word + text[at:end], end
                continue
            char = " "
        is_redirection = char == "&" and (word.endswith((">", "<")) or following == ">")
        if char == "\\":
            word += "" if following == "\n" else char + following
            at += 2
        elif char == "#" and not word:
            at = text.find("\n", at) % (len(text) + 1)
        elif is_redirection or char not in " \t\r\n;&|()":
            word, at = word + char, at + 1
        else:
            if word:
                yield word
            word, found = "", next((op for op in _OPERATORS if text.startswith(op, at)), char)
            at += len(found)
            if found in _OPERATORS:
                yield found


@dataclass
class _Reader:
    """What a script has done up to a token.

    Attributes:
        fails: unknown conditions that are taken not to hold; all others are taken to hold.
        reads: whether what comes next has an effect: it is in no branch that is not taken.
        status: whether the last command succeeded; None if that is not known.
        commands: the words of each command that has flags.
        used: variables that a command or another variable names.
    """

    tokens: Sequence[str]
    fails: frozenset[str]
    at: int = 0
    reads: bool = True
    status: bool | None = True
    values: dict[str, Value] = field(default_factory=dict)
    commands: list[Sequence[str]] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)

    def read(self) -> Sequence[Sequence[str]]:
        """Return the words of commands, and of variables too if another script trains with them."""
        if any("--num-layers" in words for words in self.commands):
            return self.commands
        left = [_as_list(value) for name, value in self.values.items() if name not in self.used]
        return [*(words for words in left if "--" in "".join(words)), *self.commands]

    def block(self, *ends: str) -> str:
        """Read up to a command, or a token, that is one of ``ends``; returns it."""
        joined = ";"
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            if token in _OPERATORS:
                self.at += 1
                if token in ends:
                    return token
                if token != "\n" or joined not in ("&&", "||"):
                    joined = token
                continue
            words = self._next_command()
            if words[0] in ends:
                return words[0]
            with self._branch(self._follows(joined)):
                if words[0] == "if":
                    self._if()
                elif words[0] in ("while", "until", "for", "select"):
                    self._loop(words)
                elif words[0] == "case" and words[1:]:
                    self._case(words[1])
                elif self.reads and words[0] not in _KEYWORDS:
                    self._command(words)
            joined = ";"
        return ""

    def _next_command(self) -> list[str]:
        """Return the words of the next command; a keyword is one."""
        words = [self.tokens[self.at]]
        self.at += 1
        while self.at < len(self.tokens) and words[-1] != "]]" and words[0] not in _KEYWORDS:
            token = self.tokens[self.at]
            is_end = token == "\n" if words[0] == "[[" else token in _OPERATORS
            if is_end or (words[0] == "case" and words[2:] == ["in"]):
                break
            words.append(token)
            self.at += 1
        return words

    def _follows(self, joined: str) -> bool:
        """Tell whether a command runs, from the operator that joins it to the one before."""
        if joined == "&&":  # a command is expected to succeed
            return self.status is not False
        return joined != "||" or not self._known(self.status, expected=False)

    def _known(self, holds: bool | None, *, expected: bool = True) -> bool:
        if holds is None and self.reads:
            here = [known for known in self.unknown if known.startswith(f"{self.at} ")]
            condition = f"{self.at} {len(here)}"  # the same in all readings
            self.unknown.add(condition)
            return expected is (condition not in self.fails)
        return bool(holds)

    @contextmanager
    def _branch(self, taken: bool) -> Iterator[None]:
        before, self.reads = self.reads, self.reads and taken
        yield
        self.reads = before

    def _if(self) -> None:
        word, is_over = "if", False
        while word in ("if", "elif", "else"):
            taken = not is_over
            if word != "else":
                with self._branch(taken):
                    self.block("then")
                    taken = taken and self._known(self.status)
            is_over |= taken
            with self._branch(taken):
                word = self.block("elif", "else", "fi")

    def _case(self, subject: str) -> None:
        word, is_over, value = ";;", False, self._text(subject)
        while word == ";;":
            taken, token = False, ""
            while self.at < len(self.tokens) and token not in (")", "esac"):
                token = self.tokens[self.at]
                self.at += 1
                if token not in (*_OPERATORS, "esac") and not (taken or is_over):
                    pattern = self._text(token)
                    known = pattern == "*" or "$" not in value + pattern
                    taken = self._known(fnmatchcase(value, pattern) if known else None)
            if token != ")":
                break
            is_over |= taken
            with self._branch(taken):
                word = self.block(";;", "esac")

    def _loop(self, words: Sequence[str]) -> None:
        self.block("do")
        depth, end = 1, self.at
        while depth and end < len(self.tokens):
            depth += (self.tokens[end] == "do") - (self.tokens[end] == "done")
            end += 1
        is_known = words[0] in ("while", "until")
        with self._branch(not is_known or self.status is not (words[0] == "until")):
            if self.reads:
                self._lose(words[1:2] if words[0] == "for" else (), "a loop sets it")
                for token in (*words, *self.tokens[self.at : end]):
                    self._lose(_assigned(token), "a loop sets it")
            self.block("done")

    def _command(self, words: Sequence[str]) -> None:
        first, *rest = [*_without_redirections(words)] or [":"]
        if first == "!":
            self._command(rest or ["true"])
            self.status = None if self.status is None else not self.status
            return
        self.status = first != "false"
        if first in ("[", "[[", "test"):
            self.status = self._test([word for word in rest if word not in ("]", "]]")])
        elif first.startswith("(("):
            number = self._number(first[2:-2])
            self.status = None if number is None else number != 0
            self._lose(_assigned(first), "arithmetic sets it")
        elif first in ("read", "mapfile", "readarray"):
            self._lose(filter(str.isidentifier, rest), f"{first} sets it")
        elif first == "printf" and rest[:1] == ["-v"]:
            self._lose(rest[1:2], "printf sets it")
        elif first == "unset":
            for name in rest:
                self.values.pop(name, None)
        else:
            self._run((first, *rest), declares=first in _DECLARES)

    def _run(self, words: Sequence[str], *, declares: bool) -> None:
        """Assign values, or keep the words of a command that has flags."""
        emitted: list[str] = []
        for word in words:
            found = _ASSIGNMENT.fullmatch(word) if declares or not emitted else None
            if found is not None:
                self._assign(*found.groups())
            elif not declares:
                emitted += self._expanded(word)
        if any("--" in word for word in emitted):
            self.commands.append(emitted)
        if emitted and emitted[0] not in (":", "true", "false"):
            self.status = None

    def _assign(self, name: str, index: str | None, plus: str, raw: str) -> None:
        if index is not None:
            self._lose([name], "its elements are set one by one")
            return
        value: Value = self._text(raw)
        if raw.startswith("("):
            tokens = (token for token in _tokens(raw[1:-1]) if token not in _OPERATORS)
            value = [word for token in tokens for word in self._expanded(token)]
        old = self.values.get(name) if plus else None
        if isinstance(old, str) and isinstance(value, str):
            value = old + value
        elif old is not None:
            value = [*_as_list(old), *_as_list(value)]
        self.values[name] = value

    def _lose(self, names: Iterable[str], why: str) -> None:
        """Forget the values of variables."""
        for name in names:
            self.values[name] = f"${name}"
            self.reasons[f"${name}"] = why

    def _expanded(self, raw: str) -> list[str]:
        """Return the words that a word stands for."""
        array = _ARRAY.fullmatch(raw.strip("\"'"))
        name = (array[1] or array[2]) if array else ""
        if isinstance(value := self.values.get(name), list):
            self.used.add(name)
            return value
        text = self._text(raw)
        is_one = raw[:1] in ("'", '"') and "--" not in text and text.strip()
        return [text] if is_one else text.split()

    def _text(self, raw: str) -> str:
        """Return what a word with quotes and variables is; what is not known stays in it."""
        parts, at = list[str](), 0
        while at < len(raw):
            if found := _PLAIN.match(raw, at):
                parts.append(found[0])
                at = found.end()
                continue
            char, end = raw[at], at + 1
            if _QUOTED.match(raw, at) and (behind := _end(raw, at)):
                inside, end = raw[at + 1 : behind - 1], behind
                if char in "'\"":
                    parts.append(self._text(inside))
                else:
                    parts.append(
                        self._expansion(raw[at + 1 : end] if char == "$" else f"({inside})")
                    )
            elif found := _VARIABLE.match(raw, at):
                parts.append(self._variable(found[1]))
                end = found.end()
            elif char == "\\":
                parts.append(raw[end : end + 1].strip("\n"))
                end += 1
            else:
                parts.append(char)
            at = end
        return "".join(parts)

    def _variable(self, name: str) -> str:
        if name in ("#", "@", "*"):
            return "0" if name == "#" else ""
        self.used.add(name)
        value = self.values.get(name, f"${name}")
        return value if isinstance(value, str) else " ".join(value)

    def _expansion(self, inside: str) -> str:
        """Return what stands behind a dollar sign, in brackets."""
        marker = f"${re.sub(r'[\s\"\']', '', inside)}"
        if inside.startswith("((") and inside.endswith("))"):
            if (number := self._number(inside[2:-2])) is not None:
                return str(number)
            why = "only + - * / % of integers are evaluated"
            for name in re.findall(r"[A-Za-z_]\w*", inside):
                if not self._is_number(name):
                    why = f"of {name} ({reasons_of(self._variable(name), self.reasons)})"
                    break
        elif inside.startswith("("):
            marker, why = f"$({(inside[1:-1].split() or [''])[0]}...)", "a command prints it"
        elif found := _PARAMETER.fullmatch(inside):
            name, _, kind, word = found.groups()
            value, kind = self._variable(name), kind or ""
            is_set = name in self.values and not (kind.startswith(":") and not value)
            if kind.endswith("+"):
                return self._text(word) if is_set else ""
            if kind and not is_set:
                value = self._text(word)
                if kind.endswith("="):
                    self.values[name] = value
            return value
        else:
            why = "the form of this expansion is not evaluated"
        self.reasons[marker] = why
        return marker

    def _is_number(self, name: str) -> bool:
        value = self.values.get(name)
        return isinstance(value, str) and bool(re.fullmatch(r"\s*[+-]?\d+\s*", value))

    def _number(self, text: str) -> int | None:
        """Return the value of integer arithmetic; None if that is not known."""
        text = self._text(text).strip()
        if "$" in text or len(text) > _LONGEST:
            return None
        try:
            return self._computed(ast.parse(text, mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
            return None

    def _computed(self, node: ast.expr) -> int:
        """Return the value of an expression.

        Raises:
            ValueError: it has something else than integers, known variables and simple operators.
        """
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.Name(id=name) if self._is_number(name):
                return int(self._variable(name))
            case ast.UnaryOp(op=ast.USub(), operand=one):
                return -self._computed(one)
            case (
                ast.BinOp(left=left, op=op, right=right)
                | ast.Compare(left=left, ops=[op], comparators=[right])
            ) if type(op) in _OPERATIONS:
                return int(_OPERATIONS[type(op)](self._computed(left), self._computed(right)))
        raise ValueError("not evaluated")

    def _test(self, words: Sequence[str]) -> bool:
        """Return whether the condition in ``[ ]`` or ``[[ ]]`` holds."""
        for joins, together in ((("||", "-o"), any), (("&&", "-a"), all)):
            if where := [number for number, word in enumerate(words) if word in joins]:
                starts, ends = [0, *(n + 1 for n in where)], [*where, len(words)]
                each = [self._test(words[a:b]) for a, b in zip(starts, ends, strict=True)]
                return together(each)
        if words[:1] == ["!"]:
            return not self._test(words[1:])
        texts = [*map(self._text, words)]
        holds: bool | None = None
        if "$" not in "".join(texts):
            match texts:
                case [text] | ["-n", text]:
                    holds = text != ""
                case ["-z", text]:
                    holds = text == ""
                case [one, "=" | "==" | "!=" as op, other]:
                    is_pattern = words[2] == other
                    equal = fnmatchcase(one, other) if is_pattern else one == other
                    holds = equal == (op != "!=")
                case [one, op, other] if op in _OPERATIONS:
                    first, second = self._number(one), self._number(other)
                    if first is not None and second is not None:
                        holds = bool(_OPERATIONS[op](first, second))
        return self._known(holds)


def _without_redirections(words: Sequence[str]) -> Iterator[str]:
    is_file = False
    for word in words:
        if not is_file and not _REDIRECTION.match(word):
            yield word
        is_file = _REDIRECTION.fullmatch(word) is not None


def _assigned(word: str) -> Iterator[str]:
    """Yield the names of variables that a word sets, or its arithmetic."""
    all_found = _SETS.finditer(word) if word.startswith("((") else [_SETS.match(word)]
    return (found[1] for found in all_found if found)


def _as_list(value: Value) -> list[str]:
    return value.split() if isinstance(value, str) else value
