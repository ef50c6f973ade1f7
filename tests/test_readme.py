"""README.md, docs/ and dev/: short, and links that lead somewhere."""
import re
import tomllib

import pytest
from conftest import ROOT

PAGES = ["README.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
# Its commands are those of earlier commits, but its links are today's.
LOG = "dev/log.md"


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_bytes()
    assert len(text) <= 9000 and text.count(b"\n") <= 150


@pytest.mark.parametrize("page", [*PAGES, LOG])
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for file, section in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text):
        if file.startswith("http"):
            continue
        target = (ROOT / page).parent / file if file else ROOT / page
        assert target.exists(), file
        if section:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.M)
            # As GitHub calls them in links.
            names = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert section in names, (file, section)


@pytest.mark.parametrize("page", PAGES)
def test_scripts_and_functions_that_are_named_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for script in re.findall(r"python (\w+\.py)", text):
        assert (ROOT / script).is_file(), script
    for tool in re.findall(r"python -m tools\.(\w+)", text):
        assert (ROOT / "tools" / f"{tool}.py").is_file(), tool


def test_where_to_change_what_names_what_is_there():
    """| idea | `name`, `other`, [file](file) |"""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text.partition("## Where to change what")[2].partition("\n\n`")[0]
    rows = [line.split("|")[2] for line in table.splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 5
    for row in rows:
        files = re.findall(r"\]\(([\w/]+\.\w+)\)", row)
        code = "".join((ROOT / file).read_text(encoding="utf-8") for file in files)
        for name in re.findall(r"`(\w+)`", row):
            assert re.search(rf"\b{name}\b", code), (name, files)


def test_arrows_run_down_only():
    """The packages import nothing from the scripts; scripts and tools import from them."""
    scripts = {file.stem for file in ROOT.glob("*.py")} | {"tools"}
    for file in [*(ROOT / "nmg").glob("*.py"), *(ROOT / "support").glob("*.py")]:
        names = re.findall(r"^\s*(?:import|from) (\w+)", file.read_text(encoding="utf-8"), re.M)
        assert not scripts & set(names), file


def test_all_files_are_installed():
    """`pip install -e .` knows every script and package."""
    found = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert set(found["py-modules"]) == {file.stem for file in ROOT.glob("*.py")}
    assert set(found["packages"]) == {file.parent.name for file in ROOT.glob("*/__init__.py")}
