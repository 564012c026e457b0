"""Hooks of mkdocs.yml: documents from outside of docs/, and pages made of docstrings and tables."""

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from posixpath import dirname, join, normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
# Pages of the site by their file in the checkout.
OUTSIDE = {
    "AGENTS.md": "agents_md.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks.md",
    "benchmarks/quality.md": "benchmarks_quality.md",
    "benchmarks/scaling.md": "benchmarks_scaling.md",
    "benchmarks/speed.md": "benchmarks_speed.md",
    "configs/ds/README.md": "configs_ds.md",
    "dschat_lora/assets/README.md": "bundled_assets.md",
}
# Pages that have taken the place of others, by the former address.
FORMER = {
    "api": "architecture",
    "chat_and_serve": "addons/serving",
    "coming_from_axolotl": "coming_from_other_trainers",
    "coming_from_llama_factory": "coming_from_other_trainers",
    "coming_from_openrlhf": "coming_from_other_trainers",
    "coming_from_other_rl_trainers": "coming_from_other_trainers",
    "coming_from_trl": "coming_from_other_trainers",
    "distill": "addons/distill",
    "four_bit_base": "memory",
    "loralib": "addons/loralib",
    "multi_node": "scaling",
    "nlg_gpt2": "addons/lora_paper",
    "nlu_glue": "addons/lora_paper",
    "notebooks": "python_api",
    "own_training_loop": "addons/loralib",
    "pipeline": "addons/pipeline",
    "python_primitives": "addons/trainer",
    "report": "addons/report",
    "rollout_engines": "addons/engines",
    "settings_and_memory": "memory",
    "tinker": "addons/tinker",
    "train_your_agent": "addons/agents",
    "use_the_result": "commands",
}
REDIRECT = """<!doctype html>
<meta charset="utf-8">
<title>{0}</title>
<script>location.replace("{0}" + location.hash)</script>
<meta http-equiv="refresh" content="0; url={0}">
<a href="{0}">{0}</a>
"""
# Rooms whose functions a program may want to call, and what each is about.
ROOMS = {
    "algos": "losses, advantages and metrics: pure functions of tensors",
    "lora": "LoRA layers, which layers to adapt, merging",
    "data": "rows, tokens, packing and loading",
    "models": "transformers models with adapters, packed attention, heads",
    "generation": "decoding: sampling, beam search, KV cache",
    "checkpoint": "adapters, checkpoints and merged models on disk",
    "engine": "DeepSpeed engines, their state, and processes",
    "perf": "FLOPs, peaks and memory",
    "rl": "step 3: roles, rollouts, experience, updates",
    "supervised": "steps 1 and 2: objectives, training loop, evaluation",
}
# What links of the checkout name, by the page of the site.
PAGES = OUTSIDE | {f"dschat_lora/{room}": f"api/{room}.md" for room in ROOMS}
OPTIONS_HEAD = "| option | type | default | |\n|---|---|---|---|\n"
# Without the module in the heading, which no user needs to know.
_PLAIN = "    options:\n      show_root_full_path: false\n"
# Material's offline plugin takes this from a server; assets/search_worker.js does the same.
SHIM = "https://unpkg.com/iframe-worker/shim"
# What Material leaves without a name for screen readers.
SEARCH = 'data-md-component="search" role="dialog"'
# A link whose text is the name of a document, which a site has no file of.
_NAMED = re.compile(r"\[([\w./]+\.md)\](?=\(([^)#\s]+))")
_LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)]*)?\)")


def modules_of(room: str) -> list[str]:
    """Dotted names of a room's modules."""
    files = sorted((ROOT / "dschat_lora" / room).rglob("[!_]*.py"))
    return [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the documents from outside and a page for each room."""
    for source, page in OUTSIDE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.name}", abs_src_path=str(path)))
    for room, about in ROOMS.items():
        # Search finds guides before functions.
        text = "---\nsearch:\n  boost: 0.2\n---\n"
        text += f"# dschat_lora.{room}\n\n{about[0].upper()}{about[1:]}.\n"
        text += "".join(f"\n::: {name}\n" for name in modules_of(room))
        files.append(File.generated(config, f"api/{room}.md", content=text))
    files.append(File.generated(config, "families.md", content=families_page()))
    for name, content in function_pages().items():
        files.append(File.generated(config, f"api/{name}.md", content=content))
    return files


def function_pages() -> dict[str, str]:
    """Pages of the public names: docstrings, and tables of options by section.

    A class that a function of its name returns stands on the page of that function.
    """
    pages: dict[str, str] = {}
    with checkout_first():
        homes = dict(import_module("dschat_lora")._HOMES)
        for addon in import_module("dschat_lora.config.addons").installed().values():
            for name, path in addon.functions.items():
                homes[name] = path.partition(":")[0].removeprefix("dschat_lora.")
        for name, module in sorted(homes.items(), key=lambda item: item[0].swapcase()):
            key, home = name.lower(), module.rpartition(".")[2]
            if home == "deepspeed_chat" or not module.startswith(("api.", "addons.")):
                key = home
            key = {"sample": "trainer"}.get(key, key)
            title = (
                "DeepSpeed-Chat's functions" if key == "deepspeed_chat" else f"dschat_lora.{name}"
            )
            page = pages.get(key, f"# {title}\n")
            page += f"\n::: dschat_lora.{module}.{name}\n{_PLAIN}"
            if module.endswith((".stages", ".verbs", ".python")):  # light
                found = getattr(import_module(f"dschat_lora.{module}"), name)
                for title, rows in getattr(found, "options", {}).items():
                    page += f"\n## Options: {title}\n\n{OPTIONS_HEAD}"
                    page += "".join(map(_option_row, rows))
            pages[key] = page
    return pages


def _option_row(row: tuple[str, str, object, str]) -> str:
    name, kind, default, about = (str(cell).replace("|", "\\|") for cell in row)
    return f"| `{name}` | `{kind}` | `{default}` | {about} |\n"


@contextmanager
def checkout_first() -> Iterator[None]:
    """A block in which the package of the checkout is imported; light modules need no library."""
    sys.path.insert(0, str(ROOT))
    try:
        yield
    finally:
        sys.path.remove(str(ROOT))


def families_page() -> str:
    """The page of the types of models, by a module of the package that needs no library."""
    with checkout_first():
        return import_module("dschat_lora.addons.planning.families").page()  # type: ignore[no-any-return]


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links between documents of the checkout lead to their pages."""
    uri = page.file.src_uri
    source = next((key for key, value in OUTSIDE.items() if value == uri), join("docs", uri))

    def moved_to(path: str) -> str:
        target = normpath(join(dirname(source), path))
        return PAGES.get(target) or target.removeprefix("docs/")

    def moved(match: re.Match[str]) -> str:
        head, path, anchor = match[1], match[2], match[3] or ""
        if ":" in path:
            return match[0]
        target = normpath(join(dirname(source), path))
        inside = moved_to(path)
        if target == inside and not target.startswith(("docs/", "notebooks/")):
            return match[0]
        return f"{head}{relpath(inside, dirname(uri) or '.')}{anchor})"

    def titled(match: re.Match[str]) -> str:
        file = files.get_file_from_path(moved_to(match[2]))
        title = file.page.title if file is not None and file.page is not None else None
        return f"[{title or match[1]}]"

    return _LINK.sub(moved, _NAMED.sub(titled, markdown))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Mark names of options, which are not to be broken after their hyphens."""
    return re.sub(r"<code>(?=--\w+( [\w.]+)?</code>)", '<code class="option">', html)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Let a page ask no server for anything, and give its search a name."""
    local = relpath("assets/search_worker.js", dirname(page.url) or ".")
    return output.replace(SHIM, local).replace(SEARCH, f'{SEARCH} aria-label="Search"')


def on_post_template(output: str, template_name: str, config: MkDocsConfig) -> str:
    """The same for the page that says that there is none."""
    return output.replace(SHIM, "/assets/search_worker.js")


def llms_txt(pages: Iterable[Path]) -> str:
    """The pages with their first sentence each, as llmstxt.org has it."""
    lines = [
        "# dschat_lora",
        "",
        "> LoRA fine-tuning and RLHF for language models on DeepSpeed",
        "",
    ]
    for path in pages:
        title, _, text = path.read_text(encoding="utf-8").partition("\n\n")
        plain = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", " ".join(text.partition("\n\n")[0].split()))
        address = path.relative_to(ROOT / "docs").with_suffix(".html").as_posix()
        about = plain.partition(". ")[0].rstrip(".:")
        lines.append(f"- [{title.removeprefix('# ')}]({address}): {about}")
    return "\n".join([*lines, ""])


def on_post_build(config: MkDocsConfig) -> None:
    """Let former addresses lead to their pages, and language models find all pages."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    Path(config.site_dir, "llms.txt").write_text(llms_txt(pages), encoding="utf-8")
    for former, page in FORMER.items():
        path = Path(config.site_dir, f"{former}.html")
        address = relpath(f"{page}.html", dirname(former) or ".")
        path.write_text(REDIRECT.format(address), encoding="utf-8")
