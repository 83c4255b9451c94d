"""A BERT, whose every stage reads data and whose last one has two heads, as stock trains it."""

import json
import random
import re
from argparse import ArgumentParser

import pytest
import tokenizers
import transformers

from scripts import prepare_data
from tests.distributed import run_distributed
from tests.end_to_end.test_equal_to_stock import ITERATIONS, OVERLAP
from tests.end_to_end.training import differences, train

pytestmark = pytest.mark.gloo

TEXT = "a pipeline folds over its ranks and each of them holds some layers of the model"
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MODEL = (
    "--device cpu --model-preset 4-32-4-32 --attention-dropout 0 --hidden-dropout 0 "
    "--num-workers 0 --micro-batch-size 1 --lr 1e-2 --split 80,10,10 "
    f"--pipeline-model-parallel-size 2 --segments 2 --global-batch-size 4 {ITERATIONS} "
    "--eval-iters 1 --eval-interval 3"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags for documents of a few sentences, and for a WordPiece tokenizer of their words."""
    folder = tmp_path_factory.mktemp("bert")
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *sorted(set(TEXT.split()))])}
    model = tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    names = {f"{name.strip('[]').lower()}_token": name for name in SPECIAL}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(
        folder / "wordpiece"
    )
    draw = random.Random(0)
    with (folder / "text.jsonl").open("w") as file:
        for _ in range(60):
            lines = (
                draw.choices(TEXT.split(), k=draw.randint(3, 9)) for _ in range(draw.randint(2, 6))
            )
            file.write(json.dumps({"text": "\n".join(map(" ".join, lines))}) + "\n")
    flags = ["--tokenizer-type", "HuggingFaceTokenizer"]
    flags += ["--tokenizer-model", str(folder / "wordpiece")]
    prepare = [str(folder / "text.jsonl"), "--sentences", "--output-prefix", str(folder / "data")]
    # In a process of its own: a script may silence the loggers of its process.
    assert run_distributed(prepare_data.main, 1, [*prepare, *flags]) == [0]
    return [*flags, "--data-path", str(folder / "data")]


@pytest.mark.parametrize(
    ("num_ranks", "flags"),
    [
        (2, ""),
        (4, f"--bert-no-binary-head --untie-embeddings-and-output-weights {OVERLAP}"),
        pytest.param(
            *(4, "--tensor-model-parallel-size 2 --sequence-parallel"), marks=pytest.mark.stress
        ),
    ],
    ids=["both heads", "words alone, all overlapped, dp=2", "sequence parallel, tp=2"],
)
def test_a_bert_is_trained_as_by_stock(data: list[str], num_ranks: int, flags: str):
    argv = [*MODEL.split(), *flags.split(), *data]
    ours = run_distributed(train, num_ranks, [*argv, "--schedule", "aiao"], "pretrain_bert")
    stock = run_distributed(train, num_ranks, argv, "pretrain_bert")
    assert differences(ours, stock) == []
    first, *_, last = ours[-1].iterations
    assert ("sop loss" in first) == ("no-binary-head" not in flags)
    assert float.fromhex(last["lm loss"]) < float.fromhex(first["lm loss"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--mock-data", "--mock-data: this script trains a BERT on documents"),
        ("--num-experts 2", "--num-experts: this script trains a BERT on documents"),
        ("--data-path /nowhere", "no data at /nowhere: "),
        ("--context-parallel-size 2", "--context-parallel-size 2: a BERT's padding is not split"),
        ("--position-embedding-type none", "Megatron-core's BERT has learned_absolute and rope"),
        ("--tokenizer-type NullTokenizer --vocab-size 99", "has [CLS], [SEP], [MASK] and [PAD]"),
    ],
)
def test_flags_that_bert_excludes_are_refused(
    parser: ArgumentParser, data: list[str], words: str, message: str
):
    from megatron.fold3d.training import bert

    run = "--transformer-impl local --eval-interval 3 --split 80,10,10"
    args = parser.parse_args([*run.split(), *data, *words.split()])
    args.rank = 0
    with pytest.raises(ValueError, match=re.escape(message)):
        bert.check(args)
