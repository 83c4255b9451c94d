"""What GitHub reads agrees with the package."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml"))  # without config.yml


def read(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def test_the_citation_names_this_version_and_the_paper_of_the_docs():
    citation = read("CITATION.cff")
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    paper = citation["preferred-citation"]
    page = (ROOT / "docs/paper.md").read_text()
    assert f"DOI {paper['doi']}" in page
    assert paper["title"] in " ".join(page.split())
    assert PROJECT["urls"]["Paper"].endswith(paper["doi"])


def test_the_workflow_runs_what_a_developer_runs_on_the_pythons_that_are_allowed():
    [job] = read(".github/workflows/ci.yml")["jobs"].values()
    assert job["steps"][-1]["run"].endswith(" .ci/run")
    python = "Programming Language :: Python :: "
    named = [c.removeprefix(python) for c in PROJECT["classifiers"] if c.startswith(python)]
    assert job["strategy"]["matrix"]["python"] == named
    least, newest = (int(version.split(".")[1]) for version in (named[0], named[-1]))
    assert PROJECT["requires-python"] == f">=3.{least},<3.{newest + 1}"


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_an_issue_form_asks_for_what_is_needed(form: Path):
    asked = yaml.safe_load(form.read_text())
    assert {"name", "description", "body"} <= set(asked)
    assert all(re.fullmatch(r"[a-z]+", field["id"]) for field in asked["body"])
    assert any(field.get("validations", {}).get("required") for field in asked["body"])
