"""The documentation as a whole: links, pages of the site, pictures, tables of options."""

import re
import runpy
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml

from dschat_lora import __version__
from dschat_lora.config.addon_names import ADDONS
from dschat_lora.config.options import option_names
from dschat_lora.config.stages import DpoStageConfig, RewardStageConfig, SupervisedConfig
from dschat_lora.rl.options.config import RlhfConfig
from helpers.addons import of_the_whole

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
DOCUMENTS = [
    *(
        ROOT / name
        for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
    ),
    *sorted((ROOT / "benchmarks").glob("*.md")),
    ROOT / "configs" / "ds" / "README.md",
    ROOT / "dschat_lora" / "assets" / "README.md",
    *sorted(DOCS.rglob("*.md")),
]


def prose(path):
    """The text of a document without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.M | re.S)


def anchors(path):
    """What links to headings of a document may name: their words in small letters and hyphens."""
    found = set()
    for title in re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower()
        found.add(re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", words).strip()))
    return found


def broken(path):
    """Links of a document that lead nowhere in the checkout."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        file = path if not name else (path.parent / name).resolve()
        if not file.exists() or (anchor and anchor not in anchors(file)):
            yield target


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_exist(path):
    assert list(broken(path)) == []


def test_a_link_to_a_missing_file_or_heading_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# One title\n[a](#one-title) [b](#two) [c](gone.md) [d](page.md#one)\n")
    assert list(broken(page)) == ["#two", "gone.md", "page.md#one"]


def naming():
    """Files of the checkout, documents aside, that name a document in a text or a comment."""
    files = [ROOT / "Makefile", ROOT / "Dockerfile", ROOT / "setup.py"]
    for place in "dschat_lora training benchmarks examples notebooks configs scripts".split():
        files += [path for path in (ROOT / place).rglob("*") if path.suffix in SOURCES]
    found = {
        path: re.findall(r"(?<![\w)-])docs/[\w/]+\.\w+(?:#[\w-]+)?", path.read_text())
        for path in files
    }
    return {path: names for path, names in found.items() if names}


SOURCES = {".py", ".pyi", ".html", ".js", ".ipynb", ".yaml", ".sh", ".toml"}


def test_documents_that_code_and_notebooks_name_exist():
    gone = []
    for path, names in naming().items():
        for name, _, anchor in (each.partition("#") for each in names):
            file = ROOT / name
            if not file.exists() or (anchor and anchor not in anchors(file)):
                gone.append(f"{path.relative_to(ROOT)}: {name}#{anchor}")
    assert ROOT / "dschat_lora" / "engine" / "rendezvous.py" in naming()
    assert gone == []


def test_every_addon_has_a_page_or_a_section_and_a_row_of_the_index():
    index = (DOCS / "addons" / "index.md").read_text("utf-8")
    found = re.findall(r"^\| \[(\w+)\]\((\w+)\.md(#[\w-]+)?\) (.*)", index, re.MULTILINE)
    rows = {name: row for name, _, _, row in found}
    pages = {path.stem for path in DOCS.glob("addons/*.md")} - {"index"}
    assert rows.keys() == ADDONS.keys()
    assert {page for _, page, _, _ in found} == pages
    assert all(page == name or section for name, page, section, _ in found)
    for name, row in rows.items():
        assert [f"`{verb}`" for verb in ADDONS[name].verbs.split()] == re.findall(
            "`[a-z]+`", row.split("|")[2]
        )


@pytest.mark.parametrize(
    ("former", "page"),
    [
        ("chat_and_serve", "addons/serving"),
        ("nlg_gpt2", "addons/lora_paper"),
        ("nlu_glue", "addons/lora_paper"),
        ("pipeline", "addons/pipeline"),
        ("report", "addons/report"),
        ("tinker", "addons/tinker"),
        ("train_your_agent", "addons/agents"),
    ],
)
def test_former_addresses_of_the_site_lead_to_their_pages(former, page, tmp_path, monkeypatch):
    made = {"mkdocs": (), "mkdocs.config.defaults": ("MkDocsConfig",)}
    made |= {"mkdocs.structure.files": ("File", "Files"), "mkdocs.structure.pages": ("Page",)}
    for name, members in made.items():
        module = ModuleType(name)
        vars(module).update(dict.fromkeys(members))
        monkeypatch.setitem(sys.modules, name, module)
    hooks = runpy.run_path(str(ROOT / "scripts" / "docs_hooks.py"))
    hooks["on_post_build"](SimpleNamespace(site_dir=tmp_path))
    listed = re.findall(
        r"^- \[.+\]\((.+)\.html\): .{20}", (tmp_path / "llms.txt").read_text(), re.M
    )
    assert listed == [path.relative_to(DOCS).as_posix()[:-3] for path in sorted(DOCS.rglob("*.md"))]
    text = (tmp_path / f"{former}.html").read_text()
    assert set(re.findall(r"[\w/]+\.html", text)) == {f"{page}.html"}
    assert (DOCS / f"{page}.md").is_file()
    assert not (DOCS / f"{former}.md").exists()


def test_readme_is_short_and_names_the_command_that_runs_these_tests():
    text = (ROOT / "README.md").read_text("utf-8")
    assert len(re.findall(r"\S*\w\S*", text)) <= 700
    assert len(re.findall(r"\]\(", text)) <= 15
    assert "`make test`" in text
    assert re.search(r"^test: ", (ROOT / "Makefile").read_text(), re.MULTILINE)


def named_pages(entry):
    """Files that an entry of the navigation names, at any depth."""
    if isinstance(entry, str):
        return [entry]
    below = entry.values() if isinstance(entry, dict) else entry
    return [page for each in below for page in named_pages(each)]


def test_every_document_has_a_place_in_the_navigation_of_the_site():
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    pages = named_pages(yaml.safe_load(text)["nav"])
    assert len(pages) == len(set(pages))
    assert {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} <= set(pages)


def test_every_page_of_the_benchmarks_is_in_the_site():
    hooks = (ROOT / "scripts" / "docs_hooks.py").read_text("utf-8")
    nav = named_pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"])
    for path in (ROOT / "benchmarks").glob("*.md"):
        (page,) = re.findall(rf'"benchmarks/{path.name}": "(\w+\.md)"', hooks)
        assert page in nav


def test_pictures_are_small_and_shown():
    texts = "".join(path.read_text("utf-8") for path in DOCUMENTS)
    for path in (DOCS / "pictures").iterdir():
        assert path.stat().st_size < 60_000, path.name
        assert f"pictures/{path.name})" in texts
        if path.suffix == ".svg":
            ElementTree.parse(path)


@of_the_whole
def test_options_of_ours_beside_another_trainers_exist():
    stages = (SupervisedConfig, RewardStageConfig, DpoStageConfig, RlhfConfig)
    known = {name for stage in stages for name in option_names(stage)}
    known |= {"config", "help", "num_gpus", "show", "reward"}
    page, found, column = DOCS / "coming_from_other_trainers.md", 0, 0
    for line in prose(page).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if "dschat_lora" in cells:
            column = cells.index("dschat_lora")
        elif line.startswith("| "):
            names = re.findall(r"`--(\w+)", cells[column])
            assert set(names) <= known, line
            found += len(names)
    assert found > 50


def test_version_is_one_everywhere():
    for name, pattern in (("setup.py", 'version="{}"'), ("CITATION.cff", "version: {}")):
        assert pattern.format(__version__) in (ROOT / name).read_text("utf-8")
    minor = ".".join(__version__.split(".")[:2])
    assert f"\n## {minor} " in (ROOT / "CHANGELOG.md").read_text("utf-8")
