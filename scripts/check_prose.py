"""Keep the pages short: limits of their words, and of the words of a sentence.

    .venv/bin/python scripts/check_prose.py

Words are those of `wc -w`. In a sentence, a span of code is one word. A sentence ends with its
item, cell, heading or paragraph; blocks of code have none.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
README_WORDS = 1_300
ALL_WORDS = 25_000
SENTENCE_WORDS = 35
# The beginnings of longer sentences that are clearer whole: at most ten.
EXCEPTIONS = (
    "The same comparisons also give",  # options, by name
    "CODE CODE CODE CODE CODE CODE CODE CODE CODE CODE CODE CODE CODE",  # patched symbols
)

CODE_BLOCK = re.compile(r"^```.*?^```$|^(?: {4} *\S[^\n]*\n)+(?=\n|\Z)", re.M | re.S)
BEGINS = re.compile(r"^(?:[-*] |\d+\. |#+ |> )|\|", re.M)  # of an item, a heading or a cell
SENTENCE_END = re.compile(r"(?<=[.!?])[)*\"]*\s+(?=[^a-z])")


def num_words(text: str) -> int:
    """Count words as `wc -w` does."""
    return len(text.split())


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a page, with each span of code as one word."""
    prose = CODE_BLOCK.sub("\n\n", text)
    prose = re.sub(r"`[^`]+`", "CODE", prose)
    prose = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", prose)
    for block in re.split(r"\n\s*\n", BEGINS.sub("\n\n", prose)):
        for sentence in SENTENCE_END.split(block):
            if sentence.strip():
                yield " ".join(sentence.split())


def problems(root: Path) -> Iterator[str]:
    """Yield a line for each limit that a page exceeds: what was found, the rule, the fix."""
    pages = [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").glob("*.md"))]
    words = [num_words(page.read_text()) for page in pages]
    if words[0] > README_WORDS:
        yield f"README.md has {words[0]} words, of at most {README_WORDS}; move some to docs/"
    if sum(words) > ALL_WORDS:
        yield (
            f"README.md, CONTRIBUTING.md and docs/*.md have {sum(words)} words, of at most "
            f"{ALL_WORDS}; shorten, or move what is past to scripts/bench/LOG.md"
        )
    if len(EXCEPTIONS) > 10:
        yield f"EXCEPTIONS has {len(EXCEPTIONS)} sentences, of at most 10; split some"
    unused = set(EXCEPTIONS)
    for page in pages:
        for sentence in sentences(page.read_text()):
            if (count := num_words(sentence)) > SENTENCE_WORDS:
                excepted = {start for start in EXCEPTIONS if sentence.startswith(start)}
                unused -= excepted
                if not excepted:
                    yield (
                        f"{page.relative_to(root)}: a sentence of {count} words, of at most "
                        f"{SENTENCE_WORDS}; split it: {sentence[:70]} ..."
                    )
    for start in sorted(unused):
        yield f"EXCEPTIONS names no long sentence: {start!r}; drop it"


def main() -> int:
    """Print what exceeds a limit; returns the exit code."""
    found = list(problems(ROOT))
    print("\n".join(found) or "all pages are within their limits")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
