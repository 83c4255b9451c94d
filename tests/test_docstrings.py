"""What docstrings must say, as far as a test can tell."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [
    *sorted((ROOT / "megatron/fold3d/runtime").rglob("*.py")),
    *sorted((ROOT / "megatron/fold3d/training").rglob("*.py")),
]
SAYS_SHAPE = re.compile(r"``\[|\b\dd?-[dD]\b|[Ss]hape")
REFERS = re.compile(r"`(\w+\.)?\w+`")  # to the docstring that says it, as in "as `Transfers.send`"


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef, str]]:
    """Yield the name of each public function, its definition, and its class's docstring."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node, ""
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    told = ast.get_docstring(node) or ""
                    yield f"{node.name}.{inner.name}", inner, told


def tensors(function: ast.FunctionDef) -> bool:
    """Tell whether a parameter or the result is a tensor."""
    arguments = function.args
    hints = [a.annotation for a in (*arguments.args, *arguments.kwonlyargs)] + [function.returns]
    return any(re.search(r"\bTensor\b", ast.unparse(hint)) for hint in hints if hint is not None)


def is_public(name: str) -> bool:
    """Tell whether a function may be called from outside its class or file."""
    return name == "__init__" or not name.startswith("_")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_of_public_functions_tell_the_shapes_of_tensors(path: Path) -> None:
    silent = [
        name
        for name, function, of_class in functions(ast.parse(path.read_text()))
        if is_public(function.name) and tensors(function)
        for told in [ast.get_docstring(function) or ""]
        if not (SAYS_SHAPE.search(of_class + told) or REFERS.search(told))
    ]
    assert silent == []
