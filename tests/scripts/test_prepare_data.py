"""A dataset holds the very text, is whole or absent, and a bad input is one line."""

import base64
import fcntl
import json
import logging
import signal
import string
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
import transformers
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training.arguments import parse_args

from scripts import prepare_data

EOD = 256
SENTENCE = "a pipeline folds over its ranks"


@pytest.fixture(autouse=True)
def levels_of_loggers() -> Iterator[None]:
    """Give the loggers that the script silences their levels back, for the tests that follow."""
    loggers = [logging.getLogger(name) for name in ("megatron", "torch.utils.cpp_extension")]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


def prepare(*arguments: object) -> int:
    return prepare_data.main([str(argument) for argument in arguments])


def read(prefix: Path) -> list[list[int]]:
    dataset = IndexedDataset(str(prefix))
    assert list(dataset.document_indices) == list(range(len(dataset) + 1))
    return [dataset[i].tolist() for i in range(len(dataset))]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    file = tmp_path / "corpus.jsonl"
    file.write_text('{"text": "wörld"}\n\n{"text": "  "}\n{"text": "a\\nb\\u0000"}\n')
    return file


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    return tmp_path / "out" / "data"


def written(prefix: Path) -> set[str]:
    return {path.name for path in prefix.parent.iterdir()} if prefix.parent.exists() else set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "documents"),
    [
        ([], [[*"wörld".encode()], [*b"a\nb\0"]]),
        (["--append-eod"], [[*"wörld".encode(), EOD], [*b"a\nb\0", EOD]]),
        (["--max-bytes", 2], [[*b"w"]]),  # cut at a character
    ],
)
def test_tokens_are_the_bytes_of_the_text(flags, documents, corpus: Path, prefix: Path):
    assert prepare(corpus, "--output-prefix", prefix, *flags) == 0
    assert read(prefix) == documents


def test_sentences_are_the_lines_of_a_document(corpus: Path, prefix: Path):
    assert prepare(corpus, "--output-prefix", prefix, "--sentences", "--append-eod") == 0
    dataset = IndexedDataset(str(prefix))
    sentences = [dataset[i].tolist() for i in range(len(dataset))]
    assert sentences == [[*"wörld".encode(), EOD], [*b"a"], [*b"b\0", EOD]]
    assert dataset.document_indices.tolist() == [0, 1, 3]


def test_directories_and_globs_are_read_in_sorted_order(tmp_path: Path, prefix: Path):
    for name in ("d/b.txt", "d/a.txt", "d/sub/c.txt", "d/skipped.md", "e/z.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert prepare(tmp_path / "d", tmp_path / "e" / "*.md", "--output-prefix", prefix) == 0
    names = [bytes(tokens).decode() for tokens in read(prefix)]
    assert names == ["d/a.txt", "d/b.txt", "d/sub/c.txt", "e/z.md"]


@pytest.mark.processes
def test_workers_write_the_same_bytes_as_one_process(tmp_path: Path, prefix: Path):
    files = [tmp_path / f"{i}.txt" for i in range(100)]
    for i, file in enumerate(files):
        file.write_text(string.ascii_letters * (i % 7 + 1))
    one, two = prefix.with_name("one"), prefix.with_name("two")
    assert prepare(*files, "--output-prefix", one) == 0
    assert prepare(*files, "--output-prefix", two, "--workers", 2) == 0
    for suffix in (".bin", ".idx"):
        assert one.with_suffix(suffix).read_bytes() == two.with_suffix(suffix).read_bytes()


@pytest.mark.slow
def test_stdlib_is_the_same_text_every_time(prefix: Path):
    one, two = prefix.with_name("one"), prefix.with_name("two")
    for output in (one, two):
        assert prepare("--stdlib", "--max-bytes", 200_000, "--output-prefix", output) == 0
    assert one.with_suffix(".bin").read_bytes() == two.with_suffix(".bin").read_bytes()
    assert sum(map(len, read(one))) == 200_000
    assert b"import" in bytes(read(one)[0])


def huggingface(folder: Path) -> list[str]:
    vocabulary = {word: i for i, word in enumerate(["<eod>", "<unk>", *SENTENCE.split()])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token="<eod>", unk_token="<unk>"
    ).save_pretrained(folder / "hf")
    return ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder / "hf")]


def sentence_piece(folder: Path) -> list[str]:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([SENTENCE] * 4),
        model_prefix=str(folder / "sp"),
        vocab_size=30,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", f"{folder}/sp.model"]


def tiktoken(folder: Path) -> list[str]:
    ranks = [
        {"rank": i, "token_bytes": base64.b64encode(bytes([i])).decode(), "token_str": ""}
        for i in range(256)
    ]
    (folder / "tik.json").write_text(json.dumps(ranks))
    model = ["--tokenizer-type", "TikTokenizer", "--tokenizer-model", f"{folder}/tik.json"]
    return [*model, "--vocab-size", str(1000 + 256), "--tiktoken-pattern", "v1"]


def null(_: Path) -> list[str]:
    return ["--tokenizer-type", "NullTokenizer", "--vocab-size", "70000"]


def byte_level(_: Path) -> list[str]:
    return []


@pytest.mark.parametrize(
    ("choose", "text"),
    [
        (byte_level, SENTENCE),
        (huggingface, SENTENCE),
        (sentence_piece, SENTENCE),
        (tiktoken, SENTENCE),
        (null, "1 2 65999"),
    ],
)
def test_printed_flags_build_the_tokenizer_of_the_dataset(
    choose, text, tmp_path: Path, prefix: Path, capsys, monkeypatch
):
    (tmp_path / "a.txt").write_text(text)
    flags = choose(tmp_path)
    assert prepare(tmp_path / "a.txt", "--output-prefix", prefix, "--append-eod", *flags) == 0

    printed = capsys.readouterr().out.partition("pretrain_gpt.py ")[2].split()
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *printed])
    args = parse_args()
    assert args.data_path == [str(prefix)]
    args.rank, args.pad_vocab_size = 0, False
    tokenizer = build_tokenizer(args)
    [tokens] = read(prefix)
    assert tokens[-1] == tokenizer.eod
    assert max(tokens) < tokenizer.vocab_size
    if choose is byte_level:
        assert bytes(tokens[:-1]).decode() == text
    else:
        assert tokens[:-1] == tokenizer.tokenize(text)


@pytest.mark.processes
def test_killed_run_leaves_no_dataset_and_is_cleared_by_the_next(tmp_path: Path, prefix: Path):
    large = tmp_path / "large.jsonl"
    line = json.dumps({"text": SENTENCE * 1000}) + "\n"
    large.write_text(line * 2000)
    command = [sys.executable, prepare_data.__file__, str(large), "--output-prefix", str(prefix)]
    run = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    partial = Path(f"{prefix}.bin.partial")
    while not (partial.exists() and partial.stat().st_size):
        assert run.poll() is None
        time.sleep(0.01)
    run.kill()

    assert run.wait() == -signal.SIGKILL
    assert written(prefix) == {"data.bin.partial", "data.idx.partial"}
    assert not IndexedDataset.exists(str(prefix))

    (tmp_path / "small.txt").write_text("small")
    assert prepare(tmp_path / "small.txt", "--output-prefix", prefix) == 0
    assert written(prefix) == {"data.bin", "data.idx"}
    assert read(prefix) == [list(b"small")]


def test_run_killed_between_the_two_renames_is_redone(corpus: Path, prefix: Path):
    prefix.parent.mkdir()
    Path(f"{prefix}.bin").write_text("data without its index")
    Path(f"{prefix}.idx.partial").touch()
    assert prepare(corpus, "--output-prefix", prefix) == 0
    assert len(read(prefix)) == 2


def test_existing_dataset_is_kept_without_overwrite(corpus: Path, prefix: Path, capsys):
    assert prepare(corpus, "--output-prefix", prefix) == 0
    assert prepare(corpus, "--output-prefix", prefix, "--append-eod") == 2
    assert "--overwrite" in capsys.readouterr().err
    assert read(prefix)[0] == list("wörld".encode())
    assert written(prefix) == {"data.bin", "data.idx"}


def test_overwrite_that_fails_keeps_the_old_dataset(corpus: Path, prefix: Path):
    assert prepare(corpus, "--output-prefix", prefix) == 0
    corpus.write_text('{"text": "new"}\n{')
    assert prepare(corpus, "--output-prefix", prefix, "--overwrite") == 2
    assert [bytes(tokens).decode() for tokens in read(prefix)] == ["wörld", "a\nb\0"]


def test_overwrite_drops_the_sample_order_that_megatron_kept(corpus: Path, prefix: Path):
    assert prepare(corpus, "--output-prefix", prefix) == 0
    kept = prefix / "cache" / "GPTDataset_indices" / "shuffle_index.npy"
    kept.parent.mkdir(parents=True)
    kept.touch()
    assert prepare(corpus, "--output-prefix", prefix, "--overwrite", "--append-eod") == 0
    assert not kept.exists()
    assert read(prefix)[0][-1] == EOD


def test_two_runs_do_not_write_one_dataset(corpus: Path, prefix: Path, capsys):
    prefix.parent.mkdir()
    with Path(f"{prefix}.idx.partial").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert prepare(corpus, "--output-prefix", prefix) == 2
    assert "another run is writing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "flags", "message"),
    [
        ('{"text": "a"}\n{"text"\n', [], "in.jsonl:2: not JSON: Expecting ':' delimiter at column"),
        ('{"body": "a", "id": 1}', [], "in.jsonl:1: no key 'text'; its keys are body, id"),
        ('{"text": 3}', [], "in.jsonl:1: 'text' holds a int, need a string"),
        ('["a"]', [], "in.jsonl:1: found list, need a JSON object"),
        ("\n \n", [], "found only blank documents"),
        ('{"text": "a"}', ["--json-key", "body"], "no key 'body'; its keys are text"),
        ('{"text": "a"}', ["--tokenizer-type", "Foo"], "unknown tokenizer Foo; known are"),
        ('{"text": "a"}', ["--tokenizer-type", "TikTokenizer"], "needs --tokenizer-model"),
        ('{"text": "a"}', ["--tokenizer-type", "NullTokenizer"], "needs --vocab-size"),
        ('{"text": "1 9"}', ["--tokenizer-type", "NullTokenizer", "--vocab-size", "5"], "token 9"),
        ('{"text": "a"}', ["--vocab-size", "300"], "drop --vocab-size"),
        ('{"text": "a"}', ["--workers", "0"], "--workers 0 is not positive"),
        ('{"text": "a"}', ["--stdlib"], "either INPUT files or --stdlib"),
        (b"caf\xe9", [], "in.txt is not UTF-8 at byte 3"),
        (None, [], "in.jsonl is no file, directory or glob"),
    ],
)
def test_mistake_is_one_line_and_exit_code_2(content, flags, message, tmp_path, prefix, capsys):
    source = tmp_path / ("in.txt" if isinstance(content, bytes) else "in.jsonl")
    if content is not None:
        source.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert prepare(source, "--output-prefix", prefix, *flags) == 2
    lines = capsys.readouterr().err.splitlines()
    errors = [line for line in lines if not line.startswith(("Tokenizing", "\rTokenizing"))]
    assert len([line for line in errors if line]) == 1
    assert message in errors[-1]
    assert written(prefix) == set()
