"""Turn text into the indexed dataset (``.bin`` and ``.idx``) that Megatron trains on.

    python scripts/prepare_data.py --stdlib --output-prefix out/corpus --append-eod
    python scripts/prepare_data.py 'books/*.jsonl' notes/ --output-prefix data/books --append-eod \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model DIR --workers 8

A dataset appears under its name only when it is whole: whatever ends a run early, Megatron finds
either the previous dataset or none.
"""

import argparse
import contextlib
import fcntl
import glob
import json
import logging
import multiprocessing
import os
import shlex
import shutil
import sys
import sysconfig
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import batched
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

BYTE_LEVEL, NULL, TIKTOKEN = "ByteLevelTokenizer", "NullTokenizer", "TikTokenizer"
TOKENIZERS = (BYTE_LEVEL, "HuggingFaceTokenizer", "SentencePieceTokenizer", TIKTOKEN, NULL)

BATCH = 32  # documents per task of a worker process
TASKS_PER_WORKER = 4  # bounds what is read ahead of the slowest worker

type Tokens = np.ndarray[tuple[int], np.dtype[np.integer]]


@dataclass(frozen=True, slots=True)
class Document:
    """One text, and the ``file`` or ``file:line`` it was read from."""

    origin: str
    text: str


# Reading


def find_files(inputs: Sequence[str]) -> list[Path]:
    """List the files that the arguments name, each once and in sorted order per argument.

    Raises:
        ValueError: An argument names nothing.
    """
    files: dict[Path, None] = {}
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            found = [p for ext in ("txt", "jsonl") for p in path.rglob(f"*.{ext}") if p.is_file()]
            rule = "holds no .txt or .jsonl file; name other text files by a glob, as 'DIR/**/*.md'"
        else:
            names = [name] if path.is_file() else glob.glob(name, recursive=True)  # noqa: PTH207
            found = [Path(name) for name in names if Path(name).is_file()]
            rule = "is no file, directory or glob that matches a file"
        if not found:
            raise ValueError(f"{name} {rule}")
        files |= dict.fromkeys(sorted(found))
    return list(files)


def find_stdlib() -> list[Path]:
    """List the modules of the running Python's standard library, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    return [p for p in sorted(root.rglob("*.py")) if skipped.isdisjoint(p.relative_to(root).parts)]


def read_documents(
    files: Iterable[Path], json_key: str, skip_unreadable: bool, on_read: Callable[[int], object]
) -> Iterator[Document]:
    """Yield one document per line of a ``.jsonl`` file and one per file of any other kind.

    Blank documents are left out. ``on_read`` is told how many bytes of input each one took.
    """
    for path in files:
        try:
            if path.suffix == ".jsonl":
                documents = _read_json_lines(path, json_key, on_read)
            else:
                documents = _read_text(path, on_read)
            yield from (document for document in documents if document.text.strip())
        except (UnicodeDecodeError, PermissionError) as error:
            if skip_unreadable:
                continue
            if isinstance(error, PermissionError):
                raise
            raise ValueError(f"{path} is not UTF-8 at byte {error.start}") from None


def _read_text(path: Path, on_read: Callable[[int], object]) -> Iterator[Document]:
    data = path.read_bytes()
    on_read(len(data))
    yield Document(str(path), data.decode())


def _read_json_lines(
    path: Path, json_key: str, on_read: Callable[[int], object]
) -> Iterator[Document]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            on_read(len(line))
            origin = f"{path}:{number}"
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode())
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{origin}: not JSON: {error.msg} at column {error.colno}"
                ) from None
            except UnicodeDecodeError as error:
                raise ValueError(f"{origin}: not UTF-8 at byte {error.start} of the line") from None
            if not isinstance(record, dict):
                raise ValueError(f"{origin}: found {type(record).__name__}, need a JSON object")
            if json_key not in record:
                keys = ", ".join(sorted(record)) or "none"
                raise ValueError(f"{origin}: no key {json_key!r}; its keys are {keys} (--json-key)")
            if not isinstance(record[json_key], str):
                kind = type(record[json_key]).__name__
                raise ValueError(f"{origin}: {json_key!r} holds a {kind}, need a string")
            yield Document(origin, record[json_key])


def cut(documents: Iterable[Document], max_bytes: int) -> Iterator[Document]:
    """Pass on the first ``max_bytes`` of text; the last document ends at a character."""
    left = max_bytes
    for document in documents:
        text = document.text.encode()
        if len(text) >= left:
            yield Document(document.origin, text[:left].decode(errors="ignore"))
            return
        yield document
        left -= len(text)


# Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerChoice:
    """The tokenizer asked for: small enough to send to a worker, which builds its own."""

    type: str
    model: str | None
    vocab_size: int | None
    tiktoken_pattern: str | None
    sentences: bool
    """Each line of a text is a sentence, without the special tokens that BERT's dataset adds."""

    def __post_init__(self) -> None:
        """Refuse what cannot be built.

        Raises:
            ValueError: Unknown type, or an argument that is missing or has no use.
        """
        if self.type not in TOKENIZERS:
            raise ValueError(f"unknown tokenizer {self.type}; known are {', '.join(TOKENIZERS)}")
        needs_model = self.type not in (BYTE_LEVEL, NULL)
        if needs_model and not self.model:
            raise ValueError(f"{self.type} needs --tokenizer-model")
        if self.model and not needs_model:
            raise ValueError(f"{self.type} has no model; drop --tokenizer-model")
        if self.type == NULL and not self.vocab_size:
            raise ValueError(f"{NULL} needs --vocab-size, one more than the largest token")
        if self.vocab_size and self.type not in (NULL, TIKTOKEN):
            raise ValueError(f"{self.type} knows its vocabulary; drop --vocab-size")
        if self.tiktoken_pattern and self.type != TIKTOKEN:
            raise ValueError(f"--tiktoken-pattern is for {TIKTOKEN}, not {self.type}")

    def build(self) -> Any:
        """Build Megatron's tokenizer, the very one that training will build from `flags`."""
        from megatron.core.tokenizers import MegatronTokenizer
        from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

        from megatron.fold3d.upstream import pretrain

        if self.type == BYTE_LEVEL:
            # Tokens 0-255 are the bytes; the one special token comes after them.
            return MegatronTokenizer.from_pretrained(
                metadata_path={"library": "byte-level"},
                special_tokens=["<eod>"],
                vocab_size=256,
                _eos_id=256,
            )
        config = pretrain.tokenizer_config(
            tokenizer_type=self.type,
            tokenizer_model=self.model,
            vocab_size=self.vocab_size,
            tiktoken_pattern=self.tiktoken_pattern,
            tokenizer_hf_no_include_special_tokens=self.sentences,
            pad_vocab_size=False,
        )
        try:
            return build_tokenizer(config)
        except (ValueError, OSError, RuntimeError, AssertionError, LookupError, TypeError) as error:
            reason = _first_line(error) or "it is no such file"
            raise ValueError(f"cannot load {self.model} as a {self.type}: {reason}") from None

    def flags(self, vocab_size: int) -> list[str]:
        """Spell the choice for training.

        Training never tokenizes: of a byte-level dataset it only has to know the vocabulary's size
        and that its last token ends a document, which is what Megatron's null tokenizer says.
        """
        if self.type == BYTE_LEVEL:
            from megatron.fold3d.upstream import pretrain

            size = pretrain.null_vocab_size(vocab_size)
            return ["--tokenizer-type", NULL, "--vocab-size", str(size)]
        given = {
            "--tokenizer-type": self.type,
            "--tokenizer-model": self.model,
            "--vocab-size": self.vocab_size,
            "--tiktoken-pattern": self.tiktoken_pattern,
        }
        return [str(word) for flag in given.items() if flag[1] for word in flag]


class Encoder:
    """Documents to arrays of tokens in the dataset's own type."""

    def __init__(self, choice: TokenizerChoice, append_eod: bool) -> None:
        _silence_megatron()
        from megatron.core.datasets.indexed_dataset import DType

        self._sentences = choice.sentences
        self._tokenizer = choice.build()
        self.vocab_size = int(self._tokenizer.vocab_size)
        self.dtype = DType.optimal_dtype(self.vocab_size)
        self._tail = [self._tokenizer.eod] if append_eod else []
        if self._tail == [None]:
            raise ValueError(f"{choice.model} has no end-of-document token; drop --append-eod")

    def encode(self, document: Document) -> list[Tokens]:
        """Tokens of a document's sentences, or of the document as one; none is empty.

        Raises:
            ValueError: The tokenizer refused the text or left its own vocabulary.
        """
        texts = document.text.splitlines() if self._sentences else [document.text]
        try:
            encoded = [ids for text in texts if len(ids := self._tokenizer.tokenize(text))]
        except ValueError as error:
            raise ValueError(f"{document.origin}: {_first_line(error)}") from None
        if encoded:
            encoded[-1] = [*encoded[-1], *self._tail]
        return [self._checked(np.array(ids, dtype=np.int64), document.origin) for ids in encoded]

    def _checked(self, tokens: Tokens, origin: str) -> Tokens:
        if not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
            outside = tokens.max() if tokens.min() >= 0 else tokens.min()
            raise ValueError(
                f"{origin}: token {outside} is outside the vocabulary of {self.vocab_size}"
            )
        return tokens.astype(self.dtype)


_encoder: Encoder | None = None  # of a worker process


def _start_worker(choice: TokenizerChoice, append_eod: bool) -> None:
    global _encoder
    _encoder = Encoder(choice, append_eod)


def _encode_batch(documents: Sequence[Document]) -> list[list[Tokens]]:
    assert _encoder is not None
    return [_encoder.encode(document) for document in documents]


def encode_in_parallel(
    documents: Iterable[Document], choice: TokenizerChoice, append_eod: bool, num_workers: int
) -> Generator[list[Tokens]]:
    """Yield the tokens of each document, in order, from worker processes."""
    waiting: deque[Future[list[list[Tokens]]]] = deque()
    pool = ProcessPoolExecutor(
        num_workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(choice, append_eod),
    )
    try:
        for batch in batched(documents, BATCH):
            waiting.append(pool.submit(_encode_batch, batch))
            if len(waiting) >= TASKS_PER_WORKER * num_workers:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


# Writing


@contextlib.contextmanager
def new_dataset(prefix: str, dtype: type[np.integer], overwrite: bool) -> Iterator[Any]:
    """Lend Megatron's builder, and publish what it wrote if the block ends well.

    The builder writes ``.bin.partial`` and ``.idx.partial``, which a later run reuses when this one
    is killed. The index comes last and, when a dataset is replaced, goes first: without it Megatron
    sees no dataset. A lock on the partial index keeps a second run out and dies with its process.

    Raises:
        ValueError: There is a dataset already, or another run is writing it.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    data, index = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    data_part, index_part = Path(f"{data}.partial"), Path(f"{index}.partial")
    data.parent.mkdir(parents=True, exist_ok=True)
    killed_before = index_part.exists()
    with index_part.open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another run is writing {prefix}; wait for it to end") from None
        try:
            if not overwrite and (index.exists() or (data.exists() and not killed_before)):
                raise ValueError(f"{data} exists; replace it with --overwrite or name another")
            builder = IndexedDatasetBuilder(str(data_part), dtype=dtype)
            yield builder
            builder.finalize(str(index_part))
            for part in (data_part, index_part):
                with part.open("rb") as file:
                    os.fsync(file.fileno())
            index.unlink(missing_ok=True)
            # Megatron's sample order, kept beside the dataset, is looked up by name, not content.
            shutil.rmtree(Path(prefix, "cache"), ignore_errors=True)
            data_part.replace(data)
            index_part.replace(index)
        finally:
            data_part.unlink(missing_ok=True)
            index_part.unlink(missing_ok=True)


# The command


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Turn text into an indexed dataset that Megatron trains on.",
    )
    source = parser.add_argument_group("text")
    source.add_argument(
        "inputs",
        nargs="*",
        metavar="INPUT",
        help="a file, a directory (its .txt and .jsonl files, recursively) or a glob; a .jsonl file"
        " holds one document per line, any other file is one document",
    )
    source.add_argument(
        "--stdlib", action="store_true", help="take the source of Python's standard library"
    )
    source.add_argument("--json-key", default="text", help="where a JSON line has its text (text)")
    source.add_argument(
        "--sentences", action="store_true", help="each line of a text is a sentence, for a BERT"
    )
    source.add_argument("--max-bytes", type=int, help="stop after this much text")
    tokens = parser.add_argument_group("tokens")
    tokens.add_argument(
        "--tokenizer-type", default=BYTE_LEVEL, help=f"{', '.join(TOKENIZERS)} ({BYTE_LEVEL})"
    )
    tokens.add_argument("--tokenizer-model", help="a file, or a HuggingFace directory or name")
    tokens.add_argument("--vocab-size", type=int, help=f"of {NULL} and {TIKTOKEN}")
    tokens.add_argument("--tiktoken-pattern", choices=("v1", "v2"), help=f"of {TIKTOKEN}")
    tokens.add_argument("--append-eod", action="store_true", help="mark the end of each document")
    output = parser.add_argument_group("dataset")
    output.add_argument(
        "--output-prefix", required=True, help="writes PREFIX.bin and PREFIX.idx", metavar="PREFIX"
    )
    output.add_argument("--overwrite", action="store_true", help="replace an existing dataset")
    output.add_argument("--workers", type=int, default=1, help="processes that tokenize (1)")
    return parser.parse_args(argv)


def prepare(args: argparse.Namespace) -> None:
    """Write the dataset that the arguments describe, and say how to train on it.

    Raises:
        ValueError: The arguments or the texts cannot be used.
    """
    if args.stdlib == bool(args.inputs):
        raise ValueError("need either INPUT files or --stdlib")
    for flag in ("max_bytes", "workers", "vocab_size"):
        value = getattr(args, flag)
        if value is not None and value < 1:
            raise ValueError(f"--{flag.replace('_', '-')} {value} is not positive")
    choice = TokenizerChoice(
        type=args.tokenizer_type,
        model=args.tokenizer_model,
        vocab_size=args.vocab_size,
        tiktoken_pattern=args.tiktoken_pattern,
        sentences=args.sentences,
    )
    files = find_stdlib() if args.stdlib else find_files(args.inputs)
    num_bytes = sum(path.stat().st_size for path in files)
    encoder = Encoder(choice, args.append_eod)

    with (
        new_dataset(args.output_prefix, encoder.dtype, args.overwrite) as builder,
        tqdm(
            desc=f"Tokenizing {len(files)} files",
            total=min(num_bytes, args.max_bytes or num_bytes),
            unit="B",
            unit_scale=True,
            mininterval=0.1 if sys.stderr.isatty() else 10,
        ) as progress,
    ):
        documents = read_documents(files, args.json_key, args.stdlib, progress.update)
        if args.max_bytes:
            documents = cut(documents, args.max_bytes)
        if args.workers > 1:
            arrays = encode_in_parallel(documents, choice, args.append_eod, args.workers)
        else:
            arrays = (encoder.encode(document) for document in documents)
        with contextlib.closing(arrays):
            for sentences in arrays:
                if sentences:
                    builder.add_document(np.concatenate(sentences), [len(s) for s in sentences])
        num_documents, num_tokens = len(builder.document_indices) - 1, sum(builder.sequence_lengths)
        if not num_documents:
            raise ValueError(f"no text in {len(files)} files: found only blank documents")

    flags = ["--data-path", args.output_prefix, *choice.flags(encoder.vocab_size)]
    script = "pretrain_bert.py" if args.sentences else "pretrain_gpt.py"
    print(
        f"{args.output_prefix}.bin, .idx: {num_documents:,} documents, {num_tokens:,} tokens, "
        f"{num_tokens * np.dtype(encoder.dtype).itemsize:,} bytes, "
        f"vocabulary of {encoder.vocab_size:,} ({choice.type})\n"
        f"Train on it with: {script} {shlex.join(flags)}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; a user's mistake is one line on stderr and exit code 2."""
    try:
        prepare(parse_arguments(argv))
    except ValueError as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(": ".join(str(part) for part in (error.filename, error.strerror) if part))
    except BrokenProcessPool:
        return _fail("a worker process died, perhaps for want of memory; try fewer --workers")
    except KeyboardInterrupt:
        _fail("interrupted; no dataset was written")
        return 130
    return 0


def _fail(message: str) -> int:
    print(f"prepare_data.py: error: {message}", file=sys.stderr)
    return 2


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _silence_megatron() -> None:
    """Keep Megatron's remarks on absent GPU libraries from the terminal: no GPU is wanted here."""
    warnings.filterwarnings("ignore", module=r"megatron\.")
    for name in ("megatron", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)


if __name__ == "__main__":
    sys.exit(main())
